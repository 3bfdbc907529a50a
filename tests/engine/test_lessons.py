"""Lessons: what they change about the examples of a task, and who wins when two teach at once."""

import time

import numpy as np
import pytest

from server.engine.lessons import Lesson, Photo, Teacher
from server.engine.tasks.changes import ChangeOutcome
from server.engine.teaching import examples_of
from server.errors import UnteachableExamples
from server.model.examples import Example, Examples
from task_store import Limits, PreconditionFailed, open_store
from tests.bundles import TINY

random = np.random.default_rng(0)


def photo(label):
    digest = f"sha256:{random.bytes(32).hex()}"
    return Photo(digest, random.standard_normal(TINY.width), frozenset([label]))


def committing(store, before=lambda: None):
    """Publishes to a store, after something else has happened."""

    def commit(publish, condition):
        before()
        made = store.commit(publish, condition=condition)
        return ChangeOutcome(None, made.version, made.created)

    return commit


@pytest.fixture
def store():
    return open_store("memory://")


def kept(store, task="rust"):
    """The digests of the examples that the task has now."""
    examples = examples_of(store.read_bundle(store.catalog().resolve(task).digest))
    return {f"sha256:{one.digest.hex()}" for one in examples}


def test_who_is_overtaken_adds_to_what_the_other_has_made(store):
    teacher, other = Teacher(TINY, store), Teacher(TINY, store)
    first = [photo("a"), photo("b")]
    teacher.teach(Lesson("rust", first), committing(store))
    mine, theirs = photo("a"), photo("b")
    others = iter([lambda: other.teach(Lesson("rust", [theirs]), committing(store))])
    outcome = teacher.teach(
        Lesson("rust", [mine]), committing(store, lambda: next(others, lambda: None)())
    )
    assert outcome.change.version == 3
    assert kept(store) == {one.digest for one in [*first, mine, theirs]}


def test_two_who_make_the_same_task_make_one_of_both(store):
    teacher, other = Teacher(TINY, store), Teacher(TINY, store)
    mine, theirs = [photo("a"), photo("b")], [photo("b"), photo("c")]
    others = iter([lambda: other.teach(Lesson("rust", theirs), committing(store))])
    teacher.teach(Lesson("rust", mine), committing(store, lambda: next(others, lambda: None)()))
    assert kept(store) == {one.digest for one in [*mine, *theirs]}


def test_under_a_condition_nobody_is_overtaken_silently(store):
    teacher = Teacher(TINY, store)
    teacher.teach(Lesson("rust", [photo("a"), photo("b")]), committing(store))
    seen = store.catalog().generation

    def unchanged(catalog):
        if catalog.generation != seen:
            raise PreconditionFailed("changed")

    def meanwhile():
        Teacher(TINY, store).teach(Lesson("rust", [photo("b")]), committing(store))

    with pytest.raises(PreconditionFailed, match="changed"):
        teacher.teach(Lesson("rust", [photo("a")]), committing(store, meanwhile), unchanged)
    assert len(kept(store)) == 3


def test_who_is_overtaken_for_ever_gives_up(store, monkeypatch):
    monkeypatch.setattr("server.engine.lessons._PATIENCE_SECONDS", 0.0)
    teacher = Teacher(TINY, store)
    teacher.teach(Lesson("rust", [photo("a"), photo("b")]), committing(store))

    def meanwhile():
        Teacher(TINY, store).teach(Lesson("rust", [photo("b")]), committing(store))

    with pytest.raises(PreconditionFailed, match="try again"):
        teacher.teach(Lesson("rust", [photo("a")]), committing(store, meanwhile))


def test_there_is_an_end_to_examples():
    most = Limits().max_examples
    features = np.zeros((most, 2), np.float16)
    targets = np.zeros((most, 2), np.bool_)
    targets[np.arange(most), np.arange(most) % 2] = True
    digests = np.zeros((most, 32), np.uint8)
    digests[:, :4] = np.arange(most, dtype=">u4").view(np.uint8).reshape(-1, 4)
    full = Examples("single_label", ("a", "b"), features, targets, digests)
    one_more = Photo(f"sha256:{'ff' * 32}", np.zeros(2), frozenset("a"))
    with pytest.raises(UnteachableExamples, match=f"{most + 1} examples"):
        Lesson("rust", [one_more]).applied_to(full)


@pytest.mark.slow
def test_ten_thousand_examples_are_taught(store):
    labels = [f"class{number:02}" for number in range(50)]
    middles = {label: random.standard_normal(192) * 3 for label in labels}
    examples = [
        Example(random.bytes(32), middles[label] + random.standard_normal(192), frozenset([label]))
        for label in labels * 200
    ]
    photos = [Photo(f"sha256:{one.digest.hex()}", one.feature, one.labels) for one in examples]
    wide = type(TINY)(width=192)
    teacher = Teacher(wide, store)
    teacher.teach(Lesson("rust", photos[:-1]), committing(store))
    started = time.process_time()
    outcome = teacher.teach(Lesson("rust", photos[-1:]), committing(store))
    seconds = time.process_time() - started
    assert len(outcome.version.examples) == 10_000
    assert outcome.version.solved.leave_one_out.accuracy > 0.99
    assert seconds < 30
