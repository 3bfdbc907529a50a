"""Full attention and full fine-tuning: what they compute, learn, leave alone and cost."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from engram_server.model.backbone import named_tensors
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, base_task, prepare
from engram_training.data.images import ImageSet, encode
from engram_training.data.workspace import Scratch
from engram_training.fitting.loop import answers, epoch_order
from engram_training.fitting.variants import Variant, Variants, rate_factor

from research import comparison
from research.comparison import Recipe, cost_of_candidate, full_attention, full_fine_tuning
from tests.reference import dense
from tests.training.pictures import class_folders

TOLERANCE = 1e-4
CLASSES = 4
RECIPE = Recipe(epochs=2, batch=8, rate=0.1, seed=5)


@pytest.fixture(scope="module")
def backbone(backbone_of):
    return backbone_of("vit")


@pytest.fixture(scope="module")
def images(backbone, tmp_path_factory):
    """Four colours, six pictures each."""
    root = class_folders(tmp_path_factory.mktemp("pictures") / "colours", each=6)
    with closing(Scratch(2**26)) as scratch, ThreadPoolExecutor(1) as pool:
        found = ImageSet(sorted(root.glob("*/*.png")), backbone.preprocessing, scratch)
        assert not found.read_all(pool)
        yield found


@pytest.fixture(scope="module")
def targets(images):
    colours = sorted({path.parent.name for path in images.paths})
    return torch.tensor([colours.index(path.parent.name) for path in images.paths])


def view_of(backbone, count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, *backbone.image_size, generator=generator)


def rows_of(candidate, view):
    task = prepare(candidate.backbone, candidate.weights)
    with torch.no_grad():
        return comparison.final_rows(candidate.backbone, view, task)


def tensors_of(backbone):
    parts = [backbone.embedding, *backbone.blocks]
    found = [tensor for part in parts for _, tensor in named_tensors(part)]
    return [*found, backbone.final_norm_weight, backbone.final_norm_bias]


@pytest.fixture
def untouched(backbone):
    """The shared backbone must be, bit for bit, what it was before the test."""
    before = [tensor.clone() for tensor in tensors_of(backbone)]
    yield
    for tensor, old in zip(tensors_of(backbone), before, strict=True):
        assert torch.equal(tensor, old)
        assert not tensor.requires_grad


# --- what they compute ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["vit", "deit-teacher", "dinov2-registers"])
def test_before_training_and_without_memory_both_are_the_backbones_own_forward(backbone_of, family):
    backbone = backbone_of(family)
    view = view_of(backbone)
    with torch.no_grad():
        passed = masked_pass(backbone, view, None, [[base_task(backbone)]] * 3, StackCache())
    own = passed.logits[0].features[:, : backbone.width]  # the class token comes first
    for candidate in (full_attention(backbone, 5, 0, 0), full_fine_tuning(backbone, 5)):
        torch.testing.assert_close(rows_of(candidate, view)[:, 0], own, rtol=0, atol=TOLERANCE)


def test_full_attention_is_that_of_the_reference_without_its_mask(
    hugging_face, backbone, monkeypatch
):
    # The task's class token replaces the backbone's, so no token attends to the backbone's.
    monkeypatch.setattr(
        dense, "may_attend", lambda _, key, __: (key.kind, key.index) != ("base", 0)
    )
    candidate = full_attention(backbone, 5, 3, seed=2)
    head = torch.randn(5, backbone.width, generator=torch.Generator().manual_seed(3))
    token = candidate.weights.class_token.detach() + 0.1
    weights = replace(candidate.weights, head_weight=head, head_bias=None, class_token=token)
    pixels = torch.randint(0, 256, (3, *backbone.image_size, 3), dtype=torch.uint8)
    task = dense.ReferenceTask(head, None, token, weights.memory.detach())
    with torch.no_grad():
        found = replace(candidate, weights=weights).logits(pixels)
        view = backbone.preprocessing.normalise(pixels)
        expected = dense.dense_forward(hugging_face("vit"), view, {"task": task})["task"]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_patches_see_memory_of_full_attention_and_do_not_see_masked_memory(backbone):
    view = view_of(backbone)
    candidate = full_attention(backbone, 5, 4, seed=3)
    plain = rows_of(full_attention(backbone, 5, 0, seed=3), view)
    seen = (rows_of(candidate, view) - plain).abs().amax(dim=(0, 2))
    assert (seen > 1e-4).all(), "some row does not see the memory"

    task = prepare(backbone, candidate.weights)
    with torch.no_grad():
        alone, among = (
            masked_pass(backbone, view, None, [tasks] * 3, StackCache(), keep_contexts=True)
            for tasks in ([], [task])
        )
    for before, after in zip(alone.contexts.states, among.contexts.states, strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=1e-5)


# --- what they learn ------------------------------------------------------------------------------


@pytest.mark.usefixtures("untouched")
def test_full_attention_learns_memory_token_and_head_and_leaves_the_backbone(
    backbone, images, targets
):
    candidate = full_attention(backbone, CLASSES, 2, seed=7)
    masked = Variants(backbone, [Variant("memory", 2, 0.1, 7)], CLASSES).weights(0)
    for name in ("head_weight", "head_bias", "class_token", "memory"):
        start = getattr(candidate.weights, name)
        assert torch.equal(start, getattr(masked, name)), f"{name} starts elsewhere"
    assert candidate.backbone is backbone
    comparison.train(candidate, images, targets, RECIPE)
    assert len(candidate.learned) == 4
    for name in ("head_weight", "head_bias", "class_token", "memory"):
        assert not torch.equal(getattr(candidate.weights, name), getattr(masked, name)), name


@pytest.mark.usefixtures("untouched")
def test_full_fine_tuning_learns_every_number_of_a_copy_of_the_backbone(backbone, images, targets):
    candidate = full_fine_tuning(backbone, CLASSES)
    comparison.train(candidate, images, targets, RECIPE)
    pairs = zip(tensors_of(candidate.backbone), tensors_of(backbone), strict=True)
    for place, (own, shared) in enumerate(pairs):
        assert own.data_ptr() != shared.data_ptr() or not own.numel()
        assert not torch.equal(own, shared) or not own.numel(), f"tensor {place} was not learned"
    assert candidate.weights.head_weight.abs().sum() > 0


def test_a_step_is_that_of_the_servable_regimes(backbone, images, targets):
    """Where there is no memory and nothing but the head to learn, both trainers do the same."""
    candidate = full_fine_tuning(backbone, CLASSES)
    head = [candidate.weights.head_weight, candidate.weights.head_bias]
    comparison.train(replace(candidate, learned=head), images, targets, RECIPE)

    variants = Variants(backbone, [Variant("head", 0, RECIPE.rate, 0)], CLASSES)
    for step in range(6):
        epoch, position = divmod(step, 3)
        places = epoch_order(RECIPE.seed, epoch, len(images))[8 * position : 8 * position + 8]
        logits = answers(
            backbone, encode(backbone, images.batch(places)), list(variants.tasks().values())
        )
        torch.nn.functional.cross_entropy(logits[0], targets[places]).backward()
        variants.step(rate_factor(step, 6))
    expected = variants.weights(0)
    torch.testing.assert_close(head[0].detach(), expected.head_weight, rtol=0, atol=1e-5)
    torch.testing.assert_close(head[1].detach(), expected.head_bias, rtol=0, atol=1e-5)


@pytest.mark.parametrize("regime", ["full attention", "full fine-tuning"])
def test_training_learns_to_tell_the_colours_apart(backbone, images, targets, regime):
    candidate = {
        "full attention": lambda: full_attention(backbone, CLASSES, 2, seed=0),
        "full fine-tuning": lambda: full_fine_tuning(backbone, CLASSES),
    }[regime]()
    progress = []
    recipe = Recipe(epochs=20, batch=8, rate=0.1, seed=0)
    losses = comparison.train(candidate, images, targets, recipe, lambda *at: progress.append(at))
    assert progress == [(step, 60) for step in range(1, 61)]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(CLASSES)).item(), abs=1e-4)
    assert losses[-1] < 0.5 * losses[0]
    right = comparison.predict(candidate, images, 5).argmax(dim=1) == targets
    assert right.double().mean() > 0.9


def test_a_run_that_goes_to_infinity_ends_at_its_last_finite_numbers(backbone, images, targets):
    candidate = full_attention(backbone, CLASSES, 1, seed=0)
    with torch.no_grad():
        candidate.weights.memory.fill_(torch.inf)
    before = candidate.weights.class_token.detach().clone()
    assert comparison.train(candidate, images, targets, RECIPE) == []
    assert torch.equal(candidate.weights.class_token, before)


# --- what they cost -------------------------------------------------------------------------------


def test_costs_are_a_whole_pass_and_what_is_learned(backbone):
    geometry, width = backbone.geometry, backbone.width
    attention = cost_of_candidate(full_attention(backbone, CLASSES, 3, seed=0))
    assert attention.parameters == width * backbone.layers * 3 + width + width * CLASSES
    keys = 2 * 2 * 3 * geometry.attention_width  # scores and sums
    extra = geometry.layers * geometry.tokens * keys
    assert attention.task_flops == attention.backbone_flops + extra + 2 * width * CLASSES
    whole = cost_of_candidate(full_fine_tuning(backbone, CLASSES))
    size = sum(tensor.numel() for tensor in tensors_of(backbone))
    assert whole.parameters == size + width * CLASSES
    assert whole.task_flops == whole.backbone_flops + 2 * width * CLASSES
