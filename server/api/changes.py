"""Changes to tasks, made so that they are served when the call returns. Blocking: for threads.

The ETag of a task stands for its labels and live versions. A change may be made under a condition:
`If-Match` with that ETag (somebody else has changed nothing since), `If-None-Match: *` (there is no
such task yet).
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from server.api.errors import InvalidRequest
from server.engine.task_bank import Snapshot, TaskBank
from server.errors import EngramError
from task_store import (
    Catalog,
    InvalidName,
    PreconditionFailed,
    Published,
    TaskBundle,
    TaskInfo,
    TaskStoreError,
    check_task_name,
)

T = TypeVar("T")

# The last part of paths below a task: `team/history` could not be told from a task's history.
RESERVED = frozenset({"history", "labels", "restore", "rollback", "versions"})
_TAG = re.compile(r'\s*(W/)?"([^"]*)"\s*(?:,|$)')
_ATTEMPTS = 20


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

    bank: TaskBank
    actor: str

    def publish(
        self, name: str, file: Path, labels: Sequence[str], condition: Condition
    ) -> tuple[Published, Snapshot]:
        """Validate, store and load a bundle; returns when it is being served."""
        _check_new_name(name)
        self.bank.check_writable()
        bundle = TaskBundle.load(file)
        self.bank.verify(bundle)

        def change(expected: int | None) -> Published:
            return self.bank.store.publish(
                name,
                bundle,
                labels=labels,
                actor=self.actor,
                only_if_absent=condition.absent,
                expected_generation=expected,
            )

        published = self._under(name, condition, change)
        self.bank.readmit(name)  # whoever publishes a task here wants it served here
        snapshot = self.bank.sync(at_least=published.generation, retry=(published.digest,))
        # A version that is not loaded by itself counts as served: it loads when it is asked for.
        self.bank.resolve(snapshot, [f"{name}@{published.version}"])
        return published, snapshot

    def label(self, name: str, label: str, version: int, condition: Condition) -> Snapshot:
        return self._change(name, condition, self.bank.store.label, name, label, version)

    def remove_label(self, name: str, label: str, condition: Condition) -> Snapshot:
        return self._change(name, condition, self.bank.store.remove_label, name, label)

    def rollback(self, name: str, label: str, condition: Condition) -> Snapshot:
        return self._change(name, condition, self.bank.store.rollback, name, label)

    def retire(self, name: str, version: int | None, condition: Condition) -> Snapshot:
        return self._change(name, condition, self.bank.store.retire, name, version)

    def restore(self, name: str, version: int | None) -> Snapshot:
        return self._change(name, Condition(), self.bank.store.restore, name, version)

    def _change(
        self, name: str, condition: Condition, change: Callable[..., Catalog], *given: object
    ) -> Snapshot:
        check_task_name(name)
        self.bank.check_writable()
        catalog = self._under(
            name,
            condition,
            lambda expected: change(*given, actor=self.actor, expected_generation=expected),
        )
        return self.bank.sync(at_least=catalog.generation)

    def _under(self, name: str, condition: Condition, change: Callable[[int | None], T]) -> T:
        """Make a change on the very generation its condition was checked on."""
        if condition.matching is None:
            return change(None)
        for _ in range(_ATTEMPTS):
            generation = self._check(name, condition)
            try:
                return change(generation)
            except PreconditionFailed:
                continue  # something else may have changed: what counts is this task
        raise PreconditionFailed(f"The store is too busy to match task '{name}': try again.")

    def _check(self, name: str, condition: Condition) -> int:
        catalog = self.bank.store.catalog()
        try:
            condition.check(name, catalog)
        except PreconditionFailed:
            self.bank.sync()  # so that looking again shows what has changed
            raise
        return catalog.generation


def judge(bank: TaskBank, file: Path) -> tuple[TaskBundle | None, str | None]:
    """A bundle if it is one, and what speaks against serving it here."""
    try:
        bundle = TaskBundle.load(file)
    except TaskStoreError as error:
        return None, str(error)
    try:
        bank.verify(bundle)
    except (EngramError, TaskStoreError) as error:
        return bundle, str(error)
    return bundle, None


def _check_new_name(name: str) -> None:
    check_task_name(name)
    team, _, last = name.rpartition("/")
    if team and last in RESERVED:
        raise InvalidName(
            f"'{name}' cannot be told from the {last} of a task '{team}': choose another name.",
            names=[name],
        )
