"""Linear maps of a frozen backbone, packed once for the processor that runs them.

Training and GPUs multiply by plain matrices. A server on a CPU multiplies by the same matrices for
as long as it runs, so it lays them out once as its kernels read them, in float32 (`FloatWeight`) or
in eight bits (`Int8Weight`). Neither has gradients.
"""

from abc import ABC, abstractmethod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# A pass over warm images has a row or two per task, so its time is that of reading the weights. CPU
# libraries read them two and a half times as fast in `weight @ rows.T` as in `rows @ weight.T` when
# there are few rows (measured with MKL on two cores: 4 rows 16 against 41 ms for all the matrices
# of a ViT-B, 32 rows 49 against 66, equal from about 50).
FEW_ROWS: Final = 32
# Up to so many rows oneDNN's packed matrices take less time than MKL's plain ones, above it more
# (measured on two cores of a Zen 3, all matrices of a ViT-B/32: 51 rows 0.83, 401 rows 1.08).
PACKED_ROWS: Final = 128
# A row in eight bits is its smallest value plus 0 … 255 steps of its own.
_ROW_STEPS: Final = 255
_SIGN_BIT: Final = 128
_WEIGHT_LEVELS: Final = 127
# Processors that add products in 32 bits at once. Others first add those of two neighbours in 16,
# and silently give a wrong sum beyond 32767: there two neighbours share the levels of a weight, as
# (127 and 1 for rounding) · 255 is less. That costs at most one bit.
_WIDE_SUMS: Final = ("avx512_vnni", "avx_vnni", "amx_int8")
_SMALLEST: Final = 1e-30  # a row or a weight of zeros has a scale too


class PackedWeight(ABC):
    """A matrix (K, D) in the layout that some kernel reads."""

    shape: torch.Size
    nbytes: int

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape

    @abstractmethod
    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        """`rows @ weight.T + bias` for rows (R, D): (R, K), contiguous."""


Weight = Tensor | PackedWeight


class FloatWeight(PackedWeight):
    """In float32, plain and as oneDNN reads it: twice the memory, for the faster of two kernels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._plain = weight.float().contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._plain)
        self.nbytes = 2 * self._plain.nbytes

    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        if len(rows) > PACKED_ROWS:
            return F.linear(rows, self._plain, bias)
        packed: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, bias, "none", [], ""
        )
        return packed


class Int8Weight(PackedWeight):
    """In eight bits with a scale for each output; rows are rounded to eight bits as they come.

    A row's steps are its own, so what a row gives depends on no other row.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        weight = weight.float()
        scales = _largest(weight).clamp_min(_SMALLEST) / _WEIGHT_LEVELS
        rounded = (weight / scales[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scales = scales
        # What a row of ones gives: the smallest value of a row is added to all its numbers.
        self._sums = scales * rounded.sum(dim=1)
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)
        self.nbytes = weight.numel() + 3 * scales.nbytes

    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        # Two reductions and a conversion to signed bytes: `aminmax` and unsigned ones are not
        # vectorised, and would take longer than all the rest.
        smallest, largest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        step = ((largest - smallest) / _ROW_STEPS).clamp_min_(_SMALLEST)
        signed = (rows * (1 / step)).sub_(smallest / step + _SIGN_BIT).round_().to(torch.int8)
        product = torch.ops.onednn.qlinear_pointwise(
            *(signed.view(torch.uint8).bitwise_xor_(_SIGN_BIT), 1.0, 0),
            *(self._packed, self._scales, self._zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return torch.addcmul(bias, smallest, self._sums).addcmul_(product, step)


def has_int8() -> bool:
    """Whether this processor has kernels for eight bits that were tested."""
    return bool(torch.cpu.get_capabilities().get("avx2", False))


def adds_in_32_bits() -> bool:
    """Whether this processor's sums of eight-bit products are always right."""
    abilities = torch.cpu.get_capabilities()
    return any(abilities.get(name, False) for name in _WIDE_SUMS)


def _largest(weight: Tensor) -> Tensor:
    """What the levels of each output's weights must reach, (K,)."""
    sizes = weight.abs()
    if not adds_in_32_bits():
        sizes = F.pad(sizes, (0, sizes.shape[1] % 2)).view(len(sizes), -1, 2).sum(dim=2)
    return sizes.amax(dim=1)


def plain(weight: Weight) -> Tensor:
    """A matrix that is not packed: of a backbone as it was loaded."""
    if isinstance(weight, PackedWeight):
        raise TypeError("this needs the plain backbone, as `load_backbone` gives it")
    return weight


def linear_from(start: int, rows: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """`linear` without its first outputs."""
    if isinstance(weight, PackedWeight):
        return linear(rows, weight, bias)[:, start:]
    return linear(rows, weight[start:], bias[start:])


def linear(rows: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """`rows @ weight.T + bias` for rows (R, D): (R, K), contiguous."""
    if isinstance(weight, PackedWeight):
        if torch.is_grad_enabled() and rows.requires_grad:
            raise RuntimeError("packed weights have no gradients: train on the plain backbone")
        return weight.apply(rows, bias)
    few = rows.shape[0] <= FEW_ROWS and weight.device.type == "cpu"
    if few and not torch.compiler.is_compiling():
        return torch.addmm(bias[:, None], weight, rows.t()).t().contiguous()
    return F.linear(rows, weight, bias)
