"""Changes to tasks, made so that they are served when the call returns. Blocking: for threads."""

from dataclasses import dataclass
from pathlib import Path

from server.engine.tasks.follower import StoreFollower
from server.engine.tasks.loader import Prepared, TaskLoader
from server.engine.tasks.snapshot import Snapshot
from server.errors import EngramError
from task_store import (
    Change,
    Commit,
    Condition,
    PreconditionFailed,
    Publish,
    TaskBundle,
    TaskRef,
    TaskStore,
    TaskStoreError,
    check_task_name,
)


@dataclass(frozen=True, slots=True)
class ChangeOutcome:
    """What is served after a change."""

    snapshot: Snapshot
    version: int | None = None  # of a publish: the one with the bundle
    created: bool = False  # whether the publish made that version


class TaskChanges:
    """Commits changes to the store, and has this server serve them."""

    def __init__(self, store: TaskStore, follower: StoreFollower, loader: TaskLoader) -> None:
        self._store = store
        self._follower = follower
        self._loader = loader

    def make(
        self, change: Change, *, actor: str | None = None, condition: Condition | None = None
    ) -> ChangeOutcome:
        """Commit a change, under a condition on the catalog, and serve it.

        A bundle is prepared and checked before it is published, and served as it was prepared.
        """
        check_task_name(change.task)
        self._follower.check_writable()
        if isinstance(change, Publish):
            return self._publish(change, actor, condition)
        commit = self._commit(change, actor, condition)
        return ChangeOutcome(self._follower.sync(at_least=commit.generation))

    def _publish(
        self, change: Publish, actor: str | None, condition: Condition | None
    ) -> ChangeOutcome:
        prepared = self.verify(change.bundle)
        with self._loader.handing_over(prepared):
            commit = self._commit(change, actor, condition)
            # Whoever publishes a task here wants it served here.
            self._follower.readmit(change.task)
            snapshot = self._follower.sync(
                at_least=commit.generation, retry=(change.bundle.digest,)
            )
        # A version that is not loaded by itself counts as served: the first request loads it.
        self._loader.resolve(snapshot, [f"{change.task}@{commit.version}"])
        return ChangeOutcome(snapshot, commit.version, commit.created)

    def _commit(self, change: Change, actor: str | None, condition: Condition | None) -> Commit:
        try:
            return self._store.commit(change, actor=actor, condition=condition)
        except PreconditionFailed:
            self._follower.sync()  # so that looking again shows what has changed
            raise

    def verify(self, bundle: TaskBundle) -> Prepared:
        """A bundle as it would be served here, or what speaks against that: see the loader."""
        snapshot = self._follower.snapshot
        if not all(digest in snapshot.slots for digest in bundle.extends):
            snapshot = self._follower.sync()
        return self._loader.verify(bundle, snapshot.slots)

    def validate(self, file: Path) -> tuple[TaskBundle | None, str | None]:
        """A bundle, if the file is one, and the reason why it cannot be served here."""
        try:
            bundle = TaskBundle.load(file)
        except TaskStoreError as error:
            return None, str(error)
        try:
            self.verify(bundle)
        except (EngramError, TaskStoreError) as error:
            return bundle, str(error)
        return bundle, None

    def reload(self, name: str) -> Snapshot:
        """Read the store, and have the task's default version on the device.

        A task that was unloaded is served again, one that has failed is tried again now. Raises
        UnknownTask, TaskUnavailable, or StoreUnavailable.
        """
        digest = self._store.refresh().resolve(TaskRef(name)).digest
        self._follower.readmit(name)
        snapshot = self._follower.sync(retry=(digest,))
        self._loader.resolve_loading(snapshot, [name])
        return snapshot
