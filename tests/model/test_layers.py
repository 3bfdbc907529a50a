"""Heads that read the summaries of layers: equal to the reference, and without effect on others."""

from dataclasses import replace

import pytest
import torch
from engram_server.errors import TaskMismatch
from engram_server.model import MultiTaskViT, masked_pass
from engram_server.model.tasks import FloatBuffer, StackCache, prepare

from tests.families import KINDS, image_batch
from tests.model.tasks import (
    add_all,
    assert_same,
    head_only,
    random_task,
    reading_layers,
    some_tasks,
    weights,
)
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4


def layer_tasks(model, backbone):
    """A head on layers, one beside a task row with LoRA, one that reads the backbone's feature as
    well, and one on the last layer only.
    """
    row = random_task(model, 2, targets=("query", "down"))
    last = backbone.summary_layers[-1:]
    feature = 0.1 * torch.randn(row.head_weight.shape, generator=torch.Generator().manual_seed(4))
    return {
        "head": reading_layers(head_only(model, 1), backbone, 11),
        "row": reading_layers(row, backbone, 12),
        "feature": replace(reading_layers(row, backbone, 14), feature=feature),
        "last": reading_layers(head_only(model, 3, classes=9), backbone, 13, last),
    }


@pytest.mark.parametrize("family", KINDS)
def test_layer_tasks_equal_the_reference(hugging_face, backbone_of, family):
    model, backbone = hugging_face(family), backbone_of(family)
    tasks = layer_tasks(model, backbone) | some_tasks(model, 3)
    pixels = image_batch(model, 3)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
        got = add_all(MultiTaskViT(backbone), tasks)(pixels)
    assert_same(got, expected, TOLERANCE)


@pytest.mark.parametrize("family", KINDS)
def test_contexts_give_the_same_answers_as_pixels(hugging_face, backbone_of, family):
    model, backbone = hugging_face(family), backbone_of(family)
    tasks = layer_tasks(model, backbone)
    ours = add_all(MultiTaskViT(backbone), tasks)
    pixels = image_batch(model, 3)
    cold = ours.predict_pairs(list(pixels), [list(tasks)] * 3)
    warm = ours.predict_pairs(ours.encode(pixels), [list(tasks)] * 3)
    for one, other in zip(cold, warm, strict=True):
        assert_same(one, other, 1e-5)


@pytest.mark.parametrize("count", [1, 4])
def test_cold_and_warm_images_mix_in_any_pairs(hugging_face, backbone_of, count):
    """Cold images whose tasks read no layers have no summary; the warm ones beside them do."""
    model, backbone = hugging_face("vit"), backbone_of("vit")
    tasks = layer_tasks(model, backbone) | {"plain": head_only(model, 7)}
    ours = add_all(MultiTaskViT(backbone), tasks)
    pixels = image_batch(model, 2 * count)
    images = [*pixels[:count], *ours.encode(pixels[count:])]
    requested = [["plain"]] * count + [["plain", *layer_tasks(model, backbone)]] * count
    alone = ours(pixels)
    for index, answers in enumerate(ours.predict_pairs(images, requested)):
        for name, values in answers.items():
            torch.testing.assert_close(values, alone[name][index], atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_rows", [False, True])
def test_other_tasks_are_bit_equal_beside_layer_tasks(hugging_face, backbone_of, with_rows):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    others = {"head": head_only(model, 4)}
    if with_rows:
        others |= {"row": random_task(model, 5), "lora": random_task(model, 6, targets=("up",))}
    pixels = image_batch(model, 5)
    alone = add_all(MultiTaskViT(backbone), others)(pixels)
    layers = {"layers": reading_layers(head_only(model, 1), backbone, 11)}
    together = add_all(MultiTaskViT(backbone), others | layers)(pixels)
    for name, values in alone.items():
        assert torch.equal(together[name], values), name


@pytest.mark.parametrize("int8", [False, True])
def test_packed_backbones_give_nearly_the_same_answers(hugging_face, backbone_of, int8):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    task = {"t": reading_layers(head_only(model, 1), backbone, 11)}
    pixels = image_batch(model, 3)
    expected = add_all(MultiTaskViT(backbone), task)(pixels)["t"]
    got = add_all(MultiTaskViT(backbone.packed(int8=int8)), task)(pixels)["t"]
    torch.testing.assert_close(got, expected, atol=0.2 if int8 else 1e-4, rtol=0)


def test_a_half_precision_backbone_summarises_in_float32(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    task = {"t": reading_layers(head_only(model, 1), backbone, 11)}
    pixels = image_batch(model, 3)
    expected = add_all(MultiTaskViT(backbone), task)(pixels)["t"]
    got = add_all(MultiTaskViT(backbone.to(dtype=torch.bfloat16)), task)(pixels)["t"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=0.1, rtol=0)


def test_without_layer_tasks_no_summary_is_computed(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    task = prepare(backbone, weights(head_only(model, 1)))
    result = masked_pass.masked_pass(
        backbone, image_batch(model, 2), None, [[task]] * 2, StackCache()
    )
    assert result.readout is not None
    assert result.readout.values.shape == (2, len(backbone.readout) * backbone.width)


def test_layers_that_the_backbone_does_not_summarise_are_rejected(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    task = weights(reading_layers(head_only(model, 1), backbone, 11))
    assert task.layers is not None
    with pytest.raises(TaskMismatch, match="reads layer 99"):
        prepare(backbone, replace(task, layers=replace(task.layers, layers=(99,))))
    narrow = replace(task.layers, weight=task.layers.weight[..., :-1])
    with pytest.raises(TaskMismatch, match="weight on layers is"):
        prepare(backbone, replace(task, layers=narrow))


def test_weights_of_half_precision_take_half_the_memory_and_change_nothing(
    hugging_face, backbone_of
):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    single = weights(reading_layers(head_only(model, 1), backbone, 11))
    rounded = replace(single, layers=replace(single.layers, weight=single.layers.weight.half()))
    widened = replace(rounded, layers=replace(single.layers, weight=rounded.layers.weight.float()))
    heads = [prepare(backbone, one).layer_head for one in (single, rounded, widened)]
    sizes = [head.weight.nbytes for head in heads]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 2]
    read = torch.randn(2, heads[0].weight.shape[1])
    assert torch.equal(heads[1].logits(read, FloatBuffer()), heads[2].logits(read, FloatBuffer()))


def test_weights_of_several_tasks_share_a_buffer_and_keep_their_values():
    buffer = FloatBuffer()
    weights = [torch.randn(rows, 7).half() for rows in (3, 5, 2)]
    with torch.inference_mode():
        for weight in weights:
            assert torch.equal(buffer.float(weight), weight.float())
    trained = torch.randn(3, 7, requires_grad=True)
    assert buffer.float(trained) is trained
