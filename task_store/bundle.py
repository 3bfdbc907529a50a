"""One version of one task: tensors and manifest, immutable, always valid.

head.weight    (K, D)        F32 | F16 | BF16
head.bias      (K,)          optional
head.projection (E, D)       optional: where a normalised head measures what it reads
class_token    (D,)          optional: without it the head reads the backbone's class token
memory         (L, m, D)     optional, needs class_token, whose row alone attends to it
adapter.…      (L, …, …)     optional, needs class_token: changes to the maps of its row
golden.pixels  (G, H, W, 3)  U8, optional, with golden.logits (G, K)
known.…                      F16, optional: where the features of its photos lie
examples.…                   F16 and U8, optional: what the task was taught from
text.…         (K, D), (K,)  optional: the head that class names gave before the examples
"""

import hashlib
import itertools
import os
import stat
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from task_store import codec
from task_store.codec import ByteArray, FloatArray, FloatDtype, HalfArray
from task_store.errors import IncompatibleBundle, MalformedBundle, UnreadableBundle
from task_store.files import write_whole
from task_store.limits import DEFAULT_LIMITS, Limits
from task_store.manifest import (
    AdaptedMap,
    Manifest,
    Placement,
    PreprocessingSpec,
    ProblemType,
    shown,
)

METADATA_KEY = "engram"
ADAPTER = "adapter."  # how its tensors are named

# Golden logits replayed on the right backbone agree within this, relative to their largest value
# (and never finer than for logits of size one). Wrong placement or preprocessing is far outside.
GOLDEN_TOLERANCE = 1e-3

