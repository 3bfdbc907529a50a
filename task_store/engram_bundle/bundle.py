"""Task bundles: one version of one task, as a manifest and tensors."""

import os
import stat
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_bundle import codec
from engram_bundle.codec import FloatDtype
from engram_bundle.errors import IncompatibleBundle, MalformedBundle, UnreadableBundle
from engram_bundle.files import write_whole
from engram_bundle.limits import DEFAULT_LIMITS, BundleLimits
from engram_bundle.manifest import Manifest
from engram_bundle.media import check_media
from engram_bundle.names import digest_of
from engram_bundle.preprocessing import PreprocessingSpec
from engram_bundle.schema import TENSORS, LoraTarget, TaskType, lora_names
from engram_bundle.untrusted import printable
from engram_bundle.validation import check_name, check_shapes, check_stored_dtype, check_values

METADATA_KEY = "engram"

# Golden logits replayed on the right backbone agree within this, relative to their largest value
# (and at least 1). Wrong placement or preprocessing is far outside.
GOLDEN_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class TaskBundle:
    """A manifest and tensors: immutable and always valid. Equal bundles have equal digests.

    `tensors` maps names of `schema.TENSORS` to arrays; None means that a tensor is absent. The
    bundle's own arrays are read-only, in write order, and of the dtypes of the schema.
    """

    manifest: Manifest
    tensors: Mapping[str, Any]
    limits: InitVar[BundleLimits] = DEFAULT_LIMITS
    # The file that this bundle was read from. It keeps the digest stable when another writer laid
    # out the file differently. Not an argument: a changed copy is a new bundle.
    _file: bytes | None = field(default=None, init=False, repr=False)

    def __post_init__(self, limits: BundleLimits) -> None:
        for name in self.tensors:
            check_name(name)
        arrays = {
            name: _read_only(name, array)
            for name in TENSORS
            if (array := self.tensors.get(name)) is not None
        }
        memory = arrays.get("memory")
        if memory is not None and memory.ndim == 3 and memory.shape[1] == 0:
            del arrays["memory"]
        object.__setattr__(self, "tensors", MappingProxyType(arrays))
        self._check_sizes(limits)
        check_values(arrays, self.manifest, limits)

    def check(self, limits: BundleLimits) -> None:
        """Raise MalformedBundle if this bundle's file could not be read with these limits."""
        codec.read_header(self._bytes, limits)
        self._check_sizes(limits)
        check_media(self.tensors, limits)

    @classmethod
    def from_bytes(cls, data: bytes, limits: BundleLimits = DEFAULT_LIMITS) -> "TaskBundle":
        """Read a whole file from memory, or raise MalformedBundle."""
        metadata, stored = codec.read_header(data, limits)
        for name, entry in stored.items():
            check_stored_dtype(name, entry.dtype)
        if metadata.keys() != {METADATA_KEY}:
            keys = ", ".join(printable(key) for key in metadata) or "none"
            raise MalformedBundle(
                f"The file's metadata must have the single key '{METADATA_KEY}'; it has "
                f"{printable(keys, 120)}. Is this a bundle?"
            )
        manifest = Manifest.from_json(metadata[METADATA_KEY], limits)
        # Before decoding, because F16 doubles its size in memory.
        check_shapes({name: entry.shape for name, entry in stored.items()}, manifest, limits)
        tensors = {name: codec.decode(data, entry) for name, entry in stored.items()}
        bundle = cls(manifest, tensors, limits)
        object.__setattr__(bundle, "_file", data)
        return bundle

    @classmethod
    def load(cls, path: str | Path, limits: BundleLimits = DEFAULT_LIMITS) -> "TaskBundle":
        """Read a file, or raise UnreadableBundle or MalformedBundle."""
        return cls.from_bytes(read_file(path, limits), limits)

    def to_bytes(self, *, dtype: FloatDtype | None = None) -> bytes:
        """Return the file's bytes, the same every time.

        Without `dtype` these are the bytes behind `digest`: the file that was read, or F32. With
        it, float tensors are written again in that dtype (golden.logits always in F32).
        """
        return self._bytes if dtype is None else self._encode(dtype)

    def save(self, path: str | Path, *, dtype: FloatDtype | None = None) -> Path:
        """Write the file atomically and durably, or raise UnreadableBundle."""
        target, data = Path(path), self.to_bytes(dtype=dtype)
        try:
            write_whole(target, data)
        except OSError as error:
            reason = error.strerror or error
            raise UnreadableBundle(f"The bundle '{target}' cannot be written: {reason}.") from error
        return target

    def get(self, name: str) -> NDArray[Any] | None:
        return self.tensors.get(name)

    @cached_property
    def digest(self) -> str:
        """The identity of the bundle: the digest of its file."""
        return digest_of(self._bytes)

    @property
    def size_bytes(self) -> int:
        return len(self._bytes)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.manifest.labels

    @property
    def task_type(self) -> TaskType:
        return self.manifest.task_type

    @property
    def extends(self) -> tuple[str, ...]:
        """Digests of the parents, in order."""
        return self.manifest.extends

    @property
    def classes(self) -> int:
        """K, the number of outputs."""
        return int(self.tensors["head.weight"].shape[0])

    @property
    def width(self) -> int:
        """D, the width of the backbone."""
        return int(self.tensors["head.weight"].shape[1])

    @property
    def memory_tokens(self) -> int:
        """m, memory tokens per layer; 0 without memory."""
        memory = self.get("memory")
        return 0 if memory is None else int(memory.shape[1])

    @property
    def lora(self) -> dict[LoraTarget, tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """A and B of each LoRA target; empty without LoRA."""
        spec = self.manifest.lora
        pairs = {target: lora_names(target) for target in (() if spec is None else spec.targets)}
        return {target: (self.tensors[a], self.tensors[b]) for target, (a, b) in pairs.items()}

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, TaskBundle) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def _bytes(self) -> bytes:
        return self._encode("F32") if self._file is None else self._file

    def _check_sizes(self, limits: BundleLimits) -> None:
        self.manifest.check(limits)
        shapes = {name: array.shape for name, array in self.tensors.items()}
        check_shapes(shapes, self.manifest, limits)

    def _encode(self, dtype: FloatDtype) -> bytes:
        arrays: dict[str, NDArray[Any]] = dict(self.tensors)
        if dtype == "F16":
            for name, array in arrays.items():
                if name != "golden.logits" and array.dtype == np.float32:
                    arrays[name] = self._to_half(name, array)
        else:
            # LoRA and weights on layers are most of a bundle: F16 where that loses nothing.
            for group in ("lora", "layers"):
                names = [name for name in arrays if TENSORS[name].group == group]
                halves = {name: _as_half(arrays[name]) for name in names}
                if all(np.array_equal(half, arrays[name]) for name, half in halves.items()):
                    arrays |= halves
        return codec.encode(arrays, {METADATA_KEY: self.manifest.to_json()})

    def _to_half(self, name: str, array: NDArray[np.float32]) -> NDArray[np.float16]:
        half = _as_half(array)
        if not np.isfinite(half).all():
            raise MalformedBundle(f"Tensor '{name}' has values too large for F16: write F32.")
        if "golden.logits" in self.tensors and not np.array_equal(half, array):
            raise MalformedBundle(
                f"Writing tensor '{name}' as F16 would round it, but the golden logits were "
                f"computed from the unrounded values: round first, then compute the golden logits."
            )
        return half


