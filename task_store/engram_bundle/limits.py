"""Limits on the size of everything in a bundle.

They are far above the needs of any known bundle and far below what would hurt a server. Most are
checked on the header, before memory is allocated for the data.
"""

from dataclasses import dataclass, field


def _limit(default: int, doc: str) -> int:
    limit: int = field(default=default, metadata={"doc": doc})
    return limit


@dataclass(frozen=True, slots=True)
class BundleLimits:
    """Inclusive upper bounds. The `doc` in each field's metadata says what it limits."""

    max_file_bytes: int = _limit(256 * 1024 * 1024, "size of the file")
    max_header_bytes: int = _limit(8 * 1024 * 1024, "`n`, the length of the header")
    max_layers: int = _limit(128, "`L`, `b` and `s`")
    max_parts: int = _limit(3, "`P`")
    max_memory_tokens: int = _limit(1024, "`m`")
    max_lora_rank: int = _limit(256, "`R`")
    max_width: int = _limit(8192, "`D`, `I` and `E`; `U` and `F` may be eight times as large")
    max_classes: int = _limit(65536, "`K` and `C`")
    max_golden: int = _limit(64, "`G`")
    max_golden_side: int = _limit(2048, "`H` and `W`")
    max_examples: int = _limit(65536, "`n` of `examples.*`")
    max_example_values: int = _limit(64_000_000, "values of `examples.features` and `summaries`")
    max_example_labels: int = _limit(2_000_000, "values of `examples.labels`, `n` × `K`")
    max_media_bytes: int = _limit(64 * 1024 * 1024, "`B`")
    max_name_bytes: int = _limit(1024, "bytes of one file name in `media.data`")
    max_thumbnail_bytes: int = _limit(16 * 1024, "bytes of one thumbnail in `media.data`")
    max_label_chars: int = _limit(256, "characters of one label")
    max_text_chars: int = _limit(256, "characters of the backbone name, license or a metric name")
    max_description_chars: int = _limit(4096, "characters of `description`")
    max_parents: int = _limit(64, "entries of `extends`")
    max_metrics: int = _limit(256, "entries of `metrics`")
    max_training_bytes: int = _limit(65536, "bytes of `training` as ASCII JSON")
    max_training_depth: int = _limit(16, "nesting of `training`")


DEFAULT_LIMITS = BundleLimits()


def readable_size(nbytes: int) -> str:
    """Write a size for people: 32 MB instead of 33554432 bytes."""
    return f"{nbytes:,} bytes" if nbytes < 2**20 else f"{nbytes / 2**20:.4g} MB"
