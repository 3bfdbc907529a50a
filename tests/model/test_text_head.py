"""Class names and photos together: names lead where photos are few, photos where they are many."""

import numpy as np
import pytest
from engram_server.errors import UnteachableExamples
from engram_server.model.heads.closed_form import solve
from engram_server.model.heads.examples import Example, Examples
from engram_server.model.heads.lda import log_softmax
from engram_server.model.heads.text_head import TEXT_PRIOR_COUNT, TextHead

WIDTH = 6
RANDOM = np.random.default_rng(3)
PROJECTION = RANDOM.standard_normal((4, WIDTH)).astype(np.float32)
CLASS_MEANS = {name: RANDOM.standard_normal(WIDTH) for name in ("beach", "forest", "snow")}


def text_head(*labels: str, bias: bool = False, wrong: bool = False) -> TextHead:
    """Names that say where their classes lie; with `wrong`, where another one does."""
    order = [*labels[1:], labels[0]] if wrong else labels
    weight = np.stack([8 * CLASS_MEANS[name] for name in order]).astype(np.float32)
    offsets = np.full(len(labels), -1.5, np.float32) if bias else None
    return TextHead(labels, weight, offsets, PROJECTION, ("a {}",))


def photos(counts: dict[str, int], task_type="single_label", seed=0) -> Examples:
    random = np.random.default_rng(seed)
    return Examples.of(
        task_type,
        [
            Example(
                random.bytes(32),
                CLASS_MEANS[name] + 0.3 * random.standard_normal(WIDTH),
                frozenset([name]),
            )
            for name, count in counts.items()
            for _ in range(count)
        ],
    )


def joined(examples: Examples, text: TextHead) -> tuple[Examples, TextHead]:
    examples = examples.with_labels(text.labels)
    return examples, text.reindexed(examples.labels)


def answers(solved, text: TextHead, features) -> np.ndarray:
    return text.normalised(features) @ solved.weight.T + solved.bias


def test_names_alone_are_the_head():
    text = text_head("beach", "forest", bias=True)
    examples, text = joined(Examples.of("multi_label", []), text)
    solved = solve(examples, text)
    assert np.array_equal(solved.weight, text.weight)
    assert np.array_equal(solved.bias, text.bias)
    assert solved.temperature is None
    assert solved.leave_one_out.accuracy is None


def test_a_class_without_photos_is_answered_by_its_name():
    examples, text = joined(photos({"beach": 3, "forest": 3}), text_head(*CLASS_MEANS))
    solved = solve(examples, text)
    assert examples.labels == ("beach", "forest", "snow")
    new = photos({"snow": 8}, seed=5).features
    assert (answers(solved, text, new).argmax(axis=1) == 2).all()


def test_names_help_where_photos_are_few_and_yield_where_they_are_many():
    test = photos(dict.fromkeys(CLASS_MEANS, 20), seed=9)
    truth = test.targets.argmax(axis=1)

    def sure(count: int, **how) -> float:
        """Mean log-probability of the right class."""
        examples, text = joined(
            photos(dict.fromkeys(CLASS_MEANS, count)), text_head(*CLASS_MEANS, **how)
        )
        logits = answers(solve(examples, text), text, test.features)
        return float(log_softmax(logits.astype(float))[np.arange(len(truth)), truth].mean())

    assert sure(1) > sure(1, wrong=True)
    assert sure(200, wrong=True) > sure(1, wrong=True)
    assert abs(sure(200) - sure(200, wrong=True)) < abs(sure(1) - sure(1, wrong=True)) / 4


def test_photos_that_are_alone_in_their_class_count_for_as_much_as_its_name_does_not():
    text = text_head("beach", "forest", "snow")
    one_each = photos(dict.fromkeys(CLASS_MEANS, 1))
    beside, alone = solve(*joined(one_each, text)), solve(one_each)
    assert alone.temperature is not None
    share = 1 / (1 + TEXT_PRIOR_COUNT)
    assert beside.temperature == pytest.approx(alone.temperature / share)


