"""Compare our pass with the unmodified Hugging Face model."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from engram_server.model.backbone import Backbone, ReadoutPart
from engram_server.model.families.loading import read_trunk
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, TaskWeights, prepare

TOLERANCE: Final = 1e-4  # of the largest value
IMAGES: Final = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """The difference between our features and those of the unmodified model, on random images."""

    largest: float  # largest magnitude of the unmodified model
    difference: float  # largest difference

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest)


def compare_with_transformers(name_or_folder: str | Path, backbone: Backbone) -> Agreement:
    height, width = backbone.image_size
    pixels = torch.randn(IMAGES, 3, height, width, generator=torch.Generator().manual_seed(0))
    expected = unmodified_features(name_or_folder, pixels, backbone.feature)
    got = features(backbone, pixels)
    return Agreement(float(expected.abs().max()), float((got - expected).abs().max()))


def features(backbone: Backbone, pixels: Tensor) -> Tensor:
    """Return the features that head-only tasks read, (B, D), of normalised images (B, 3, H, W)."""
    reader = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    with torch.inference_mode():
        result = masked_pass(backbone, pixels, None, [[reader]] * len(pixels), StackCache())
    return result.logits[0].features


@torch.inference_mode()
def unmodified_features(name_or_folder: str | Path, pixels: Tensor, feature: ReadoutPart) -> Tensor:
    """Return the same features from the model's own `forward`."""
    trunk, family = read_trunk(name_or_folder)
    if hasattr(trunk.config, "mask_ratio"):  # a masked autoencoder runs on all patches here
        trunk.config.mask_ratio = 0.0
    normed: list[Tensor] = []

    def record(module: Any, inputs: Any, output: Tensor) -> None:  # noqa: ANN401 - from torch
        normed.append(output)

    if family.final_norm is not None:
        trunk.get_submodule(family.final_norm).register_forward_hook(record)
    # Some models interpolate position embeddings by default, the others on request.
    optional = "interpolate_pos_encoding" in inspect.signature(trunk.forward).parameters
    output = trunk(pixels, **({"interpolate_pos_encoding": True} if optional else {}))
    if feature == "pooled":
        pooled: Tensor = output.pooler_output
        return pooled
    rows: Tensor = normed[-1] if normed else output.last_hidden_state
    if feature == "patches":
        return rows.mean(dim=1)
    return rows if rows.ndim == 2 else rows[:, 0]  # CLIP normalises only the class token
