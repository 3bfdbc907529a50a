"""Reading Hugging Face's `preprocessor_config.json`, in its old and new spellings."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from server.errors import BackboneError
from server.model.preprocessing.resizing import FILTERS, Resample
from server.model.preprocessing.values import edge, is_int, pair, triple

IMAGENET_STANDARD: Mapping[str, object] = {"image_mean": 0.5, "image_std": 0.5}
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

# What a key left out (or null) means, by the class the file names. BiT's is DINOv2's.
CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "ViT": {
        **EVERY_CLASS,
        **IMAGENET_STANDARD,
        "size": 224,
        "resample": 2,
        "do_center_crop": False,
        "crop_size": None,
    },
    "DeiT": {**EVERY_CLASS, **IMAGENET_STANDARD, "size": 256},
    "CLIP": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
    "Bit": {**EVERY_CLASS, **OPENAI_CLIP, **SHORTEST_EDGE},
}
CLASS_SUFFIXES = ("Fast", "Pil", "ImageProcessor", "FeatureExtractor")
RESAMPLE_CODES: Mapping[int, Resample] = {int(code): name for name, code in FILTERS.items()}


def find_config(folder: Path) -> Mapping[str, object] | None:
    # The newest releases nest it in processor_config.json, and prefer that where both exist.
    nested = (_read_json(folder / "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, Mapping):
        return nested
    return _read_json(folder / "preprocessor_config.json")


def _read_json(path: Path) -> Mapping[str, object] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BackboneError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise BackboneError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def type_name(config: Mapping[str, object]) -> str:
    name = config.get("image_processor_type") or config.get("feature_extractor_type") or ""
    return str(name)


def with_class_defaults(config: Mapping[str, object]) -> Mapping[str, object]:
    name = type_name(config)
    family = name
    for suffix in CLASS_SUFFIXES:
        family = family.removesuffix(suffix)
    if family not in CLASS_DEFAULTS:
        known = ", ".join(f"{known}ImageProcessor" for known in CLASS_DEFAULTS)
        raise BackboneError(
            f"The preprocessor configuration names the image processor {name!r}; known are {known}."
            if name
            else f"The preprocessor configuration names no image_processor_type; known are {known}."
        )
    given = {key: value for key, value in config.items() if value is not None}
    settings = {**CLASS_DEFAULTS[family], **given}
    for option in ("do_pad", "use_square_size"):
        if settings.get(option):
            raise BackboneError(f"The preprocessor configuration sets {option}: not supported.")
    return settings


def read_size(settings: Mapping[str, object]) -> tuple[int, int] | int:
    size = settings["size"]
    if isinstance(size, Mapping):
        size = {key: value for key, value in size.items() if value is not None}
        if set(size) == {"shortest_edge"}:
            return edge("size", size["shortest_edge"])
    elif is_int(size) and not settings["default_to_square"]:
        return size
    return _read_pair("size", size)


def read_crop(settings: Mapping[str, object]) -> tuple[int, int]:
    if settings["crop_size"] is None:
        raise BackboneError("The preprocessor configuration sets do_center_crop but no crop_size.")
    return _read_pair("crop_size", settings["crop_size"])


def _read_pair(name: str, value: object) -> tuple[int, int]:
    """(height, width) from 224, [224, 224] or {"height": 224, "width": 224}."""
    if isinstance(value, Mapping):
        value = {key: given for key, given in value.items() if given is not None}
        if set(value) != {"height", "width"}:
            raise BackboneError(
                f"The preprocessor configuration gives {name} as {sorted(map(str, value))}; "
                "supported are height with width, and for size also shortest_edge alone."
            )
        return edge(name, value["height"]), edge(name, value["width"])
    return (value, value) if is_int(value) else pair(name, value)


def read_resample(value: object) -> Resample:
    if is_int(value) and value in RESAMPLE_CODES:
        return RESAMPLE_CODES[value]
    raise BackboneError(f"resample is {value!r}; it is one of Pillow's filters 0 to 5.")


def read_channels(name: str, value: object) -> tuple[float, float, float]:
    return triple(name, value if isinstance(value, Sequence) else (value,) * 3)
