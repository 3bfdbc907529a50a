"""Training goes through the same pass: gradients equal the reference's, the backbone gets none."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from engram_server.model import MultiTaskViT
from torch import Tensor

from tests.families import KINDS, image_batch
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4  # of the largest gradient of each tensor
PARAMETERS = ["head_weight", "head_bias", "class_token", "memory"]


def trainable(tasks):
    """The same tasks with fresh leaves that collect gradients."""
    return {
        name: replace(
            task,
            **{
                part: value.detach().clone().requires_grad_()
                for part in PARAMETERS
                if (value := getattr(task, part)) is not None
            },
        )
        for name, task in tasks.items()
    }


def loss_of(logits):
    """A different weight on every logit, so that no two gradients cancel or coincide."""
    total = torch.zeros(())
    for name in sorted(logits):
        values = logits[name]
        weight = torch.linspace(-1, 2, values.numel()).view_as(values)
        total = total + (weight * values).sum() + (values**2).mean()
    return total


def gradients(tasks):
    return {
        f"{name}.{part}": value.grad
        for name, task in tasks.items()
        for part in PARAMETERS
        if (value := getattr(task, part)) is not None
    }


def assert_same_gradients(got, expected):
    got, expected = gradients(got), gradients(expected)
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        if gradient is None or not gradient.any():  # not requested, or memory without tokens
            assert got[name] is None or not got[name].any(), name
            continue
        assert got[name] is not None, f"no gradient reached {name}"
        scale = max(gradient.abs().max().item(), 1.0)
        worst = (got[name] - gradient).abs().max().item()
        assert worst <= TOLERANCE * scale, f"{name}: off by {worst} of {scale}"


def tensors_in(owner):
    if isinstance(owner, Tensor):
        yield owner
    elif is_dataclass(owner):
        for field in fields(owner):
            yield from tensors_in(getattr(owner, field.name))
    elif isinstance(owner, list | tuple):
        for item in owner:
            yield from tensors_in(item)


def graph_of(model, kind):
    if kind == "apart":
        return {
            "pre": random_task(model, 1, memory=3),
            "post": random_task(model, 2, memory=2, placement="post_norm"),
            "none": random_task(model, 3, memory=0),
            "head": head_only(model, 4),
        }
    if kind == "chain":
        return {
            "a": random_task(model, 1),
            "b": random_task(model, 2, memory=1, placement="post_norm", parents=("a",)),
            "c": random_task(model, 3, memory=None, parents=("b",)),
        }
    return {
        "a": random_task(model, 1),
        "b": random_task(model, 2, memory=4, parents=("a",)),
        "c": random_task(model, 3, memory=1, placement="post_norm", parents=("a",)),
        "d": random_task(model, 4, memory=2, parents=("b", "c")),
    }


@pytest.mark.parametrize("kind", ["apart", "chain", "diamond"])
@pytest.mark.parametrize("family", KINDS)
def test_gradients_of_task_parameters_equal_the_references(hugging_face, backbone_of, family, kind):
    model = hugging_face(family)
    backbone = backbone_of(family)
    pixels = image_batch(model, 3)
    slow, quick = trainable(graph_of(model, kind)), trainable(graph_of(model, kind))
    expected = dense_forward(model, pixels, slow)
    got = add_all(MultiTaskViT(backbone), quick)(pixels)
    assert_same({name: got[name].detach() for name in got}, expected_values(expected), TOLERANCE)
    loss_of({name: expected[name] for name in slow}).backward()
    loss_of({name: got[name] for name in quick}).backward()
    assert_same_gradients(quick, slow)
    for tensor in tensors_in(backbone):
        assert not tensor.requires_grad
        assert tensor.grad is None
    model.zero_grad()


def expected_values(logits):
    return {name: values.detach() for name, values in logits.items()}


@pytest.mark.parametrize("requested", [["d"], ["b"], ["d", "a"], ["c", "b"]])
def test_gradients_reach_ancestors_that_were_not_requested(hugging_face, backbone_of, requested):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    slow, quick = trainable(graph_of(model, "diamond")), trainable(graph_of(model, "diamond"))
    expected = dense_forward(model, pixels, slow)
    got = add_all(MultiTaskViT(backbone_of("vit")), quick)(pixels, tasks=requested)
    loss_of({name: expected[name] for name in requested}).backward()
    loss_of(got).backward()
    assert_same_gradients(quick, slow)


@pytest.mark.parametrize("family", ["vit", "dinov2-registers", "clip"])
def test_gradients_through_contexts_and_ragged_pairs(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    slow, quick = trainable(graph_of(model, "diamond")), trainable(graph_of(model, "diamond"))
    fast = add_all(MultiTaskViT(backbone_of(family)), quick)
    contexts = fast.encode(pixels)
    requested = [["d", "a"], ["c"], ["b", "d"]]
    got = fast.predict_pairs([contexts[0], pixels[1], contexts[2]], requested)
    expected = dense_forward(model, pixels, slow)
    pairs = [(index, name) for index, names in enumerate(requested) for name in names]
    loss_of({f"{i}{name}": got[i][name] for i, name in pairs}).backward()
    loss_of({f"{i}{name}": expected[name][i] for i, name in pairs}).backward()
    assert_same_gradients(quick, slow)


def test_frozen_tasks_ride_along_in_training_unchanged(hugging_face, backbone_of):
    """A child is trained on frozen parents: only its own tensors collect gradients."""
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    frozen = graph_of(model, "chain")
    child = random_task(model, 9, memory=2, parents=("c",))
    slow, quick = trainable({"child": child}), trainable({"child": child})
    got = add_all(MultiTaskViT(backbone_of("vit")), {**frozen, **quick})(pixels)
    expected = dense_forward(model, pixels, {**frozen, **slow})
    assert_same(expected_values(got), expected_values(expected), TOLERANCE)
    loss_of({"child": got["child"]}).backward()
    loss_of({"child": expected["child"]}).backward()
    assert_same_gradients(quick, slow)
    assert all(not tensor.requires_grad for task in frozen.values() for tensor in task_parts(task))


def task_parts(task):
    return [value for part in PARAMETERS if (value := getattr(task, part)) is not None]


def test_a_trained_tasks_next_pass_uses_its_new_values(hugging_face, backbone_of):
    """Keys and values prepared before an optimiser's step must not outlive it."""
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = trainable(graph_of(model, "diamond"))
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    optimiser = torch.optim.SGD([p for task in tasks.values() for p in task_parts(task)], lr=0.05)
    before = fast(pixels)
    for _ in range(3):
        optimiser.zero_grad()
        loss_of(fast(pixels)).backward()
        optimiser.step()
    after = fast(pixels)
    assert (after["d"] - before["d"]).abs().max() > 1e-2
    assert_same(
        expected_values(after), expected_values(dense_forward(model, pixels, tasks)), TOLERANCE
    )
    optimiser.zero_grad()
    with torch.no_grad():
        assert not fast(pixels)["d"].requires_grad