_RANKS = {
    "head.weight": ("K", "D"),
    "head.bias": ("K",),
    "head.projection": ("E", "D"),
    "class_token": ("D",),
    "memory": ("L", "m", "D"),
    "adapter.query.a": ("L", "D", "R"),
    "adapter.query.b": ("L", "R", "I"),
    "adapter.output.a": ("L", "I", "R"),
    "adapter.output.b": ("L", "R", "D"),
    "adapter.up.a": ("L", "D", "R"),
    "adapter.up.b": ("L", "R", "U"),
    "adapter.down.a": ("L", "F", "R"),
    "adapter.down.b": ("L", "R", "D"),
    "golden.pixels": ("G", "H", "W", "3"),
    "golden.logits": ("G", "K"),
    "text.weight": ("K", "D"),
    "text.bias": ("K",),
    "known.means": ("C", "D"),
    "known.axes": ("r", "D"),
    "examples.features": ("n", "D"),
    "examples.labels": ("n", "K"),
    "examples.digests": ("n", "32"),
}
_BYTES = ("golden.pixels", "examples.labels", "examples.digests")  # written last, as U8
_HALVES = ("known.means", "known.axes", "examples.features")  # always F16
_TOGETHER = (
    ("golden.pixels", "golden.logits"),
    ("known.means", "known.axes"),
    ("examples.features", "examples.labels", "examples.digests"),
)
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class TaskBundle:
    """A task's tensors (float32, read-only) and manifest. Equal bundles have equal digests."""

    manifest: Manifest
    head_weight: FloatArray  # (K, D)
    head_bias: FloatArray | None = None  # (K,)
    head_projection: FloatArray | None = None  # (E, D)
    class_token: FloatArray | None = None  # (D,)
    memory: FloatArray | None = None  # (L, m, D)
    adapter_query_a: FloatArray | None = None  # (L, D, R)
    adapter_query_b: FloatArray | None = None  # (L, R, I)
    adapter_output_a: FloatArray | None = None  # (L, I, R)
    adapter_output_b: FloatArray | None = None  # (L, R, D)
    adapter_up_a: FloatArray | None = None  # (L, D, R)
    adapter_up_b: FloatArray | None = None  # (L, R, U)
    adapter_down_a: FloatArray | None = None  # (L, F, R)
    adapter_down_b: FloatArray | None = None  # (L, R, D)
    golden_pixels: ByteArray | None = None  # (G, H, W, 3)
    golden_logits: FloatArray | None = None  # (G, K)
    text_weight: FloatArray | None = None  # (K, D)
    text_bias: FloatArray | None = None  # (K,)
    known_means: HalfArray | None = None  # (C, D)
    known_axes: HalfArray | None = None  # (r, D)
    examples_features: HalfArray | None = None  # (n, D): the backbone's class token of each photo
    examples_labels: ByteArray | None = None  # (n, K) of 0 and 1
    examples_digests: ByteArray | None = None  # (n, 32): SHA-256 of the photos, ascending
    limits: InitVar[Limits] = DEFAULT_LIMITS
    # The file this bundle was read from, so that its identity survives a round trip even when
    # another writer laid it out differently. Not an argument: a changed copy is a new bundle.
    _file: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self, limits: Limits) -> None:
        for name, value in self._arrays().items():
            object.__setattr__(self, _attribute(name), _frozen(name, value))
        if self.memory is not None and self.memory.ndim == 3 and self.memory.shape[1] == 0:
            object.__setattr__(self, "memory", None)
        self._check_sizes(limits)
        for name, array in self._arrays().items():
            if array.dtype != np.uint8 and not np.isfinite(array).all():
                raise MalformedBundle(
                    f"Tensor '{name}' has values that are not finite (NaN or infinity)."
                )
        if self.examples_labels is not None and self.examples_digests is not None:
            _check_examples(self.problem, self.examples_labels, self.examples_digests)

    def check(self, limits: Limits) -> None:
        """Refuse, with MalformedBundle, a bundle whose file would not be read with these limits."""
        codec.read_header(self._bytes, limits)
        self._check_sizes(limits)

    @classmethod
    def from_bytes(cls, data: bytes, limits: Limits = DEFAULT_LIMITS) -> "TaskBundle":
        """Read a whole file from memory, or raise MalformedBundle."""
        metadata, tensors = codec.read_header(data, limits)
        for name, spec in tensors.items():
            _check_tensor_name_and_dtype(name, spec.dtype)
        if metadata.keys() != {METADATA_KEY}:
            keys = ", ".join(shown(key) for key in metadata) or "nothing"
            raise MalformedBundle(
                f"The file's metadata must hold the key '{METADATA_KEY}' alone; it holds "
                f"{shown(keys, 120)}. Is this a bundle?"
            )
        manifest = Manifest.from_json(metadata[METADATA_KEY], limits)
        # Before decoding: F16 doubles in memory, so the shapes must be sane first.
        _check_shapes({name: spec.shape for name, spec in tensors.items()}, manifest, limits)
        arrays = {_attribute(name): codec.decode(data, spec) for name, spec in tensors.items()}
        bundle = cls(manifest=manifest, limits=limits, **arrays)
        object.__setattr__(bundle, "_file", data)
        return bundle

    @classmethod
    def load(cls, path: str | Path, limits: Limits = DEFAULT_LIMITS) -> "TaskBundle":
        """Read a file, or raise UnreadableBundle or MalformedBundle."""
        return cls.from_bytes(read_file(path, limits), limits)

    def to_bytes(self, *, dtype: FloatDtype | None = None) -> bytes:
        """The file's bytes, the same every time.

        Without `dtype` these are the bytes behind `digest`: the file that was read, or F32. With
        it, float tensors are written anew in that type (golden.logits always in F32).
        """
        return self._bytes if dtype is None else self._encode(dtype)

    def save(self, path: str | Path, *, dtype: FloatDtype | None = None) -> Path:
        """Write the file whole or not at all, and only return when it is on the disk."""
        target = Path(path)
        data = self.to_bytes(dtype=dtype)
        try:
            write_whole(target, data)
        except OSError as error:
            raise UnreadableBundle(
                f"The bundle '{target}' cannot be written: {error.strerror or error}."
            ) from error
        return target

    @cached_property
    def digest(self) -> str:
        """Identity: `sha256:` and the hash of the file."""
        return digest_of(self._bytes)

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    @property
    def placement(self) -> Placement:
        return self.manifest.placement

    @property
    def extends(self) -> tuple[str, ...]:
        """Digests of the parents, in order."""
        return self.manifest.extends

    @property
    def backbone_fingerprint(self) -> str:
        return self.manifest.backbone.fingerprint

    @property
    def labels(self) -> tuple[str, ...]:
        return self.manifest.labels

    @property
    def problem(self) -> ProblemType:
        return self.manifest.problem

    @property
    def normalised(self) -> bool:
        """Whether the head reads features divided by their length."""
        return self.manifest.normalised is not None

    @property
    def known_threshold(self) -> float | None:
        """With `known_means` and `known_axes`; None without them."""
        return None if self.manifest.known is None else self.manifest.known.threshold

    @property
    def classes(self) -> int:
        """K, the number of outputs."""
        return int(self.head_weight.shape[0])

    @property
    def width(self) -> int:
        """D, the backbone's width."""
        return int(self.head_weight.shape[1])

    @property
    def memory_tokens(self) -> int:
        """m, memory tokens per layer; 0 without memory."""
        return 0 if self.memory is None else int(self.memory.shape[1])

    @property
    def adapter(self) -> dict[AdaptedMap, tuple[FloatArray, FloatArray]]:
        """A and B of each map that the task's row has adapted; empty without an adapter."""
        spec = self.manifest.adapter
        arrays = self._arrays()
        return {
            name: (arrays[f"adapter.{name}.a"], arrays[f"adapter.{name}.b"])
            for name in (() if spec is None else spec.maps)
        }

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, TaskBundle) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _bytes(self) -> bytes:
        return self._encode("F32") if self._file is None else self._file

    def _check_sizes(self, limits: Limits) -> None:
        self.manifest.check(limits)
        shapes = {name: array.shape for name, array in self._arrays().items()}
        _check_shapes(shapes, self.manifest, limits)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Tensors that are present, by file name, in the order they are written."""
        # Bytes last, and halves before them: what follows would not be aligned.
        order = sorted(_RANKS, key=lambda name: (name in _BYTES, name in _HALVES))
        named = {name: getattr(self, _attribute(name)) for name in order}
        return {name: array for name, array in named.items() if array is not None}

    def _encode(self, dtype: FloatDtype) -> bytes:
        arrays = self._arrays()
        if dtype == "F16":
            for name, array in arrays.items():
                if name != "golden.logits" and array.dtype == np.float32:
                    arrays[name] = self._halved(name, array)
        else:
            # An adapter is most of its bundle: half as large wherever that changes no value.
            adapter = {name: array for name, array in arrays.items() if name.startswith(ADAPTER)}
            if all(map(_is_half, adapter.values())):
                arrays |= {name: array.astype(np.float16) for name, array in adapter.items()}
        return codec.encode(arrays, {METADATA_KEY: self.manifest.to_json()})

    def _halved(self, name: str, array: FloatArray) -> NDArray[np.float16]:
        with np.errstate(over="ignore", under="ignore"):
            half = array.astype(np.float16)
        if not np.isfinite(half).all():
            raise MalformedBundle(f"Tensor '{name}' has values too large for F16: write F32.")
        if self.golden_logits is not None and not np.array_equal(half.astype(np.float32), array):
            raise MalformedBundle(
                f"Writing tensor '{name}' as F16 would round it, and the golden logits were made "
                f"with the unrounded values: round first, then compute the golden logits."
            )
        return half


def check_compatible(
    bundle: TaskBundle,
    *,
    fingerprint: str,
    layers: int,
    width: int,
    preprocessing: object,
    image_size: int | tuple[int, int],
) -> None:
    """Raise IncompatibleBundle unless the bundle fits this backbone.

    `preprocessing` is a PreprocessingSpec, a mapping, or any dataclass with the same fields.
    """
    made_for = bundle.manifest.backbone
    if made_for.fingerprint != fingerprint:
        raise IncompatibleBundle(
            f"The bundle was trained on backbone '{shown(made_for.name)}' with fingerprint "
            f"{made_for.fingerprint}, and this one has {fingerprint}."
        )
    if bundle.width != width:
        raise IncompatibleBundle(
            f"The bundle is {bundle.width} wide, and the backbone is {width} wide."
        )
    adapter = (array for change in bundle.adapter.values() for array in change)
    for what, array in (("memory", bundle.memory), ("an adapter", next(adapter, None))):
        if array is not None and array.shape[0] != layers:
            raise IncompatibleBundle(
                f"The bundle has {what} for {array.shape[0]} layers, and the backbone has "
                f"{layers} layers."
            )
    made_with = bundle.manifest.preprocessing
    try:
        present = PreprocessingSpec.of(preprocessing)
    except ValidationError as error:
        raise IncompatibleBundle(
            f"The backbone's preprocessing cannot be compared with the bundle's: "
            f"{shown(str(error.errors(include_url=False)[0]['msg']), 200)}."
        ) from error
    different = made_with.difference(present)
    if different is not None:
        raise IncompatibleBundle(
            f"The bundle was trained with preprocessing {different} = "
            f"{getattr(made_with, different)}, and the backbone uses {getattr(present, different)}."
        )
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if bundle.golden_pixels is not None and bundle.golden_pixels.shape[1:3] != size:
        height, width = bundle.golden_pixels.shape[1:3]
        raise IncompatibleBundle(
            f"The bundle's golden images are {height}×{width} pixels, and the backbone takes "
            f"{size[0]}×{size[1]}."
        )


def digest_of(data: bytes) -> str:
    """`sha256:` and the hash of these bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def read_file(path: str | Path, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """A regular file's bytes, or UnreadableBundle, or MalformedBundle when it is too large."""
    try:
        # O_NONBLOCK: opening a named pipe must fail below instead of waiting for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableBundle(f"The bundle '{path}' is not a regular file.")
            if status.st_size > limits.max_file_bytes:
                raise MalformedBundle(
                    f"The file has {status.st_size} bytes, more than the "
                    f"{limits.max_file_bytes} allowed."
                )
            return file.read(limits.max_file_bytes + 1)
    except OSError as error:
        raise UnreadableBundle(
            f"The bundle '{path}' cannot be read: {error.strerror or error}."
        ) from error


def _attribute(tensor: str) -> str:
    return tensor.replace(".", "_")


def _frozen(name: str, value: object) -> NDArray[Any]:
    wanted = None if name in _BYTES else np.float16 if name in _HALVES else np.float32
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype=wanted, order="C")
    except (TypeError, ValueError) as error:
        raise MalformedBundle(f"Tensor '{name}' is not an array of numbers.") from error
    if wanted is None and array.dtype != np.uint8:
        raise MalformedBundle(f"Tensor '{name}' must be uint8, not {array.dtype}.")
    # A writable array belongs to the caller and may change later: take a copy.
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _is_half(array: FloatArray) -> bool:
    """Whether float16 has all these values; denormal ones too."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.array_equal(array.astype(np.float16).astype(np.float32), array))


def _check_tensor_name_and_dtype(name: str, dtype: str) -> None:
    if name not in _RANKS:
        raise MalformedBundle(
            f"The file has a tensor '{shown(name)}' that no bundle has; known are "
            f"{', '.join(_RANKS)}."
        )
    allowed = codec.FLOAT_DTYPES
    if name in _BYTES or name in _HALVES:
        allowed = frozenset({"U8" if name in _BYTES else "F16"})
    if dtype not in allowed:
        raise MalformedBundle(
            f"Tensor '{name}' is stored as {dtype}; it must be {' or '.join(sorted(allowed))}."
        )


def _check_shapes(shapes: _Shapes, manifest: Manifest, limits: Limits) -> None:
    """Ranks, sizes and everything that must agree between tensors and manifest."""
    if "head.weight" not in shapes:
        raise MalformedBundle("The bundle has no tensor 'head.weight', and every task needs one.")
    sizes = _sizes(shapes)
    bounds = {
        "K": limits.max_classes,
        "D": limits.max_width,
        "L": limits.max_layers,
        "m": limits.max_memory_tokens,
        "R": limits.max_adapter_rank,
        "I": limits.max_width,
        "E": limits.max_width,
        # An MLP is four times as wide as its rows, and twice that where it has a gate.
        "U": 8 * limits.max_width,
        "F": 8 * limits.max_width,
        "G": limits.max_golden,
        "H": limits.max_golden_side,
        "W": limits.max_golden_side,
        "n": limits.max_examples,
        "C": limits.max_classes,
        "r": sizes["D"][0],
    }
    for letter, (size, where) in sizes.items():
        if letter in bounds and not 1 <= size <= bounds[letter]:
            raise MalformedBundle(
                f"Tensor '{where}' has {letter} = {size}; allowed are 1 to {bounds[letter]}."
            )
    if "memory" in shapes and "class_token" not in shapes:
        raise MalformedBundle(
            "The bundle has memory and no class_token, whose row alone could read the memory."
        )
    if manifest.extends and "class_token" not in shapes:
        raise MalformedBundle(
            "The bundle extends another and has no class_token, whose row alone could read the "
            "parent."
        )
    _check_adapter(shapes, manifest)
    _check_companions(shapes, manifest)
    named, classes = len(manifest.labels), sizes["K"][0]
    names_optional = manifest.problem in ("regression", "embedding")
    if named != classes and (named or not names_optional):
        raise MalformedBundle(
            f"The manifest names {named} labels, and the head has {classes} outputs."
        )


def _check_companions(shapes: _Shapes, manifest: Manifest) -> None:
    """What is of no use without another tensor, or without a word of the manifest."""
    for names in _TOGETHER:
        if any(name in shapes for name in names) and not all(name in shapes for name in names):
            *others, last = names
            raise MalformedBundle(f"{', '.join(others)} and {last} come together or not at all.")
    if ("known.means" in shapes) != (manifest.known is not None):
        raise MalformedBundle("The manifest's known and the tensors known.* come together.")
    if "head.projection" in shapes and manifest.normalised is None:
        raise MalformedBundle(
            "The bundle has head.projection, by which lengths are measured, and the manifest does "
            "not say that the head is normalised."
        )
    if "text.weight" in shapes and "examples.labels" not in shapes:
        raise MalformedBundle(
            "The bundle has text.weight and no examples: without them the head itself is what the "
            "text gave."
        )
    if "text.bias" in shapes and "text.weight" not in shapes:
        raise MalformedBundle("The bundle has text.bias and no text.weight.")
    if "examples.labels" in shapes and manifest.problem not in ("single_label", "multi_label"):
        raise MalformedBundle(f"A bundle of the problem '{manifest.problem}' has no examples.")


def _check_adapter(shapes: _Shapes, manifest: Manifest) -> None:
    """The manifest says which tensors of an adapter there are."""
    spec = manifest.adapter
    named = {f"{ADAPTER}{name}.{part}" for name in (spec.maps if spec else ()) for part in "ab"}
    present = {name for name in shapes if name.startswith(ADAPTER)}
    for name in sorted(named - present):
        raise MalformedBundle(
            f"The manifest's adapter needs the tensor '{name}', and it is not there."
        )
    for name in sorted(present - named):
        raise MalformedBundle(f"The manifest's adapter does not name the map of tensor '{name}'.")
    if spec is None:
        return
    rank = shapes[f"{ADAPTER}{spec.maps[0]}.a"][2]
    if rank != spec.rank:
        raise MalformedBundle(
            f"The manifest's adapter has rank {spec.rank}, and its tensors have {rank}."
        )
    if "class_token" not in shapes:
        raise MalformedBundle(
            "The bundle has an adapter and no class_token, whose row alone it could change."
        )


def _check_examples(problem: ProblemType, labels: ByteArray, digests: ByteArray) -> None:
    """One row for each photo, in the order of the digests: the same examples, the same bytes."""
    if labels.max() > 1:
        raise MalformedBundle("Tensor 'examples.labels' has values other than 0 and 1.")
    if problem == "single_label" and (labels.sum(axis=1) != 1).any():
        raise MalformedBundle(
            "Tensor 'examples.labels' must name one label for each photo of a single-label task."
        )
    names = [row.tobytes() for row in digests]
    if any(one >= other for one, other in itertools.pairwise(names)):
        raise MalformedBundle("Tensor 'examples.digests' must be ascending, each photo once.")


def _sizes(shapes: _Shapes) -> dict[str, tuple[int, str]]:
    """Letter → (size, first tensor with it); the same letter must be the same size everywhere."""
    sizes: dict[str, tuple[int, str]] = {"3": (3, "golden.pixels"), "32": (32, "examples.digests")}
    for name, letters in _RANKS.items():
        shape = shapes.get(name)
        if shape is None:
            continue
        if len(shape) != len(letters):
            raise MalformedBundle(
                f"Tensor '{name}' has the shape {list(shape)}; it must be [{', '.join(letters)}]."
            )
        for letter, size in zip(letters, shape, strict=True):
            known, where = sizes.setdefault(letter, (size, name))
            if size != known:
                raise MalformedBundle(
                    f"Tensor '{name}' has the shape {list(shape)}, so {letter} = {size}, and "
                    f"'{where}' has {letter} = {known}."
                )
    return sizes
