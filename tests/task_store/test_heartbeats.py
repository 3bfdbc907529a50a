"""Heartbeats in a store: written, listed, read and removed."""

from datetime import timedelta
from pathlib import Path

import pytest
from engram_store import Heartbeat, replica_id
from engram_store.layout import REPLICAS

from tests.bundles import bundle

DOCS = Path(__file__).resolve().parents[2] / "docs"


def heartbeat(id: str, generation: int = 1) -> Heartbeat:
    return Heartbeat(
        id=id,
        generation=generation,
        interval=5.0,
        hostname="node",
        address="http://node:8000",
        started="2026-01-31T12:00:00.000Z",
        version="1.0",
        backbone="vit",
        fingerprint="sha256:" + "ab" * 32,
    )


def test_what_one_process_writes_another_reads(reopen):
    writer, reader = reopen().heartbeats, reopen().heartbeats
    writer.write(heartbeat("a-1"))
    writer.write(heartbeat("b-1", 7))
    first = {one.id: one.modified for one in reader.listing()}
    assert set(first) == {"a-1", "b-1"}
    assert {beat.id: beat.generation for beat in reader.read(["a-1", "b-1"])} == {
        "a-1": 1,
        "b-1": 7,
    }
    writer.write(heartbeat("a-1", 8))
    (again,) = reader.read(["a-1"])
    assert again.generation == 8
    assert next(one.modified for one in reader.listing() if one.id == "a-1") >= first["a-1"]


def test_a_replica_that_left_is_not_found(reopen):
    heartbeats = reopen().heartbeats
    heartbeats.write(heartbeat("a-1"))
    heartbeats.remove("a-1")
    heartbeats.remove("a-1")
    assert heartbeats.listing() == []
    assert heartbeats.read(["a-1"]) == []


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"format": 2, "id": "x-1"}'])
def test_invalid_heartbeat_is_ignored(store, content):
    store.objects.put("replicas/x-1.json", content)
    assert store.heartbeats.read(["x-1"]) == []


def test_one_that_lies_about_its_name_is_ignored(store):
    store.heartbeats.write(heartbeat("a-1"))
    data = store.objects.get("replicas/a-1.json")
    store.objects.put("replicas/b-1.json", data)
    assert store.heartbeats.read(["b-1"]) == []


def test_keys_of_a_later_engram_are_ignored(store):
    text = heartbeat("a-1").model_dump_json()[:-1] + ', "colour": "blue"}'
    store.objects.put("replicas/a-1.json", text.encode())
    assert [beat.id for beat in store.heartbeats.read(["a-1"])] == ["a-1"]


def test_heartbeats_are_neither_damage_nor_changes_of_the_catalog(store):
    store.publish("t", bundle(1))
    store.heartbeats.write(heartbeat("a-1"))
    assert store.find_damage() == []
    assert store.catalog().generation == 1


def test_garbage_collection_deletes_heartbeats_that_are_no_longer_written(store):
    store.heartbeats.write(heartbeat("a-1"))
    assert store.collect_garbage(timedelta(hours=1)).heartbeats == ()
    assert store.collect_garbage(timedelta(seconds=-5), dry_run=True).heartbeats
    assert [one.id for one in store.heartbeats.listing()] == ["a-1"]
    report = store.collect_garbage(timedelta(seconds=-5))
    assert report.heartbeats == ("replicas/a-1.json",)
    assert store.heartbeats.listing() == []


def test_every_key_is_documented():
    page = (DOCS / "reference" / "task-store.md").read_text(encoding="utf-8")
    for key in Heartbeat.model_fields:
        assert f"`{key}`" in page, key


@pytest.mark.parametrize("host", ["node-7.example.org", "", "-", "Ünï/cöde host", "a" * 300])
def test_every_host_has_a_name_that_fits_a_path(host):
    replica = replica_id(host, "0123abcd")
    assert REPLICAS.name_at(REPLICAS.path(replica)) == replica
