"""A head that is solved, and what leaving out each example tells, against really leaving it out."""

import time

import numpy as np
import pytest
from engram_bundle.schema import LabelledTaskType
from engram_server.errors import UnteachableExamples
from engram_server.model.heads import lda
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Example, Examples
from engram_server.model.heads.lda import LdaStatistics, RidgeRegression, wilson


def digest(number: int) -> bytes:
    return np.random.default_rng(number).bytes(32)


def some(
    counts: list[int],
    width: int = 12,
    *,
    apart: float = 1.0,
    seed: int = 0,
    task_type: LabelledTaskType = "single_label",
) -> list[Example]:
    """So many examples of each class, in statistics that are longer in some directions."""
    random = np.random.default_rng(seed)
    shape = np.linspace(0.3, 2.0, width)
    means = apart * random.standard_normal((len(counts), width))
    examples = []
    for place, count in enumerate(counts):
        for _ in range(count):
            feature = (means[place] + shape * random.standard_normal(width)).astype(np.float16)
            labels = {f"class-{place}"}
            if task_type == "multi_label" and place:
                labels.add("not the first")
            examples.append(Example(digest(len(examples)), feature, frozenset(labels)))
    return examples


def squared_distances(statistics: LdaStatistics, feature: np.ndarray) -> np.ndarray:
    away = feature.astype(np.float64) - statistics.centre - statistics.shrunk_means
    inverse = np.linalg.inv(statistics.covariance())
    return np.einsum("kd,de,ke->k", away, inverse, away)


@pytest.mark.parametrize("counts", [[9, 9, 9], [2, 5, 1, 3], [1, 2], [2, 2], [40, 3]], ids=str)
def test_leaving_out_in_closed_form_equals_really_leaving_each_example_out(counts):
    features = np.stack([one.feature for one in some(counts)]).astype(np.float64)
    classes = np.repeat(np.arange(len(counts)), counts)
    got = LdaStatistics.of(features, classes).leave_one_out_distances()
    for place in range(len(features)):
        others = np.arange(len(features)) != place
        present, numbers = np.unique(classes[others], return_inverse=True)
        naive = squared_distances(LdaStatistics.of(features[others], numbers), features[place])
        assert got[place, present] == pytest.approx(naive, rel=1e-6)
        gone = [k for k in range(len(counts)) if k not in present]
        assert np.isinf(got[place, gone]).all(), "an only example leaves no class behind"


@pytest.mark.parametrize("counts", [[9, 9, 9], [2, 5, 3], [40, 3]], ids=str)
def test_cosines_in_closed_form_equal_those_of_really_leaving_each_example_out(counts):
    features = np.stack([one.feature for one in some(counts)]).astype(np.float64)
    classes = np.repeat(np.arange(len(counts)), counts)
    got = LdaStatistics.of(features, classes).leave_one_out_cosines()
    for place in range(len(features)):
        others = np.arange(len(features)) != place
        statistics = LdaStatistics.of(features[others], classes[others])
        inverse, means = np.linalg.inv(statistics.covariance()), statistics.shrunk_means
        point = features[place] - statistics.centre
        lengths = np.einsum("kd,de,ke->k", means, inverse, means) * (point @ inverse @ point)
        assert got[place] == pytest.approx((means @ inverse @ point / np.sqrt(lengths)).max())


def test_leaving_out_of_a_regression_equals_really_leaving_each_example_out():
    examples = Examples.of("multi_label", some([5, 7, 3], task_type="multi_label"))
    features, truth = examples.features.astype(np.float64), examples.targets.astype(np.float64)
    got = RidgeRegression.of(features, truth).leave_one_out_scores(lda.RIDGE)
    for place in range(len(examples)):
        others = np.arange(len(examples)) != place
        weight, bias = RidgeRegression.of(features[others], truth[others]).solve(lda.RIDGE)
        assert got[place] == pytest.approx(weight @ features[place] + bias, rel=1e-6)


def test_accuracy_is_the_share_that_heads_without_the_example_name_rightly():
    examples = Examples.of("single_label", some([12, 12, 12], apart=0.7))
    right = 0
    for place, example in enumerate(examples):
        head = solve(examples.without({example.digest}))
        logits = head.weight @ examples.features[place].astype(np.float32) + head.bias
        right += int(logits.argmax() == examples.targets[place].argmax())
    result = solve(examples).leave_one_out
    assert (result.images, result.correct) == (36, right)
    assert result.accuracy == right / 36
    assert result.interval == wilson(right, 36)
    assert 0 < right < 36, "too easy, or too hard, to tell anything"


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_adding_an_example_and_taking_it_away_gives_the_same_bytes(task_type):
    made = some([8, 8, 8], task_type=task_type)
    examples = Examples.of(task_type, made[:-1])
    before = solve(examples)
    more = examples.with_added([made[-1], Example(digest(99), made[0].feature, frozenset(["new"]))])
    assert len(more.labels) == len(examples.labels) + 1
    again = solve(more.without({made[-1].digest, digest(99)}))
    assert again.weight.tobytes() == before.weight.tobytes()
    assert again.bias.tobytes() == before.bias.tobytes()


