"""The task store: publish, label, retire and read tasks on any object store.

    blobs/sha256/<64 hex>           bundles, written once
    log/<20-digit generation>.json  one entry per change, created only if absent
    checkpoints/<20 digits>.json    the catalog at a generation, to open quickly
    replicas/<id>.json              who serves it, each written by its own server

A change is decided on the newest catalog, appended as the next generation, and lost to nobody:
when another writer takes that generation first, we catch up and decide again.
docs/reference/task-store.md has the whole protocol.
"""

import getpass
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from task_store import maintenance
from task_store.bundle import TaskBundle, digest_of, read_file
from task_store.bundle_cache import BundleCache
from task_store.catalog import (
    Catalog,
    NewVersion,
    Problem,
    dump_checkpoint,
    find_live,
    load_checkpoint,
    log_path,
    plan_label,
    plan_publish,
    plan_remove_label,
    plan_restore,
    plan_retire,
    plan_rollback,
)
from task_store.errors import (
    CorruptStore,
    InvalidName,
    PreconditionFailed,
    StoreUnavailable,
    UnknownVersion,
    UnsupportedFormat,
)
from task_store.events import Change, Entry, Publish, Stamp
from task_store.heartbeats import Heartbeats
from task_store.limits import DEFAULT_LIMITS, Limits
from task_store.maintenance import GarbageReport
from task_store.names import DEFAULT_LABEL, check_label, check_task_name
from task_store.objects import Objects, open_objects

Clock = Callable[[], datetime]

_LOG_NAME = re.compile(r"log/(\d{20})\.json")
_CHECKPOINT_NAME = re.compile(r"checkpoints/(\d{20})\.json")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# A writer that keeps losing gives up after this; every loss is another writer's success.
_PATIENCE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 0.05
_HISTORY_CHUNK = 64
# More entries than this are not missing by accident: what follows is not ours.
_WIDEST_GAP = 1000


