"""The frozen backbone: any Vision Transformer, packed into one representation.

Every family we read (see `families`) is, once loaded, the same machine: patches through one matrix,
some prefix tokens (the class token first, then distillation or register tokens), pre-norm blocks, a
final norm. Differences between families are folded into the numbers: layer scale into the matrices
behind it, absent biases into zeros, position embeddings into the prefix tokens. What cannot be is a
part that may be absent: class token, positions that are added, positions that turn, pooling.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.linear import FloatWeight, Int8Weight, PackedWeight, Weight, linear, plain
from server.model.preprocessing import Preprocessing
from server.model.rotary import Rotary

ReadoutPart = Literal["class", "distillation", "patches", "pooled"]
Problem = Literal["single_label", "multi_label", "regression", "embedding"]


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
    """The numbers that fix every shape, and the two constants of the arithmetic."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    layers: int
    heads: int
    head_width: int
    width: int
    prefix_tokens: int  # the class token, then distillation or register tokens; 0 without any
    activation: str
    epsilon: float
    rotary_base: float | None = None  # of positions that turn queries and keys, where there are

    @property
    def grid(self) -> tuple[int, int]:
        (height, width), (patch_height, patch_width) = self.image_size, self.patch_size
        return height // patch_height, width // patch_width

    @property
    def tokens(self) -> int:
        """Base rows of one image: prefix tokens and patches."""
        rows, columns = self.grid
        return self.prefix_tokens + rows * columns

    @property
    def patches(self) -> int:
        return self.tokens - self.prefix_tokens

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
        """With its four matrices in another form."""
        return replace(
            self,
            qkv_weight=pack(plain(self.qkv_weight)),
            out_weight=pack(plain(self.out_weight)),
            up_weight=pack(plain(self.up_weight)),
            down_weight=pack(plain(self.down_weight)),
        )


@dataclass(frozen=True, slots=True)
class Embedding:
    """What turns pixels into the rows that enter the first layer."""

    patch_weight: Tensor  # (D, 3 · patch height · patch width)
    patch_bias: Tensor  # (D,)
    class_token: Tensor | None  # (D,), without its position
    class_position: Tensor | None  # (D,); a task's class token gets it too
    other_prefix: Tensor  # (prefix - 1, D), positions added
    patch_positions: Tensor | None  # (patches, D)
    norm_weight: Tensor | None  # (D,): CLIP normalises the embedded rows
    norm_bias: Tensor | None  # (D,)


