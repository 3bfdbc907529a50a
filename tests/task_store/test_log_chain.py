"""Each entry has the hash of the one before, and breaks of the chain are reported."""

import json

import pytest
from engram_bundle import digest_of
from engram_store import MoveAlias
from engram_store.catalog import NOTHING, Catalog
from engram_store.layout import log_path

from tests.bundles import bundle
from tests.task_store.entries import chain, published


def stored(store, generation: int) -> dict:
    return json.loads(store.objects.get(log_path(generation)))


def test_each_entry_names_the_hash_of_the_one_before(store, reopen):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    reopen().commit(MoveAlias("t", "canary", 1))
    assert stored(store, 1)["previous"] == NOTHING
    for generation in (2, 3):
        before = store.objects.get(log_path(generation - 1))
        assert stored(store, generation)["previous"] == digest_of(before)
    assert store.catalog().head == digest_of(store.objects.get(log_path(3)))
    assert reopen().verify().damages == ()


def test_chain_goes_on_after_a_checkpoint(reopen):
    store = reopen(checkpoint_every=2)
    for seed in range(2):
        store.publish("t", bundle(seed))
    reader = reopen()
    reader.publish("t", bundle(2))
    assert stored(store, 3)["previous"] == digest_of(store.objects.get(log_path(2)))
    assert reopen().find_damage() == []


@pytest.mark.parametrize("generation", [1, 2])
def test_entry_altered_without_a_trace_in_itself_is_found(store, reopen, generation):
    for seed in range(3):
        store.publish("t", bundle(seed), actor="ada@lab")
    path = log_path(generation)
    store.objects.put(path, store.objects.get(path).replace(b"ada@lab", b"eve@lab"))
    (damage,) = reopen().find_damage()
    assert damage.path == path
    assert damage.reason == f"not the entry that log entry {generation + 1} was written after"


def test_entry_without_the_hash_of_the_one_before_is_damaged():
    log = chain([published("t", 1), published("t", 2)])
    flat = json.loads(log[1].to_json())
    del flat["previous"]
    raw = [(1, log[0].to_json()), (2, json.dumps(flat).encode())]
    catalog, (damage,) = Catalog().read(raw)
    assert (damage.path, "previous" in damage.reason) == (log_path(2), True)
    assert catalog.resolve("t").version == 1


def test_entry_after_a_damaged_one_names_the_bytes_that_its_writer_saw(store, reopen):
    """So the chain says what was there, and does not claim that all was well."""
    for seed in range(2):
        store.publish("t", bundle(seed))
    whole = store.objects.get(log_path(2))
    store.objects.put(log_path(2), whole[:50])
    reopen().publish("t", bundle(3))
    assert stored(store, 3)["previous"] == digest_of(whole[:50])
    assert [damage.path for damage in reopen().find_damage()] == [log_path(2)]


def test_writer_that_knew_the_entry_before_it_was_damaged_names_it_as_it_was(store, reopen):
    for seed in range(2):
        store.publish("t", bundle(seed))
    whole = store.objects.get(log_path(2))
    store.objects.put(log_path(2), whole[:50])
    store.publish("t", bundle(3))
    assert stored(store, 3)["previous"] == digest_of(whole)
    store.objects.put(log_path(2), whole)
    assert reopen().verify().damages == ()
