"""Hugging Face Vision Transformers, converted to a `Backbone`. Only this package uses transformers.

`registry.FAMILIES` describes where each family keeps its parts; nothing is subclassed or patched.
Weights are read from the model that `from_pretrained` builds, not from checkpoint keys, so all key
conversions of transformers are already applied.
"""

from engram_server.model.families.loading import load_backbone

__all__ = ["load_backbone"]
