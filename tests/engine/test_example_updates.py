"""Updates of examples: what they change, and what happens when two clients teach at once."""

import time

import numpy as np
import pytest
from engram_bundle import BundleLimits
from engram_server.engine.tasks.service import PublishOutcome
from engram_server.engine.taught_bundle import examples_of
from engram_server.engine.teaching import ExampleUpdate, Teaching
from engram_server.errors import ContextNotCached, UnteachableExamples
from engram_server.model.heads.examples import Example, Examples
from engram_store import PreconditionFailed, open_store

from tests.bundles import TINY

random = np.random.default_rng(0)


def photo(label):
    return Example(random.bytes(32), random.standard_normal(TINY.width), frozenset([label]))


class Publisher:
    """Publishes to a store like a TaskService, after something else has happened."""

    def __init__(self, store, before=lambda: None):
        self._store = store
        self._before = before

    def publish(self, change, *, actor, condition):
        self._before()
        made = self._store.commit(change, actor=actor, condition=condition)
        return PublishOutcome(change.task, None, made.version, change.bundle.digest, made.created)


def teach(store, added, before=lambda: None, *, condition=None, backbone=TINY):
    teaching = Teaching(backbone, store, Publisher(store, before), None)
    return teaching.teach(ExampleUpdate("rust", added), actor="ada", condition=condition)


@pytest.fixture
def store():
    return open_store("memory://")


def kept(store, task="rust"):
    """The digests of the examples that the task has now."""
    examples = examples_of(store.read_bundle(store.catalog().resolve(task).digest))
    return {one.digest for one in examples}


def test_a_concurrent_update_is_kept_and_extended(store):
    first = [photo("a"), photo("b")]
    teach(store, first)
    mine, theirs = photo("a"), photo("b")
    others = iter([lambda: teach(store, [theirs])])
    outcome = teach(store, [mine], lambda: next(others, lambda: None)())
    assert outcome.published.version == 3
    assert kept(store) == {one.digest for one in [*first, mine, theirs]}


def test_two_clients_that_create_the_same_task_create_one_with_both_examples(store):
    mine, theirs = [photo("a"), photo("b")], [photo("b"), photo("c")]
    others = iter([lambda: teach(store, theirs)])
    teach(store, mine, lambda: next(others, lambda: None)())
    assert kept(store) == {one.digest for one in [*mine, *theirs]}


def test_a_condition_stops_an_update_after_a_concurrent_one(store):
    teach(store, [photo("a"), photo("b")])
    seen = store.catalog().generation

    def unchanged(catalog):
        if catalog.generation != seen:
            raise PreconditionFailed("changed")

    with pytest.raises(PreconditionFailed, match="changed"):
        teach(store, [photo("a")], lambda: teach(store, [photo("b")]), condition=unchanged)
    assert len(kept(store)) == 3


def test_an_update_gives_up_after_too_many_concurrent_ones(store, monkeypatch):
    monkeypatch.setattr("engram_server.engine.teaching.PATIENCE_SECONDS", 0.0)
    teach(store, [photo("a"), photo("b")])
    with pytest.raises(PreconditionFailed, match="try again"):
        teach(store, [photo("a")], lambda: teach(store, [photo("b")]))


def test_the_author_of_an_update_is_in_the_history(store):
    teach(store, [photo("a"), photo("b")])
    assert store.history("rust", 1)[0].stamp.actor == "ada"


def many_examples(count, classes):
    targets = np.zeros((count, classes), np.bool_)
    targets[np.arange(count), np.arange(count) % classes] = True
    digests = np.zeros((count, 32), np.uint8)
    digests[:, :4] = np.arange(count, dtype=">u4").view(np.uint8).reshape(-1, 4)
    labels = tuple(f"class{number:03}" for number in range(classes))
    return Examples("single_label", labels, np.zeros((count, 2), np.float16), targets, digests)


def one_more(label):
    return ExampleUpdate("rust", [Example(b"\xff" * 32, np.zeros(2), frozenset([label]))])


def test_the_number_of_examples_is_limited():
    most = BundleLimits().max_examples
    with pytest.raises(UnteachableExamples, match=f"{most + 1} examples"):
        one_more("class000").apply(many_examples(most, 2))


def test_the_number_of_examples_times_classes_is_limited():
    """S7: the work of solving grows with both."""
    before = many_examples(1999, 1000)
    assert len(one_more("class000").apply(before)) == 2000
    with pytest.raises(UnteachableExamples, match=r"2001 examples of 1000 classes.* is 2000 ex"):
        one_more("class000").apply(many_examples(2000, 1000))
    with pytest.raises(UnteachableExamples, match=r"2000 examples of 1001 classes.* is 1998 ex"):
        one_more("new").apply(before)


def test_the_number_of_feature_values_is_limited(monkeypatch):
    limits = BundleLimits(max_example_values=200)
    monkeypatch.setattr("engram_server.engine.teaching.DEFAULT_LIMITS", limits)
    assert len(one_more("class000").apply(many_examples(99, 2))) == 100
    with pytest.raises(UnteachableExamples, match="101 examples"):
        one_more("class000").apply(many_examples(100, 2))


def test_cached_evaluations_are_limited_by_bytes(store, monkeypatch):
    """S7: versions with many examples do not stay in memory, however few versions."""
    teaching = Teaching(TINY, store, Publisher(store), None)
    outcomes = [
        teaching.teach(ExampleUpdate("rust", [photo("a"), photo("b")]), actor="ada")
        for _ in range(2)
    ]
    first, second = (outcome.published.digest for outcome in outcomes)
    read, read_bundle = [], store.read_bundle
    monkeypatch.setattr(
        store, "read_bundle", lambda each: (read.append(each), read_bundle(each))[1]
    )
    for digest in (first, second):
        teaching.examples(digest)
    assert read == []
    # Room for one of them: the one that was shown last.
    size = outcomes[1].version.nbytes
    monkeypatch.setattr("engram_server.engine.teaching._CACHED_BYTES", size)
    for digest in (second, first, first, second, second):
        teaching.examples(digest)
    assert read == [first, second]


def test_a_digest_without_cached_image_relabels_an_example_or_fails():
    one, other = photo("a"), photo("b")
    before = Examples.of("single_label", [one, other])
    after = ExampleUpdate("rust", relabelled=[(one.digest, frozenset("b"))]).apply(before)
    assert {each.labels for each in after} == {frozenset("b")}
    with pytest.raises(ContextNotCached, match="is not an example of task 'rust'"):
        ExampleUpdate("rust", relabelled=[(b"\x00" * 32, frozenset("b"))]).apply(before)


@pytest.mark.slow
def test_ten_thousand_examples_are_taught(store):
    labels = [f"class{number:02}" for number in range(50)]
    means = {label: random.standard_normal(192) * 3 for label in labels}
    examples = [
        Example(random.bytes(32), means[label] + random.standard_normal(192), frozenset([label]))
        for label in labels * 200
    ]
    wide = type(TINY)(width=192)
    teach(store, examples[:-1], backbone=wide)
    started = time.process_time()
    outcome = teach(store, examples[-1:], backbone=wide)
    seconds = time.process_time() - started
    assert len(outcome.version) == 10_000
    assert outcome.version.leave_one_out.accuracy > 0.99
    assert seconds < 30
