"""Entries of a log, built by hand."""

from task_store.events import Entry, Event, Published, Stamp, VersionFacts
from tests.bundles import FINGERPRINT


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def entry(generation: int, event: Event) -> Entry:
    stamp = Stamp(
        generation=generation,
        id=f"{generation:032x}",
        time="2025-01-31T12:00:00.000Z",
        actor="ada@lab",
    )
    return Entry(stamp=stamp, event=event)


def published(task: str, version: int, **changes: object) -> Published:
    facts = {
        "digest": digest(version),
        "size": 100,
        "problem": "single_label",
        "classes": 3,
        "backbone": "tiny",
        "fingerprint": FINGERPRINT,
    }
    facts = VersionFacts(**(facts | changes))
    return Published(task=task, version=version, labels=("default",), facts=facts)
