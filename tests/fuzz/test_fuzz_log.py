"""Mutated log entries: a store that others wrote to is read as far as it makes sense."""

import contextlib
import json

import pytest
from engram_bundle import TaskStoreError
from engram_store import MoveAlias, Publish, Retire, open_store
from engram_store.layout import log_path

from tests.bundles import bundle
from tests.fuzz.conftest import Case, run_cases
from tests.fuzz.mutator import Mutator

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def entries() -> list[bytes]:
    """A log of every kind of entry."""
    store = open_store("memory://", actor="ada@lab")
    for change in (
        Publish("birds", bundle(1)),
        Publish("birds", bundle(2), aliases=("default", "canary")),
        MoveAlias("birds", "canary", 1),
        Publish("team/cars", bundle(3)),
        Retire("team/cars"),
        Publish("team/cars", bundle(4)),
    ):
        store.commit(change)
    datas = [store.objects.get(log_path(n)) for n in range(1, store.catalog().generation + 1)]
    return [data for data in datas if data is not None]


def damaged(mutator: Mutator, entry: bytes, others: list[bytes]) -> bytes:
    if mutator.dice.random() < 0.4:
        return mutator.damaged(entry, others)
    return mutator.damaged_json(json.loads(entry))


def test_mutated_log_entries_are_passed_over_or_refused_in_a_sentence(entries):
    """Opening such a store, reading all of it, and writing on."""

    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"log {number}")
        place = mutator.dice.randrange(len(entries))
        content = damaged(mutator, entries[place], entries)
        store = open_store("memory://")
        for generation, entry in enumerate(entries, start=1):
            store.objects.put(log_path(generation), content if generation == place + 1 else entry)
        # Damage must raise the store's own error: a TypeError, for example, is a bug.
        with contextlib.suppress(TaskStoreError):
            catalog = store.refresh()
            assert catalog.generation <= len(entries)
            store.history("birds")
            store.find_damage()
            store.publish("birds", bundle(5))
            store.collect_garbage(dry_run=True)
        return 200, content

    run_cases("log entries", run_one)


def test_a_server_goes_on_beside_mutated_log_entries(send, world, entries):
    """Entries that another writer appends to the store of a running server."""

    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"follow {number}")
        content = damaged(mutator, mutator.dice.choice(entries), entries)
        world.store.objects.put(log_path(world.engine.tasks.snapshot.generation + 1), content)
        with contextlib.suppress(TaskStoreError):
            world.engine.tasks.sync()
        responses = [send(Case("GET", url)) for url in ("/tasks", "/tasks/pets/history", "/readyz")]
        responses.append(send(Case("POST", "/predict?tasks=pets,scene,age", b"GIF89a")))
        return max(response.status_code for response in responses), content

    run_cases("entries followed", run_one, count=100)