def check_compatible(
    bundle: TaskBundle,
    *,
    fingerprint: str,
    layers: int,
    width: int,
    preprocessing: PreprocessingSpec,
    image_size: tuple[int, int],
) -> None:
    """Raise IncompatibleBundle unless the bundle fits this backbone."""
    backbone, expected = bundle.manifest.backbone, bundle.manifest.preprocessing
    if backbone.fingerprint != fingerprint:
        raise IncompatibleBundle(
            f"The bundle was trained on backbone '{printable(backbone.name)}' with fingerprint "
            f"{backbone.fingerprint}, but this backbone has {fingerprint}."
        )
    if bundle.width != width:
        raise IncompatibleBundle(
            f"The bundle has width {bundle.width}, but the backbone has width {width}."
        )
    for name, array in bundle.tensors.items():
        if TENSORS[name].shape[0] == "L" and array.shape[0] != layers:
            raise IncompatibleBundle(
                f"Tensor '{name}' of the bundle has {array.shape[0]} layers, but the backbone has "
                f"{layers} layers."
            )
    if different := expected.difference(preprocessing):
        raise IncompatibleBundle(
            f"The bundle was trained with preprocessing {different} = "
            f"{getattr(expected, different)}, but the backbone uses "
            f"{getattr(preprocessing, different)}."
        )
    golden = bundle.get("golden.pixels")
    if golden is not None and golden.shape[1:3] != image_size:
        raise IncompatibleBundle(
            f"The bundle's golden images are {golden.shape[1]}×{golden.shape[2]} pixels, but the "
            f"backbone takes {image_size[0]}×{image_size[1]}."
        )


def read_file(path: str | Path, limits: BundleLimits = DEFAULT_LIMITS) -> bytes:
    """Read a regular file, or raise UnreadableBundle, or MalformedBundle if it is too large."""
    try:
        # O_NONBLOCK: opening a named pipe must fail below instead of waiting for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise UnreadableBundle(f"The bundle '{path}' is not a regular file.")
            codec.check_file_size(status.st_size, limits)
            return file.read(limits.max_file_bytes + 1)
    except OSError as error:
        reason = error.strerror or error
        raise UnreadableBundle(f"The bundle '{path}' cannot be read: {reason}.") from error


def _read_only(name: str, value: object) -> NDArray[Any]:
    dtype = TENSORS[name].dtype
    try:
        with np.errstate(over="ignore"):
            array = np.asarray(value, dtype=None if dtype == np.uint8 else dtype, order="C")
    except (TypeError, ValueError) as error:
        raise MalformedBundle(f"Tensor '{name}' is not an array of numbers.") from error
    if array.dtype != dtype:
        raise MalformedBundle(f"Tensor '{name}' must be uint8, not {array.dtype}.")
    # A writable array belongs to the caller, who may change it later.
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array


def _as_half(array: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(np.float16)
