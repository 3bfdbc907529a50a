"""Packed matrices: the same answers in float32, near ones in int8; no row depends on another."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from engram_server.model import MultiTaskViT, load_backbone
from engram_server.model.kernels.linear import (
    FloatWeight,
    Int8Weight,
    has_int8_linear,
    linear,
    linear_from,
)

from tests.families import FAMILIES, image_batch
from tests.model.tasks import add_all, some_tasks

int8_here = pytest.mark.skipif(not has_int8_linear(), reason="int8 needs a processor with AVX2")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_backbone_answers_as_the_plain_one(hugging_face, backbone_of, family):
    model, backbone = hugging_face(family), backbone_of(family)
    plain, packed = MultiTaskViT(backbone), MultiTaskViT(backbone.packed())
    for each in (plain, packed):
        add_all(each, some_tasks(model, 5))
    height, width = backbone.image_size
    images = torch.randint(0, 256, (3, height, width, 3), dtype=torch.uint8)
    for pixels in (images, image_batch(model, 3, 0)):
        expected, got = plain(pixels), packed(pixels)
        for name, logits in expected.items():
            assert (got[name] - logits).abs().max() < 1e-4 * logits.abs().max().clamp_min(1), name


@int8_here
def test_an_int8_backbone_answers_near_the_plain_one(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    plain, packed = MultiTaskViT(backbone), MultiTaskViT(backbone.packed(int8=True))
    for each in (plain, packed):
        add_all(each, some_tasks(model, 5))
    pixels = image_batch(model, 3, 0)
    expected, got = plain(pixels), packed(pixels)
    for name, logits in expected.items():
        error = (got[name] - logits).abs().max() / logits.abs().max()
        assert 1e-6 < error < 0.1, name


@int8_here
@pytest.mark.parametrize(("width", "outputs"), [(768, 96), (33, 7), (1, 1)])
def test_eight_bits_are_near_the_matrix(width, outputs):
    rows, weight, bias = noise(20, width), noise(outputs, width, seed=1), noise(outputs, seed=2)
    expected = F.linear(rows, weight, bias)
    error = (Int8Weight(weight).apply(rows, bias) - expected).norm() / expected.norm()
    assert error < 0.02


@int8_here
@pytest.mark.parametrize("pattern", [(127.0, 1.0), (1.0, 127.0), (64.0, 63.0), (127.0, 127.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_numbers_do_not_overflow(pattern, sign):
    """Without 32-bit sums two products of these would be cut off at 32767, unnoticed."""
    weight = sign * torch.tensor(pattern).repeat(8, 384)
    rows = torch.ones(5, 768)
    rows[:, 0] = -1  # so that all others are 255 steps
    expected = F.linear(rows, weight)
    got = Int8Weight(weight).apply(rows, torch.zeros(8))
    assert (got - expected).abs().max() < 0.01 * expected.abs().max()


@int8_here
@pytest.mark.parametrize("other", [1.0, 1e6, float("nan"), float("inf")])
def test_a_row_in_int8_depends_on_no_other(other):
    weight, bias = Int8Weight(noise(96, 64)), noise(96, seed=1)
    rows = noise(9, 64, seed=2)
    alone = torch.cat([weight.apply(row[None], bias) for row in rows])
    beside = torch.cat([noise(40, 64, seed=3) * other, rows])
    assert torch.equal(weight.apply(beside, bias)[40:], alone)


@int8_here
def test_rows_that_hold_one_value_are_exact_but_for_the_weights():
    weight = torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]])
    rows = torch.tensor([[0.0, 0.0, 0.0], [2.5, 2.5, 2.5]])
    got = Int8Weight(weight).apply(rows, torch.tensor([1.0, 2.0]))
    assert torch.allclose(got, torch.tensor([[1.0, 2.0], [1.0, 2.0]]), atol=1e-6)


@int8_here
def test_other_images_change_no_bit_of_an_answer_in_int8(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = add_all(MultiTaskViT(backbone_of("vit").packed(int8=True)), some_tasks(model, 5))
    pixels = image_batch(model, 3, 0)
    others = pixels.clone()
    others[1:] = 3e38
    expected, got = fast(pixels), fast(others)
    for name, logits in expected.items():
        assert torch.equal(got[name][0], logits[0]), name


@pytest.mark.parametrize("form", [FloatWeight, pytest.param(Int8Weight, marks=int8_here)])
def test_no_rows_give_none(form):
    assert form(noise(6, 4)).apply(torch.zeros(0, 4), torch.zeros(6)).shape == (0, 6)


@pytest.mark.parametrize("form", [FloatWeight, pytest.param(Int8Weight, marks=int8_here)])
def test_the_first_outputs_can_be_left_out(form):
    rows, weight, bias = noise(5, 32), noise(12, 32, seed=1), noise(12, seed=2)
    packed = form(weight)
    whole = linear(rows, packed, bias)
    assert torch.equal(linear_from(4, rows, packed, bias), whole[:, 4:])
    assert torch.allclose(linear_from(4, rows, weight, bias), linear(rows, weight, bias)[:, 4:])


def test_packed_matrices_refuse_gradients(backbone_of):
    packed = backbone_of("vit").packed()
    rows = noise(2, packed.width).requires_grad_()
    with pytest.raises(RuntimeError, match="Train on the plain backbone"):
        linear(rows, packed.blocks[0].up_weight, packed.blocks[0].up_bias)


@int8_here
def test_a_packed_backbone_keeps_its_name_and_not_the_plain_matrices(folder_of):
    backbone = load_backbone(folder_of("vit"))
    plain = backbone.blocks[0].up_weight
    bytes_of_plain, watched = plain.nbytes, weakref.ref(plain)
    name = backbone.fingerprint
    packed = backbone.packed(int8=True)
    del plain, backbone
    gc.collect()
    assert watched() is None
    assert packed.fingerprint == name
    assert packed.precision == "int8"
    assert packed.dtype == torch.float32
    # A quarter, and three numbers for each of the outputs, of which this tiny one has many.
    up = packed.blocks[0].up_weight
    assert up.nbytes == bytes_of_plain // 4 + 12 * up.shape[0]
