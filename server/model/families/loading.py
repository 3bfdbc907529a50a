"""`load_backbone`: a model folder, or a name on the hub, to a `Backbone`."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from server.errors import BackboneError, BrokenCheckpoint, NoClassToken, NotAVisionTransformer
from server.model.backbone import Backbone
from server.model.families import clip, deit, dinov2, vit
from server.model.families.family import Family
from server.model.families.packing import pack, pair, submodule
from server.model.preprocessing import Preprocessing
from server.model.preprocessing.huggingface import from_folder, from_huggingface

# By Hugging Face's `model_type`.
FAMILIES: Final[Mapping[str, Family]] = {
    **vit.FAMILIES,
    **deit.FAMILIES,
    **dinov2.FAMILIES,
    **clip.FAMILIES,
}

# Parts of a checkpoint that no pass of ours reads, so they may be missing.
_UNUSED_WEIGHTS: Final = ("pooler.", "mask_token")

_WITHOUT_CLASS_TOKEN: Final = frozenset(
    {"siglip", "siglip2", "siglip_vision_model", "siglip2_vision_model", "swin", "swinv2", "pvt"}
)


def load_backbone(
    name_or_folder: str | Path, *, image_size: int | tuple[int, int] | None = None
) -> Backbone:
    """Reads a Hugging Face Vision Transformer, from a folder or by its hub name, in float32.

    `image_size` other than the trained one interpolates the position embeddings; left out, it is
    what the model's own preprocessing produces.
    """
    name = str(name_or_folder)
    config, family = _read_config(name)
    model, trunk = _read_model(name, config, family)
    vision_config = family.config(config)
    trained_size = pair(vision_config.image_size)
    preprocessing = _read_preprocessing(name, family, trained_size)
    if image_size is not None:
        preprocessing = preprocessing.with_size(pair(image_size))
    try:
        return pack(name, model, trunk, family, vision_config, preprocessing)
    except BackboneError as error:
        raise type(error)(f"{name}: {error}") from error


def _read_config(name: str) -> tuple[PretrainedConfig, Family]:
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise BackboneError(f"{name}: there is no such folder; name a folder with a config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackboneError(
            f"{name}: no readable model configuration in a folder or hub model of this name "
            f"({reason})"
        ) from error
    family = FAMILIES.get(config.model_type)
    if family is None and config.model_type in _WITHOUT_CLASS_TOKEN:
        raise NoClassToken(
            f"{name}: '{config.model_type}' has no class token, and tasks are read from class "
            "tokens; use a ViT, DeiT, DINOv2 or CLIP model"
        )
    if family is None:
        raise NotAVisionTransformer(
            f"{name}: '{config.model_type}' is not a Vision Transformer we read; "
            f"we read {', '.join(sorted(FAMILIES))}"
        )
    return config, family


def _read_model(
    name: str, config: PretrainedConfig, family: Family
) -> tuple[PreTrainedModel, nn.Module]:
    architecture = (config.architectures or [""])[0]
    if architecture not in family.trunks:
        architecture = next(iter(family.trunks))
    model_class: Any = getattr(transformers, architecture)
    try:
        with _quiet_transformers():
            model, loading = model_class.from_pretrained(
                name, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BrokenCheckpoint(f"{name}: the weights cannot be loaded: {reason}") from error
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise BrokenCheckpoint(
            f"{name}: '{key}' is {tuple(stored)} in the checkpoint, but the configuration makes it "
            f"{tuple(expected)}"
        )
    unused = (*_UNUSED_WEIGHTS, *family.unused_weights)
    missing = sorted(
        key for key in loading["missing_keys"] if not any(part in key for part in unused)
    )
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BrokenCheckpoint(
            f"{name}: {len(missing)} weights of {architecture} are missing from the checkpoint: "
            f"{shown}"
        )
    return model.eval(), submodule(model, family.trunks[architecture])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading reports and bars are for people at a notebook; what is wrong we say ourselves."""
    settings: Any = transformers.utils.logging
    verbosity, bar = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity(logging.CRITICAL)
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bar:
            settings.enable_progress_bar()


def _read_preprocessing(name: str, family: Family, trained_size: tuple[int, int]) -> Preprocessing:
    if Path(name).is_dir():
        folder: Path | None = Path(name)
    else:
        path = cached_file(
            name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
        )
        folder = None if path is None else Path(path).parent
    stored = None if folder is None else from_folder(folder, family.processor)
    if stored is not None:
        return stored
    default = from_huggingface({"image_processor_type": family.processor})
    return default.with_size(trained_size)
