"""Taught tasks as bundles."""

import numpy as np
import pytest

from server.engine.teaching import examples_of, is_taught, taught_bundle
from server.model.examples import Example, Examples
from task_store import TaskBundle
from tests.bundles import TINY, bundle


def photos(*names: str) -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(random.bytes(32), random.standard_normal(TINY.width), frozenset([name]))
        for name in names
    ]


@pytest.mark.parametrize("problem", ["single_label", "multi_label"])
def test_examples_travel_in_the_bundle_and_give_it_again(problem):
    examples = Examples.of(problem, photos(*"abcabcabc"))
    made, _ = taught_bundle(examples, TINY, description="letters", license="CC0")
    read = examples_of(TaskBundle.from_bytes(made.to_bytes()))
    assert is_taught(made)
    assert read is not None
    again, _ = taught_bundle(read, TINY, description="letters", license="CC0")
    assert again.to_bytes() == made.to_bytes()


def test_an_example_added_and_taken_away_gives_the_same_file():
    *first, last = photos(*"abcabcabd")
    examples = Examples.of("single_label", first)
    made, _ = taught_bundle(examples, TINY)
    more = examples.with_added([last])
    assert taught_bundle(more, TINY)[0].labels == ("a", "b", "c", "d")
    assert taught_bundle(more.without({last.digest}), TINY)[0].digest == made.digest


def test_the_manifest_says_how_right_it_is_without_each_example():
    examples = Examples.of("single_label", photos(*"aaabbbc"))
    made, solved = taught_bundle(examples, TINY)
    metrics = made.manifest.metrics
    assert (metrics["examples"], metrics["leave_one_out_images"]) == (7, 6)
    assert metrics["leave_one_out_accuracy"] == round(solved.leave_one_out.accuracy, 6)
    assert made.manifest.temperature == solved.temperature
    assert made.class_token is None


def test_a_bundle_that_was_not_taught_has_no_examples():
    assert examples_of(bundle(1)) is None
    assert not is_taught(bundle(1))
