"""Verification reads every byte and finds flipped, cut and lost objects by path."""

import json

import pytest
from engram_bundle import digest_of
from engram_store.catalog import Catalog
from engram_store.layout import LOG, blob_path, checkpoint_path, log_path
from engram_store.replay import dump_checkpoint

from tests.bundles import bundle

BLOB = blob_path(bundle(1).digest)


@pytest.fixture
def whole(open_memory):
    """Four versions and a checkpoint of the first two."""
    store = open_memory(checkpoint_every=2, actor="ada@lab")
    for seed in range(4):
        store.publish("t", bundle(seed))
    store.objects.delete(checkpoint_path(4))
    return store


def test_intact_store_has_no_damage(whole):
    report = whole.verify()
    assert (report.generation, report.bundles, report.checkpoints) == (4, 4, 1)
    assert report.bundle_bytes == sum(bundle(seed).size_bytes for seed in range(4))
    assert report.damages == ()


@pytest.mark.parametrize("path", [BLOB, log_path(1), log_path(3), checkpoint_path(2)])
@pytest.mark.parametrize("where", [0, 0.3, 0.6, 0.99])
def test_any_flipped_bit_is_found(whole, open_memory, path, where):
    data = bytearray(whole.objects.get(path))
    data[int(where * len(data))] ^= 1
    whole.objects.put(path, bytes(data))
    assert path in {damage.path for damage in open_memory().verify().damages}


@pytest.mark.parametrize("path", [BLOB, log_path(1), log_path(3)])
def test_anything_lost_is_found(whole, open_memory, path):
    whole.objects.delete(path)
    found = {damage.path for damage in open_memory().verify().damages}
    assert path in found
    assert found <= {path, checkpoint_path(2)}, "a checkpoint that still has it is reported too"


def test_published_file_that_is_not_a_bundle_is_found(whole, open_memory):
    """Its digest is right: it was published by something else than the store."""
    data = b"no bundle"
    newest = whole.catalog()
    entry = json.loads(whole.objects.get(log_path(4)))
    digest = digest_of(data)
    entry |= {"generation": 5, "version": 5, "digest": digest, "size": len(data)}
    entry["previous"] = newest.head
    whole.objects.put(blob_path(digest), data)
    whole.objects.put(log_path(5), json.dumps(entry).encode())
    (damage,) = open_memory().verify().damages
    assert damage.path == blob_path(digest)
    assert "not a valid bundle" in damage.reason


def test_readable_but_wrong_checkpoint_is_found(whole, open_memory):
    datas = [(g, whole.objects.get(log_path(g))) for g in (1, 2)]
    other, _ = Catalog().read(datas[:1])
    forged = dump_checkpoint(other).replace(b'"generation":1', b'"generation":2', 1)
    whole.objects.put(checkpoint_path(2), forged)
    (damage,) = open_memory().verify().damages
    assert damage.path == checkpoint_path(2)
    assert "differs from the log" in damage.reason


def test_log_whose_end_is_lost_is_found_by_a_later_checkpoint(open_memory):
    store = open_memory(checkpoint_every=4)
    for seed in range(4):
        store.publish("t", bundle(seed))
    for generation in (3, 4):
        store.objects.delete(log_path(generation))
    found = {damage.path for damage in open_memory().verify().damages}
    assert {log_path(3), log_path(4)} <= found


def test_unpublished_bundle_is_garbage_and_no_damage(whole):
    whole.objects.put(blob_path(bundle(99).digest), bundle(99).to_bytes())
    assert whole.verify().damages == ()


def test_foreign_objects_are_reported(whole):
    whole.objects.put(f"{LOG.folder}/notes.txt", b"hello")
    assert [damage.path for damage in whole.verify().damages] == ["log/notes.txt"]
