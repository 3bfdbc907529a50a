"""The task store: publish, label, retire and read tasks on any object store.

A change is decided on the newest catalog, appended as the next generation, and lost to nobody:
when another writer takes that generation first, we catch up and decide again.
docs/reference/task-store.md has the whole protocol, and `layout` says where everything lies.
"""

import contextlib
import getpass
import random
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from task_store import maintenance
from task_store.bundle import TaskBundle, digest_of, read_file
from task_store.bundle_cache import BundleCache
from task_store.catalog import Catalog, Damage, dump_checkpoint, load_checkpoint
from task_store.changes import Change, Condition, Publish
from task_store.corrections import Correction, CorrectionRecord, Corrections
from task_store.errors import CorruptStore, StoreUnavailable, UnknownVersion, UnsupportedFormat
from task_store.events import Entry, Event, Published, Stamp
from task_store.heartbeats import Heartbeats
from task_store.layout import CHECKPOINTS, LOG, blob_path, checkpoint_path, log_path
from task_store.limits import DEFAULT_LIMITS, Limits
from task_store.maintenance import GarbageReport
from task_store.names import DEFAULT_LABEL
from task_store.objects import Objects, open_objects

Clock = Callable[[], datetime]

# A writer that keeps losing gives up after this; every loss is another writer's success.
_PATIENCE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 0.05
_HISTORY_CHUNK = 64
# More entries than this are not missing by accident: what follows is not ours.
_WIDEST_GAP = 1000


@dataclass(frozen=True, slots=True)
class Commit:
    """The catalog after a change was committed, and the event that was appended for it."""

    catalog: Catalog
    event: Event | None  # None: there was nothing to do
    version: int | None = None  # of a publish: the one it made, or the one with the same bytes

    @property
    def generation(self) -> int:
        return self.catalog.generation

    @property
    def created(self) -> bool:
        """Whether this made a new version."""
        return isinstance(self.event, Published)


def open_store(
    location: str | Path,
    *,
    actor: str | None = None,
    create: bool = True,
    limits: Limits = DEFAULT_LIMITS,
    checkpoint_every: int = 200,
    cache: BundleCache | None = None,
    config: Mapping[str, Any] | None = None,
    client_options: Mapping[str, Any] | None = None,
    retry_config: Mapping[str, Any] | None = None,
) -> "TaskStore":
    """Open the store at a folder, file://, memory://, s3://, gs:// or az:// and read its catalog.

    `create=False` refuses a local folder that does not exist. `cache` keeps bundles of a remote
    store on the disk; one that is a folder or in memory needs none. `config`, `client_options` and
    `retry_config` are passed to obstore; credentials and endpoints come from the environment
    (`AWS_*`, `AZURE_*`, `GOOGLE_*`) when not given. Every `memory://` store is a new one.
    """
    objects = open_objects(
        location,
        create=create,
        config=config,
        client_options=client_options,
        retry_config=retry_config,
    )
    return TaskStore(
        objects,
        actor=actor,
        limits=limits,
        checkpoint_every=checkpoint_every,
        cache=cache if objects.remote else None,
    )


