"""How large anything in a bundle may be.

The limits are far above every bundle we know and far below what would hurt a server: they are
checked on the header, before memory is taken for the data it promises.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, all inclusive; docs/reference/bundle-format.md lists the same numbers."""

    max_file_bytes: int = 256 * 1024 * 1024
    max_header_bytes: int = 8 * 1024 * 1024
    max_layers: int = 128
    max_memory_tokens: int = 1024
    max_adapter_rank: int = 256
    max_width: int = 8192
    max_classes: int = 65536
    max_golden: int = 64
    max_golden_side: int = 2048
    max_examples: int = 65536
    max_label_chars: int = 256
    max_text_chars: int = 256
    max_description_chars: int = 4096
    max_parents: int = 64
    max_metrics: int = 256
    max_training_bytes: int = 65536
    max_training_depth: int = 16


DEFAULT_LIMITS = Limits()
