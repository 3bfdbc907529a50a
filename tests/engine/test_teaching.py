"""Taught tasks as bundles."""

from functools import partial

import numpy as np
import pytest
from engram_bundle import TaskBundle
from engram_server.engine.taught_bundle import examples_of, is_taught, taught_bundle
from engram_server.model.heads.examples import Example, Examples

from tests.bundles import TINY, bundle

made_from = partial(taught_bundle, name="letters")


def photos(*names: str) -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(random.bytes(32), random.standard_normal(TINY.width), frozenset([name]))
        for name in names
    ]


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_examples_travel_in_the_bundle_and_give_it_again(task_type):
    examples = Examples.of(task_type, photos(*"abcabcabc"))
    made, _ = made_from(examples, TINY, description="letters", license="CC0")
    read = examples_of(TaskBundle.from_bytes(made.to_bytes()))
    assert is_taught(made)
    assert read is not None
    again, _ = made_from(read, TINY, description="letters", license="CC0")
    assert again.to_bytes() == made.to_bytes()


def test_adding_and_removing_an_example_gives_the_same_file():
    *first, last = photos(*"abcabcabd")
    examples = Examples.of("single_label", first)
    made, _ = made_from(examples, TINY)
    more = examples.with_added([last])
    assert made_from(more, TINY)[0].labels == ("a", "b", "c", "d")
    assert made_from(more.without({last.digest}), TINY)[0].digest == made.digest


def test_the_manifest_says_how_right_it_is_without_each_example():
    examples = Examples.of("single_label", photos(*"aaabbbc"))
    made, solved = made_from(examples, TINY)
    metrics = made.manifest.metrics
    assert (metrics["examples"], metrics["leave_one_out_images"]) == (7, 6)
    assert metrics["leave_one_out_accuracy"] == round(solved.leave_one_out.accuracy, 6)
    assert made.manifest.temperature == solved.temperature
    assert made.get("class_token") is None


def test_a_bundle_that_was_not_taught_has_no_examples():
    assert examples_of(bundle(1)) is None
    assert not is_taught(bundle(1))


def summarised_photos(*names: str) -> list[Example]:
    """Photos whose label shows in the summary of the layer and nowhere else."""
    random = np.random.default_rng(1)
    count = TINY.width * (1 + TINY.summary_shape[0] * TINY.summary_parts)
    features = random.standard_normal((len(names), count))
    for feature, name in zip(features, names, strict=True):
        feature[TINY.width + "abc".index(name)] += 8
    return [
        Example(random.bytes(32), feature, frozenset([name]))
        for feature, name in zip(features, names, strict=True)
    ]


def test_a_taught_task_reads_layers_and_keeps_the_summaries_of_its_examples():
    examples = Examples.of("single_label", summarised_photos(*"abcabcabcabc"))
    made, solved = made_from(examples, TINY)
    assert made.manifest.layers == (1,)
    assert made.tensors["summaries"].shape == (12, *TINY.summary_shape)
    head, layers = made.tensors["head.weight"], made.tensors["layers.weight"]
    parts = [head, layers.reshape(len(head), -1)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), solved.weight, rtol=1e-3, atol=1e-6)
    read = examples_of(TaskBundle.from_bytes(made.to_bytes()))
    assert read is not None
    np.testing.assert_array_equal(read.features, examples.features)
    assert made_from(read, TINY)[0].to_bytes() == made.to_bytes()


def test_examples_without_summaries_stay_without():
    """A task that was taught before layers were read goes on as it was."""
    before = Examples.of("single_label", photos(*"abab"))
    after = before.with_added(summarised_photos(*"ab"))
    assert after.features.shape == (6, TINY.width)
    assert made_from(after, TINY)[0].manifest.layers is None
