"""Where tasks look: the dense reference's softmax weights; and asking moves no prediction."""

import pytest
import torch
from engram_server.model import ContextBatch, MultiTaskViT
from engram_server.model.explaining import attention_maps
from engram_server.model.masked_pass import encode, masked_pass
from engram_server.model.tasks import StackCache, base_task, prepare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import SiglipForImageClassification

from tests.families import FAMILIES, image_batch, vision_config
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks, weights
from tests.model.test_masked_pass import GRAPHS, tasks_of
from tests.model.test_ragged_pairs import build, worlds
from tests.reference.dense import attention_of, key_tokens

TOLERANCE = 1e-4


def dense_grids(model, pixels, tasks):
    """By image {task: (rows, columns)}, read off the reference's last layer."""
    # `base` reads the row that a head without a class token reads.
    requested = {**tasks, "base": head_only(model, 0)}
    with torch.no_grad():
        found = attention_of(model, pixels, requested)
    patch = vision_config(model).patch_size
    grid = pixels.shape[2] // patch, pixels.shape[3] // patch
    patches = grid[0] * grid[1]
    keys = next(iter(found.values())).shape[-1]
    # Of the base tokens, which come first, the patches are the last.
    base = keys - (len(key_tokens(0, requested)))
    grids = [
        {
            name: rows[image, -1, :, base - patches : base].mean(dim=0).reshape(grid)
            for name, rows in found.items()
        }
        for image in range(len(pixels))
    ]
    if isinstance(model, SiglipForImageClassification):  # whose classifier reads the mean patch
        for one in grids:
            one["base"] = torch.full(grid, 1 / patches)
    return grids


def assert_grids(fast, images, requested, expected, atol=TOLERANCE):
    got = fast.attention_pairs(images, requested)
    for answer, names, grids in zip(got, requested, expected, strict=True):
        assert list(answer) == list(names)
        assert_same(answer, {name: grids[name] for name in names}, atol)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds(), seed=st.integers(0, 1000))
def test_attention_of_ragged_pairs_equals_the_reference(hugging_face, backbone_of, world, seed):
    model, fast, tasks, pixels, images = build(world, seed, hugging_face, backbone_of)
    assert_grids(fast, images, world[2], dense_grids(model, pixels, tasks))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_warm_and_cold(hugging_face, backbone_of, family):
    """Distillation and register tokens are not patches, so they are not in the grid."""
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = {**some_tasks(model, 6), "child": random_task(model, 9, parents=("task-1",))}
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    expected = dense_grids(model, pixels, tasks)
    requested = [fast.tasks] * 3
    assert_grids(fast, list(pixels), requested, expected)
    assert_grids(fast, fast.encode(pixels), requested, expected)


@pytest.mark.parametrize("graph", GRAPHS)
def test_graphs_of_tasks(hugging_face, backbone_of, graph):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = tasks_of(model, GRAPHS[graph])
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    assert_grids(fast, list(pixels), [fast.tasks] * 2, dense_grids(model, pixels, tasks))