class TaskStore:
    """One store; safe to share between threads, and between processes through its backend."""

    def __init__(
        self,
        objects: Objects,
        *,
        actor: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
        checkpoint_every: int = 200,
        cache: BundleCache | None = None,
        clock: Clock = lambda: datetime.now(UTC),
    ) -> None:
        self._objects = objects
        self.heartbeats = Heartbeats(objects)
        self.corrections = Corrections(objects)
        self._cache = cache
        self._actor = actor or _default_actor()
        self._limits = limits
        self._checkpoint_every = checkpoint_every
        self._clock = clock
        self._lock = threading.RLock()
        self._conditional_writes_checked = not objects.remote
        self._skipped: dict[str, Damage] = {}
        self._catalog = self._open()

    @property
    def url(self) -> str:
        return self._objects.url

    # Opening

    def _open(self) -> Catalog:
        """Newest readable checkpoint, then every later entry of the log."""
        self._catalog = self._newest_checkpoint()
        after = log_path(self._catalog.generation)
        generations = self._without_gaps([*map(int, self._objects.named(LOG, after=after))])
        datas = self._objects.get_many([log_path(g) for g in generations])
        return self._adopt(zip(generations, datas, strict=True))

    def _newest_checkpoint(self) -> Catalog:
        for generation in sorted(map(int, self._objects.named(CHECKPOINTS)), reverse=True):
            path = checkpoint_path(generation)
            data = self._objects.get(path)
            if data is None:
                continue
            try:
                return load_checkpoint(data, generation)
            except UnsupportedFormat:
                # The log tells the same, and says clearly if it is too new as well.
                continue
            except ValueError as error:
                self._note_damage(path, f"damaged checkpoint: {error}")
        return Catalog()

    def _without_gaps(self, listed: list[int]) -> list[int]:
        """The generations to read: those listed and those the listing may have missed.

        A folder that is written to while it is listed may show an entry and not the one before
        it, so what seems missing is read by name. But a stray file with an enormous number must
        neither cost a million reads nor push the generation to the end of its digits.
        """
        generations: list[int] = []
        newest = self._catalog.generation
        for generation in listed:
            if generation - newest > _WIDEST_GAP:
                self._note_damage(log_path(generation), "far beyond the end of the log, ignored")
                continue
            generations.extend(range(newest + 1, generation + 1))
            newest = generation
        return generations

    # Reading

    def catalog(self, refresh: bool = True) -> Catalog:
        """The state of all tasks; with `refresh=False` as last seen, without any I/O."""
        return self.refresh() if refresh else self._catalog

    def refresh(self) -> Catalog:
        """Catch up with other writers; costs one look-up when nothing is new."""
        with self._lock:
            while True:
                generation = self._catalog.generation + 1
                data = self._objects.get(log_path(generation))
                if data is None:
                    return self._catalog
                self._adopt([(generation, data)])

    def read_bytes(self, digest: str) -> bytes:
        """A bundle's file, its digest checked."""
        path = blob_path(digest)
        cached = None if self._cache is None else self._cache.get(digest)
        if cached is not None:
            return cached
        data = self._objects.get(path)
        if data is None:
            if digest in self.refresh().by_digest:
                raise CorruptStore(
                    f"The bundle {digest} is published and its file is missing from "
                    f"{self.url}: publish the same file again to repair it.",
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
        if self._cache is not None:
            self._cache.put(digest, data)
        return data

    def read_bundle(self, digest: str) -> TaskBundle:
        """A bundle, its digest and content checked."""
        return TaskBundle.from_bytes(self.read_bytes(digest), self._limits)

    def history(self, task: str | None = None, limit: int = 50) -> list[Entry]:
        """The newest changes first, of one task or of all."""
        entries: list[Entry] = []
        newest = self.refresh().generation
        while newest > 0 and len(entries) < limit:
            generations = range(newest, max(newest - _HISTORY_CHUNK, 0), -1)
            datas = self._objects.get_many([log_path(g) for g in generations])
            for generation, data in zip(generations, datas, strict=True):
                # What is damaged was passed over when the catalog was made, and is here too.
                with contextlib.suppress(ValueError):
                    entry = None if data is None else Entry.from_json(data, generation)
                    if entry is not None and task in (None, entry.event.task):
                        entries.append(entry)
            newest -= _HISTORY_CHUNK
        return entries[:limit]

    def find_damage(self) -> list[Damage]:
        """Everything in the store that should not be there or is missing, by path."""
        with self._lock:
            catalog = self.refresh()
            skipped = dict(self._skipped)
        return maintenance.find_damage(self._objects, catalog, skipped)

    # Committing

    def commit(
        self, change: Change, *, actor: str | None = None, condition: Condition | None = None
    ) -> Commit:
        """Decide a change on the newest catalog and append it to the log.

        `condition` raises to refuse; it sees the very catalog the change is decided on, also when
        another writer came first and it is decided again. Everything is checked before anything is
        written. Safe to repeat after StoreUnavailable.
        """
        if not isinstance(change, Publish):
            return self._commit(change, actor, condition)
        digest, data = change.bundle.digest, change.bundle.to_bytes()
        blob = blob_path(digest)
        change.bundle.check(self._limits)
        # Refusals first, so that a refused bundle leaves no trace, not even a blob.
        catalog = self.refresh()
        _decide(change, catalog, condition)
        # The blob must be there, whole and, if nothing refers to it yet, young.
        info = self._objects.stat(blob) if digest in catalog.by_digest else None
        if info is None or info.size != len(data):
            self._objects.put(blob, data)
        commit = self._commit(change, actor, condition)
        # A garbage collection that began before our blob was fresh may have taken it meanwhile.
        if self._objects.stat(blob) is None:
            self._objects.put(blob, data)
        if self._cache is not None:
            self._cache.put(digest, data)
        version = commit.catalog.task(change.task).live_with(digest)
        assert version is not None, "the change just made is in the catalog"
        return replace(commit, version=version.version)

    def correct(
        self, task: str, corrections: Sequence[Correction], *, actor: str | None = None
    ) -> None:
        """Keep what photos show beside a task, for its next training; UnknownTask."""
        info = self.refresh().task(task)
        version = info.versions[info.labels[DEFAULT_LABEL]]
        self.corrections.append(
            CorrectionRecord(
                time=self._now(),
                actor=actor or self._actor,
                task=task,
                version=version.version,
                fingerprint=version.facts.fingerprint,
                corrections=tuple(corrections),
            )
        )

    def _now(self) -> str:
        now = self._clock().astimezone(UTC).isoformat(timespec="milliseconds")
        return now.replace("+00:00", "Z")

    def publish(
        self,
        task: str,
        bundle: TaskBundle | bytes | str | Path,
        *,
        labels: Sequence[str] = (DEFAULT_LABEL,),
        actor: str | None = None,
    ) -> Commit:
        """Commit a `Publish` of a bundle, its bytes or its file."""
        if not isinstance(bundle, TaskBundle):
            data = bundle if isinstance(bundle, bytes) else read_file(bundle, self._limits)
            bundle = TaskBundle.from_bytes(data, self._limits)
        return self.commit(Publish(task, bundle, tuple(labels)), actor=actor)

    def collect_garbage(
        self, grace: timedelta = timedelta(hours=24), *, dry_run: bool = False
    ) -> GarbageReport:
        """Delete bundles that nothing published, staging files, old checkpoints and heartbeats.

        Only what is older than `grace` goes; retired versions can be restored and keep theirs.
        """
        before = self._clock() - grace
        return maintenance.collect_garbage(
            self._objects, self.refresh, before=before, dry_run=dry_run
        )

    # The log

    def _adopt(self, raw: Iterable[tuple[int, bytes | None]]) -> Catalog:
        """Fold raw entries, in order, into the catalog we show."""
        entries: list[Entry] = []
        newest = self._catalog.generation
        for generation, data in raw:
            newest = max(newest, generation)
            try:
                if data is None:
                    raise ValueError("it is missing or cannot be read")
                entries.append(Entry.from_json(data, generation))
            except ValueError as error:
                self._note_damage(log_path(generation), f"damaged log entry, passed over: {error}")
        catalog, damages = self._catalog.apply(entries)
        for damage in damages:
            self._note_damage(damage.path, damage.reason)
        # Past those that could not be read, too.
        self._catalog = replace(catalog, generation=newest)
        return self._catalog

    def _commit(self, change: Change, actor: str | None, condition: Condition | None) -> Commit:
        """Append what the change comes to on the newest catalog."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        pause = 0.001
        with self._lock:
            while True:
                catalog = self.refresh()
                event = _decide(change, catalog, condition)
                if event is None:
                    return Commit(catalog, None)
                stamp = Stamp(
                    generation=catalog.generation + 1,
                    id=uuid.uuid4().hex,
                    time=self._now(),
                    actor=actor or self._actor,
                )
                if self._append(Entry(stamp=stamp, event=event)):
                    return Commit(self._catalog, event)
                if time.monotonic() > deadline:
                    raise StoreUnavailable(
                        f"The task store {self.url} is so busy that nothing could be added for "
                        f"{_PATIENCE_SECONDS:.0f} seconds: try again."
                    )
                # Random, so that writers who collided do not collide again in step.
                time.sleep(random.uniform(0, pause))
                pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    def _append(self, entry: Entry) -> bool:
        """Write one entry as its generation, or False when another writer took it."""
        path, data = log_path(entry.generation), entry.to_json()
        self._check_conditional_writes(entry.generation - 1)
        if not self._objects.create(path, data):
            landed = self._objects.get(path)
            if landed is None and not self._objects.remote:
                # Taken by something unreadable, such as a folder of that name: step over it. On
                # a bucket this may be another writer about to finish, whom we must not overtake.
                self._adopt([(entry.generation, None)])
            if landed != data:
                return False
            # Our own: the answer to a first attempt was lost, and obstore tried again.
        self._adopt([(entry.generation, data)])
        self._check_conditional_writes(entry.generation)
        if entry.generation % self._checkpoint_every == 0:
            self._write_checkpoint()
        return True

    def _check_conditional_writes(self, generation: int) -> None:
        """Refuse to write where `create if absent` is ignored: racing publishes would be lost.

        Tried once per store, by creating an entry that exists, with the bytes it has.
        """
        if self._conditional_writes_checked or generation < 1:
            return
        path = log_path(generation)
        data = self._objects.get(path)
        if data is None:
            return
        if self._objects.create(path, data):
            raise StoreUnavailable(
                f"The task store {self.url} replaces what it was asked to create only if absent, "
                f"so that two writers could overwrite each other: use an object store with "
                f"conditional writes."
            )
        self._conditional_writes_checked = True

    def _note_damage(self, path: str, reason: str) -> None:
        self._skipped[path] = Damage(path, reason)

    def _write_checkpoint(self) -> None:
        """Best effort: the log alone is the truth, and the next writer to cross tries again."""
        path = checkpoint_path(self._catalog.generation)
        try:
            self._objects.put(path, dump_checkpoint(self._catalog))
        except StoreUnavailable as error:
            self._note_damage(path, f"checkpoint not written: {error}")


def _decide(change: Change, catalog: Catalog, condition: Condition | None) -> Event | None:
    if condition is not None:
        condition(catalog)
    return change.plan(catalog)


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container may run as a number that no user database knows.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
