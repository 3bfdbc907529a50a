"""From the task references of a request to tasks on the devices."""

import itertools
from collections.abc import Iterable, Sequence

from server.engine.tasks.loader import TaskLoader
from server.engine.tasks.snapshot import Match, Snapshot, unavailable
from server.engine.types import ResidentTask
from server.errors import TaskUnavailable

ResolvedTasks = list[tuple[str, ResidentTask]]  # each with the reference that stands for it


class TaskResolver:
    """Resolves references by a snapshot. Safe to use from any thread; `resolve` never waits."""

    def __init__(self, loader: TaskLoader) -> None:
        self._loader = loader
        self._ticks = itertools.count(1)  # a clock of requests: who was used longest ago?

    def resolve(self, snapshot: Snapshot, refs: Sequence[str] | None) -> ResolvedTasks | None:
        """The tasks references stand for; None if one must be loaded first. Never waits.

        Without references: every ready task. Raises UnknownTask or TaskUnavailable.
        """
        matches = snapshot.find(refs)
        tick = next(self._ticks)
        resolved: ResolvedTasks = []
        for match in matches:
            loaded = match.slot.loaded
            if loaded is None:
                self._refuse_failed(matches)
                return None
            match.slot.used = tick
            resolved.append((match.ref, loaded.served_as(match.key)))
        return resolved

    def load(self, snapshot: Snapshot, refs: Sequence[str] | None) -> ResolvedTasks:
        """Like `resolve`, and loads what is missing. Blocks: not for the event loop."""
        tick = next(self._ticks)
        resolved: ResolvedTasks = []
        reasons: dict[str, str] = {}
        for match in snapshot.find(refs):
            match.slot.used = tick
            try:
                loaded = self._loader.load(match.slot)
            except TaskUnavailable as error:
                reasons[match.ref] = str(error)
            else:
                resolved.append((match.ref, loaded.served_as(match.key)))
        if reasons:
            raise unavailable(reasons)
        return resolved

    def _refuse_failed(self, matches: Iterable[Match]) -> None:
        refusals = {match.ref: self._loader.refusal(match.slot) for match in matches}
        reasons = {ref: reason for ref, reason in refusals.items() if reason is not None}
        if reasons:
            raise unavailable(reasons)
