"""Private torch ops are called by one module only, and a torch without them still works."""

import re
from pathlib import Path

import engram_server
import pytest
import torch
import torch.nn.functional as F
from engram_server.model.kernels import linear

PRIVATE = re.compile(r"torch\.ops\.(?:mkldnn|onednn|quantized)|torch\._C\b|torch\._inductor")
needs_packing = pytest.mark.skipif(not linear.has_packed_linear(), reason="torch without oneDNN")
needs_int8 = pytest.mark.skipif(not linear.has_int8_linear(), reason="processor without AVX2")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_packing
def test_packed_linear_equals_linear():
    rows, weight, bias = noise(9, 33), noise(7, 33, seed=1), noise(7, seed=2)
    got = linear.packed_linear(rows, linear.pack_linear(weight), bias)
    torch.testing.assert_close(got, F.linear(rows, weight, bias))


@needs_int8
def test_int8_linear_multiplies_integers_exactly():
    rows = torch.arange(20, dtype=torch.uint8).view(4, 5)
    weight = (torch.arange(15) - 7).to(torch.int8).view(3, 5)
    scales, zeros = torch.tensor([1.0, 0.5, 2.0]), torch.zeros(3, dtype=torch.int32)
    got = linear.int8_linear(rows, linear.pack_int8(weight), scales, zeros)
    assert torch.equal(got, rows.float() @ weight.float().T * scales)


def test_float_weight_falls_back_to_plain_torch(monkeypatch):
    monkeypatch.setattr(linear, "has_packed_linear", lambda: False)
    rows, weight, bias = noise(9, 33), noise(7, 33, seed=1), noise(7, seed=2)
    packed = linear.FloatWeight(weight)
    assert torch.equal(packed.apply(rows, bias), F.linear(rows, weight, bias))
    assert packed.nbytes == weight.nbytes


def test_missing_ops_are_detected(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(torch.ops, "onednn", object())
    assert not linear.has_packed_linear()
    assert not linear.has_int8_linear()


def test_no_other_module_calls_private_torch_ops():
    sources = Path(engram_server.__file__).parent.rglob("*.py")
    users = [path.name for path in sources if PRIVATE.search(path.read_text(encoding="utf-8"))]
    assert users == ["linear.py"]