def test_a_class_that_was_not_named_joins_by_its_photos():
    examples, text = joined(
        photos({"beach": 5, "forest": 5, "snow": 5}), text_head("beach", "forest")
    )
    assert text.named.tolist() == [True, True, False]
    solved = solve(examples, text)
    new = photos({"snow": 8}, seed=6).features
    assert (answers(solved, text, new).argmax(axis=1) == 2).mean() >= 0.9


def test_what_is_judged_is_the_head_made_without_the_example():
    """Against solving anew without each example, and the same temperature."""
    examples, text = joined(photos({"beach": 4, "forest": 3}), text_head(*CLASS_MEANS))
    solved = solve(examples, text)
    place = 2
    rest = examples.without({examples.digests[place].tobytes()}).with_labels(text.labels)
    without = solve(rest, text)
    centred = text.centred()

    def scaled(one, counts) -> np.ndarray:
        """With the temperature that was fitted on all."""
        text_part = centred.share(counts)[:, None] * centred.weight
        return (one.weight - text_part) * one.temperature / solved.temperature + text_part

    units = text.normalised(examples.features[place : place + 1])
    weight = scaled(without, rest.targets.sum(axis=0))
    bias = without.bias * without.temperature / solved.temperature
    logits = (units @ weight.T + bias).astype(float)
    expected = np.exp(log_softmax(logits))[0, examples.targets[place].argmax()]
    assert solved.leave_one_out.probabilities[place] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("counts", [{"beach": 4, "forest": 4}, {"beach": 4}])
def test_several_labels_mix_with_names_too(counts):
    examples, text = joined(photos(counts, "multi_label"), text_head(*CLASS_MEANS, bias=True))
    solved = solve(examples, text)
    new = photos({"snow": 8}, seed=5).features
    logits = answers(solved, text, new)
    alone = text.normalised(new) @ text.weight.T + text.bias
    np.testing.assert_allclose(logits[:, 2], alone[:, 2], rtol=1e-4, atol=1e-4)
    assert len(solved.leave_one_out.probabilities) == len(examples)


def test_a_label_that_neither_a_name_nor_a_counterexample_tells_is_refused():
    examples, text = joined(photos({"snow": 3}, "multi_label"), text_head("beach", "forest"))
    with pytest.raises(UnteachableExamples, match="Every image has the label 'snow'"):
        solve(examples, text)


def test_one_name_alone_is_a_task_only_where_an_image_may_have_no_label():
    examples, text = joined(Examples.of("single_label", []), text_head("beach"))
    with pytest.raises(UnteachableExamples, match="'beach' is the only class"):
        solve(examples, text)
    examples, text = joined(Examples.of("multi_label", []), text_head("beach"))
    assert np.array_equal(solve(examples, text).weight, text.weight)


def test_a_name_read_again_replaces_its_text():
    old, new = text_head("beach", "forest"), text_head("forest", "snow", wrong=True)
    both = old.merged_with(new)
    assert both.labels == ("beach", "forest", "snow")
    assert np.array_equal(both.weight[0], old.weight[0])
    assert np.array_equal(both.weight[1], new.weight[0])


def test_a_names_share_falls_with_the_photos_of_its_class():
    text = text_head("beach", "forest")
    assert text.share(0) == 1
    assert text.share(TEXT_PRIOR_COUNT) == pytest.approx(0.5)


def test_photos_of_one_class_alone_leave_the_names_as_they_are():
    examples, text = joined(photos({"beach": 3}), text_head(*CLASS_MEANS))
    solved = solve(examples, text)
    assert np.array_equal(solved.weight, text.weight)
    assert np.isnan(solved.leave_one_out.probabilities).all()
    assert solved.leave_one_out.most_suspicious(5) == []


def test_photos_of_one_class_that_was_not_named_are_refused():
    examples, text = joined(photos({"snow": 3}), text_head("beach", "forest"))
    with pytest.raises(UnteachableExamples, match="of class 'snow', which has no class name"):
        solve(examples, text)
