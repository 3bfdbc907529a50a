"""Every image asks for its own tasks, from pixels or from its context, all in one pass."""

import pytest
import torch
from engram_server.errors import UnknownTask
from engram_server.model import Context, MultiTaskViT
from engram_server.model.lora import LORA_TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families import FAMILIES, FAMILIES_WITH_HEAD, image_batch
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4
FEW = [
    "vit",
    "deit-teacher",
    "dinov2-swiglu",
    "dinov2-registers",
    "clip-projection",
    "vit-headless",
    "dinov3",
    "siglip",
]


def dense_rows(model, pixels, tasks):
    """The reference's logits by image: a list of {task: (K,)}."""
    with torch.no_grad():
        logits = dense_forward(model, pixels, tasks)
    return [{name: rows[i] for name, rows in logits.items()} for i in range(len(pixels))]


def assert_pairs(fast, images, requested, expected):
    got = fast.predict_pairs(images, requested)
    assert len(got) == len(requested)
    for answer, names, rows in zip(got, requested, expected, strict=True):
        assert list(answer) == list(names)
        assert_same(answer, {name: rows[name] for name in names}, TOLERANCE)


@st.composite
def worlds(draw):
    """A family, a random directed acyclic graph of tasks, and what each image asks for."""
    family = draw(st.sampled_from(FEW))
    shapes = []
    for index in range(draw(st.integers(0, 7))):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        targets = draw(
            st.sets(st.sampled_from(LORA_TARGETS)) if draw(st.booleans()) else st.just(())
        )
        shapes.append(
            {
                "memory": draw(st.one_of(st.none(), st.integers(0, 20))),
                "placement": draw(st.sampled_from(["pre_norm", "post_norm"])),
                "parents": tuple(f"t{parent}" for parent in sorted(parents)),
                "classes": draw(st.integers(1, 6)),
                "bias": draw(st.booleans()),
                # A task without a row cannot attend to a parent.
                "class_token": bool(parents) or draw(st.integers(0, 3)) > 0,
                "targets": sorted(targets),
                "rank": draw(st.integers(1, 9)),
            }
        )
    names = [f"t{index}" for index in range(len(shapes))]
    if family in FAMILIES_WITH_HEAD:
        names.append("base")
    sets = st.lists(st.sampled_from(names), unique=True) if names else st.just([])
    requested = draw(st.lists(sets, min_size=1, max_size=5))
    warm = [draw(st.booleans()) for _ in requested]
    return family, shapes, requested, warm


def build(world, seed, hugging_face, backbone_of):
    """The model of a world, its tasks, and its images, some of them as contexts."""
    family, shapes, requested, warm = world
    model = hugging_face(family)
    pixels = image_batch(model, len(requested), seed)
    tasks = {
        f"t{index}": random_task(model, seed + index, **shape) for index, shape in enumerate(shapes)
    }
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    contexts = fast.encode(pixels)
    images = [contexts[i] if is_warm else pixels[i] for i, is_warm in enumerate(warm)]
    return model, fast, tasks, pixels, images


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds(), seed=st.integers(0, 1000))
def test_ragged_pairs_equal_the_reference(hugging_face, backbone_of, world, seed):
    model, fast, tasks, pixels, images = build(world, seed, hugging_face, backbone_of)
    assert_pairs(fast, images, world[2], dense_rows(model, pixels, tasks))


@pytest.mark.parametrize("family", FAMILIES)
def test_warm_equals_cold(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = {**some_tasks(model, 6), "child": random_task(model, 9, parents=("task-1",))}
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    requested = [fast.tasks] * 3
    contexts = fast.encode(pixels)
    assert all(isinstance(context, Context) for context in contexts)
    cold = fast.predict_pairs(list(pixels), requested)
    warm = fast.predict_pairs(contexts, requested)
    expected = dense_rows(model, pixels, tasks)
    for cold_rows, warm_rows, rows in zip(cold, warm, expected, strict=True):
        assert_same(warm_rows, cold_rows, 1e-5)
        assert_same(warm_rows, rows, TOLERANCE)


def test_a_context_answers_tasks_added_after_it_was_made(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    fast = MultiTaskViT(backbone_of("vit"))
    contexts = fast.encode(pixels)
    tasks = some_tasks(model, 4)
    add_all(fast, tasks)
    assert_pairs(fast, contexts, [fast.tasks] * 2, dense_rows(model, pixels, tasks))


def test_a_context_of_one_image_does_not_depend_on_its_batch(hugging_face, backbone_of):
    model = hugging_face("dinov2-registers")
    pixels = image_batch(model, 4)
    fast = MultiTaskViT(backbone_of("dinov2-registers"))
    together = fast.encode(pixels)
    for index, context in enumerate(together):
        (alone,) = fast.encode(pixels[index : index + 1])
        torch.testing.assert_close(context.states, alone.states, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(context.readout, alone.readout, atol=1e-5, rtol=1e-5)


def popular(count, images, kind):
    """Which of `count` tasks each image asks for."""
    names = [f"task-{index}" for index in range(count)]
    if kind == "same":
        return [[names[0]]] * images
    if kind == "distinct":
        return [[names[index % count]] for index in range(images)]
    if kind == "skewed":
        return [names[: count // (index + 1)] for index in range(images)]
    return [names] * images


@pytest.mark.parametrize("warm", ["cold", "warm", "mixed"])
@pytest.mark.parametrize("kind", ["same", "distinct", "skewed", "all"])
def test_mixes_of_popularity(hugging_face, backbone_of, kind, warm):
    model = hugging_face("vit")
    pixels = image_batch(model, 9)
    tasks = some_tasks(model, 8)
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    contexts = fast.encode(pixels)
    share = {"cold": 0, "warm": 1, "mixed": 2}[warm]
    images = [
        contexts[i] if share == 1 or (share == 2 and i % 3 == 0) else pixels[i] for i in range(9)
    ]
    assert_pairs(fast, images, popular(8, 9, kind), dense_rows(model, pixels, tasks))


def test_a_chain_is_shared_raggedly(hugging_face, backbone_of):
    """One image asks for the child alone, one for the parent alone, one for both."""
    model = hugging_face("vit")
    pixels = image_batch(model, 4)
    tasks = {
        "a": random_task(model, 1),
        "b": random_task(model, 2, memory=0, parents=("a",)),
        "c": random_task(model, 3, memory=5, parents=("b",)),
        "lone": random_task(model, 4, memory=1),
    }
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    requested = [["c"], ["a"], ["lone", "c", "a"], []]
    expected = dense_rows(model, pixels, tasks)
    contexts = fast.encode(pixels)
    for mask in range(16):
        images = [contexts[i] if mask >> i & 1 else pixels[i] for i in range(4)]
        assert_pairs(fast, images, requested, expected)


def test_images_that_ask_for_nothing_or_only_for_heads(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 3)
    tasks = {"head": head_only(model, 1), "row": random_task(model, 2)}
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    expected = dense_rows(model, pixels, tasks)
    contexts = fast.encode(pixels)
    for images in (list(pixels), contexts, [pixels[0], contexts[1], pixels[2]]):
        assert_pairs(fast, images, [[], [], []], expected)
        assert_pairs(fast, images, [["head"], [], ["base", "head"]], expected)
        assert_pairs(fast, images, [["head"], ["row"], []], expected)
    assert fast.predict_pairs([], []) == []


def test_an_unknown_task_in_any_pair_is_refused(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = MultiTaskViT(backbone_of("vit"))
    with pytest.raises(UnknownTask, match="nothing"):
        fast.predict_pairs(list(image_batch(model, 2)), [["base"], ["nothing"]])
