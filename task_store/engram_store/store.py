"""The task store: publish, alias, retire and read tasks on any object store.

A change is decided on the newest catalog and appended as the next generation. If another writer
takes that generation first, the store catches up and decides again.
docs/reference/task-store.md describes the protocol, and `layout` the paths.
"""

import contextlib
import getpass
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engram_bundle import BundleLimits, TaskBundle, digest_of
from engram_bundle.bundle import read_file
from engram_bundle.limits import DEFAULT_LIMITS
from engram_bundle.names import DEFAULT_ALIAS

from engram_store import backup, maintenance
from engram_store.backup import CopyReport
from engram_store.bundle_cache import BundleCache
from engram_store.catalog import Catalog, Damage
from engram_store.changes import Change, Collect, Condition, Publish, Purge
from engram_store.corrections import Correction, CorrectionLimits, CorrectionRecord, Corrections
from engram_store.drafts import LIMITS as DRAFT_LIMITS
from engram_store.drafts import Draft, DraftLimits, Drafts, unknown_upload
from engram_store.errors import CorruptStore, StoreUnavailable, UnknownVersion, UnsupportedFormat
from engram_store.events import Collected, Entry, Event, Published, Stamp, format_time
from engram_store.layout import CHECKPOINTS, LOG, checkpoint_path, log_path
from engram_store.maintenance import GarbageReport, Verification
from engram_store.objects import Objects, open_objects
from engram_store.replay import dump_checkpoint, fill_gaps, load_checkpoint, read_entries, replay
from engram_store.replicas.evidence import KEPT, Evidence
from engram_store.replicas.heartbeats import Heartbeats

Clock = Callable[[], datetime]

