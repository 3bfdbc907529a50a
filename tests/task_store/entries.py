"""Entries of a log, built by hand."""

from collections.abc import Sequence

from engram_bundle import digest_of
from engram_store.catalog import NOTHING
from engram_store.events import Entry, Event, Published, Stamp, VersionFacts

from tests.bundles import FINGERPRINT


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def entry(generation: int, event: Event, previous: str = NOTHING) -> Entry:
    stamp = Stamp(
        generation=generation,
        id=f"{generation:032x}",
        time="2025-01-31T12:00:00.000Z",
        actor="ada@lab",
        previous=previous,
    )
    return Entry(stamp=stamp, event=event)


def chain(events: Sequence[Event]) -> list[Entry]:
    """A log of these events, each entry with the hash of the one before."""
    entries: list[Entry] = []
    previous = NOTHING
    for generation, event in enumerate(events, start=1):
        entries.append(entry(generation, event, previous))
        previous = digest_of(entries[-1].to_json())
    return entries


def published(task: str, version: int, **changes: object) -> Published:
    facts = {
        "digest": digest(version),
        "size": 100,
        "task_type": "single_label",
        "classes": 3,
        "backbone": "tiny",
        "fingerprint": FINGERPRINT,
    }
    facts = VersionFacts(**(facts | changes))
    return Published(task=task, version=version, aliases=("default",), facts=facts)
