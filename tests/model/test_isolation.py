"""One image never reaches another, nor one task another that does not extend it.

Whatever the numbers of an image are, NaN and infinity included, all others of its pass are answered
bit by bit as if it were an ordinary one, and within the tolerance of batching as if it were not
there.
"""

from dataclasses import replace

import pytest
import torch
from engram_server.model import Context, MultiTaskViT
from engram_server.model.lora import LORA_TARGETS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.families import image_batch
from tests.model.tasks import add_all, assert_same, random_task, some_tasks
from tests.model.test_ragged_pairs import TOLERANCE, worlds

POISONS = [float("nan"), float("inf"), float("-inf"), 3e38, -3e38]


def poisoned(image, value):
    """Pixels or a context that hold nothing but one value."""
    if isinstance(image, Context):
        attention = (
            None if image.patch_attention is None else torch.full_like(image.patch_attention, value)
        )
        return Context(
            torch.full_like(image.states, value), torch.full_like(image.readout, value), attention
        )
    return torch.full_like(image, value)


def assert_equal(got, expected):
    """The same tasks with the same bits."""
    assert set(got) == set(expected)
    for name, values in expected.items():
        assert torch.isfinite(values).all()
        assert torch.equal(got[name], values), name


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds(), seed=st.integers(0, 1000), data=st.data())
def test_no_image_changes_the_answers_of_another(hugging_face, backbone_of, world, seed, data):
    family, shapes, requested, warm = world
    model = hugging_face(family)
    tasks = {
        f"t{index}": random_task(model, seed + index, **shape) for index, shape in enumerate(shapes)
    }
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    pixels = image_batch(model, len(requested), seed)
    contexts = fast.encode(pixels)
    images = [contexts[i] if is_warm else pixels[i] for i, is_warm in enumerate(warm)]
    culprits = data.draw(st.sets(st.integers(0, len(requested) - 1), min_size=1))
    value = data.draw(st.sampled_from(POISONS))
    broken = [poisoned(image, value) if i in culprits else image for i, image in enumerate(images)]
    innocent = [i for i in range(len(requested)) if i not in culprits]
    for run in (fast.predict_pairs, fast.attention_pairs):
        beside_poison, beside_others = run(broken, requested), run(images, requested)
        alone = run([images[i] for i in innocent], [requested[i] for i in innocent])
        for number, i in enumerate(innocent):
            assert_equal(beside_poison[i], beside_others[i])
            assert_same(beside_poison[i], alone[number], TOLERANCE)


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("family", ["vit", "dinov2-registers"])
def test_no_image_changes_the_context_of_another(hugging_face, backbone_of, family, value):
    model = hugging_face(family)
    fast = MultiTaskViT(backbone_of(family))
    pixels = image_batch(model, 3)
    broken = pixels.clone()
    broken[1] = value
    for place in (0, 2):
        got, expected = fast.encode(broken)[place], fast.encode(pixels)[place]
        assert torch.equal(got.states, expected.states)
        assert torch.equal(got.readout, expected.readout)
        assert torch.equal(got.patch_attention, expected.patch_attention)


def test_an_image_whose_tasks_extend_others_is_safe_from_the_first_image(hugging_face, backbone_of):
    """Regression test: padding of the lineage must not point to a row of another image."""
    model = hugging_face("vit")
    tasks = {"parent": random_task(model, 1), "child": random_task(model, 2, parents=("parent",))}
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    pixels = image_batch(model, 2)
    requested = [["parent"], ["parent", "child"]]
    expected = fast.predict_pairs(list(pixels), requested)[1]
    for value in POISONS:
        found = fast.predict_pairs([torch.full_like(pixels[0], value), pixels[1]], requested)[1]
        assert_equal(found, expected)


@pytest.mark.parametrize("value", POISONS)
@pytest.mark.parametrize("part", ["head_weight", "class_token", "memory", "lora"])
def test_a_task_reaches_only_those_that_extend_it(hugging_face, backbone_of, part, value):
    model = hugging_face("vit")
    backbone = backbone_of("vit")
    others = {
        **some_tasks(model, 6),
        "parent": random_task(model, 20),
        "other-child": random_task(model, 21, parents=("parent",), targets=["up"], rank=1),
        "adapted": random_task(model, 22, targets=LORA_TARGETS, rank=3),
    }
    sound = random_task(model, 30, memory=9, targets=LORA_TARGETS)
    whole = getattr(sound, part)
    if part == "lora":
        filled = {
            name: tuple(torch.full_like(one, value) for one in change)
            for name, change in whole.items()
        }
    else:
        filled = torch.full_like(whole, value)
    sick = replace(sound, **{part: filled})
    pixels = image_batch(model, 2)
    answers = [
        add_all(MultiTaskViT(backbone), {**others, "task": task})(pixels) for task in (sound, sick)
    ]
    for name in ("base", *others):
        assert torch.equal(answers[0][name], answers[1][name]), name
    if part == "head_weight":
        assert not torch.isfinite(answers[1]["task"]).all()