_COMMIT_TIMEOUT_SECONDS = 60.0  # then a writer that keeps losing races gives up
_MAX_BACKOFF_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The catalog after a commit, and the event that was appended."""

    catalog: Catalog
    event: Event | None  # None: there was nothing to do
    version: int | None = None  # of a publish: the new version, or the one with the same bytes

    @property
    def generation(self) -> int:
        return self.catalog.generation

    @property
    def created(self) -> bool:
        return isinstance(self.event, Published)


def open_store(
    location: str | Path,
    *,
    actor: str | None = None,
    create: bool = True,
    limits: BundleLimits = DEFAULT_LIMITS,
    checkpoint_every: int = 200,
    cache: BundleCache | None = None,
    **options: Any,  # noqa: ANN401 - those of obstore
) -> "TaskStore":
    """Open the store at a folder, file://, memory://, s3://, gs:// or az:// and read its catalog.

    `create=False` raises StoreUnavailable for a local folder that does not exist. `cache` keeps
    bundles of a remote store on disk. The options `config`, `client_options` and `retry_config` are
    passed to obstore, which reads credentials and endpoints from the environment (`AWS_*`,
    `AZURE_*`, `GOOGLE_*`). Every `memory://` store is new.
    """
    objects = open_objects(location, create=create, **options)
    return TaskStore(
        objects,
        actor=actor,
        limits=limits,
        checkpoint_every=checkpoint_every,
        cache=cache if objects.remote else None,
    )


class TaskStore:
    """A task store; safe to share between threads, and between processes through its backend."""

    def __init__(
        self,
        objects: Objects,
        *,
        actor: str | None = None,
        limits: BundleLimits = DEFAULT_LIMITS,
        checkpoint_every: int = 200,
        cache: BundleCache | None = None,
        clock: Clock = lambda: datetime.now(UTC),
        draft_limits: DraftLimits = DRAFT_LIMITS,
    ) -> None:
        self.objects = objects
        self.heartbeats = Heartbeats(objects)
        self.corrections = Corrections(objects)
        self.drafts = Drafts(objects, draft_limits)
        self.evidence = Evidence(objects)
        self._cache = cache
        self._actor = actor or _default_actor()
        self._limits = limits
        self._checkpoint_every = checkpoint_every
        self._clock = clock
        self._lock = threading.RLock()
        self._conditional_writes_checked = not objects.remote
        self._damages: dict[str, Damage] = {}  # by path, as found while reading
        self._checkpoint_overdue = False
        self._catalog = self._open()
        self._purges_pending = bool(self._purged_tasks(self._catalog))
        self._clean_cache()

    @property
    def url(self) -> str:
        return self.objects.url

    def _open(self) -> Catalog:
        self._catalog = self._newest_checkpoint()
        after = log_path(self._catalog.generation)
        listed = map(int, self.objects.named(LOG, after=after))
        generations, strays = fill_gaps(self._catalog.generation, listed)
        self._note(strays)
        self._checkpoint_overdue = len(generations) >= self._checkpoint_every
        return self._adopt(read_entries(self.objects, generations))

    def _newest_checkpoint(self) -> Catalog:
        for generation in sorted(map(int, self.objects.named(CHECKPOINTS)), reverse=True):
            path = checkpoint_path(generation)
            data = self.objects.get(path)
            # A checkpoint of another format is skipped: the log has the same content.
            with contextlib.suppress(UnsupportedFormat):
                try:
                    if data is not None:
                        return load_checkpoint(data, generation)
                except ValueError as error:
                    self._note([Damage(path, f"damaged checkpoint: {error}")])
        return Catalog()

    def catalog(self, refresh: bool = True) -> Catalog:
        """Return the state of all tasks; with `refresh=False` as last seen, without any I/O."""
        return self.refresh() if refresh else self._catalog

    def refresh(self) -> Catalog:
        """Read new log entries; costs one request if there are none."""
        with self._lock:
            while True:
                generation = self._catalog.generation + 1
                data = self.objects.get(log_path(generation))
                if data is None:
                    return self._catalog
                self._adopt([(generation, data)])

    def read_bytes(self, digest: str) -> bytes:
        """Return a bundle's file, with its digest checked."""
        path = self._catalog.blob_path(digest)
        cached = None if self._cache is None else self._cache.get(digest)
        if cached is not None:
            return cached
        data = self.objects.get(path)
        if data is None:
            catalog = self.refresh()
            if catalog.blob_path(digest) != path:
                # It was collected and published again in the meantime.
                return self.read_bytes(digest)
            if digest in catalog.by_digest:
                raise CorruptStore(
                    f"The file of the published bundle {digest} is missing from {self.url}: "
                    f"publish the same file again to repair it.",
                    names=[digest],
                )
            raise UnknownVersion(f"There is no bundle {digest} in the store.", names=[digest])
        actual = digest_of(data)
        if actual != digest:
            raise CorruptStore(
                f"The file of bundle {digest} in {self.url} has the digest {actual}: it was "
                f"damaged or replaced.",
                names=[digest],
            )
        self._keep_in_cache(digest, data)
        return data

    def _keep_in_cache(self, digest: str, data: bytes) -> None:
        if self._cache is not None:
            self._cache.put(digest, data)
            if digest in self._catalog.purged:
                # It was purged after it was read or published.
                self._cache.remove([digest])

    def read_bundle(self, digest: str) -> TaskBundle:
        """Return a bundle, with its digest and content checked."""
        return TaskBundle.from_bytes(self.read_bytes(digest), self._limits)

    def history(self, task: str | None = None, limit: int = 50) -> list[Entry]:
        """Return the newest changes first, of all tasks or of one (its newest thousand)."""
        catalog = self.refresh()
        generations: Sequence[int] = range(1, catalog.generation + 1)
        if task is not None:
            info = catalog.all_tasks.get(task)
            generations = () if info is None else info.changes
        newest = generations[-limit:][::-1] if limit else ()
        entries: list[Entry] = []
        for generation, data in read_entries(self.objects, newest):
            # Damaged entries are skipped here as they are in the catalog.
            with contextlib.suppress(ValueError):
                entries.append(Entry.from_json(data, generation))
        return entries

    def find_damage(self) -> list[Damage]:
        """Return damaged, missing and foreign objects, by path; `verify` also reads every byte."""
        with self._lock:
            catalog = self.refresh()
            known = dict(self._damages)
        return maintenance.find_damage(self.objects, catalog, known)

    def verify(self) -> Verification:
        """Read every byte of the log and its hash chain, bundles, checkpoints and corrections."""
        damages = self.find_damage()
        return maintenance.verify(self.objects, self._catalog, self._limits, damages)

    def finish_purges(self) -> None:
        """Delete what purges left behind, if an interrupted process did not do so.

        Every purge calls this, and so does a server that sees one. Costs nothing if there was no
        purge since the last call.
        """
        if self._purges_pending:
            catalog = self.refresh()
            self._purges_pending = False
            try:
                maintenance.delete_purged(self.objects, catalog)
            except BaseException:
                self._purges_pending = True
                raise

    def collect_garbage(
        self,
        grace: timedelta = timedelta(hours=24),
        *,
        corrections_older_than: timedelta | None = None,
        dry_run: bool = False,
    ) -> GarbageReport:
        """Delete unpublished bundles and uploads, staging files, old checkpoints and heartbeats.

        Also completes interrupted purges and removals of corrections.
        Objects younger than `grace`, by the store's clock, are kept, and so are the bundles of
        retired versions. Raises CorruptStore while the log is damaged, because an entry that
        cannot be read may have published a bundle.
        """
        catalog, damages, _ = replay(self.objects, self.refresh().generation)
        self._check_log(damages)
        before = self.objects.now() - grace
        report = maintenance.collect_garbage(
            self.objects, catalog, self.release_blobs, before=before, dry_run=dry_run
        )
        if corrections_older_than is None:
            return report
        deleted = self.delete_old_corrections(corrections_older_than, dry_run=dry_run)
        return replace(report, corrections=(*report.corrections, *deleted))

    def release_blobs(self, blobs: Mapping[str, int]) -> tuple[str, ...]:
        """Append a `Collect` of these bundles to the log, and return those that may be deleted."""
        event = self.commit(Collect(blobs), condition=lambda _: self._check_log()).event
        return event.digests if isinstance(event, Collected) else ()

    def _check_log(self, found: Iterable[Damage] = ()) -> None:
        """Raise CorruptStore if the log is damaged, as far as this store has seen or just found."""
        paths = {damage.path for damage in found}
        paths |= {path for path in self._damages if LOG.in_folder(path)}
        if paths:
            shown = ", ".join(sorted(paths)[:10]) + (", …" if len(paths) > 10 else "")
            raise CorruptStore(
                f"The log of {self.url} is damaged, so bundles of damaged entries would look like "
                f"garbage: repair the log before deleting anything ({shown}).",
                names=sorted(paths),
            )

    def copy_to(self, target: "TaskStore") -> CopyReport:
        """Bring another store to this generation, or raise Conflict if it has more changes.

        What was purged here is deleted there.
        """
        return backup.copy(self.objects, self.refresh(), target.objects, target.refresh())

    def commit(
        self,
        change: Change | Collect,
        *,
        actor: str | None = None,
        condition: Condition | None = None,
    ) -> CommitResult:
        """Decide a change on the newest catalog and append it to the log.

        `condition` raises to reject the change. It sees the catalog on which the change is
        decided, also after a lost race. Everything is checked before anything is written. A commit
        can be repeated safely after StoreUnavailable.
        """
        if isinstance(change, Purge):
            return self._purge(change, actor, condition)
        if not isinstance(change, Publish):
            return self._commit(change, actor, condition)
        change.bundle.check(self._limits)
        # Decided once before writing, so that a rejected bundle leaves no blob.
        catalog = self.refresh()
        _decide(change, catalog, condition)
        # Outside the lock: writing a large bundle takes a while, and others keep reading.
        written = self._write_blob(change.bundle, catalog)
        result = self._commit(change, actor, condition, written)
        self._keep_in_cache(change.bundle.digest, change.bundle.to_bytes())
        version = result.catalog.task(change.task).live_with(change.bundle.digest)
        assert version is not None, "the change just made is in the catalog"
        return replace(result, version=version.version)

    def _purge(self, change: Purge, actor: str | None, check: Condition | None) -> CommitResult:
        """Commit a purge, then delete what it purged; repeating it completes an interrupted one."""

        def condition(catalog: Catalog) -> None:
            self._check_log()
            if check is not None:
                check(catalog)

        result = self._commit(change, actor, condition)
        self._purges_pending = True
        self.finish_purges()
        return result

    def publish(
        self,
        task: str,
        bundle: TaskBundle | bytes | str | Path,
        *,
        aliases: Sequence[str] = (DEFAULT_ALIAS,),
        actor: str | None = None,
    ) -> CommitResult:
        """Commit a `Publish` of a bundle, its bytes or its file."""
        if not isinstance(bundle, TaskBundle):
            data = bundle if isinstance(bundle, bytes) else read_file(bundle, self._limits)
            bundle = TaskBundle.from_bytes(data, self._limits)
        return self.commit(Publish(task, bundle, tuple(aliases)), actor=actor)

    def correct(
        self,
        task: str,
        corrections: Sequence[Correction],
        *,
        actor: str | None = None,
        limits: CorrectionLimits | None = None,
    ) -> None:
        """Store corrections of a task's predictions, or raise UnknownTask or CorrectionsFull."""
        version = self.refresh().task(task).aliases[DEFAULT_ALIAS]
        record = CorrectionRecord(
            time=self._now(),
            actor=actor or self._actor,
            task=task,
            version=version,
            corrections=tuple(corrections),
        )
        self.corrections.append(record, limits)
        # A purge may have listed the corrections before this one was written.
        if version <= self.refresh().all_tasks[task].purged_whole:
            self._purges_pending = True
            self.finish_purges()

    def add_part(self, draft: Draft, part: str, data: bytes) -> int:
        """Keep a part of an upload, named by its content, and return how many there are."""
        purged = _purges(self.refresh(), draft.task)
        count = self.drafts.add(draft, purged, part, data, self._clock())
        # A purge may have listed the drafts before this part was written.
        if _purges(self.refresh(), draft.task) != purged:
            self.drafts.abort(draft)
            raise unknown_upload(draft)
        return count

    def read_parts(self, draft: Draft) -> Iterator[bytes]:
        """Yield the parts of an upload, or raise UnknownUpload."""
        return self.drafts.read(draft, _purges(self.refresh(), draft.task))

    def finish_draft(self, draft: Draft, version: int) -> None:
        """Delete the parts of an upload that was published as a version."""
        self.drafts.finish(draft, _purges(self._catalog, draft.task), version)

    def delete_expired(self) -> None:
        """Delete old uploads that were not published, and old evidence of stopped servers."""
        now = self._clock()
        expired = self.drafts.expired(now - DRAFT_LIMITS.age)
        self.drafts.delete(info.path for info in expired)
        self.evidence.delete(self.evidence.expired(now - KEPT))

    def delete_old_corrections(self, age: timedelta, *, dry_run: bool = False) -> tuple[str, ...]:
        """Delete corrections older than an age, and return the paths of their records."""
        return self.corrections.delete_older(self._clock() - age, dry_run=dry_run)

    def _now(self) -> str:
        return format_time(self._clock())

    def _write_blob(self, bundle: TaskBundle, catalog: Catalog, written: str | None = None) -> str:
        """Write the bundle where this catalog expects it, and return the path."""
        path, data = catalog.blob_path(bundle.digest), bundle.to_bytes()
        if path == written:
            return path
        # An unpublished bundle is always written again: then it is too young to be collected.
        info = self.objects.stat(path) if bundle.digest in catalog.by_digest else None
        if info is None or info.size != len(data):
            self.objects.put(path, data)
        return path

    def _adopt(self, raw: Iterable[tuple[int, bytes | None]]) -> Catalog:
        before = self._catalog
        self._catalog, damages = before.read(raw)
        self._note(damages)
        if self._purged_tasks(self._catalog) != self._purged_tasks(before):
            self._purges_pending = True
            self._clean_cache()
        return self._catalog

    @staticmethod
    def _purged_tasks(catalog: Catalog) -> dict[str, int]:
        """Return the tasks that have purged versions, and how many."""
        return {task.name: len(task.purged) for task in catalog.all_tasks.values() if task.purged}

    def _clean_cache(self) -> None:
        """Delete purged bundles from the cache on disk, also those purged while it was unused."""
        if self._cache is not None:
            self._cache.remove(self._catalog.purged)

    def _commit(
        self,
        change: Change | Collect,
        actor: str | None,
        condition: Condition | None,
        written: str | None = None,
    ) -> CommitResult:
        """Append the event of a change on the newest catalog.

        `written` is the path of a publish's bundle. The entry is appended only after a catalog
        that expects the bundle there: a collection in between changes the path.
        """
        deadline = time.monotonic() + _COMMIT_TIMEOUT_SECONDS
        pause = 0.001
        with self._lock:
            while True:
                catalog = self.refresh()
                event = _decide(change, catalog, condition)
                if event is None:
                    return CommitResult(catalog, None)
                if isinstance(change, Publish):
                    written = self._write_blob(change.bundle, catalog, written)
                stamp = Stamp(
                    generation=catalog.generation + 1,
                    id=uuid.uuid4().hex,
                    time=self._now(),
                    actor=actor or self._actor,
                    previous=catalog.head,
                )
                if self._append(Entry(stamp=stamp, event=event)):
                    return CommitResult(self._catalog, event)
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"The task store {self.url} is too busy: other writers were first for "
                        f"{_COMMIT_TIMEOUT_SECONDS:.0f} seconds. Try again."
                    )
                # Random, so that writers that collided do not collide again.
                time.sleep(random.uniform(0, pause))
                pause = min(pause * 2, _MAX_BACKOFF_SECONDS)

    def _append(self, entry: Entry) -> bool:
        """Write one entry as its generation; False if another writer took it."""
        path, data = log_path(entry.generation), entry.to_json()
        self._check_log_present(entry.generation - 1)
        self._check_conditional_writes(entry.generation - 1)
        if not self.objects.create(path, data):
            landed = self.objects.get(path)
            if landed is None and not self.objects.remote:
                # The path is unreadable, for example a folder of that name: skip it. On a bucket
                # another writer may be about to finish, and must not be overtaken.
                self._adopt([(entry.generation, None)])
            if landed != data:
                return False
            # The same bytes: the first attempt succeeded, and its response was lost.
        self._adopt([(entry.generation, data)])
        self._check_conditional_writes(entry.generation)
        if self._checkpoint_overdue or entry.generation % self._checkpoint_every == 0:
            self._write_checkpoint()
        return True

    def _check_log_present(self, generation: int) -> None:
        """Raise StoreUnavailable if the whole log is gone, as on a disk that is not mounted."""
        missing = generation > 0 and self.objects.stat(log_path(generation)) is None
        if missing and not self.objects.named(LOG):
            raise StoreUnavailable(
                f"The task store {self.url} is empty, but had {generation} changes: is a disk not "
                f"mounted?"
            )

    def _check_conditional_writes(self, generation: int) -> None:
        """Raise StoreUnavailable if the backend ignores *create only if absent*."""
        if self._conditional_writes_checked or generation < 1:
            return
        path = log_path(generation)
        data = self.objects.get(path)
        if data is None:
            return
        # Tried on an existing entry, with the bytes that it already has.
        if self.objects.create(path, data):
            raise StoreUnavailable(
                f"The task store {self.url} replaces objects that should only be created if "
                f"absent, so writers could overwrite each other: use an object store with "
                f"conditional writes."
            )
        self._conditional_writes_checked = True

    def _note(self, damages: Iterable[Damage]) -> None:
        """Remember damage; the first at a path is the cause of later ones."""
        for damage in damages:
            self._damages.setdefault(damage.path, damage)

    def _write_checkpoint(self) -> None:
        # Failing is fine: without a checkpoint, opening reads more of the log.
        path = checkpoint_path(self._catalog.generation)
        self._checkpoint_overdue = False
        try:
            self.objects.put(path, dump_checkpoint(self._catalog))
        except StoreUnavailable as error:
            self._note([Damage(path, f"checkpoint not written: {error}")])


def _decide(change: Change | Collect, catalog: Catalog, check: Condition | None) -> Event | None:
    if check is not None:
        check(catalog)
    return change.plan(catalog)


def _purges(catalog: Catalog, task: str) -> int:
    """The number of versions of a task that were purged."""
    info = catalog.all_tasks.get(task)
    return 0 if info is None else len(info.purged)


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container may run with a user id that is not in its user database.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
