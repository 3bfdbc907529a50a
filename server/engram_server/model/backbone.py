"""The frozen backbone: any Vision Transformer in one representation.

Every supported family (see `families`) has the same structure: a patch projection, prefix tokens
(the class token, then distillation or register tokens), pre-norm blocks and a final norm. Most
differences are folded into the weights: layer scale into the linear layer before it, missing biases
into zeros, position embeddings into the prefix tokens. The others are optional parts: class token,
added position embeddings, rotary position embeddings, pooling.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from engram_bundle.names import format_digest
from engram_bundle.schema import TaskType
from torch import Tensor

from engram_server.model.kernels.linear import (
    FloatWeight,
    Int8Weight,
    PackedWeight,
    Weight,
    linear,
    plain,
)
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.rotary import Rotary

ReadoutPart = Literal["class", "distillation", "patches", "pooled"]


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _geglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


def _tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "geglu": _geglu,
    "gelu": F.gelu,
    "gelu_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": _swiglu,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that determine all shapes, the activation and the epsilon of LayerNorm."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    layers: int
    heads: int
    head_width: int
    width: int
    prefix_tokens: int  # the class token, then distillation or register tokens; 0 without any
    activation: str
    epsilon: float
    rotary_base: float | None = None  # of rotary position embeddings, if any

    @property
    def grid(self) -> tuple[int, int]:
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.patches

    @property
    def patches(self) -> int:
        rows, columns = self.grid
        return rows * columns

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width

    def norm(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.layer_norm(rows, (self.width,), weight, bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One pre-norm block. I is heads × head width, F the hidden width of the MLP."""

    norm1_weight: Tensor  # (D,)
    norm1_bias: Tensor  # (D,)
    qkv_weight: Weight  # (3I, D)
    qkv_bias: Tensor  # (3I,)
    out_weight: Weight  # (D, I)
    out_bias: Tensor  # (D,)
    norm2_weight: Tensor  # (D,)
    norm2_bias: Tensor  # (D,)
    up_weight: Weight  # (F, D); for swiglu gate and up stacked, (2F, D)
    up_bias: Tensor  # (F,)
    down_weight: Weight  # (D, F)
    down_bias: Tensor  # (D,)

    def packed(self, pack: Callable[[Tensor], Weight]) -> "Layer":
        names = ("qkv_weight", "out_weight", "up_weight", "down_weight")
        packed: dict[str, Any] = {name: pack(plain(getattr(self, name))) for name in names}
        return replace(self, **packed)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The weights that turn pixels into the rows of the first layer."""

    patch_weight: Tensor  # (D, 3 · patch height · patch width)
    patch_bias: Tensor  # (D,)
    class_token: Tensor | None  # (D,), without position
    class_position: Tensor | None  # (D,); also added to the class tokens of tasks
    other_prefix: Tensor  # (prefix - 1, D), including positions
    patch_positions: Tensor | None  # (patches, D)
    norm_weight: Tensor | None  # (D,): CLIP normalises the embedded rows
    norm_bias: Tensor | None  # (D,)


@dataclass(frozen=True, slots=True)
class Pooling:
    """Attention pooling with one learned query, the probe: SigLIP's replacement of a class token.

    Heads, activation and epsilon are those of the layers.
    """

    probe: Tensor  # (D,)
    qkv_weight: Tensor  # (3D, D)
    qkv_bias: Tensor  # (3D,)
    out_weight: Tensor  # (D, D)
    out_bias: Tensor  # (D,)
    norm_weight: Tensor  # (D,)
    norm_bias: Tensor  # (D,)
    up_weight: Tensor  # (F, D)
    up_bias: Tensor  # (F,)
    down_weight: Tensor  # (D, F)
    down_bias: Tensor  # (D,)


@dataclass(frozen=True, slots=True)
class BytePatches:
    """The patch projection with pixel normalisation folded in: it takes decoded bytes."""

    weight: PackedWeight  # (D, patch height · patch width · 3)
    bias: Tensor  # (D,)

    @classmethod
    def of(cls, embedding: Embedding, geometry: Geometry, preprocessing: Preprocessing) -> Self:
        factor, shift = preprocessing.affine.unbind()  # (3,) each
        weight = embedding.patch_weight.double().view(-1, 3, *geometry.patch_size)
        bias = embedding.patch_bias.double() + weight.sum(dim=(2, 3)) @ shift
        folded = (weight * factor.view(3, 1, 1)).permute(0, 2, 3, 1).flatten(1)
        return cls(FloatWeight(folded), bias.float())


Value = TypeVar("Value", bound=np.floating[Any])
Part = TypeVar("Part", Embedding, Layer, Pooling, Rotary, "Backbone")


@dataclass(frozen=True, slots=True)
class BaseHead:
    """The classifier of the backbone, served as the task `base`.

    `reads` lists its inputs, concatenated. `Backbone.feature`, the input of head-only tasks, comes
    first, with zero weights if the head does not use it.
    """

    weight: Tensor  # (K, len(reads) · D)
    bias: Tensor | None  # (K,)
    labels: tuple[str, ...]
    task_type: TaskType
    reads: tuple[ReadoutPart, ...] = ("class",)

    @property
    def classes(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class Backbone:
    """A frozen Vision Transformer. Tasks are bound to `fingerprint`, a hash of the weights."""

    name: str
    fingerprint: str
    geometry: Geometry
    preprocessing: Preprocessing
    embedding: Embedding
    blocks: tuple[Layer, ...]
    final_norm_weight: Tensor | None  # (D,); C-RADIO has no final norm
    final_norm_bias: Tensor | None  # (D,)
    base: BaseHead | None
    rotary: Rotary | None = None  # for this image size
    pooling: Pooling | None = None
    byte_patches: "BytePatches | None" = None  # if packed
    compiled: bool = False  # whether passes run the MLPs, most of the work, with torch.compile

    @property
    def layers(self) -> int:
        return self.geometry.layers

    @property
    def width(self) -> int:
        return self.geometry.width

    @property
    def image_size(self) -> tuple[int, int]:
        return self.geometry.image_size

    @property
    def device(self) -> torch.device:
        return self.embedding.patch_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.patch_weight.dtype

    @property
    def feature(self) -> ReadoutPart:
        """The input of head-only tasks: the model's own summary of an image."""
        if self.pooling is not None:
            return "pooled"
        return "patches" if self.embedding.class_token is None else "class"

    @property
    def readout(self) -> tuple[ReadoutPart, ...]:
        """The parts of the final base rows that `base` and head-only tasks read."""
        return (self.feature,) if self.base is None else self.base.reads

    @property
    def readout_rows(self) -> int:
        """The number of leading base rows that the readout needs after the last layer."""
        parts = {"class": 1, "distillation": 2}
        return max(parts.get(part, self.geometry.tokens) for part in self.readout)

    @property
    def summary_layers(self) -> tuple[int, ...]:
        """The layers whose input the summary of an image covers: every second, and the last."""
        last = self.layers - 1
        return (*range(2, last, 2), last)

    @property
    def summary_parts(self) -> int:
        """Rows of the summary per layer: class token, if any, mean and deviation of patches."""
        return 2 if self.embedding.class_token is None else 3

    def features_of(self, readout: npt.NDArray[Value]) -> npt.NDArray[Value]:
        """Return the features that examples keep, of a readout with a summary: (…, F)."""
        final, summary = readout[..., : self.width], readout[..., len(self.readout) * self.width :]
        return np.concatenate([final, summary], axis=-1)

    @property
    def summary_shape(self) -> tuple[int, int, int]:
        return len(self.summary_layers), self.summary_parts, self.width

    @property
    def first_token(self) -> Tensor:
        """The initial class token of a new task, (D,), without position.

        It is the class token of the backbone. A backbone without one gives the embedding of a patch
        of the mean colour at the mean position, which is close to what its layers expect.
        """
        embedding = self.embedding
        if embedding.class_token is not None:
            return embedding.class_token
        if embedding.patch_positions is None:
            return embedding.patch_bias
        return embedding.patch_bias + embedding.patch_positions.mean(dim=0)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "Backbone":
        """Move to another device or precision; the fingerprint stays the same."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        base = self.base
        if base is not None:
            # Heads stay in float32: they are small, and half precision would lose digits.
            bias = None if base.bias is None else base.bias.to(device)
            base = replace(base, weight=base.weight.to(device), bias=bias)
        return replace(
            _map_tensors(self, move),  # the final norm
            embedding=_map_tensors(self.embedding, move),
            blocks=tuple(_map_tensors(block, move) for block in self.blocks),
            base=base,
            rotary=None if self.rotary is None else _map_tensors(self.rotary, move),
            pooling=None if self.pooling is None else _map_tensors(self.pooling, move),
        )

    def packed(self, *, int8: bool = False) -> "Backbone":
        """Pack the weights for CPU inference without gradients; the fingerprint stays the same.

        An int8 backbone does not keep the plain matrices alive.
        """
        pack = Int8Weight if int8 else FloatWeight
        return replace(
            self,
            blocks=tuple(block.packed(pack) for block in self.blocks),
            byte_patches=BytePatches.of(self.embedding, self.geometry, self.preprocessing),
        )

    @property
    def nbytes(self) -> int:
        """The size of all weights without the head."""
        tensors = sum(tensor.nbytes for _, tensor in self.named_tensors())
        packed = [getattr(block, each.name) for block in self.blocks for each in fields(block)]
        if self.byte_patches is not None:
            packed.append(self.byte_patches.weight)
        return tensors + sum(one.nbytes for one in packed if isinstance(one, PackedWeight))

    @property
    def precision(self) -> str:
        """The precision, as in `ENGRAM_PRECISION`."""
        if isinstance(self.blocks[0].qkv_weight, Int8Weight):
            return "int8"
        return str(self.dtype).removeprefix("torch.")

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights without the head, in the order of the fingerprint."""
        yield from named_tensors(self.embedding)
        for index, block in enumerate(self.blocks):
            yield from ((f"{index}.{name}", tensor) for name, tensor in named_tensors(block))
        if self.final_norm_weight is not None and self.final_norm_bias is not None:
            yield "final_norm_weight", self.final_norm_weight
            yield "final_norm_bias", self.final_norm_bias
        if self.pooling is not None:
            yield from ((f"pooling.{name}", part) for name, part in named_tensors(self.pooling))

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Embed pixels as the rows of the first layer, (B, S, D).

        Pixels are normalised floats (B, 3, H, W), or bytes (B, H, W, 3) from the preprocessing.
        """
        embedding = self.embedding
        count = pixels.shape[0]
        embedded = self._embed_patches(pixels)
        if embedding.patch_positions is not None:
            embedded = embedded + embedding.patch_positions
        if embedding.class_token is not None:
            class_token = self._positioned(embedding.class_token)[None]
            prefix = torch.cat([class_token, embedding.other_prefix])
            embedded = torch.cat([prefix.expand(count, -1, -1), embedded], dim=1)
        return self._embedding_norm(embedded)

    def _embed_patches(self, pixels: Tensor) -> Tensor:
        """Apply the patch projection: (B, patches, D)."""
        of_bytes, embedding = self.byte_patches, self.embedding
        if pixels.dtype == torch.uint8 and of_bytes is None:
            pixels = self.preprocessing.normalise(pixels, self.dtype)
        (rows, columns), (patch_height, patch_width) = self.geometry.grid, self.geometry.patch_size
        height, width = rows * patch_height, columns * patch_width
        # If the patch grid does not cover the image, its right and bottom edges are ignored.
        if of_bytes is not None and pixels.dtype == torch.uint8:
            patches = pixels[:, :height, :width].reshape(
                -1, rows, patch_height, columns, patch_width, 3
            )
            patches = patches.transpose(2, 3).flatten(3).flatten(0, 2).to(self.dtype)
            embedded = linear(patches, of_bytes.weight, of_bytes.bias)
            return embedded.view(-1, rows * columns, self.width)
        pixels = pixels[:, :, :height, :width].to(self.dtype)
        patches = pixels.reshape(-1, 3, rows, patch_height, columns, patch_width)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, embedding.patch_weight, embedding.patch_bias)

    def embed_class_token(self, token: Tensor) -> Tensor:
        """Embed a task's class token (…, D) like the class token of the backbone."""
        return self._embedding_norm(self._positioned(token))

    def final_norm(self, rows: Tensor) -> Tensor:
        if self.final_norm_weight is None:
            return rows
        return self.geometry.norm(rows, self.final_norm_weight, self.final_norm_bias)

    def _positioned(self, token: Tensor) -> Tensor:
        position = self.embedding.class_position
        return token if position is None else token + position

    def _embedding_norm(self, rows: Tensor) -> Tensor:
        weight, bias = self.embedding.norm_weight, self.embedding.norm_bias
        return rows if weight is None else self.geometry.norm(rows, weight, bias)


def named_tensors(
    owner: Embedding | Layer | Pooling | Rotary | Backbone,
) -> Iterator[tuple[str, Tensor]]:
    for field in fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _map_tensors(owner: Part, change: Callable[[Tensor], Tensor]) -> Part:
    changed: dict[str, Any] = {name: change(value) for name, value in named_tensors(owner)}
    return replace(owner, **changed)


def fingerprint(backbone: Backbone) -> str:
    """Hash everything a task depends on, in float32, independent of the file and its dtype.

    The head is excluded: a trunk with and without a classifier serves the same tasks. Pass the
    position embeddings as stored, before interpolation: bicubic resampling is not bit-identical
    everywhere, and the geometry contains the image size. The same holds for rotary embeddings.
    """
    # Optional sizes that are None are excluded, so that new ones do not change old fingerprints.
    numbers = {name: one for name, one in asdict(backbone.geometry).items() if one is not None}
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
    for name, tensor in backbone.named_tensors():
        data = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(json.dumps([name, list(data.shape)]).encode())
        digest.update(data.astype("<f4", copy=False).data)  # large ones are not copied
    return format_digest(digest.digest())
