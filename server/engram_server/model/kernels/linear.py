"""Linear layers of a frozen backbone, packed once for the CPU that runs them.

Training and GPUs use plain matrices. A server on a CPU uses the same matrices for every request, so
it packs them once into the layout of oneDNN, in float32 (`FloatWeight`) or int8 (`Int8Weight`).
Packed weights have no gradients.

This is the only module with private torch ops: torch has no public API for packed linear layers, so
it calls `torch.ops.mkldnn` and `torch.ops.onednn` as TorchInductor does. Tested with torch 2.13. If
the ops are missing, float32 runs `F.linear`, and the server rejects `ENGRAM_PRECISION=int8`.
"""

from abc import ABC, abstractmethod
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

# A pass over warm images has few rows, so it is bound by reading the weights. With few rows, CPU
# libraries compute `weight @ rows.T` faster than `rows @ weight.T` (measured with MKL on two cores,
# all matrices of a ViT-B: 16 instead of 41 ms for 4 rows, 49 instead of 66 for 32, equal at 50).
FEW_ROWS: Final = 32
# oneDNN's packed matrices are faster than MKL's plain ones up to this many rows (measured on two
# cores of a Zen 3, all matrices of a ViT-B/32: 0.83 of the time for 51 rows, 1.08 for 401).
PACKED_ROWS: Final = 128
# A row in int8 is its smallest value plus 0 … 255 steps; the step size is per row.
_ROW_STEPS: Final = 255
_SIGN_BIT: Final = 128
_WEIGHT_LEVELS: Final = 127
# Processors that accumulate products in 32 bits. Others add two neighbouring products in 16 bits,
# which overflows silently beyond 32,767. There, two neighbours share the levels of a weight,
# because (127 + 1 for rounding) · 255 fits. That costs at most one bit.
_WIDE_SUMS: Final = ("avx512_vnni", "avx_vnni", "amx_int8")
_SMALLEST: Final = 1e-30  # a row or a weight of zeros needs a scale too


# --- private torch ops ----------------------------------------------------------------------------


def has_packed_linear() -> bool:
    ops = torch.ops.mkldnn
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def pack_linear(weight: Tensor) -> Tensor:
    """Reorder a float32 matrix (K, D) into oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor) -> Tensor:
    """Compute `rows @ weight.T + bias` with a matrix from `pack_linear`."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out


def has_int8_linear() -> bool:
    """Whether torch has the int8 ops and the processor has AVX2, for which they were tested."""
    ops = torch.ops.onednn
    return (
        bool(torch.cpu.get_capabilities().get("avx2", False))
        and hasattr(ops, "qlinear_prepack")
        and hasattr(ops, "qlinear_pointwise")
    )


def pack_int8(weight: Tensor) -> Tensor:
    """Reorder an int8 matrix (K, D) into oneDNN's layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def int8_linear(rows: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Multiply uint8 rows by a matrix from `pack_int8`, with a scale per output: float32."""
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        *(rows, 1.0, 0),
        *(packed, scales, zeros, None),
        *(1.0, 0, torch.float32, "none", [], ""),
    )
    return out


# --- packed weights -------------------------------------------------------------------------------


class PackedWeight(ABC):
    shape: torch.Size
    nbytes: int

    def __init__(self, weight: Tensor) -> None:
        self.shape = weight.shape

    @abstractmethod
    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        """Compute `rows @ weight.T + bias` for rows (R, D): (R, K), contiguous."""


Weight = Tensor | PackedWeight


class FloatWeight(PackedWeight):
    """A float32 matrix, plain and packed: twice the memory, for the faster of two kernels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._plain = weight.float().contiguous()
        self._packed = pack_linear(self._plain) if has_packed_linear() else None
        self.nbytes = (1 if self._packed is None else 2) * self._plain.nbytes

    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        if self._packed is None or len(rows) > PACKED_ROWS:
            return F.linear(rows, self._plain, bias)
        return packed_linear(rows, self._packed, bias)


class Int8Weight(PackedWeight):
    """An int8 matrix with a scale per output; rows are quantised dynamically.

    The step size is per row, so the result of a row does not depend on other rows.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        weight = weight.float()
        scales = _largest(weight).clamp_min(_SMALLEST) / _WEIGHT_LEVELS
        rounded = (weight / scales[:, None]).round_().to(torch.int8)
        self._packed = pack_int8(rounded)
        self._scales = scales
        # The result of a row of ones: the smallest value of a row is added to all its values.
        self._sums = scales * rounded.sum(dim=1)
        self._zeros = torch.zeros(len(scales), dtype=torch.int32)
        self.nbytes = weight.numel() + 3 * scales.nbytes

    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        # Two reductions and a conversion to signed bytes: `aminmax` and conversion to unsigned
        # bytes are not vectorised and would take longer than everything else.
        smallest, largest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        step = ((largest - smallest) / _ROW_STEPS).clamp_min_(_SMALLEST)
        signed = (rows * (1 / step)).sub_(smallest / step + _SIGN_BIT).round_().to(torch.int8)
        unsigned = signed.view(torch.uint8).bitwise_xor_(_SIGN_BIT)
        product = int8_linear(unsigned, self._packed, self._scales, self._zeros)
        return torch.addcmul(bias, smallest, self._sums).addcmul_(product, step)


def adds_in_32_bits() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _WIDE_SUMS)


def _largest(weight: Tensor) -> Tensor:
    """Return the largest magnitude that the levels of each output must cover, (K,)."""
    sizes = weight.abs()
    if not adds_in_32_bits():
        sizes = F.pad(sizes, (0, sizes.shape[1] % 2)).view(len(sizes), -1, 2).sum(dim=2)
    return sizes.amax(dim=1)


def plain(weight: Weight) -> Tensor:
    """Return a weight of a backbone that is not packed; raise TypeError otherwise."""
    if isinstance(weight, PackedWeight):
        raise TypeError(
            "Packed weights cannot be used here. Use the backbone from `load_backbone`."
        )
    return weight


def linear_from(start: int, rows: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """Apply a linear layer without its first `start` outputs."""
    if isinstance(weight, PackedWeight):
        return linear(rows, weight, bias)[:, start:]
    return linear(rows, weight[start:], bias[start:])


def linear(rows: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """Compute `rows @ weight.T + bias` for rows (R, D): (R, K), contiguous."""
    if isinstance(weight, PackedWeight):
        if torch.is_grad_enabled() and rows.requires_grad:
            raise RuntimeError("Packed weights have no gradients. Train on the plain backbone.")
        return weight.apply(rows, bias)
    few = rows.shape[0] <= FEW_ROWS and weight.device.type == "cpu"
    if few and not torch.compiler.is_compiling():
        return torch.addmm(bias[:, None], weight, rows.t()).t().contiguous()
    return F.linear(rows, weight, bias)
