"""Closed-form heads that read every layer: one head per block, fused by fitted weights."""

import numpy as np
import pytest
from engram_server.model.heads import lda
from engram_server.model.heads.closed_form import (
    MAX_LAYERS,
    MIN_SHARE,
    PENALTY,
    fit_weights,
    sigmoid_loss,
    softmax_loss,
    solve,
)
from engram_server.model.heads.examples import Example, Examples, FeatureLayout

WIDTH, PARTS, LAYERS = 6, 3, 2
LAYOUT = FeatureLayout(WIDTH, PARTS)
FEATURES = WIDTH * (1 + LAYERS * PARTS)


def random_features(classes: np.ndarray, seed: int, informative: slice) -> np.ndarray:
    """Noise, with class means in the columns `informative` only."""
    means = np.random.default_rng(0).standard_normal((1 + classes.max(), FEATURES))
    features = np.random.default_rng(seed).standard_normal((len(classes), FEATURES))
    features[:, informative] += 3 * means[classes][:, informative]
    return features


def examples(features: np.ndarray, labels: list[list[str]], task_type="single_label") -> Examples:
    return Examples.of(
        task_type,
        [
            Example(index.to_bytes(32, "big"), feature, frozenset(names))
            for index, (feature, names) in enumerate(zip(features, labels, strict=True))
        ],
    )


def accuracy(head: lda.ClosedFormHead, features: np.ndarray, classes: np.ndarray) -> float:
    return float(((features @ head.weight.T + head.bias).argmax(axis=1) == classes).mean())


@pytest.mark.parametrize("per_class", [3, 40])  # fewer and more examples than dimensions
def test_what_only_a_layer_shows_is_learned(per_class):
    layer = LAYOUT.blocks(FEATURES)[2]
    classes = np.repeat(np.arange(4), per_class)
    train = random_features(classes, 1, layer)
    head = solve(examples(train, [[str(k)] for k in classes]), None, LAYOUT)
    tested = np.repeat(np.arange(4), 200)
    features = random_features(tested, 2, layer)
    alone = solve(examples(train[:, :WIDTH], [[str(k)] for k in classes]))
    assert accuracy(head, features, tested) > 0.8
    assert accuracy(alone, features[:, :WIDTH], tested) < 0.45
    # What the examples predict about themselves holds for new ones.
    low, high = head.leave_one_out.interval
    assert low - 0.1 < accuracy(head, features, tested) < high + 0.1


def test_layers_without_information_are_dropped():
    classes = np.repeat(np.arange(3), 100)
    train = random_features(classes, 1, slice(0, WIDTH))
    head = solve(examples(train, [[str(k)] for k in classes]), None, LAYOUT)
    unused = [not head.weight[:, columns].any() for columns in LAYOUT.blocks(FEATURES)]
    assert unused == [False, True, True]


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_a_head_reads_a_limited_number_of_layers(task_type):
    """Weak layers all help, but a bundle must stay small."""
    width = WIDTH * (1 + 9 * PARTS)
    classes = np.repeat(np.arange(4), 60)
    means = 0.4 * np.random.default_rng(0).standard_normal((4, width))
    train = means[classes] + np.random.default_rng(1).standard_normal((len(classes), width))
    head = solve(examples(train, [[str(k)] for k in classes], task_type), None, LAYOUT)
    used = [bool(head.weight[:, columns].any()) for columns in LAYOUT.blocks(width)]
    assert used[0]
    assert sum(used[1:]) == MAX_LAYERS


def test_labels_of_a_multi_label_task_are_learned_from_a_layer():
    layer = LAYOUT.blocks(FEATURES)[1]
    classes = np.tile(np.arange(4), 30)
    labels = [[["a"], ["b"], ["a", "b"], []][k] for k in classes]
    train = random_features(classes, 1, layer)
    head = solve(examples(train, labels, "multi_label"), None, LAYOUT)
    alone = solve(examples(train[:, :WIDTH], labels, "multi_label"))
    assert head.leave_one_out.accuracy > 0.85 > 0.4 > alone.leave_one_out.accuracy


def test_one_photo_a_class_uses_the_final_feature():
    train = random_features(np.arange(3), 1, slice(0, FEATURES))
    head = solve(examples(train, [["a"], ["b"], ["c"]]), None, LAYOUT)
    alone = solve(examples(train[:, :WIDTH], [["a"], ["b"], ["c"]]))
    np.testing.assert_allclose(head.weight[:, :WIDTH], alone.weight, atol=2e-3)
    assert not head.weight[:, WIDTH:].any()


@pytest.mark.parametrize("count", [5, 30])
def test_coordinates_in_the_span_give_the_same_head_and_leave_one_out(count):
    """With fewer examples than dimensions the head is solved in their span, which is exact."""
    random = np.random.default_rng(count)
    features, classes = random.standard_normal((count, 30)), np.arange(count) % 2
    (block,) = lda.lda_blocks(features, classes)
    whole = lda.LdaStatistics.of(features, classes)
    weight, bias = whole.discriminant()
    np.testing.assert_allclose(block.weight, weight, atol=1e-8)
    np.testing.assert_allclose(block.bias, bias, atol=1e-8)
    expected = -0.5 * whole.leave_one_out_distances()
    np.testing.assert_allclose(block.left_out, expected, rtol=1e-6)


def test_equal_examples_can_be_taught():
    head = solve(examples(np.ones((4, FEATURES)), [["a"], ["a"], ["b"], ["b"]]), None, LAYOUT)
    assert np.isfinite(head.weight).all()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_at_the_minimum_of_the_penalised_loss(kind, seed):
    random = np.random.default_rng(seed)
    if kind == "softmax":
        classes = random.integers(0, 3, 40)
        logits = random.standard_normal((4, 40, 3)) + 0.8 * np.eye(3)[classes]
        loss = softmax_loss(logits, classes)
    else:
        targets = random.random(60) < 0.5
        logits = random.standard_normal((4, 60)) + np.where(targets, 0.8, -0.8)
        loss = sigmoid_loss(logits, targets)
    first = 0.7

    def penalised(weights: np.ndarray) -> float:
        off = weights[0] - first
        return loss(weights)[0] + PENALTY * (weights[1:].sum() + 0.5 * off * off)

    weights = fit_weights(loss, 4, first)
    for step in np.vstack([np.eye(4), -np.eye(4)]) * 0.01:
        moved = np.maximum(weights + step, 0)
        moved[0] = max(moved[0], MIN_SHARE * first)
        assert penalised(moved) >= penalised(weights) - 2e-3


@pytest.mark.parametrize("make", ["softmax", "sigmoid"])
def test_gradient_and_hessian_are_those_of_the_loss(make):
    random = np.random.default_rng(3)
    if make == "softmax":
        loss = softmax_loss(random.standard_normal((3, 20, 4)), random.integers(0, 4, 20))
    else:
        loss = sigmoid_loss(random.standard_normal((3, 50)), random.random(50) < 0.5)
    weights, small = np.array([0.5, 1.0, 0.2]), 1e-5
    _, gradient, hessian = loss(weights)
    for index, step in enumerate(np.eye(3) * small):
        up, down = loss(weights + step), loss(weights - step)
        assert gradient[index] == pytest.approx((up[0] - down[0]) / (2 * small), rel=1e-5)
        np.testing.assert_allclose(hessian[index], (up[1] - down[1]) / (2 * small), rtol=1e-4)
