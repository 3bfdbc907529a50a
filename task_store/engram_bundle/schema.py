"""The bundle schema: the table of tensors, and the values that manifest fields may take.

To add an optional tensor, add a row to `TENSORS` and use it as `bundle.get(name)`. Names, dtypes,
shapes, limits, write order and the documentation table all derive from the row.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import DTypeLike

TaskType = Literal["single_label", "multi_label", "regression", "embedding"]
LabelledTaskType = Literal["single_label", "multi_label"]  # outputs are class scores
SupervisedTaskType = Literal["single_label", "multi_label", "regression"]  # can be trained
Placement = Literal["pre_norm", "post_norm"]  # of memory, relative to a layer's first LayerNorm
# Query and output projection of attention, up and down projection of the MLP. The gate of a gated
# MLP is part of `up`.
LoraTarget = Literal["query", "output", "up", "down"]
Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

LABELLED_TASK_TYPES: Final[tuple[LabelledTaskType, ...]] = get_args(LabelledTaskType)
PLACEMENTS: Final[tuple[Placement, ...]] = get_args(Placement)
LORA_TARGETS: Final[tuple[LoraTarget, ...]] = get_args(LoraTarget)

FLOAT = ("F32", "F16", "BF16")  # read as float32
HALF = ("F16",)
BYTE = ("U8",)

CLASS_TOKEN = "class_token"


@dataclass(frozen=True, slots=True)
class Dimension:
    """A symbol in tensor shapes. It has the same size wherever it appears."""

    doc: str
    limit: str  # a field of BundleLimits
    factor: int = 1  # times that limit
    at_most: str = ""  # another symbol that it cannot exceed


DIMENSIONS: Final[dict[str, Dimension]] = {
    "K": Dimension("outputs", "max_classes"),
    "D": Dimension("width of the backbone", "max_width"),
    "L": Dimension("layers of the backbone", "max_layers"),
    "m": Dimension("memory tokens per layer", "max_memory_tokens"),
    "R": Dimension("LoRA rank", "max_lora_rank"),
    "I": Dimension("attention width (heads times head width)", "max_width"),
    # An MLP is usually four times as wide as its rows, and twice that with a gate.
    "F": Dimension("MLP width", "max_width", factor=8),
    "U": Dimension("output width of the up projection: `F`, or `2F` with a gate", "max_width", 8),
    "E": Dimension("width of the space in which a normalised head measures lengths", "max_width"),
    "G": Dimension("golden examples", "max_golden"),
    "H": Dimension("height of a golden example in pixels", "max_golden_side"),
    "W": Dimension("width of a golden example in pixels", "max_golden_side"),
    "b": Dimension("layers that the head reads", "max_layers"),
    "s": Dimension("layers of the summary", "max_layers"),
    "P": Dimension("parts of the summary of a layer: 3, or 2 without a class token", "max_parts"),
    "n": Dimension("examples", "max_examples"),
    "B": Dimension("bytes of all file names and thumbnails", "max_media_bytes"),
    "C": Dimension("class means of the out-of-distribution detector", "max_classes"),
    "r": Dimension("axes of the out-of-distribution detector", "max_width", at_most="D"),
    "q": Dimension("axes of the drift reference", "max_width", at_most="D"),
}


# Tensors whose names start with one of these are all present or all absent.
GROUPS = ("golden", "ood", "examples", "media")


@dataclass(frozen=True, slots=True)
class TensorSchema:
    name: str
    symbols: str  # the shape: symbols of DIMENSIONS, or numbers
    doc: str
    stored_as: tuple[str, ...] = FLOAT  # dtypes of the file format
    needs: str = ""  # a tensor without which this one is not allowed

    @property
    def shape(self) -> tuple[str, ...]:
        return tuple(self.symbols.split())

    @property
    def group(self) -> str:
        """The prefix of its name, such as `lora` or `golden`."""
        return self.name.partition(".")[0]

    @property
    def required(self) -> bool:
        return self.name == "head.weight"

    @property
    def presence(self) -> str:
        """When the tensor is present, for the documentation."""
        if self.required:
            return "required"
        if self.group in GROUPS:
            return f"with all of `{self.group}.*`"
        return f"needs `{self.needs}`" if self.needs else "optional"

    @property
    def dtype(self) -> DTypeLike:
        """The NumPy dtype in memory."""
        if self.stored_as == FLOAT:
            return np.float32
        return np.float16 if self.stored_as == HALF else np.uint8


def lora_names(target: LoraTarget) -> tuple[str, str]:
    return f"lora.{target}.a", f"lora.{target}.b"


def _lora(target: LoraTarget, into: str, out: str) -> Iterator[TensorSchema]:
    for name, symbols in zip(lora_names(target), (f"L {into} R", f"L R {out}"), strict=True):
        doc = f"LoRA `{name[-1].upper()}` of the {target} projection"
        yield TensorSchema(name, symbols, doc, needs=CLASS_TOKEN)


_TENSORS = (
    TensorSchema("head.weight", "K D", "weight of the head"),
    TensorSchema("head.bias", "K", "bias of the head"),
    TensorSchema("head.projection", "E D", "a normalised head measures lengths after it"),
    TensorSchema("layers.weight", "K b P D", "weight of the head on the layers in `layers`"),
    TensorSchema("feature.weight", "K D", "weight on the backbone's feature", needs=CLASS_TOKEN),
    TensorSchema(CLASS_TOKEN, "D", "own class token; without it, the head reads the backbone's"),
    TensorSchema("memory", "L m D", "memory tokens of each layer", needs=CLASS_TOKEN),
    *_lora("query", "D", "I"),
    *_lora("output", "I", "D"),
    *_lora("up", "D", "U"),
    *_lora("down", "F", "D"),
    TensorSchema("golden.logits", "G K", "expected logits of the golden examples"),
    TensorSchema("golden.pixels", "G H W 3", "golden examples", BYTE),
    TensorSchema("text.weight", "K D", "head from class names alone", needs="examples.labels"),
    TensorSchema("text.bias", "K", "bias of that head", needs="text.weight"),
    TensorSchema("ood.means", "C D", "class means of the training features", HALF),
    TensorSchema("ood.axes", "r D", "axes of their shared covariance", HALF),
    TensorSchema("drift.axes", "q D", "main axes of the training features, scaled", HALF),
    TensorSchema("drift.centre", "q", "mean of the training features on them", needs="drift.axes"),
    TensorSchema("drift.shares", "K", "share of each class in training", needs="drift.axes"),
    TensorSchema("examples.features", "n D", "backbone feature of each image", HALF),
    TensorSchema("summaries", "n s P D", "summary of each image", HALF, needs="examples.features"),
    TensorSchema("examples.labels", "n K", "labels of each image: 0 or 1", BYTE),
    TensorSchema("examples.digests", "n 32", "SHA-256 of each image file, ascending, unique", BYTE),
    TensorSchema(
        "media.sizes",
        "n 8",
        "bytes of the file name and of the thumbnail of each image: two little-endian uint32",
        BYTE,
        needs="examples.digests",
    ),
    TensorSchema(
        "media.data", "B", "file name (UTF-8) and thumbnail (WebP) of each image, in turn", BYTE
    ),
)
# In write order: wider items first, so that every tensor of the file is aligned.
TENSORS: Final[dict[str, TensorSchema]] = {
    tensor.name: tensor
    for stored_as in (FLOAT, HALF, BYTE)
    for tensor in _TENSORS
    if tensor.stored_as == stored_as
}


def missing_class_token(names: Collection[str], *, extends: bool) -> str | None:
    """Return why a task with these tensors needs a class token, or None if it has all it needs."""
    # Memory, LoRA and parents only act on the task row, which the class token creates.
    if CLASS_TOKEN in names:
        return None
    users = [name for name in names if name in TENSORS and TENSORS[name].needs == CLASS_TOKEN]
    if not users and not extends:
        return None
    what = f"Tensor '{users[0]}'" if users else "A task that extends others"
    return f"{what} needs a class token: add 'class_token' or leave it out."