@dataclass(frozen=True, slots=True)
class Published:
    """Outcome of a publish; `created` is False when the task had these bytes already."""

    task: str
    version: int
    digest: str
    generation: int
    created: bool


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
        self._cache = cache
        self._actor = actor or _default_actor()
        self._limits = limits
        self._checkpoint_every = checkpoint_every
        self._clock = clock
        self._lock = threading.RLock()
        self._conditions_checked = not objects.remote
        self._skipped: dict[str, Problem] = {}
        self._catalog = self._open()

    @property
    def url(self) -> str:
        """Where the store is."""
        return self._objects.url

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
        found = digest_of(data)
        if found != digest:
            raise CorruptStore(
                f"The file of bundle {digest} in {self.url} has the digest {found}: it was "
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
        found: list[Entry] = []
        newest = self.refresh().generation
        while newest > 0 and len(found) < limit:
            generations = range(newest, max(newest - _HISTORY_CHUNK, 0), -1)
            datas = self._objects.get_many([log_path(g) for g in generations])
            for generation, data in zip(generations, datas, strict=True):
                entry = None if data is None else _readable(data, generation)
                if entry is not None and task in (None, entry.change.task):
                    found.append(entry)
            newest -= _HISTORY_CHUNK
        return found[:limit]

    def problems(self) -> list[Problem]:
        """Everything in the store that should not be there or is missing, by path."""
        with self._lock:
            catalog = self.refresh()
            skipped = dict(self._skipped)
        return maintenance.find_problems(self._objects, catalog, skipped)

    # Writing

    def publish(
        self,
        task: str,
        bundle: TaskBundle | bytes | str | Path,
        *,
        labels: Sequence[str] = (DEFAULT_LABEL,),
        actor: str | None = None,
        only_if_absent: bool = False,
        expected_generation: int | None = None,
    ) -> Published:
        """Store a bundle as the next version of a task and point `labels` to it.

        Everything is checked before anything is written. The first live version of a task gets
        `default` as well. When the task has a live version with the very same bytes, no version is
        made; labels that point elsewhere still move to it. Safe to repeat after StoreUnavailable.
        """
        check_task_name(task)
        wanted = tuple(dict.fromkeys(check_label(label) for label in labels))
        data = _file_bytes(bundle, self._limits)
        checked = TaskBundle.from_bytes(data, self._limits)
        new = _facts(checked)

        def plan(catalog: Catalog) -> Change | None:
            return plan_publish(catalog, task, new, wanted, only_if_absent=only_if_absent)

        # Rejections first, so that a refused bundle leaves no trace, not even a blob.
        catalog = self.refresh()
        _expect(catalog, expected_generation)
        plan(catalog)
        self._ensure_blob(catalog, new.digest, data)
        catalog, change = self._commit(plan, actor, expected_generation)
        # A garbage collection that began before our blob was fresh may have taken it meanwhile.
        if self._objects.stat(blob_path(new.digest)) is None:
            self._objects.put(blob_path(new.digest), data)
        if self._cache is not None:
            self._cache.put(new.digest, data)
        found = find_live(catalog.task(task), new.digest)
        assert found is not None, "the change just made is in the catalog"
        return Published(
            task, found.version, new.digest, catalog.generation, isinstance(change, Publish)
        )

    # Each change below is made only on `expected_generation`, if one is given.

    def label(
        self,
        task: str,
        label: str,
        version: int,
        *,
        actor: str | None = None,
        expected_generation: int | None = None,
    ) -> Catalog:
        """Point a label to a version."""
        check_label(label)
        return self._commit(
            lambda c: plan_label(c, task, label, version), actor, expected_generation
        )[0]

    def remove_label(
        self,
        task: str,
        label: str,
        *,
        actor: str | None = None,
        expected_generation: int | None = None,
    ) -> Catalog:
        """Take a label other than `default` away."""
        return self._commit(
            lambda c: plan_remove_label(c, task, label), actor, expected_generation
        )[0]

    def rollback(
        self,
        task: str,
        label: str = DEFAULT_LABEL,
        *,
        actor: str | None = None,
        expected_generation: int | None = None,
    ) -> Catalog:
        """Undo the last move of a label; twice goes two back."""
        return self._commit(lambda c: plan_rollback(c, task, label), actor, expected_generation)[0]

    def retire(
        self,
        task: str,
        version: int | None = None,
        *,
        actor: str | None = None,
        expected_generation: int | None = None,
    ) -> Catalog:
        """Take a version, or the whole task, out of the catalog; its bundles are kept."""
        return self._commit(lambda c: plan_retire(c, task, version), actor, expected_generation)[0]

    def restore(
        self,
        task: str,
        version: int | None = None,
        *,
        actor: str | None = None,
        expected_generation: int | None = None,
    ) -> Catalog:
        """Bring back a version, or what the last retirement of the whole task took."""
        return self._commit(lambda c: plan_restore(c, task, version), actor, expected_generation)[0]

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

    def _open(self) -> Catalog:
        """Newest readable checkpoint, then every later entry of the log."""
        catalog = self._newest_checkpoint()
        self._catalog = catalog
        after = log_path(catalog.generation)
        listed = [_LOG_NAME.fullmatch(o.path) for o in self._objects.listing("log", after=after)]
        generations = self._without_gaps([int(match[1]) for match in listed if match])
        datas = self._objects.get_many([log_path(g) for g in generations])
        return self._adopt(zip(generations, datas, strict=True))

    def _without_gaps(self, listed: list[int]) -> list[int]:
        """The generations to read: those listed and those the listing may have missed.

        A folder that is written to while it is listed may show an entry and not the one before
        it, so what seems missing is asked for by name. But a stray file with an enormous number
        must neither cost a million questions nor push the generation to the end of its digits.
        """
        generations: list[int] = []
        newest = self._catalog.generation
        for generation in listed:
            path = log_path(generation)
            if generation - newest > _WIDEST_GAP:
                self._skipped[path] = Problem(path, "far beyond the end of the log, ignored")
                continue
            generations.extend(range(newest + 1, generation + 1))
            newest = generation
        return generations

    def _newest_checkpoint(self) -> Catalog:
        listed = [_CHECKPOINT_NAME.fullmatch(o.path) for o in self._objects.listing("checkpoints")]
        for generation in sorted((int(m[1]) for m in listed if m), reverse=True):
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
                self._skipped[path] = Problem(path, f"damaged checkpoint: {error}")
        return Catalog()

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
                path = log_path(generation)
                self._skipped[path] = Problem(path, f"damaged log entry, passed over: {error}")
        catalog, problems = self._catalog.apply(entries)
        self._skipped.update({problem.path: problem for problem in problems})
        self._catalog = catalog.skip_to(newest)
        return self._catalog

    def _commit(
        self,
        plan: Callable[[Catalog], Change | None],
        actor: str | None,
        expected_generation: int | None = None,
    ) -> tuple[Catalog, Change | None]:
        """Append what `plan` decides on the newest state; the new catalog and the change."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        pause = 0.001
        with self._lock:
            while True:
                catalog = self.refresh()
                _expect(catalog, expected_generation)
                change = plan(catalog)
                if change is None:
                    return catalog, None
                entry = self._stamped(change, catalog.generation + 1, actor)
                if self._append(entry):
                    return self._catalog, change
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
        self._check_conditions(entry.generation - 1)
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
        self._check_conditions(entry.generation)
        if entry.generation % self._checkpoint_every == 0:
            self._write_checkpoint()
        return True

    def _check_conditions(self, generation: int) -> None:
        """Refuse to write where `create if absent` is ignored: racing publishes would be lost.

        Asked once per store, by creating an entry that exists, with the bytes it has.
        """
        if self._conditions_checked or generation < 1:
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
        self._conditions_checked = True

    def _write_checkpoint(self) -> None:
        """Best effort: the log alone is the truth, and the next writer to cross tries again."""
        path = checkpoint_path(self._catalog.generation)
        try:
            self._objects.put(path, dump_checkpoint(self._catalog))
        except StoreUnavailable as error:
            self._skipped[path] = Problem(path, f"checkpoint not written: {error}")

    def _stamped(self, change: Change, generation: int, actor: str | None) -> Entry:
        now = self._clock().astimezone(UTC).isoformat(timespec="milliseconds")
        stamp = Stamp(
            generation=generation,
            id=uuid.uuid4().hex,
            time=now.replace("+00:00", "Z"),
            actor=actor or self._actor,
        )
        return Entry(stamp=stamp, change=change)

    def _ensure_blob(self, catalog: Catalog, digest: str, data: bytes) -> None:
        """Make sure the bundle's file is there, whole and, if nothing refers to it yet, young."""
        path = blob_path(digest)
        if digest in catalog.by_digest:
            info = self._objects.stat(path)
            if info is not None and info.size == len(data):
                return
        self._objects.put(path, data)


def blob_path(digest: str) -> str:
    """Where a bundle is kept."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidName(
            f"'{digest[:80]}' is no digest: write 'sha256:' and 64 hexadecimal digits.",
            names=[digest],
        )
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def checkpoint_path(generation: int) -> str:
    """Where the catalog at a generation is kept."""
    return f"checkpoints/{generation:020d}.json"


def _file_bytes(bundle: TaskBundle | bytes | str | Path, limits: Limits) -> bytes:
    if isinstance(bundle, TaskBundle):
        return bundle.to_bytes()
    return bytes(bundle) if isinstance(bundle, bytes) else read_file(bundle, limits)


def _facts(bundle: TaskBundle) -> NewVersion:
    return NewVersion(
        digest=bundle.digest,
        size=bundle.size_bytes,
        extends=bundle.extends,
        problem=bundle.problem,
        classes=bundle.classes,
        memory_tokens=bundle.memory_tokens,
        description=bundle.manifest.description,
        backbone=bundle.manifest.backbone.name,
        fingerprint=bundle.backbone_fingerprint,
    )


def _expect(catalog: Catalog, generation: int | None) -> None:
    if generation is not None and catalog.generation != generation:
        raise PreconditionFailed(
            f"The catalog is at generation {catalog.generation}, not at the expected "
            f"{generation}: look at what changed and try again."
        )


def _readable(data: bytes, generation: int) -> Entry | None:
    try:
        return Entry.from_json(data, generation)
    except ValueError:
        return None


def _default_actor() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container may run as a number that no user database knows.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
