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

from task_store import backup, maintenance
from task_store.backup import CopyReport
from task_store.bundle import TaskBundle, digest_of, read_file
from task_store.bundle_cache import BundleCache
from task_store.catalog import Catalog, Damage, dump_checkpoint, load_checkpoint
from task_store.changes import Accept, Change, Collect, Condition, Publish, Upkeep
from task_store.corrections import Correction, CorrectionRecord, Corrections
from task_store.errors import CorruptStore, StoreUnavailable, UnknownVersion, UnsupportedFormat
from task_store.events import Collected, Entry, Event, Published, Stamp
from task_store.heartbeats import Heartbeats
from task_store.layout import CHECKPOINTS, LOG, checkpoint_path, log_path
from task_store.limits import DEFAULT_LIMITS, Limits
from task_store.log import replay, without_gaps
from task_store.maintenance import GarbageReport, Verification
from task_store.names import DEFAULT_LABEL
from task_store.objects import Objects, open_objects

Clock = Callable[[], datetime]

# A writer that keeps losing gives up after this; every loss is another writer's success.
_PATIENCE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 0.05
_HISTORY_CHUNK = 64


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
        self._checkpoint_overdue = False
        self._catalog = self._open()

    @property
    def url(self) -> str:
        return self._objects.url

    # Opening

    def _open(self) -> Catalog:
        """Newest readable checkpoint, then every later entry of the log."""
        self._catalog = self._newest_checkpoint()
        after = log_path(self._catalog.generation)
        listed = map(int, self._objects.named(LOG, after=after))
        generations, strays = without_gaps(self._catalog.generation, listed)
        self._note_damages(strays)
        # As after an upgrade from a release whose checkpoints are not read: let it be the last
        # time that so much is read.
        self._checkpoint_overdue = len(generations) >= self._checkpoint_every
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
        path = self._catalog.blob_path(digest)
        cached = None if self._cache is None else self._cache.get(digest)
        if cached is not None:
            return cached
        data = self._objects.get(path)
        if data is None:
            catalog = self.refresh()
            if catalog.blob_path(digest) != path:
                # Given up and published again since we last looked.
                return self.read_bytes(digest)
            if digest in catalog.by_digest:
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
        """The newest changes first, of all tasks, or of one, which tells its newest thousand."""
        catalog = self.refresh()
        generations: Sequence[int] = range(1, catalog.generation + 1)
        if task is not None:
            info = catalog.all_tasks.get(task)
            generations = () if info is None else info.changes
        entries: list[Entry] = []
        while generations and len(entries) < limit:
            chunk = generations[-min(_HISTORY_CHUNK, limit - len(entries)) :]
            entries += self._read_entries(chunk[::-1])
            generations = generations[: -len(chunk)]
        return entries

    def _read_entries(self, generations: Sequence[int]) -> list[Entry]:
        entries: list[Entry] = []
        datas = self._objects.get_many([log_path(g) for g in generations])
        for generation, data in zip(generations, datas, strict=True):
            # What is damaged was passed over when the catalog was made, and is here too.
            with contextlib.suppress(ValueError):
                if data is not None:
                    entries.append(Entry.from_json(data, generation))
        return entries

    # Looking after

    def find_damage(self) -> list[Damage]:
        """Everything in the store that should not be there or is missing, by path.

        One listing, no reading: `verify` reads every byte.
        """
        with self._lock:
            catalog = self.refresh()
            skipped = dict(self._skipped)
        return maintenance.find_damage(self._objects, catalog, skipped)

    def verify(self) -> Verification:
        """Read every byte: the log and its chain, bundles and checkpoints."""
        damages = self.find_damage()
        return maintenance.verify(self._objects, self._catalog, self._limits, damages)

    def accept(self, damages: Iterable[Damage], *, actor: str | None = None) -> list[Damage]:
        """Vouch for log entries that only lack the name of the one before; what else is damaged."""
        found = list(damages)
        catalog = self.commit(
            Accept([damage.unlinked for damage in found if damage.unlinked]), actor=actor
        ).catalog
        return catalog.not_accepted(found)

    def collect_garbage(
        self, grace: timedelta = timedelta(hours=24), *, dry_run: bool = False
    ) -> GarbageReport:
        """Delete bundles that nothing published, staging files, old checkpoints and heartbeats.

        Only what is older than `grace`, by the store's clock, goes; retired versions can be
        restored and keep theirs. CorruptStore while the log is damaged: an entry that cannot be
        read may be the one that published a bundle.
        """
        log = replay(self._objects, self.refresh().generation)
        self._refuse_damaged_log(log.damages)
        before = self._objects.now() - grace
        return maintenance.collect_garbage(
            self._objects, log.catalog, self._give_up, before=before, dry_run=dry_run
        )

    def copy_to(self, target: "TaskStore") -> CopyReport:
        """Bring another store, empty or an earlier copy, to this one's generation of now.

        Conflict if the other has changes that this one has not.
        """
        catalog = self.refresh()
        return backup.copy(self._objects, catalog, target._objects, target.refresh())

    def _refuse_damaged_log(self, found: Iterable[Damage] = ()) -> None:
        """CorruptStore if anything is wrong with the log, as far as we have seen or just found."""
        paths = {damage.path for damage in found}
        paths |= {path for path in self._skipped if LOG.holds(path)}
        if paths:
            shown = ", ".join(sorted(paths)[:10]) + (", …" if len(paths) > 10 else "")
            raise CorruptStore(
                f"The log of {self.url} is damaged, and what a damaged entry published would look "
                f"like garbage: nothing is deleted until it is repaired ({shown}).",
                names=sorted(paths),
            )

    def _give_up(self, blobs: Mapping[str, int]) -> tuple[str, ...]:
        """Say in the log that these bundles are garbage; those that are, and may be deleted."""
        event = self.commit(Collect(blobs), condition=lambda _: self._refuse_damaged_log()).event
        return event.digests if isinstance(event, Collected) else ()

    # Committing

    def commit(
        self,
        change: Change | Upkeep,
        *,
        actor: str | None = None,
        condition: Condition | None = None,
    ) -> Commit:
        """Decide a change on the newest catalog and append it to the log.

        `condition` raises to refuse; it sees the very catalog the change is decided on, also when
        another writer came first and it is decided again. Everything is checked before anything is
        written. Safe to repeat after StoreUnavailable.
        """
        if not isinstance(change, Publish):
            return self._commit(change, actor, condition)
        change.bundle.check(self._limits)
        # Refusals first, so that a refused bundle leaves no trace, not even a blob.
        catalog = self.refresh()
        _decide(change, catalog, condition)
        # Outside the lock: a large bundle takes a while, and others read on meanwhile.
        written = self._write_blob(change.bundle, catalog)
        commit = self._commit(change, actor, condition, written)
        if self._cache is not None:
            self._cache.put(change.bundle.digest, change.bundle.to_bytes())
        version = commit.catalog.task(change.task).live_with(change.bundle.digest)
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

    def _write_blob(self, bundle: TaskBundle, catalog: Catalog) -> str:
        """Have the bundle whole where this catalog expects it; the path.

        Written anew when no version has it, so that it is young: a collection then leaves it
        alone, which saves writing it twice.
        """
        path, data = catalog.blob_path(bundle.digest), bundle.to_bytes()
        info = self._objects.stat(path) if bundle.digest in catalog.by_digest else None
        if info is None or info.size != len(data):
            self._objects.put(path, data)
        return path

    # The log

    def _adopt(self, raw: Iterable[tuple[int, bytes | None]]) -> Catalog:
        """Fold raw entries, in order, into the catalog we show."""
        self._catalog, damages = self._catalog.read(raw)
        self._note_damages(damages)
        left = self._catalog.not_accepted(self._skipped.values())
        self._skipped = {damage.path: damage for damage in left}
        return self._catalog

    def _commit(
        self,
        change: Change | Upkeep,
        actor: str | None,
        condition: Condition | None,
        written: str | None = None,
    ) -> Commit:
        """Append what the change comes to on the newest catalog.

        `written` is where the bundle of a publish was put. The entry is appended only right after
        a catalog that expects the bundle there: a collection in between moves it.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        pause = 0.001
        with self._lock:
            while True:
                catalog = self.refresh()
                event = _decide(change, catalog, condition)
                if event is None:
                    return Commit(catalog, None)
                if isinstance(change, Publish):
                    expected = catalog.blob_path(change.bundle.digest)
                    if expected != written:
                        written = self._write_blob(change.bundle, catalog)
                stamp = Stamp(
                    generation=catalog.generation + 1,
                    id=uuid.uuid4().hex,
                    time=self._now(),
                    actor=actor or self._actor,
                    previous=catalog.head,
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
        self._refuse_lost_log(entry.generation - 1)
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
        if self._checkpoint_overdue or entry.generation % self._checkpoint_every == 0:
            self._write_checkpoint()
        return True

    def _refuse_lost_log(self, generation: int) -> None:
        """StoreUnavailable where the log was and is not, as under a disk that is not mounted."""
        missing = generation > 0 and self._objects.stat(log_path(generation)) is None
        if missing and not self._objects.named(LOG):
            raise StoreUnavailable(
                f"The task store {self.url} is empty, and had {generation} changes: is a disk not "
                f"mounted?"
            )

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

    def _note_damages(self, damages: Iterable[Damage]) -> None:
        """The first that is found is the cause of those that follow from it."""
        for damage in damages:
            self._skipped.setdefault(damage.path, damage)

    def _note_damage(self, path: str, reason: str) -> None:
        self._skipped[path] = Damage(path, reason)

    def _write_checkpoint(self) -> None:
        """Best effort: the log alone is the truth, and the next writer to cross tries again."""
        path = checkpoint_path(self._catalog.generation)
        self._checkpoint_overdue = False
        try:
            self._objects.put(path, dump_checkpoint(self._catalog))
        except StoreUnavailable as error:
            self._note_damage(path, f"checkpoint not written: {error}")


def _decide(change: Change | Upkeep, catalog: Catalog, condition: Condition | None) -> Event | None:
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
