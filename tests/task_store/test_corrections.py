"""Corrections of tasks in the store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from engram_store import Correction, UnknownTask, newest_of, open_store

from tests.bundles import bundle


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path, actor="ada@lab")
    store.publish("pets", bundle(1))
    store.publish("team/pets", bundle(2))
    return store


def correction(number, *labels):
    return Correction(digest=f"sha256:{number:064x}", labels=labels)


def test_records_have_the_actor_the_version_and_the_order(store):
    store.correct("pets", [correction(1, "cat"), correction(2, "dog")], actor="bob")
    store.publish("pets", bundle(3))
    store.correct("pets", [correction(1, "dog")])
    first, second = store.corrections.read("pets")
    assert (first.actor, first.version, second.actor, second.version) == ("bob", 1, "ada@lab", 2)
    newest = newest_of([first, second])
    assert [(digest[-1], one.labels) for digest, (_, one) in newest.items()] == [
        ("2", ("dog",)),
        ("1", ("dog",)),
    ]


def test_a_task_sees_its_own_alone(store):
    store.publish("team", bundle(4))
    store.correct("team/pets", [correction(1, "cat")])
    store.correct("pets", [correction(2, "cat")])
    assert not store.corrections.read("team")
    assert [one.task for one in store.corrections.read("team/pets")] == ["team/pets"]
    with pytest.raises(UnknownTask):
        store.correct("unknown", [correction(1, "cat")])


def test_none_is_lost_when_many_write_at_once(store):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: store.correct("pets", [correction(n, "cat")]), range(40)))
    assert len(newest_of(store.corrections.read("pets"))) == 40


def test_they_are_neither_damage_nor_garbage_and_a_damaged_one_is_skipped(store, tmp_path):
    store.correct("pets", [correction(1, "cat")])
    store.correct("pets", [correction(2, "cat")])
    (first, *_) = sorted((tmp_path / "corrections" / "pets").iterdir())
    assert not store.find_damage()
    store.collect_garbage()
    assert first.exists()
    first.write_text("{")
    assert [one.corrections[0].digest[-1] for one in store.corrections.read("pets")] == ["2"]
