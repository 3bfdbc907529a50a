"""Checkpoints: a store opened from one is the store opened from its log."""

import cProfile
import hashlib
import json

import pytest
from engram_bundle import digest_of
from engram_store import RollBack, open_store
from engram_store.catalog import Catalog
from engram_store.events import AliasMoved, Collected
from engram_store.layout import checkpoint_path, log_path
from engram_store.replay import dump_checkpoint, load_checkpoint

from tests.bundles import bundle
from tests.task_store.conftest import listing
from tests.task_store.entries import chain, digest, entry, published


def test_checkpoint_of_another_format_is_skipped_and_written_again(open_memory):
    store = open_memory(checkpoint_every=7)
    for seed in range(7):
        store.publish("t", bundle(seed))
    path = checkpoint_path(7)
    store.objects.put(path, store.objects.get(path).replace(b'"format":3', b'"format":4', 1))
    reader = open_memory(checkpoint_every=5)
    assert reader.catalog() == store.catalog()
    assert reader.verify().damages == ()
    reader.publish("t", bundle(7))
    written = load_checkpoint(store.objects.get(checkpoint_path(8)), 8)
    assert written == reader.catalog()


def test_checkpoint_has_all_of_the_catalog():
    moved = AliasMoved(task="t", aliases=("canary",), version=1)
    log = chain([published("t", 1), Collected(digests=(digest(7),)), moved])
    catalog, damages = Catalog().read((e.generation, e.to_json()) for e in log)
    assert damages == []
    assert dict(catalog.collected) == {digest(7): 2}
    assert catalog.task("t").changes == (1, 3)
    assert catalog.head == digest_of(log[-1].to_json())
    assert load_checkpoint(dump_checkpoint(catalog), 3) == catalog


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row[:-1],
        lambda row: [*row, "a fact of a later release"],
        lambda row: [*row[:5], "md5:0", *row[6:]],
        lambda row: "row",
    ],
)
def test_row_that_cannot_be_read_is_damage(change):
    catalog, _ = Catalog().apply([entry(1, published("t", 1))])
    _, _, body = dump_checkpoint(catalog).partition(b"\n")
    state = json.loads(body)
    rows = state["tasks"]["t"]["versions"]
    rows[0] = change(rows[0])
    body = json.dumps(state).encode()
    head = {"format": 3, "generation": 1, "sha256": hashlib.sha256(body).hexdigest()}
    with pytest.raises(ValueError):
        load_checkpoint(json.dumps(head).encode() + b"\n" + body, 1)


def test_opening_from_a_checkpoint_equals_opening_from_the_log(reopen):
    store = reopen(checkpoint_every=4)
    for seed in range(9):
        store.publish("t", bundle(seed))
    store.commit(RollBack("t"))
    assert sorted(p for p in listing(store) if p.startswith("checkpoints/")) == [
        "checkpoints/00000000000000000004.json",
        "checkpoints/00000000000000000008.json",
    ]
    from_checkpoint = reopen().catalog()
    for path in [p for p in listing(store) if p.startswith("checkpoints/")]:
        store.objects.delete(path)
    assert from_checkpoint == reopen().catalog() == store.catalog()


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json\n{}", None])
def test_damaged_checkpoint_falls_back_to_an_older_one(reopen, damage):
    store = reopen(checkpoint_every=2)
    for seed in range(5):
        store.publish("t", bundle(seed))
    newest = "checkpoints/00000000000000000004.json"
    data = store.objects.get(newest)
    store.objects.put(newest, data.replace(b"ada", b"eve") if damage is None else damage)
    if damage is None and b"ada" not in data:
        store.objects.put(newest, data[:-30] + b"x" + data[-29:])
    reader = reopen()
    assert reader.catalog() == store.catalog()
    assert [p.path for p in reader.find_damage()] == [newest]


@pytest.mark.parametrize("tasks", [1, 100, 10_000])
def test_opening_ten_thousand_versions_takes_few_calls_for_each(tmp_path, tasks):
    per_task = 10_000 // tasks
    log = chain(
        [
            published(f"task-{n // per_task}", n % per_task + 1, digest=digest(n))
            for n in range(10_000)
        ]
    )
    read = ((made.generation, made.to_json()) for made in log[:9_801])
    checkpointed, _ = Catalog().read(read)
    # As a real store looks: all entries in the log, and 199 of them after the checkpoint.
    folder = tmp_path / "log"
    folder.mkdir()
    for made in log:
        (tmp_path / log_path(made.generation)).write_bytes(made.to_json())
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / f"{9801:020d}.json"
    path.write_bytes(dump_checkpoint(checkpointed))

    # Calls of functions, unlike seconds, are the same on every machine.
    with cProfile.Profile() as profile:
        catalog = open_store(tmp_path).catalog()
    calls = sum(entry.callcount for entry in profile.getstats())
    assert catalog.generation == 10_000
    assert sum(len(task.live) for task in catalog.tasks.values()) == 10_000
    assert calls < 25 * 10_000
