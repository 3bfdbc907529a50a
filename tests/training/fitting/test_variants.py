"""Variants: trained together, each as if alone."""

import pytest
import torch
import torch.nn.functional as F
from engram_server.model import load_backbone
from engram_server.model.lora import target_sizes
from engram_server.model.tasks import prepare
from engram_training.data.images import encode
from engram_training.errors import SettingsConflict
from engram_training.fitting.closed_form import SolvedHead
from engram_training.fitting.loop import answers
from engram_training.fitting.losses import mean_losses
from engram_training.fitting.variants import (
    AUTO_RATES,
    AUTO_REGIMES,
    CLIP_NORM,
    DECAY,
    HEAD_RATE,
    OPTIMISERS,
    REGIMES,
    ClosedForm,
    Shares,
    Variant,
    Variants,
    named_tensors,
    rate_factor,
    sweep,
    weights_from,
)

from tests.model.tasks import random_task, weights

# Products of another shape are added up in another order: the same to the last digits, not the bit.
ALONE_TOLERANCE = 1e-5
CLASSES = 5
STEPS = 40


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def batches(backbone):
    """Contexts of random images with targets that depend on them."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(4):
        pixels = torch.randint(0, 256, (6, *backbone.image_size, 3), generator=generator)
        targets = torch.randint(0, CLASSES, (6,), generator=generator)
        found.append((encode(backbone, pixels.to(torch.uint8)), targets))
    return found


def train(backbone, batches, chosen, steps=STEPS, **options):
    variants = Variants(backbone, chosen, CLASSES, **options)
    for step in range(steps):
        contexts, targets = batches[step % len(batches)]
        logits = answers(backbone, contexts, list(variants.tasks().values()))
        loss = mean_losses(logits, targets, "single_label").sum()
        if loss.requires_grad:
            loss.backward()
        variants.step(rate_factor(step, steps))
    return variants


def parts(found):
    return named_tensors(found)


TWELVE = [
    *sweep(["memory"], [1, 4], [0.003, 0.01], [7]),
    *sweep(["class", "head"], [1], [0.03, 0.1], [7]),
    *sweep(["lora"], [], [0.001, 0.003], [7, 8], [2]),
]
SOLVED = SolvedHead(torch.linspace(-1, 1, CLASSES * 32).view(CLASSES, 32), torch.arange(5.0))


def test_the_sweep_has_every_combination_that_differs_once():
    found = sweep(REGIMES, [1, 4], [0.03, 0.1], [7, 8], [2, 4])
    # Memory, LoRA and both, alone and with layers; class and head; layers.
    assert len(found) == 2 * (2 * 2 * 2 + 2 * 2 * 2 + 2 * 2 * 2 * 2) + 2 + 2 + 1
    assert len({variant.name for variant in found}) == 69
    assert {v.seed for v in found if v.regime in ("class", "head", "layers")} == {7}
    assert sweep(["memory"], [3, 3], [0.1, 0.1], [0]) == [
        Variant("memory", 3, 0.1, 0, optimiser="AdamW")
    ]
    lora = Variant("lora", 0, 0.1, 0, 4, "AdamW")
    assert sweep(["lora"], [], [0.1], [0], [4, 4]) == [lora]


def test_every_regime_has_its_own_rates_unless_some_are_given():
    found = sweep(AUTO_REGIMES, [10], None, [0])
    assert len(found) == 5
    for variant in found:
        assert variant.optimiser == OPTIMISERS[variant.regime]
        assert variant.rate in AUTO_RATES[variant.regime]


@pytest.fixture(scope="module")
def together(backbone, batches):
    return train(backbone, batches, TWELVE)


@pytest.mark.parametrize("place", range(12))
def test_a_variant_trained_among_eleven_ends_as_trained_alone(backbone, batches, together, place):
    among = parts(together.weights(place))
    alone = parts(train(backbone, batches, [TWELVE[place]]).weights(0))
    start = parts(Variants(backbone, [TWELVE[place]], CLASSES).weights(0))
    assert among.keys() == alone.keys() == start.keys()
    for name, value in alone.items():
        assert not torch.equal(value, start[name]), f"{name} was not trained"
        torch.testing.assert_close(among[name], value, rtol=0, atol=ALONE_TOLERANCE, msg=name)


def test_a_step_is_that_of_torchs_sgd_with_clipping(backbone, batches):
    chosen = Variant("memory", 3, 0.1, 1)
    ours = train(backbone, batches, [chosen], steps=8).weights(0)
    start = Variants(backbone, [chosen], CLASSES).weights(0)
    leaves = {name: value.clone().requires_grad_() for name, value in parts(start).items()}
    optimiser = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.9)
    for step in range(8):
        contexts, targets = batches[step % len(batches)]
        task = prepare(backbone, type(start)(**leaves))
        optimiser.zero_grad()
        F.cross_entropy(answers(backbone, contexts, [task])[0], targets).backward()
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), CLIP_NORM)
        optimiser.param_groups[0]["lr"] = 0.1 * rate_factor(step, 8)
        optimiser.step()
    for name, value in leaves.items():
        torch.testing.assert_close(getattr(ours, name), value.detach(), rtol=0, atol=1e-5)


def test_a_lora_step_equals_torchs_adamw(backbone, batches):
    chosen = Variant("memory+lora", 2, 0.003, 1, 3, "AdamW")
    ours = parts(train(backbone, batches, [chosen], steps=8).weights(0))
    start = parts(Variants(backbone, [chosen], CLASSES).weights(0))
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    heads = [value for name, value in leaves.items() if name.startswith("head")]
    others = [value for name, value in leaves.items() if not name.startswith("head")]
    optimiser = torch.optim.AdamW([{"params": heads}, {"params": others}], weight_decay=DECAY)
    for step in range(8):
        contexts, targets = batches[step % len(batches)]
        optimiser.zero_grad()
        task = prepare(backbone, weights_from(leaves))
        F.cross_entropy(answers(backbone, contexts, [task])[0], targets).backward()
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), CLIP_NORM)
        for group, rate in zip(optimiser.param_groups, (HEAD_RATE, 0.003), strict=True):
            group["lr"] = rate * rate_factor(step, 8)
        optimiser.step()
    assert len(leaves) == 4 + 8
    for name, value in leaves.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=0, atol=1e-5, msg=name)


def test_lora_starts_from_a_random_a_and_a_zero_b(backbone):
    found = Variants(backbone, [Variant("lora", 0, 0.1, 0, 16, "AdamW")], CLASSES).weights(0)
    assert list(found.lora) == ["query", "output", "up", "down"]
    for name, (into, out) in target_sizes(backbone).items():
        a, b = found.lora[name]
        assert (a.shape, b.shape) == ((backbone.layers, into, 16), (backbone.layers, 16, out))
        assert float(a.std()) == pytest.approx(into**-0.5, rel=0.1)
        assert not b.any()


def test_a_variant_that_goes_to_infinity_stays_and_takes_no_other_along(backbone, batches):
    good, wild = Variant("memory", 2, 0.05, 0), Variant("memory", 2, 1e30, 0)
    together = train(backbone, batches, [wild, good])
    assert together.diverged.tolist() == [True, False]
    assert all(torch.isfinite(value).all() for value in parts(together.weights(0)).values())
    alone = train(backbone, batches, [good])
    for name, value in parts(alone.weights(0)).items():
        among = parts(together.weights(1))[name]
        torch.testing.assert_close(among, value, rtol=0, atol=ALONE_TOLERANCE)


def test_variants_from_a_solved_head_train_as_alone_and_the_head_itself_stays(backbone, batches):
    chosen = sweep(["memory", "head", "layers"], [2], [0.03], [7], starts=["zero", "solved"])
    assert len(chosen) == 5
    together = train(backbone, batches, chosen, steps=8, solved=SOLVED)
    for place, variant in enumerate(chosen):
        alone = parts(train(backbone, batches, [variant], steps=8, solved=SOLVED).weights(0))
        among = parts(together.weights(place))
        for name, value in alone.items():
            torch.testing.assert_close(among[name], value, rtol=0, atol=ALONE_TOLERANCE)
        if not variant.rate:
            assert torch.equal(among["head_weight"], SOLVED.weight)
            assert torch.equal(among["head_bias"], SOLVED.bias)


def test_a_row_and_the_closed_form_are_added_by_their_shares(backbone, batches):
    count, of_layer, width = backbone.summary_shape
    features = width * (1 + count * of_layer)
    generator = torch.Generator().manual_seed(3)
    first, second = (
        SolvedHead(torch.randn(CLASSES, features, generator=generator), torch.arange(5.0) * sign)
        for sign in (1, -1)
    )
    chosen, shares = Variant("lora+layers", 0, 0.003, 0, 2, "AdamW"), Shares(0.5, 2.0)
    variants = train(backbone, batches, [chosen], steps=4, every_layer=first)
    contexts, _ = batches[0]

    def logits(*tasks):
        return answers(backbone, contexts, tasks)

    with torch.no_grad():
        row = variants.tasks()[0]
        expected = logits(row, variants.closed_form(), ClosedForm.of(backbone, second).task())
        whole = variants.weights(0, shares)
        got = logits(prepare(backbone, whole))[0]
        torch.testing.assert_close(got, 2 * expected[0] + 0.5 * expected[1], atol=1e-4, rtol=0)
        other = ClosedForm.of(backbone, second).in_place_of(
            variants.every_layer, whole, chosen, shares
        )
        got = logits(prepare(backbone, other))[0]
        torch.testing.assert_close(got, 2 * expected[0] + 0.5 * expected[2], atol=1e-4, rtol=0)
        again = logits(prepare(backbone, weights_from(named_tensors(whole))))[0]
        torch.testing.assert_close(again, 2 * expected[0] + 0.5 * expected[1], atol=1e-4, rtol=0)


def test_a_stopped_variant_is_not_run_and_does_not_change(backbone, batches):
    chosen = sweep(["memory", "class"], [2], [0.03], [7])
    variants = Variants(backbone, chosen, CLASSES)
    before = parts(variants.weights(1))
    variants.stopped = frozenset({1})
    assert list(variants.tasks()) == [0]
    contexts, targets = batches[0]
    logits = answers(backbone, contexts, list(variants.tasks().values()))
    mean_losses(logits, targets, "single_label").sum().backward()
    variants.step(1.0)
    for name, value in parts(variants.weights(1)).items():
        assert torch.equal(value, before[name])


def test_starts_are_as_the_paper_has_them(backbone):
    found = Variants(backbone, [Variant("memory", 20, 0.1, 0)], CLASSES).weights(0)
    assert not found.head_weight.any()
    assert torch.equal(found.class_token, backbone.embedding.class_token)
    assert found.memory.shape == (backbone.layers, 20, backbone.width)
    assert float(found.memory.std()) == pytest.approx(0.02, rel=0.1)
    again = Variants(backbone, [Variant("memory", 20, 0.5, 0)], CLASSES).weights(0)
    other = Variants(backbone, [Variant("memory", 20, 0.1, 1)], CLASSES).weights(0)
    assert torch.equal(found.memory, again.memory)
    assert not torch.equal(found.memory, other.memory)


def test_a_child_learns_and_its_parent_never_changes(hugging_face, backbone, batches):
    model = hugging_face("vit")
    parent_weights = weights(random_task(model, 5))
    before = {name: value.clone() for name, value in parts(parent_weights).items()}
    parent = prepare(backbone, parent_weights)
    chosen = [Variant("memory", 2, 0.1, 0), Variant("class", 0, 0.1, 0)]
    child = train(backbone, batches, chosen, parents=[parent])
    apart = train(backbone, batches, chosen)
    assert not torch.allclose(child.weights(0).memory, apart.weights(0).memory, atol=1e-4)
    for name, value in before.items():
        assert torch.equal(getattr(parent_weights, name), value)


def test_a_head_alone_cannot_extend(hugging_face, backbone):
    parent = prepare(backbone, weights(random_task(hugging_face("vit"), 5)))
    with pytest.raises(SettingsConflict, match="Omit the regime 'head'"):
        Variants(backbone, [Variant("head", 0, 0.1, 0)], CLASSES, parents=[parent])


def test_a_saved_state_goes_on_to_the_same_end(backbone, batches):
    half = train(backbone, batches, TWELVE, steps=6)
    state = half.state()
    other = Variants(backbone, TWELVE, CLASSES)
    other.load(state)
    for variants in (half, other):
        contexts, targets = batches[0]
        logits = answers(backbone, contexts, list(variants.tasks().values()))
        mean_losses(logits, targets, "single_label").sum().backward()
        variants.step(0.5)
    for place in range(12):
        for name, value in parts(half.weights(place)).items():
            assert torch.equal(parts(other.weights(place))[name], value)


def test_the_rate_warms_up_for_five_steps_and_falls_to_zero():
    factors = [rate_factor(step, 50) for step in range(51)]
    assert factors[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert factors[5] == 1
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[50] == pytest.approx(0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((["memory"], [0], [0.1], [0]), "1 to 1024 tokens"),
        ((["memory"], [], [0.1], [0]), "1 to 1024 tokens"),
        ((["memory"], [5], [0.0], [0]), "is not positive"),
        ((["memory"], [5], [], [0]), "at least one"),
        ((["lora"], [5], [0.1], [0], [0]), "1 to 256"),
        ((["lora"], [5], [0.1], [0], [300]), "1 to 256"),
    ],
)
def test_an_empty_sweep_is_rejected(settings, message):
    with pytest.raises(SettingsConflict, match=message):
        sweep(*settings)
