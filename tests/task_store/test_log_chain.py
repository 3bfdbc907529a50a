"""Each entry names the hash of the one before, and whatever breaks the chain is told."""

import json

import pytest

from task_store import MoveLabel
from task_store.bundle import digest_of
from task_store.catalog import NOTHING, Catalog
from task_store.errors import CorruptStore
from task_store.layout import log_path
from tests.bundles import bundle
from tests.task_store.entries import entry, published


def stored(store, generation: int) -> dict:
    return json.loads(store._objects.get(log_path(generation)))


def test_each_entry_names_the_hash_of_the_one_before(store, reopen):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    reopen().commit(MoveLabel("t", "canary", 1))
    assert stored(store, 1)["previous"] == NOTHING
    for generation in (2, 3):
        before = store._objects.get(log_path(generation - 1))
        assert stored(store, generation)["previous"] == digest_of(before)
    assert store.catalog().head == digest_of(store._objects.get(log_path(3)))
    assert reopen().verify().damages == ()


def test_chain_goes_on_after_a_checkpoint(reopen):
    store = reopen(checkpoint_every=2)
    for seed in range(2):
        store.publish("t", bundle(seed))
    reader = reopen()
    reader.publish("t", bundle(2))
    assert stored(store, 3)["previous"] == digest_of(store._objects.get(log_path(2)))
    assert reopen().find_damage() == []


def test_log_of_the_first_release_is_read_and_continued(store, reopen):
    for number in (1, 2):
        old = entry(number, published("t", number)).to_json()
        assert b"previous" not in old
        store._objects.put(log_path(number), old)
    writer = reopen()
    writer.publish("t", bundle(3))
    assert stored(store, 3)["previous"] == digest_of(store._objects.get(log_path(2)))
    catalog = reopen().catalog()
    assert (catalog.generation, catalog.chained) == (3, True)
    logs = [damage for damage in reopen().verify().damages if damage.path.startswith("log/")]
    assert logs == []


@pytest.mark.parametrize("generation", [1, 2])
def test_entry_altered_without_a_trace_in_itself_is_found(store, reopen, generation):
    for seed in range(3):
        store.publish("t", bundle(seed), actor="ada@lab")
    path = log_path(generation)
    store._objects.put(path, store._objects.get(path).replace(b"ada@lab", b"eve@lab"))
    (damage,) = reopen().find_damage()
    assert damage.path == path
    assert damage.reason == f"not the entry that log entry {generation + 1} was written after"


def test_entry_that_names_none_before_it_is_damage_once_another_did():
    chained = entry(1, published("t", 1)).model_copy(deep=True)
    stamp = chained.stamp.model_copy(update={"previous": NOTHING})
    log = [chained.model_copy(update={"stamp": stamp}), entry(2, published("t", 2))]
    catalog, (damage,) = Catalog().read((e.generation, e.to_json()) for e in log)
    assert damage.path == log_path(2)
    assert "names no entry before it" in damage.reason
    assert catalog.resolve("t").version == 2, "it is applied all the same"


# --- an older writer ------------------------------------------------------------------------------


def write_as_the_first_release(store, seed: int) -> str:
    """Publish without naming the entry before; the entry's path."""
    store.publish("t", bundle(seed))
    path = log_path(store.catalog().generation)
    flat = json.loads(store._objects.get(path))
    del flat["previous"]
    store._objects.put(path, json.dumps(flat).encode())
    return path


@pytest.fixture
def upgraded_halfway(store, reopen):
    """A store to which an older Engram wrote after a newer one, and then a newer one again."""
    for seed in range(2):
        store.publish("t", bundle(seed))
    path = write_as_the_first_release(store, 2)
    reopen().publish("t", bundle(3))
    return path


def test_an_entry_of_an_older_writer_is_accepted_by_name_and_the_store_goes_on(
    upgraded_halfway, reopen
):
    store = reopen()
    assert [damage.path for damage in store.verify().damages] == [upgraded_halfway]
    with pytest.raises(CorruptStore):
        store.collect_garbage()
    follower = reopen()
    assert store.accept(store.verify().damages, actor="ada@lab") == []
    (entry,) = store.history(limit=1)
    assert (entry.event.kind, entry.stamp.actor) == ("accept", "ada@lab")
    assert entry.event.digests == (digest_of(store._objects.get(upgraded_halfway)),)
    for each in (store, follower, reopen()):
        assert each.find_damage() == []
        assert each.verify().damages == ()
        each.collect_garbage()
    generation = store.catalog().generation
    assert store.accept(store.verify().damages) == []
    assert store.catalog().generation == generation, "there was nothing to accept"


def test_an_accepted_entry_that_is_altered_is_damage_again(upgraded_halfway, reopen):
    store = reopen()
    store.accept(store.verify().damages)
    data = store._objects.get(upgraded_halfway)
    store._objects.put(upgraded_halfway, data.replace(b'"labels": ["default"]', b'"labels": []'))
    assert upgraded_halfway in {damage.path for damage in reopen().verify().damages}
    with pytest.raises(CorruptStore):
        reopen().collect_garbage()


def test_only_a_missing_link_can_be_accepted(upgraded_halfway, store, reopen):
    store._objects.put(log_path(1), b"{")
    damages = reopen().verify().damages
    assert {log_path(1), upgraded_halfway} <= {damage.path for damage in damages}
    left = reopen().accept(damages)
    assert upgraded_halfway not in {damage.path for damage in left}
    assert log_path(1) in {damage.path for damage in left}
    with pytest.raises(CorruptStore):
        reopen().collect_garbage()


def test_a_checkpoint_after_the_acceptance_is_what_the_log_tells(upgraded_halfway, reopen):
    store = reopen(checkpoint_every=1)
    store.accept(store.verify().damages)
    report = reopen().verify()
    assert (report.checkpoints, report.damages) == (1, ())


# --- damage ---------------------------------------------------------------------------------------


def test_entry_after_a_damaged_one_names_the_bytes_that_its_writer_saw(store, reopen):
    """So the chain says what was there, and does not claim that all was well."""
    for seed in range(2):
        store.publish("t", bundle(seed))
    whole = store._objects.get(log_path(2))
    store._objects.put(log_path(2), whole[:50])
    reopen().publish("t", bundle(3))
    assert stored(store, 3)["previous"] == digest_of(whole[:50])
    assert [damage.path for damage in reopen().find_damage()] == [log_path(2)]


def test_writer_that_knew_the_entry_before_it_was_damaged_names_it_as_it_was(store, reopen):
    for seed in range(2):
        store.publish("t", bundle(seed))
    whole = store._objects.get(log_path(2))
    store._objects.put(log_path(2), whole[:50])
    store.publish("t", bundle(3))
    assert stored(store, 3)["previous"] == digest_of(whole)
    store._objects.put(log_path(2), whole)
    assert reopen().verify().damages == ()
