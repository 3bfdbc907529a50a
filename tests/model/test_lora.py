"""LoRA on task rows: each task row has its own update, and no other row changes."""

from dataclasses import replace

import pytest
import torch
from engram_server.errors import TaskMismatch
from engram_server.model import MultiTaskViT, TaskWeights
from engram_server.model.lora import LORA_TARGETS, BatchedLora, LoraWeight, target_sizes
from engram_server.model.tasks import StackCache, TaskStack, prepare

from tests.families import KINDS, image_batch
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks, weights
from tests.model.test_gradients import loss_of
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4
HALF = 0.05


def mixture(model):
    """Tasks with and without LoRA, with and without memory, including parents."""
    return {
        "full": random_task(model, 1, targets=LORA_TARGETS, rank=4),
        "plain": random_task(model, 2, memory=5),
        "head": head_only(model, 3),
        "query": random_task(model, 4, memory=None, targets=["query"], rank=1),
        "mlp": random_task(model, 5, memory=0, targets=["up", "down"], rank=9),
        "child": random_task(model, 6, parents=("full",), targets=["output"], rank=3),
        "plain child": random_task(model, 7, parents=("mlp", "plain")),
    }


@pytest.mark.parametrize("family", KINDS)
def test_a_mixture_of_tasks_equals_the_reference(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = mixture(model)
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
    assert_same(fast(pixels), expected, TOLERANCE)
    warm = fast.predict_pairs(fast.encode(pixels), [list(tasks)] * 3)
    for image, answers in enumerate(warm):
        assert_same(answers, {name: expected[name][image] for name in tasks}, TOLERANCE)


@pytest.mark.parametrize("name", LORA_TARGETS)
def test_every_map_shows_and_moves_its_own_task_alone(hugging_face, backbone_of, name):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    others = some_tasks(model, 4)
    plain = random_task(model, 9)
    adapted = replace(plain, lora=random_task(model, 9, targets=[name]).lora)
    before, after = (
        add_all(MultiTaskViT(backbone_of("vit")), {**others, "t": task})(pixels)
        for task in (plain, adapted)
    )
    assert (after["t"] - before["t"]).abs().max() > 1e-2
    for other in ("base", *others):
        torch.testing.assert_close(after[other], before[other], atol=1e-5, rtol=0)


def test_lora_that_starts_from_zero_changes_nothing(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    plain = random_task(model, 1)
    lora = {
        name: (a, torch.zeros_like(b))
        for name, (a, b) in random_task(model, 1, targets=LORA_TARGETS).lora.items()
    }
    before, after = (
        add_all(MultiTaskViT(backbone_of("vit")), {"t": task})(pixels)
        for task in (plain, replace(plain, lora=lora))
    )
    assert torch.equal(before["t"], after["t"])


@pytest.mark.parametrize("family", ["vit", "dinov2-swiglu", "clip"])
def test_lora_gradients_equal_the_references(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)

    def trainable():
        return {
            name: replace(
                task,
                lora={
                    one: tuple(tensor.clone().requires_grad_() for tensor in change)
                    for one, change in task.lora.items()
                },
            )
            for name, task in mixture(model).items()
        }

    slow, quick = trainable(), trainable()
    expected = dense_forward(model, pixels, slow)
    got = add_all(MultiTaskViT(backbone_of(family)), quick)(pixels)
    for logits in (expected, got):
        loss_of({name: logits[name] for name in quick}).backward()
    model.zero_grad()
    for name, task in slow.items():
        for one, change in task.lora.items():
            for part, tensor, other in zip("ab", change, quick[name].lora[one], strict=True):
                scale = max(1.0, tensor.grad.abs().max().item())
                worst = (other.grad - tensor.grad).abs().max().item()
                assert worst <= TOLERANCE * scale, f"{name}.{one}.{part}: off by {worst}"


def test_bfloat16_stays_near_the_reference(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 4)
    tasks = mixture(model)
    got = add_all(MultiTaskViT(backbone_of("vit").to(dtype=torch.bfloat16)), tasks)(pixels)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
    for name, logits in expected.items():
        assert (got[name] - logits).abs().max() < HALF * logits.abs().max(), name


def test_a_stack_counts_the_bytes_of_its_lora(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    plain, adapted = (
        prepare(backbone, weights(random_task(model, 1, targets=targets, rank=2)))
        for targets in ((), LORA_TARGETS)
    )
    assert TaskStack.of([plain]).loras is None
    stack = TaskStack.of([plain, adapted])
    assert stack.loras is not None
    assert len(stack.loras) == 1, "the plain task has no part in it"
    assert stack.loras.nbytes == sum(a.nbytes + b.nbytes for a, b in adapted.lora.values())
    assert adapted.nbytes - plain.nbytes == stack.loras.nbytes
    assert stack.nbytes > stack.loras.nbytes
    assert BatchedLora.of([{}, {}]) is None


def test_a_stack_with_lora_in_training_is_not_cached(hugging_face, backbone_of):
    task = random_task(hugging_face("vit"), 1, targets=["up"])
    lora = {"up": LoraWeight(*(tensor.requires_grad_() for tensor in task.lora["up"]))}
    trained = prepare(backbone_of("vit"), replace(weights(task), lora=lora))
    assert trained.requires_grad
    cache = StackCache()
    assert cache.stack_of([trained]) is not cache.stack_of([trained])


HEAD, TOKEN = torch.ones(5, 32), torch.ones(32)


@pytest.mark.parametrize(
    ("token", "lora", "cause"),
    [
        (None, {"query": (3, 32, 2, 32)}, "class token"),
        (TOKEN, {"key": (3, 32, 2, 32)}, "Unknown LoRA target 'key'"),
        (TOKEN, {"query": (2, 32, 2, 32)}, r"query.a is \(2, 32, 2\).*\(3, 32, r\)"),
        (TOKEN, {"up": (3, 64, 2, 64)}, r"up.a is \(3, 64, 2\).*\(3, 32, r\)"),
        (TOKEN, {"up": (3, 32, 2, 32)}, r"up.b is \(3, 2, 32\).*\(3, 2, 64\)"),
        (TOKEN, {"output": (3, 32, 0, 32)}, r"output.a is \(3, 32, 0\)"),
    ],
)
def test_lora_of_the_wrong_shape_is_rejected(backbone_of, token, lora, cause):
    made = {
        name: LoraWeight(torch.ones(layers, into, rank), torch.ones(layers, rank, out))
        for name, (layers, into, rank, out) in lora.items()
    }
    model = MultiTaskViT(backbone_of("vit"))
    with pytest.raises(TaskMismatch, match=cause):
        model.add("t", TaskWeights(HEAD, class_token=token, lora=made))
    assert model.tasks == ["base"]


def test_map_sizes_are_those_of_the_backbones_matrices(backbone_of):
    assert target_sizes(backbone_of("vit")) == {
        "query": (32, 32),
        "output": (32, 32),
        "up": (32, 64),
        "down": (64, 32),
    }
