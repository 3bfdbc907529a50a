"""Changes to tasks, made so that they are served when the call returns. Blocking: for threads.

The ETag of a task stands for its labels and live versions. A change may be made under a condition:
`If-Match` with that ETag (somebody else has changed nothing since), `If-None-Match: *` (there is no
such task yet).
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.api.errors import InvalidRequest
from server.engine.engine import Engine
from server.engine.tasks.changes import ChangeOutcome
from server.engine.tasks.snapshot import Snapshot
from task_store import (
    Catalog,
    Change,
    InvalidName,
    MoveLabel,
    PreconditionFailed,
    Publish,
    RemoveLabel,
    Restore,
    Retire,
    RollBack,
    TaskBundle,
    TaskInfo,
    check_task_name,
    only_if_absent,
)

# The last part of paths below a task: `team/history` could not be told from a task's history.
RESERVED = frozenset({"history", "labels", "restore", "rollback", "versions"})
_TAG = re.compile(r'\s*(W/)?"([^"]*)"\s*(?:,|$)')


def etag_of(task: TaskInfo | None) -> str | None:
    """A quoted name for the state of a task; None when there is none."""
    if task is None or not task.is_live:
        return None
    state = [sorted(task.labels.items()), [(v.version, v.digest) for v in task.live]]
    return f'"{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]}"'


@dataclass(frozen=True, slots=True)
class Condition:
    """What must be true of a task for a change to be made."""

    matching: frozenset[str] | None = None  # quoted ETags; `*` stands for any
    absent: bool = False

    @classmethod
    def from_headers(cls, if_match: str | None, if_none_match: str | None) -> "Condition":
        if if_none_match is not None and if_none_match.strip() != "*":
            raise InvalidRequest("If-None-Match is understood as '*' alone: only if there is none.")
        if if_match is None:
            return cls(absent=if_none_match is not None)
        return cls(matching=read_etags(if_match), absent=if_none_match is not None)

    def check(self, name: str, catalog: Catalog) -> None:
        """Raise PreconditionFailed unless it holds now."""
        if self.absent:
            only_if_absent(name)(catalog)
        if self.matching is None:
            return
        now = etag_of(catalog.tasks.get(name))
        if now is None:
            raise PreconditionFailed(f"There is no task '{name}' to match.", names=[name])
        if "*" not in self.matching and now not in self.matching:
            raise PreconditionFailed(
                f"Task '{name}' has changed in the meantime, its ETag is {now} now: look at it and "
                f"try again.",
                names=[name],
            )


def read_etags(header: str) -> frozenset[str]:
    """The strong ETags of an If-Match or If-None-Match header, quoted; `*` as it is."""
    if header.strip() == "*":
        return frozenset({"*"})
    return frozenset(f'"{tag}"' for weak, tag in _TAG.findall(header) if not weak)


@dataclass(frozen=True, slots=True)
class TaskChanges:
    """Changes on behalf of one caller."""

    engine: Engine
    actor: str

    def publish(
        self, name: str, file: Path, labels: Sequence[str], condition: Condition
    ) -> ChangeOutcome:
        """Validate, store and load a bundle; returns when it is being served."""
        _check_new_name(name)
        return self._change(Publish(name, TaskBundle.load(file), tuple(labels)), condition)

    def label(self, name: str, label: str, version: int, condition: Condition) -> Snapshot:
        return self._change(MoveLabel(name, label, version), condition).snapshot

    def remove_label(self, name: str, label: str, condition: Condition) -> Snapshot:
        return self._change(RemoveLabel(name, label), condition).snapshot

    def rollback(self, name: str, label: str, condition: Condition) -> Snapshot:
        return self._change(RollBack(name, label), condition).snapshot

    def retire(self, name: str, version: int | None, condition: Condition) -> Snapshot:
        return self._change(Retire(name, version), condition).snapshot

    def restore(self, name: str, version: int | None) -> Snapshot:
        return self._change(Restore(name, version), Condition()).snapshot

    def _change(self, change: Change, condition: Condition) -> ChangeOutcome:
        return self.engine.change(
            change,
            actor=self.actor,
            condition=lambda catalog: condition.check(change.task, catalog),
        )


def _check_new_name(name: str) -> None:
    check_task_name(name)
    team, _, last = name.rpartition("/")
    if team and last in RESERVED:
        raise InvalidName(
            f"'{name}' cannot be told from the {last} of a task '{team}': choose another name.",
            names=[name],
        )