@pytest.mark.parametrize("replaced", [False, True])
def test_a_frozen_child_follows_a_parent_in_training(hugging_face, backbone_of, replaced):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = graph_of(model, "diamond")
    fast = MultiTaskViT(backbone_of("vit"))
    if replaced:  # the parent was frozen too when the children came
        add_all(fast, tasks)
    tasks |= trainable({"a": tasks["a"]})
    add_all(fast, {"a": tasks["a"]} if replaced else tasks)
    optimiser = torch.optim.SGD(task_parts(tasks["a"]), lr=0.05)
    for _ in range(2):
        optimiser.zero_grad()
        slow = {**tasks, **trainable({"a": tasks["a"]})}
        expected = dense_forward(model, pixels, slow)["d"]
        got = fast(pixels, tasks=["d"])["d"]
        assert_same({"d": got.detach()}, {"d": expected.detach()}, TOLERANCE)
        loss_of({"d": got}).backward()
        loss_of({"d": expected}).backward()
        assert_same_gradients({"a": tasks["a"]}, {"a": slow["a"]})
        optimiser.step()


def test_variants_are_trained_side_by_side_in_one_pass(hugging_face, backbone_of):
    """Each variant's gradient is what it would be alone."""
    model = hugging_face("vit")
    pixels = image_batch(model, 4)
    together = trainable(some_tasks(model, 6))
    got = add_all(MultiTaskViT(backbone_of("vit")), together)(pixels)
    loss_of({name: got[name] for name in together}).backward()
    for name, task in some_tasks(model, 6).items():
        alone = trainable({name: task})
        single = add_all(MultiTaskViT(backbone_of("vit")), alone)(pixels, tasks=[name])
        loss_of(single).backward()
        assert_same_gradients({name: together[name]}, alone)