def test_the_order_in_which_examples_came_does_not_matter():
    made = some([8, 8, 8])
    one, other = (solve(Examples.of("single_label", each)) for each in (made, made[::-1]))
    assert one.weight.tobytes() == other.weight.tobytes()
    assert one.leave_one_out.probabilities.tobytes() == other.leave_one_out.probabilities.tobytes()


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_a_wrong_label_is_among_the_most_suspicious(task_type):
    made = some([10, 10, 10], apart=3, task_type=task_type)
    wrong = Example(made[3].digest, made[3].feature, made[-1].labels)
    examples = Examples.of(task_type, [*made[:3], wrong, *made[4:]])
    suspicious = solve(examples).leave_one_out.most_suspicious(3)
    assert wrong.digest in {examples[place].digest for place in suspicious}


def suspected(made: list[Example]) -> set[bytes]:
    examples = Examples.of("single_label", made)
    return {examples[place].digest for place in solve(examples).leave_one_out.most_suspicious(200)}


def test_suspected_label_errors_are_errors_also_where_classes_overlap():
    made = some([20] * 10, width=24, apart=0.6)
    wrong = {one.digest: made[-1 - place] for place, one in enumerate(made[:100:10])}
    planted = [
        Example(one.digest, one.feature, wrong[one.digest].labels) if one.digest in wrong else one
        for one in made
    ]
    found = suspected(planted)
    assert len(found & wrong.keys()) >= 0.5 * len(wrong)
    assert len(found & wrong.keys()) >= 0.7 * len(found)
    assert solve(Examples.of("single_label", made)).leave_one_out.accuracy < 0.95, "classes overlap"
    assert len(suspected(made)) <= 0.02 * len(made)


def test_scores_are_as_sure_as_they_are_right():
    train, test = some([40] * 4, apart=0.8), some([440] * 4, apart=0.8)
    head = solve(Examples.of("single_label", train))
    features = np.stack([one.feature for one in test]).astype(np.float64)
    classes = np.repeat(np.arange(4), 440)
    scores = np.exp(lda.log_softmax(features @ head.weight.T + head.bias))
    right = (scores.argmax(axis=1) == classes).mean()
    assert scores.max(axis=1).mean() == pytest.approx(right, abs=0.08)


def test_labels_of_one_photo_each_have_no_accuracy_and_no_suspicion():
    result = solve(Examples.of("single_label", some([1, 1, 1], apart=5))).leave_one_out
    assert (result.images, result.accuracy, result.interval) == (0, None, (0.0, 1.0))
    assert np.isnan(result.probabilities).all()
    assert result.most_suspicious(5) == []


def test_one_photo_a_class_is_enough_to_tell_clear_classes_apart():
    examples = Examples.of("single_label", some([1, 1, 1], apart=9))
    head = solve(examples)
    logits = examples.features.astype(np.float32) @ head.weight.T + head.bias
    assert np.array_equal(logits.argmax(axis=1), examples.targets.argmax(axis=1))


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_identical_features_give_numbers(task_type):
    feature = np.ones(8, np.float16)
    rows = [Example(digest(i), feature, frozenset([f"class-{i % 2}"])) for i in range(6)]
    head = solve(Examples.of(task_type, rows))
    assert np.isfinite(head.weight).all()
    assert np.isfinite(head.bias).all()
    assert np.isfinite(head.leave_one_out.probabilities).all()


def test_a_photo_of_two_classes_is_refused_by_name_unless_there_may_be_several():
    feature = np.ones(8, np.float16)
    twice = [Example(digest(1), feature, frozenset([name])) for name in ("rose", "tulip")]
    with pytest.raises(UnteachableExamples, match=r"as 'rose' and as 'tulip'.*multi-label"):
        Examples.of("single_label", twice)
    assert Examples.of("multi_label", twice)[0].labels == {"rose", "tulip"}


def test_a_photo_taught_again_is_one_example_with_the_feature_it_had():
    made = some([3, 3])
    examples = Examples.of("single_label", made)
    noisy = Example(made[0].digest, made[0].feature + np.float16(0.01), made[0].labels)
    assert np.array_equal(examples.with_added([noisy]).features, examples.features)
    other = Example(made[0].digest, made[0].feature, frozenset(["class-1"]))
    with pytest.raises(UnteachableExamples):
        examples.with_added([other])
    corrected = examples.with_added([other], relabel=True)
    assert len(corrected) == len(examples)
    assert corrected.targets.sum(axis=0).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("task_type", "labels", "message"),
    [
        ("single_label", [], "no images to learn from"),
        ("single_label", [{"rust"}, {"rust"}], r"All images are of class 'rust'.*'other'"),
        ("single_label", [set(), {"rust"}], "has no label"),
        ("multi_label", [set(), set()], "No image has a label"),
        ("multi_label", [{"rust"}, {"rust"}], "Every image has the label 'rust'"),
    ],
)
def test_insufficient_examples_are_rejected(task_type, labels, message):
    rows = [Example(digest(i), np.ones(4), frozenset(each)) for i, each in enumerate(labels)]
    with pytest.raises(UnteachableExamples, match=message):
        solve(Examples.of(task_type, rows))


def test_a_label_can_be_taught_from_photos_with_and_without_it():
    random = np.random.default_rng(0)
    rows = [
        Example(digest(i), random.standard_normal(8) + 4 * (i % 2), frozenset(["rust"] * (i % 2)))
        for i in range(20)
    ]
    examples = Examples.of("multi_label", rows)
    result = solve(examples).leave_one_out
    assert examples.labels == ("rust",)
    assert result.accuracy == 1


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_two_thousand_examples_of_fifty_classes_take_less_than_three_seconds(task_type):
    examples = Examples.of(task_type, some([40] * 50, width=192, task_type=task_type))
    started = time.process_time()
    solve(examples)
    assert time.process_time() - started < 3
