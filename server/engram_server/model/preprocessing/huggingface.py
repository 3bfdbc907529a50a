"""Read Hugging Face's `preprocessor_config.json`, in its old and new formats."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from engram_bundle.schema import Resample

from engram_server.errors import BackboneError
from engram_server.model.preprocessing.pipeline import Preprocessing
from engram_server.model.preprocessing.resizing import FILTERS

IMAGENET_STANDARD: Mapping[str, object] = {"image_mean": 0.5, "image_std": 0.5}
IMAGENET: Mapping[str, object] = {
    "image_mean": (0.485, 0.456, 0.406),
    "image_std": (0.229, 0.224, 0.225),
}
OPENAI_CLIP: Mapping[str, object] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
}
EVERY_CLASS: Mapping[str, object] = {
    "do_resize": True,
    "do_center_crop": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_pad": False,
    "rescale_factor": 1 / 255,
    "default_to_square": True,
    "crop_size": 224,
    "resample": 3,
}
SHORTEST_EDGE: Mapping[str, object] = {"size": {"shortest_edge": 224}, "default_to_square": False}
WHOLE_IMAGE: Mapping[str, object] = {
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "crop_size": None,
}

# Defaults of missing (or null) keys by image processor class. DINOv2 uses BiT's.
CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ViT": {**EVERY_CLASS, **IMAGENET_STANDARD, **WHOLE_IMAGE, "resample": 2},
    "DeiT": {**EVERY_CLASS, **IMAGENET_STANDARD, "size": 256},
    "CLIP": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
    "Bit": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
    "DINOv3ViT": {**EVERY_CLASS, **IMAGENET, **WHOLE_IMAGE, "resample": 2},
    "Siglip": {**EVERY_CLASS, **IMAGENET_STANDARD, **WHOLE_IMAGE, "default_to_square": False},
    "Tipsv2": {
        **EVERY_CLASS,
        **IMAGENET_STANDARD,
        **WHOLE_IMAGE,
        "size": 448,
        "resample": 2,
        "do_normalize": False,
    },
}
CLASS_SUFFIXES = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")
RESAMPLE_CODES: Mapping[int, Resample] = {int(code): name for name, code in FILTERS.items()}


def from_folder(folder: Path, processor: str | None = None) -> Preprocessing | None:
    """Read the preprocessing of a model folder; None if it has no configuration.

    `processor` is the default image processor, for old files that do not name one.
    """
    # New releases nest it in processor_config.json, which takes precedence.
    config = (_read_json(folder / "processor_config.json") or {}).get("image_processor")
    if not isinstance(config, Mapping):
        config = _read_json(folder / "preprocessor_config.json")
    if config is None:
        return None
    if processor is not None and not _type_name(config):
        config = {**config, "image_processor_type": processor}
    return from_huggingface(config)


def from_huggingface(config: Mapping[str, object]) -> Preprocessing:
    """Convert a parsed `preprocessor_config.json`."""
    settings = _with_class_defaults(config)
    rescale, mean, std = settings["rescale_factor"], settings["image_mean"], settings["image_std"]
    normalised = bool(settings["do_normalize"])
    return Preprocessing(
        resize=_read_size(settings) if settings["do_resize"] else None,
        resample=_read_resample(settings["resample"]),
        crop=_read_crop(settings) if settings["do_center_crop"] else None,
        rescale=_number("rescale_factor", rescale) if settings["do_rescale"] else 1.0,
        mean=_read_channels("image_mean", mean if normalised else 0.0),
        std=_read_channels("image_std", std if normalised else 1.0),
    )


def _read_json(path: Path) -> Mapping[str, object] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackboneError(f"Cannot read {path} as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BackboneError(f"{path} contains a JSON {type(value).__name__}, not an object.")
    return value


def _type_name(config: Mapping[str, object]) -> str:
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    return str(name)


def _with_class_defaults(config: Mapping[str, object]) -> Mapping[str, object]:
    name = _type_name(config)
    family = name
    for suffix in CLASS_SUFFIXES:
        family = family.removesuffix(suffix)
    if family not in CLASS_DEFAULTS:
        supported = ", ".join(f"{name}ImageProcessor" for name in CLASS_DEFAULTS)
        problem = (
            f"has the unknown image processor {name!r}" if name else "has no image_processor_type"
        )
        raise BackboneError(f"The preprocessor configuration {problem}. Supported: {supported}.")
    present = {key: value for key, value in config.items() if value is not None}
    settings = {**CLASS_DEFAULTS[family], **present}
    for option in ("do_pad", "use_square_size"):
        if settings.get(option):
            raise BackboneError(f"The preprocessor option {option} is not supported.")
    return settings


def _read_size(settings: Mapping[str, object]) -> tuple[int, int] | int:
    size = settings["size"]
    if isinstance(size, Mapping):
        size = {key: value for key, value in size.items() if value is not None}
        if set(size) == {"shortest_edge"}:
            return _edge("size", size["shortest_edge"])
    elif _is_int(size) and not settings["default_to_square"]:
        return size
    return _read_pair("size", size)


def _read_crop(settings: Mapping[str, object]) -> tuple[int, int]:
    if settings["crop_size"] is None:
        raise BackboneError("The preprocessor configuration has do_center_crop but no crop_size.")
    return _read_pair("crop_size", settings["crop_size"])


def _read_pair(name: str, value: object) -> tuple[int, int]:
    """Parse (height, width) from 224, [224, 224] or {"height": 224, "width": 224}."""
    if isinstance(value, Mapping):
        value = {key: one for key, one in value.items() if one is not None}
        if set(value) != {"height", "width"}:
            raise BackboneError(
                f"The preprocessor option {name} has the keys {sorted(map(str, value))}. "
                "Supported: height and width, or shortest_edge for size."
            )
        return _edge(name, value["height"]), _edge(name, value["width"])
    if _is_int(value):
        return value, value
    if _is_list(value, 2):
        return _edge(name, value[0]), _edge(name, value[1])
    raise BackboneError(f"{name} is {value!r}, but must be a height and a width.")


def _read_resample(value: object) -> Resample:
    if _is_int(value) and value in RESAMPLE_CODES:
        return RESAMPLE_CODES[value]
    raise BackboneError(f"resample is {value!r}, but must be a Pillow filter from 0 to 5.")


def _read_channels(name: str, value: object) -> tuple[float, float, float]:
    if not isinstance(value, Sequence):
        value = (value,) * 3
    if _is_list(value, 3):
        return _number(name, value[0]), _number(name, value[1]), _number(name, value[2])
    raise BackboneError(f"{name} is {value!r}, but must be three numbers (red, green, blue).")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, length: int) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and len(value) == length


def _edge(name: str, value: object) -> int:
    if _is_int(value):
        return value
    raise BackboneError(f"{name} is {value!r}, but must be a whole number of pixels.")


def _number(name: str, value: object) -> float:
    if isinstance(value, float) or (_is_int(value) and abs(value) < 2**64):
        return float(value)
    raise BackboneError(f"{name} is {value!r}, but must be a number.")
