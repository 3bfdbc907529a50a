"""The task service: reads what is served, and changes tasks so that the change is served.

Everything blocks, and belongs into a thread, except `snapshot` and `snapshot_for`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import engram_store
from engram_bundle import TaskBundle, TaskRef, TaskStoreError

from engram_server.engine.tasks.follower import StoreFollower
from engram_server.engine.tasks.loader import Prepared, TaskLoader
from engram_server.engine.tasks.snapshot import Snapshot
from engram_server.errors import EngramError


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    task: str
    snapshot: Snapshot
    version: int
    digest: str
    created: bool  # False: the task had a version with the same bytes


class TaskService:
    """Commits changes to the store and makes this server serve them."""

    def __init__(
        self, store: engram_store.TaskStore, follower: StoreFollower, loader: TaskLoader
    ) -> None:
        self._store = store
        self._follower = follower
        self._loader = loader

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot that a request which starts now is answered from."""
        return self._follower.snapshot

    async def snapshot_for(self, refs: Sequence[str] | None, at_least: int | None) -> Snapshot:
        """A snapshot that has reached a generation and the versions in `refs`."""
        return await self._follower.snapshot_for(refs, at_least)

    def sync(self) -> Snapshot:
        return self._follower.sync()

    def unload(self, task: str) -> Snapshot:
        return self._follower.unload(task)

    def history(self, task: str, limit: int) -> list[engram_store.Entry]:
        return self._store.history(task, limit)

    def read_bytes(self, digest: str) -> bytes:
        return self._store.read_bytes(digest)

    def read_bundle(self, digest: str) -> TaskBundle:
        return self._store.read_bundle(digest)

    def commit(
        self,
        change: engram_store.Change,
        *,
        actor: str | None = None,
        condition: engram_store.Condition | None = None,
    ) -> Snapshot:
        """Commit a change, under a condition on the catalog, and serve it."""
        if isinstance(change, engram_store.Publish):
            return self.publish(change, actor=actor, condition=condition).snapshot
        self._follower.check_writable()
        commit = self._commit(change, actor, condition)
        return self._follower.sync(at_least=commit.generation)

    def publish(
        self,
        change: engram_store.Publish,
        *,
        actor: str | None = None,
        condition: engram_store.Condition | None = None,
    ) -> PublishOutcome:
        """Check and prepare a bundle, publish it, and serve it as it was prepared."""
        self._follower.check_writable()
        prepared = self.verify(change.bundle)
        digest = change.bundle.digest
        with self._loader.reuse(prepared):
            commit = self._commit(change, actor, condition)
            # Publishing a task ends an earlier unload on this server.
            self._follower.readmit(change.task)
            snapshot = self._follower.sync(at_least=commit.generation, retry=(digest,))
        version = commit.version
        assert version is not None, "a publish has a version"
        # Raises if loading failed. A version that is loaded on demand counts as served.
        self._loader.served_tasks(snapshot.resolve([f"{change.task}@{version}"]))
        return PublishOutcome(change.task, snapshot, version, digest, commit.created)

    def _commit(
        self,
        change: engram_store.Change,
        actor: str | None,
        condition: engram_store.Condition | None,
    ) -> engram_store.CommitResult:
        try:
            return self._store.commit(change, actor=actor, condition=condition)
        except engram_store.PreconditionFailed:
            self._follower.sync()  # so that the next read shows what has changed
            raise

    def verify(self, bundle: TaskBundle) -> Prepared:
        """Prepare a bundle as this server would serve it; see `TaskLoader.verify`."""
        snapshot = self._follower.snapshot
        if not all(digest in snapshot.slots for digest in bundle.extends):
            snapshot = self._follower.sync()
        return self._loader.verify(bundle, snapshot)

    def validate(self, file: Path) -> tuple[TaskBundle | None, str | None]:
        """The bundle in a file, if it is one, and the reason why it cannot be served here."""
        try:
            bundle = TaskBundle.load(file)
        except TaskStoreError as error:
            return None, error.public_message
        try:
            self.verify(bundle)
        except EngramError as error:
            return bundle, str(error)
        except TaskStoreError as error:
            return bundle, error.public_message
        return bundle, None

    def reload(self, name: str) -> Snapshot:
        """Read the store and load the task's default version, even if unloaded or failed."""
        digest = self._store.refresh().resolve(TaskRef(name)).digest
        self._follower.readmit(name)
        snapshot = self._follower.sync(retry=(digest,))
        self._loader.load_served_tasks(snapshot.resolve([name]))
        return snapshot
