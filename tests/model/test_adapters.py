"""Row adapters: each task's row through its own maps, and nobody else's."""

from dataclasses import replace

import pytest
import torch

from server.errors import TaskMismatch
from server.model import MultiTaskViT, TaskWeights
from server.model.adapters import ADAPTED_MAPS, AdapterStack, LowRank, map_sizes
from server.model.tasks import StackCache, TaskStack, prepare
from tests.families import KINDS, image_batch
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks, weights
from tests.model.test_gradients import loss_of
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4
HALF = 0.05


def mixture(model):
    """Tasks with and without adapters, with and without memory, parents among them."""
    return {
        "full": random_task(model, 1, maps=ADAPTED_MAPS, rank=4),
        "plain": random_task(model, 2, memory=5),
        "head": head_only(model, 3),
        "query": random_task(model, 4, memory=None, maps=["query"], rank=1),
        "mlp": random_task(model, 5, memory=0, maps=["up", "down"], rank=9),
        "child": random_task(model, 6, parents=("full",), maps=["output"], rank=3),
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


@pytest.mark.parametrize("name", ADAPTED_MAPS)
def test_every_map_shows_and_moves_its_own_task_alone(hugging_face, backbone_of, name):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    others = some_tasks(model, 4)
    plain = random_task(model, 9)
    adapted = replace(plain, adapter=random_task(model, 9, maps=[name]).adapter)
    before, after = (
        add_all(MultiTaskViT(backbone_of("vit")), {**others, "t": task})(pixels)
        for task in (plain, adapted)
    )
    assert (after["t"] - before["t"]).abs().max() > 1e-2
    for other in ("base", *others):
        torch.testing.assert_close(after[other], before[other], atol=1e-5, rtol=0)


def test_an_adapter_that_starts_from_zero_changes_nothing(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    plain = random_task(model, 1)
    adapter = {
        name: (a, torch.zeros_like(b))
        for name, (a, b) in random_task(model, 1, maps=ADAPTED_MAPS).adapter.items()
    }
    before, after = (
        add_all(MultiTaskViT(backbone_of("vit")), {"t": task})(pixels)
        for task in (plain, replace(plain, adapter=adapter))
    )
    assert torch.equal(before["t"], after["t"])


@pytest.mark.parametrize("family", ["vit", "dinov2-swiglu", "clip"])
def test_gradients_of_adapters_equal_the_references(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)

    def trainable():
        return {
            name: replace(
                task,
                adapter={
                    one: tuple(tensor.clone().requires_grad_() for tensor in change)
                    for one, change in task.adapter.items()
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
        for one, change in task.adapter.items():
            for part, tensor, other in zip("ab", change, quick[name].adapter[one], strict=True):
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


def test_a_stack_without_adapters_has_none_and_others_count_theirs(hugging_face, backbone_of):
    model, backbone = hugging_face("vit"), backbone_of("vit")
    plain, adapted = (
        prepare(backbone, weights(random_task(model, 1, maps=maps, rank=2)))
        for maps in ((), ADAPTED_MAPS)
    )
    assert TaskStack.of([plain]).adapters is None
    stack = TaskStack.of([plain, adapted])
    assert stack.adapters is not None
    assert len(stack.adapters) == 1, "the plain task has no part in it"
    assert stack.adapters.nbytes == sum(a.nbytes + b.nbytes for a, b in adapted.adapter.values())
    assert adapted.nbytes - plain.nbytes == stack.adapters.nbytes
    assert stack.nbytes > stack.adapters.nbytes
    assert AdapterStack.of([{}, {}]) is None


def test_a_stack_with_an_adapter_in_training_is_not_kept(hugging_face, backbone_of):
    task = random_task(hugging_face("vit"), 1, maps=["up"])
    adapter = {"up": LowRank(*(tensor.requires_grad_() for tensor in task.adapter["up"]))}
    trained = prepare(backbone_of("vit"), replace(weights(task), adapter=adapter))
    assert trained.requires_grad
    cache = StackCache()
    assert cache.stack_of([trained]) is not cache.stack_of([trained])


HEAD, TOKEN = torch.ones(5, 32), torch.ones(32)


@pytest.mark.parametrize(
    ("token", "adapter", "cause"),
    [
        (None, {"query": (3, 32, 2, 32)}, "class token"),
        (TOKEN, {"key": (3, 32, 2, 32)}, "'key' is no map"),
        (TOKEN, {"query": (2, 32, 2, 32)}, r"query.a is \(2, 32, 2\).*\(3, 32, r\)"),
        (TOKEN, {"up": (3, 64, 2, 64)}, r"up.a is \(3, 64, 2\).*\(3, 32, r\)"),
        (TOKEN, {"up": (3, 32, 2, 32)}, r"up.b is \(3, 2, 32\).*\(3, 2, 64\)"),
        (TOKEN, {"output": (3, 32, 0, 32)}, r"output.a is \(3, 32, 0\)"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(backbone_of, token, adapter, cause):
    made = {
        name: LowRank(torch.ones(layers, into, rank), torch.ones(layers, rank, out))
        for name, (layers, into, rank, out) in adapter.items()
    }
    model = MultiTaskViT(backbone_of("vit"))
    with pytest.raises(TaskMismatch, match=cause):
        model.add("t", TaskWeights(HEAD, class_token=token, adapter=made))
    assert model.tasks == ["base"]


def test_map_sizes_are_those_of_the_backbones_matrices(backbone_of):
    assert map_sizes(backbone_of("vit")) == {
        "query": (32, 32),
        "output": (32, 32),
        "up": (32, 64),
        "down": (64, 32),
    }
