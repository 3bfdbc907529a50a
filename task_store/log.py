"""Reading the log: which entries to ask for, and all of them from the first on."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from task_store.catalog import Catalog, Damage
from task_store.layout import LOG, log_path
from task_store.objects import Objects

# More entries than this are not missing by accident: what follows is not ours.
_WIDEST_GAP = 1000
_CHUNK = 1000


@dataclass(frozen=True, slots=True)
class Replay:
    """The whole log, read from its first entry and from no checkpoint."""

    catalog: Catalog
    damages: tuple[Damage, ...]  # without what was accepted
    at: Mapping[int, Catalog]  # the catalogs at the generations that were asked for


def without_gaps(newest: int, listed: Iterable[int]) -> tuple[list[int], list[Damage]]:
    """The generations after `newest` to read: those listed and those the listing may have missed.

    A folder that is written to while it is listed may show an entry and not the one before it, so
    what seems missing is read by name. But a stray file with an enormous number must neither cost
    a million reads nor push the generation to the end of its digits.
    """
    generations: list[int] = []
    damages: list[Damage] = []
    for generation in listed:
        if generation - newest > _WIDEST_GAP:
            reason = "far beyond the end of the log, ignored"
            damages.append(Damage(log_path(generation), reason))
            continue
        generations.extend(range(newest + 1, generation + 1))
        newest = max(newest, generation)
    return generations, damages


def replay(objects: Objects, newest: int, *, stops: Collection[int] = ()) -> Replay:
    """Read every entry, at least up to the generation `newest`, which somebody has seen."""
    listed = {newest, *map(int, objects.named(LOG))}
    generations, damages = without_gaps(0, sorted(listed))
    catalog, at = Catalog(), {}
    start = 0
    for end, generation in enumerate(generations, start=1):
        if end - start < _CHUNK and end < len(generations) and generation not in stops:
            continue
        chunk = generations[start:end]
        datas = objects.get_many([log_path(each) for each in chunk])
        catalog, found = catalog.read(zip(chunk, datas, strict=True))
        damages += found
        at[generation] = catalog
        start = end
    return Replay(catalog, tuple(catalog.not_accepted(damages)), at)