@dataclass(frozen=True, slots=True)
class Pooling:
    """One learned query, the probe, takes from an image's final rows: SigLIP's for a class token.

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
    """The patch matrix with the normalisation of pixels in it: bytes as they were decoded go in."""

    weight: PackedWeight  # (D, patch height · patch width · 3)
    bias: Tensor  # (D,)

    @classmethod
    def of(cls, embedding: Embedding, geometry: Geometry, preprocessing: Preprocessing) -> Self:
        factor, shift = preprocessing.affine.unbind()  # (3,) each
        weight = embedding.patch_weight.double().view(-1, 3, *geometry.patch_size)
        bias = embedding.patch_bias.double() + weight.sum(dim=(2, 3)) @ shift
        folded = (weight * factor.view(3, 1, 1)).permute(0, 2, 3, 1).flatten(1)
        return cls(FloatWeight(folded), bias.float())


Part = TypeVar("Part", Embedding, Layer, Pooling, Rotary)


@dataclass(frozen=True, slots=True)
class BaseHead:
    """The backbone's own head, served as the task `base`.

    `reads` names what of the final rows it reads, side by side; first comes what head-only tasks
    read, `Backbone.feature`, with zeros for weights where the head does not read that.
    """

    weight: Tensor  # (K, len(reads) · D)
    bias: Tensor | None  # (K,)
    labels: tuple[str, ...]
    problem: Problem
    reads: tuple[ReadoutPart, ...] = ("class",)

    @property
    def classes(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class Backbone:
    """A frozen Vision Transformer. `fingerprint` names it by content; tasks are bound to that."""

    name: str
    fingerprint: str
    geometry: Geometry
    preprocessing: Preprocessing
    embedding: Embedding
    blocks: tuple[Layer, ...]
    final_norm_weight: Tensor | None  # (D,); C-RADIO has no final norm
    final_norm_bias: Tensor | None  # (D,)
    base: BaseHead | None
    rotary: Rotary | None = None  # of this image size
    pooling: Pooling | None = None
    byte_patches: "BytePatches | None" = None  # of packed backbones
    compiled: bool = False  # whether passes run the MLPs, most of the work, through torch.compile

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
        """What head-only tasks read: the model's own summary of an image."""
        if self.pooling is not None:
            return "pooled"
        return "patches" if self.embedding.class_token is None else "class"

    @property
    def readout(self) -> tuple[ReadoutPart, ...]:
        """What a pass reads from an image's final base rows for `base` and head-only tasks."""
        return (self.feature,) if self.base is None else self.base.reads

    @property
    def readout_rows(self) -> int:
        """How many leading base rows the last layer must finish to give the readout."""
        parts = {"class": 1, "distillation": 2}
        return max(parts.get(part, self.geometry.tokens) for part in self.readout)

    @property
    def first_token(self) -> Tensor:
        """What the class token of a new task starts from, (D,), without position.

        The backbone's own, or where it has none what a patch of the mean colour would be at the
        mean of all places: a row such as the layers know.
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
        """The same backbone elsewhere or in another precision; the fingerprint stays."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        base = self.base
        if base is not None:
            # Heads stay in float32: they are small, and half precision would cost them digits.
            bias = None if base.bias is None else base.bias.to(device)
            base = replace(base, weight=base.weight.to(device), bias=bias)
        return replace(
            self,
            embedding=_map_tensors(self.embedding, move),
            blocks=tuple(_map_tensors(block, move) for block in self.blocks),
            final_norm_weight=_if_there(move, self.final_norm_weight),
            final_norm_bias=_if_there(move, self.final_norm_bias),
            base=base,
            rotary=None if self.rotary is None else _map_tensors(self.rotary, move),
            pooling=None if self.pooling is None else _map_tensors(self.pooling, move),
        )

    def packed(self, *, int8: bool = False) -> "Backbone":
        """The same backbone for passes on a CPU that need no gradients; the fingerprint stays.

        In int8 nothing of it refers to the plain matrices: they go with the backbone given.
        """
        pack = Int8Weight if int8 else FloatWeight
        return replace(
            self,
            blocks=tuple(block.packed(pack) for block in self.blocks),
            byte_patches=BytePatches.of(self.embedding, self.geometry, self.preprocessing),
        )

    @property
    def nbytes(self) -> int:
        """Of all weights but the head's."""
        tensors = sum(tensor.nbytes for _, tensor in self.named_tensors())
        packed = [getattr(block, each.name) for block in self.blocks for each in fields(block)]
        if self.byte_patches is not None:
            packed.append(self.byte_patches.weight)
        return tensors + sum(one.nbytes for one in packed if isinstance(one, PackedWeight))

    @property
    def precision(self) -> str:
        """Of the arithmetic, in the words of the settings."""
        if isinstance(self.blocks[0].qkv_weight, Int8Weight):
            return "int8"
        return str(self.dtype).removeprefix("torch.")

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights but the head's, in the order of the fingerprint."""
        yield from named_tensors(self.embedding)
        for index, block in enumerate(self.blocks):
            yield from ((f"{index}.{name}", tensor) for name, tensor in named_tensors(block))
        if self.final_norm_weight is not None and self.final_norm_bias is not None:
            yield "final_norm_weight", self.final_norm_weight
            yield "final_norm_bias", self.final_norm_bias
        if self.pooling is not None:
            yield from ((f"pooling.{name}", part) for name, part in named_tensors(self.pooling))

    def embed_images(self, pixels: Tensor) -> Tensor:
        """Pixels to the rows that enter the first layer, (B, S, D).

        They are normalised floats (B, 3, H, W), or bytes (B, H, W, 3) as preprocessing gives them.
        """
        embedding = self.embedding
        count = pixels.shape[0]
        embedded = self._embed_patches(pixels)
        if embedding.patch_positions is not None:
            embedded = embedded + embedding.patch_positions
        if embedding.class_token is not None:
            own = self._placed(embedding.class_token)[None]
            prefix = torch.cat([own, embedding.other_prefix])
            embedded = torch.cat([prefix.expand(count, -1, -1), embedded], dim=1)
        return self._embedding_norm(embedded)

    def _embed_patches(self, pixels: Tensor) -> Tensor:
        """Of pixels as `embed_images` takes them: (B, patches, D)."""
        of_bytes, embedding = self.byte_patches, self.embedding
        if pixels.dtype == torch.uint8 and of_bytes is None:
            pixels = self.preprocessing.normalise(pixels, self.dtype)
        (rows, columns), (patch_height, patch_width) = self.geometry.grid, self.geometry.patch_size
        height, width = rows * patch_height, columns * patch_width
        # A patch grid that does not cover the image leaves its right and bottom rim unread.
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
        """A task's class token (…, D) to its first row: treated as the backbone's own is."""
        return self._embedding_norm(self._placed(token))

    def final_norm(self, rows: Tensor) -> Tensor:
        if self.final_norm_weight is None:
            return rows
        return self.geometry.norm(rows, self.final_norm_weight, self.final_norm_bias)

    def _placed(self, token: Tensor) -> Tensor:
        position = self.embedding.class_position
        return token if position is None else token + position

    def _embedding_norm(self, rows: Tensor) -> Tensor:
        weight, bias = self.embedding.norm_weight, self.embedding.norm_bias
        return rows if weight is None else self.geometry.norm(rows, weight, bias)


def named_tensors(owner: Embedding | Layer | Pooling | Rotary) -> Iterator[tuple[str, Tensor]]:
    for field in fields(owner):
        value = getattr(owner, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def _map_tensors(owner: Part, change: Callable[[Tensor], Tensor]) -> Part:
    return replace(owner, **{name: change(value) for name, value in named_tensors(owner)})


def _if_there(change: Callable[[Tensor], Tensor], tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else change(tensor)


def fingerprint(backbone: Backbone) -> str:
    """sha256 of all a task depends on, in float32: the same whatever file or dtype it came from.

    The head is left out: a trunk with and without a classifier serves the same tasks. Pass the
    position embeddings as stored, before any interpolation: bicubic resampling is not promised to
    be the same to the bit everywhere, while the image size in the geometry already tells it. So it
    does for rotary positions.
    """
    # What a geometry may lack is left out, so that older backbones keep their fingerprints.
    numbers = {
        name: value for name, value in asdict(backbone.geometry).items() if value is not None
    }
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
    for name, tensor in backbone.named_tensors():
        data = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(json.dumps([name, list(data.shape)]).encode())
        digest.update(data.astype("<f4", copy=False).data)  # large ones are not copied
    return f"sha256:{digest.hexdigest()}"
