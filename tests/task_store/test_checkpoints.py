"""Checkpoints: a store opened from one is the store opened from its log."""

import hashlib
import json
import time

import pytest

from task_store import RollBack, open_store
from task_store.bundle import digest_of
from task_store.catalog import Catalog, dump_checkpoint, load_checkpoint
from task_store.events import Collected, Labelled
from task_store.layout import checkpoint_path, log_path
from tests.bundles import bundle
from tests.task_store.conftest import listing
from tests.task_store.entries import digest, entry, published

# As the first release wrote it: a head with the hash of the second line, and the state.
OLD_CHECKPOINT = (
    b'{"format":1,"generation":7,'
    b'"sha256":"833f0cfd1d4185afdff3a9b9812c8665fb9933cf3ea325195dd7536a61fdf324"}'
    b"\n"
    b'{"team/birds":{"labels":{"canary":2,"default":1},"retired_together":[],'
    b'"undo":{"default":[1,2]},"versions":[[1,'
    b'"sha256:0000000000000000000000000000000000000000000000000000000000000001",900,1,'
    b'"2025-01-31T12:00:00.000Z","ada@lab",[],"single_label",3,2,"","tiny-vit",'
    b'"sha256:abababababababababababababababababababababababababababababababab",false],[2,'
    b'"sha256:0000000000000000000000000000000000000000000000000000000000000002",901,2,'
    b'"2025-01-31T12:00:01.000Z","eve@lab",'
    b'["sha256:0000000000000000000000000000000000000000000000000000000000000001"],'
    b'"regression",1,0,"a child","tiny-vit",'
    b'"sha256:abababababababababababababababababababababababababababababababab",true]]}}'
    b"\n"
)


def test_checkpoint_of_the_first_release_is_passed_over_for_the_log(open_memory):
    """It lacks which entries changed a task; the next change writes a checkpoint that has it."""
    store = open_memory(checkpoint_every=100)
    for seed in range(7):
        store.publish("t", bundle(seed))
    store._objects.put(checkpoint_path(7), OLD_CHECKPOINT)
    reader = open_memory(checkpoint_every=5)
    assert reader.catalog() == store.catalog()
    assert reader.catalog().task("t").changes == tuple(range(1, 8))
    assert reader.verify().damages == ()
    reader.publish("t", bundle(7))
    written = load_checkpoint(store._objects.get(checkpoint_path(8)), 8)
    assert written == reader.catalog()


def test_checkpoint_has_all_of_the_catalog():
    made = entry(3, Labelled(task="t", labels=("canary",), version=1))
    log = [entry(1, published("t", 1)), entry(2, Collected(digests=(digest(7),))), made]
    catalog, damages = Catalog().read((e.generation, e.to_json()) for e in log)
    assert damages == []
    assert dict(catalog.collected) == {digest(7): 2}
    assert catalog.task("t").changes == (1, 3)
    assert catalog.head == digest_of(made.to_json())
    assert load_checkpoint(dump_checkpoint(catalog), 3) == catalog


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row[:-2],
        lambda row: [*row[:-1], "a fact of a later release", row[-1]],
        lambda row: [row[0], "md5:0", *row[2:]],
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
    head = {"format": 2, "generation": 1, "sha256": hashlib.sha256(body).hexdigest()}
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
        store._objects.delete(path)
    assert from_checkpoint == reopen().catalog() == store.catalog()


@pytest.mark.parametrize("damage", [b"", b"{}", b"not json\n{}", None])
def test_damaged_checkpoint_falls_back_to_an_older_one(reopen, damage):
    store = reopen(checkpoint_every=2)
    for seed in range(5):
        store.publish("t", bundle(seed))
    newest = "checkpoints/00000000000000000004.json"
    data = store._objects.get(newest)
    store._objects.put(newest, data.replace(b"ada", b"eve") if damage is None else damage)
    if damage is None and b"ada" not in data:
        store._objects.put(newest, data[:-30] + b"x" + data[-29:])
    reader = reopen()
    assert reader.catalog() == store.catalog()
    assert [p.path for p in reader.find_damage()] == [newest]


def test_newer_checkpoint_is_left_to_newer_readers(open_memory):
    store = open_memory(checkpoint_every=1)
    store.publish("t", bundle(1))
    path = "checkpoints/00000000000000000001.json"
    store._objects.put(path, store._objects.get(path).replace(b'"format":2', b'"format":3', 1))
    assert open_memory().catalog() == store.catalog()


@pytest.mark.parametrize("tasks", [1, 100, 10_000])
def test_store_of_ten_thousand_versions_opens_within_a_second_of_cpu(tmp_path, tasks):
    per_task = 10_000 // tasks
    log = [
        entry(n + 1, published(f"task-{n // per_task}", n % per_task + 1, digest=digest(n)))
        for n in range(10_000)
    ]
    checkpointed, _ = Catalog().apply(log[:9_801])
    # As a real store looks: all entries in the log, and 199 of them after the checkpoint.
    folder = tmp_path / "log"
    folder.mkdir()
    for made in log:
        (tmp_path / log_path(made.generation)).write_bytes(made.to_json())
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / f"{9801:020d}.json"
    path.write_bytes(dump_checkpoint(checkpointed))

    started = time.process_time()
    catalog = open_store(tmp_path).catalog()
    spent = time.process_time() - started
    assert catalog.generation == 10_000
    assert sum(len(task.live) for task in catalog.tasks.values()) == 10_000
    assert spent < 1.0
