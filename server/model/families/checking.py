"""Whether a folder is read right: our pass against the unmodified Hugging Face model."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from server.model.backbone import Backbone, ReadoutPart
from server.model.families.loading import read_trunk
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, TaskWeights, prepare

TOLERANCE: Final = 1e-4  # of the largest value
IMAGES: Final = 2


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far what head-only tasks read is from the unmodified model's, for some random images."""

    largest: float  # value of the unmodified model
    difference: float  # the largest

    @property
    def holds(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest)


def compare_with_transformers(name_or_folder: str | Path, backbone: Backbone) -> Agreement:
    """`backbone` must have been read from this folder or name, in float32."""
    height, width = backbone.image_size
    pixels = torch.randn(IMAGES, 3, height, width, generator=torch.Generator().manual_seed(0))
    expected = unmodified_features(name_or_folder, pixels, backbone.feature)
    got = features(backbone, pixels)
    return Agreement(float(expected.abs().max()), float((got - expected).abs().max()))


def features(backbone: Backbone, pixels: Tensor) -> Tensor:
    """What head-only tasks read of normalised images (B, 3, H, W), (B, D)."""
    reader = prepare(backbone, TaskWeights(torch.zeros(1, backbone.width)))
    with torch.inference_mode():
        result = masked_pass(backbone, pixels, None, [[reader]] * len(pixels), StackCache())
    return result.logits[0].features


@torch.inference_mode()
def unmodified_features(name_or_folder: str | Path, pixels: Tensor, feature: ReadoutPart) -> Tensor:
    """The same by the model's own forward."""
    trunk, family = read_trunk(name_or_folder)
    if hasattr(trunk.config, "mask_ratio"):  # a masked autoencoder is served with all patches
        trunk.config.mask_ratio = 0.0
    normed: list[Tensor] = []

    def note(module: Any, inputs: Any, output: Tensor) -> None:  # noqa: ANN401 - of torch
        normed.append(output)

    if family.final_norm is not None:
        trunk.get_submodule(family.final_norm).register_forward_hook(note)
    # Some interpolate positions by themselves; the others want to be told.
    told = "interpolate_pos_encoding" in inspect.signature(trunk.forward).parameters
    done: Any = trunk(pixels, **({"interpolate_pos_encoding": True} if told else {}))
    if feature == "pooled":
        return done.pooler_output
    rows = normed[-1] if normed else done.last_hidden_state
    if feature == "patches":
        return rows.mean(dim=1)
    return rows if rows.ndim == 2 else rows[:, 0]  # CLIP's final norm takes the class token alone
