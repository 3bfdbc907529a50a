"""Hugging Face Vision Transformers, read into the packed `Backbone`.

A family says where it keeps its parts (`known.FAMILIES`); nothing is subclassed or patched. Weights
are read from the model that `from_pretrained` has built, never from checkpoint keys, so every
renaming that transformers does while loading is already done.
"""

from server.model.families.loading import load_backbone

__all__ = ["load_backbone"]