@pytest.mark.parametrize("size", [(36, 36), (48, 32), (16, 64)])
def test_grids_that_are_not_square_or_do_not_cover_the_image(hugging_face, backbone_of, size):
    model = hugging_face("vit", image_size=size)
    pixels = image_batch(model, 2)
    tasks = some_tasks(model, 5)
    fast = add_all(MultiTaskViT(backbone_of("vit", image_size=size)), tasks)
    expected = dense_grids(model, pixels, tasks)
    assert expected[0]["base"].shape == (size[0] // 8, size[1] // 8)
    assert_grids(fast, list(pixels), [fast.tasks] * 2, expected)


def test_what_is_left_of_the_attention_is_not_on_the_patches(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = add_all(MultiTaskViT(backbone_of("vit")), {"t": random_task(model, 1, memory=20)})
    (grids,) = fast.attention_pairs(list(image_batch(model, 1)), [["t", "base"]])
    for grid in grids.values():
        assert grid.dtype == torch.float32
        assert (grid >= 0).all()
        assert 0 < grid.sum() < 1


@pytest.mark.parametrize("family", ["vit", "dinov2-registers", "clip"])
def test_bfloat16_stays_near_the_reference(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = some_tasks(model, 6)
    half = add_all(MultiTaskViT(backbone_of(family).to(dtype=torch.bfloat16)), tasks)
    expected = dense_grids(model, pixels, tasks)
    requested = [half.tasks] * 3
    assert_grids(half, list(pixels), requested, expected, atol=0.05)
    assert_grids(half, half.encode(pixels), requested, expected, atol=0.05)


def test_half_precision_contexts_stay_near_the_reference(hugging_face, backbone_of):
    """As the server's cache keeps them."""
    model = hugging_face("vit")
    pixels = image_batch(model, 3)
    tasks = some_tasks(model, 6)
    backbone = backbone_of("vit")
    fast = add_all(MultiTaskViT(backbone), tasks)
    batch = ContextBatch.stack(fast.encode(pixels), backbone.device, backbone.dtype)
    kept = batch.unstack(dtype=torch.float16)
    expected = dense_grids(model, pixels, tasks)
    assert_grids(fast, kept, [fast.tasks] * 3, expected, atol=2e-3)


def test_tasks_in_training_tell_too(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = {"t": random_task(model, 1), "head": head_only(model, 2)}
    expected = dense_grids(model, pixels, tasks)
    fast = MultiTaskViT(backbone_of("vit"))
    for name, task in tasks.items():
        task.head_weight.requires_grad_()
        fast.add(name, weights(task))
    got = fast.attention_pairs(list(pixels), [["t", "head"]] * 2)
    for answer, grids in zip(got, expected, strict=True):
        assert_same(
            {name: grid.detach() for name, grid in answer.items()},
            {name: grids[name] for name in answer},
            TOLERANCE,
        )


# ---------------------------------------------------------------------------------------------
# Explaining does not change the logits


def run(backbone, pixels, warm, requested, explain, **options):
    with torch.inference_mode():
        result = masked_pass(backbone, pixels, warm, requested, StackCache(), **options)
        return result, attention_maps(backbone, result, warm, explain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_contexts", [False, True])
def test_asking_moves_no_prediction_by_a_bit(hugging_face, backbone_of, dtype, keep_contexts):
    model = hugging_face("dinov2-registers")
    backbone = backbone_of("dinov2-registers").to(dtype=dtype)
    parent = prepare(backbone, weights(random_task(model, 1)))
    child = prepare(backbone, weights(random_task(model, 2, memory=5)), [parent])
    head = prepare(backbone, weights(head_only(model, 3)))
    base = base_task(backbone)
    pixels = image_batch(model, 5).to(dtype)
    contexts = encode(backbone, pixels[3:])
    requested = [[parent, child, head, base], [child], [], [head, child], [base]]
    some = [[child, head], [], [], [child, head], [base]]
    with torch.inference_mode():
        plain = masked_pass(
            backbone, pixels[:3], contexts, requested, StackCache(), keep_contexts=keep_contexts
        )
    for explain in (requested, some, [[]] * 5):
        explained, maps = run(
            backbone, pixels[:3], contexts, requested, explain, keep_contexts=keep_contexts
        )
        for before, after in zip(plain.logits, explained.logits, strict=True):
            assert (before.task, before.images) == (after.task, after.images)
            assert torch.equal(before.values, after.values)
            assert torch.equal(before.features, after.features)
        explained_pairs = {(image, each.task) for each in maps for image in each.images}
        assert explained_pairs == {
            (image, task) for image, tasks in enumerate(explain) for task in tasks
        }


def test_a_map_does_not_depend_on_other_pairs(hugging_face, backbone_of):
    model = hugging_face("vit")
    backbone = backbone_of("vit")
    tasks = [prepare(backbone, weights(task)) for task in some_tasks(model, 5).values()]
    pixels = image_batch(model, 4)

    def grids(explain):
        _, maps = run(backbone, pixels, None, [tasks] * 4, explain)
        return {
            (image, each.task): grid
            for each in maps
            for image, grid in zip(each.images, each.grids, strict=True)
        }

    everything = grids([tasks] * 4)
    assert len(everything) == 20
    for image in range(4):
        for task in tasks:
            alone = grids([[task] if image == each else [] for each in range(4)])
            assert list(alone) == [(image, task)]
            torch.testing.assert_close(alone[image, task], everything[image, task])
