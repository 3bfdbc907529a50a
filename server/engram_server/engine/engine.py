"""The engine: one backbone with its workers, its tasks and four services.

engine.predictions    resolve task references and run predictions
engine.tasks          read, change, load and unload tasks
engine.teaching       teach tasks from examples, and keep corrections
engine.rollouts       compare versions on traffic, score feedback, promote
"""

import logging
import math
import socket
import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial

import torch
from engram_store import (
    Catalog,
    Conflict,
    CorrectionLimits,
    Heartbeat,
    PreconditionFailed,
    RollBack,
    TaskStore,
    replica_id,
)

from engram_server.engine.context_cache import ContextCache
from engram_server.engine.observer import QUEUE_IMAGES, EngineObserver
from engram_server.engine.predictions import GoldenReplay, Predictions
from engram_server.engine.queue import JobQueue
from engram_server.engine.replicas import Replicas
from engram_server.engine.rollout.rules import Rule
from engram_server.engine.rollout.service import Rollouts
from engram_server.engine.tasks.follower import StoreFollower
from engram_server.engine.tasks.loader import TaskLoader, TaskPreparer
from engram_server.engine.tasks.service import TaskService
from engram_server.engine.tasks.slots import Residency
from engram_server.engine.teaching import Teaching
from engram_server.engine.types import EngineConfig, EngineStatus, ModelInfo
from engram_server.engine.worker import Pass, Worker
from engram_server.engine.workers import Workers
from engram_server.model.backbone import Backbone
from engram_server.model.families.text_tower import TextTower
from engram_server.model.masked_pass import masked_pass

_log = logging.getLogger("engram.rollouts")

GOLDEN_CACHE_BYTES = 64 * 2**20


class Engine:
    """One backbone, its workers and its tasks. Call `start` before use and `stop` after."""

    def __init__(
        self,
        backbone: Backbone,
        store: TaskStore,
        config: EngineConfig,
        observer: EngineObserver,
        *,
        text_tower: TextTower | None = None,
        run_pass: Pass = masked_pass,  # replaced in tests
    ) -> None:
        self.config = config
        self.store_url = store.url
        self.replica_id = replica_id(socket.gethostname(), uuid.uuid4().hex[:8])
        self._created = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        # The engine keeps the placed backbones only, so that the original can be freed.
        backbones = place_backbone(backbone, config)
        self.backbone = next(iter(backbones.values()))
        self.model = ModelInfo.of(self.backbone)  # what the API may know of it

        self._queue = JobQueue(partial(observer.record, QUEUE_IMAGES))
        self.rollouts = Rollouts(
            store.evidence,
            self.replica_id,
            observer,
            rules=[Rule.parse(rule) for rule in config.rollback_rules],
            roll_back=self._roll_back,
        )
        self._workers = _make_workers(
            backbones, config, self._queue, observer, self.rollouts, run_pass
        )
        on = None if config.cache_device is None else torch.device(config.cache_device)
        self.cache = ContextCache(
            config.cache_bytes, dtype=config.cache_dtype, device=on, observer=observer
        )

        preparer = TaskPreparer(backbones, GoldenReplay(self._queue, GOLDEN_CACHE_BYTES))
        residency = Residency(config.resident_bytes, observer)
        self._loader = TaskLoader(store, preparer, residency, observer)
        self.replicas: Replicas | None = None
        if config.heartbeat_seconds is not None:
            self.replicas = Replicas(store.heartbeats, self.heartbeat, observer)
        self._follower = StoreFollower(
            store,
            self._loader,
            observer,
            poll_seconds=config.poll_seconds,
            pinned=config.pinned_tasks,
            shadow_aliases=config.shadow_aliases,
            on_served=(lambda: None) if self.replicas is None else self.replicas.wake,
            on_purged=self._forget,
            daily=partial(_delete_expired, store, config.correction_days),
        )

        self.predictions = Predictions(
            backbones,
            config,
            observer,
            queue=self._queue,
            workers=self._workers,
            cache=self.cache,
            follower=self._follower,
            loader=self._loader,
        )
        self.tasks = TaskService(store, self._follower, self._loader)
        self.teaching = Teaching(
            self.backbone,
            store,
            self.tasks,
            self.predictions,
            text_tower,
            correction_limits=CorrectionLimits(config.max_corrections, config.correction_bytes),
        )

    def start(self) -> None:
        """Warm up the workers and read the store. Blocks; raises on failure."""
        self._workers.start()
        self._follower.start()
        if self.replicas is not None:
            # Become visible to other replicas before the first request.
            if self.replicas.beat():
                # A change made before that did not wait for this replica: catch up.
                self.tasks.sync()
            self.replicas.start()
        self.rollouts.start()
        self.predictions.started = True

    def stop(self) -> None:
        self.predictions.draining = True
        if self.replicas is not None:
            self.replicas.stop()
        self._follower.stop()
        self._queue.close()
        self._workers.stop()
        self.predictions.stop()
        self.rollouts.stop()

    def _roll_back(self, task: str, version: int, reason: str) -> None:
        """Roll back a task whose newest version is the default and has broken a rule. Blocks."""

        def check(catalog: Catalog) -> None:
            info = catalog.task(task)
            if not info.aliases["default"] == version == max(info.versions):
                raise PreconditionFailed(f"Version {version} of task '{task}' was replaced.")

        try:
            self.tasks.commit(RollBack(task, note=reason), actor="rollback-rule", condition=check)
        except (Conflict, PreconditionFailed) as error:
            _log.warning("task '%s' is not rolled back (%s): %s", task, reason, error)
        else:
            _log.warning("task '%s': %s", task, reason)

    def _forget(self, digests: Collection[str], tasks: Collection[str]) -> None:
        """Drop what is in memory about purged bundles, and about their tasks."""
        self.teaching.forget(digests)
        for task in tasks:
            self.rollouts.forget(task)

    def heartbeat(self) -> Heartbeat:
        """The description of this server for other replicas."""
        return Heartbeat(
            id=self.replica_id,
            generation=self._follower.snapshot.generation,
            interval=self.config.heartbeat_seconds or math.inf,
            hostname=socket.gethostname(),
            address=self.config.address,
            process=self.config.process,
            started=self._created,
            version=self.config.version,
            backbone=self.backbone.name,
            fingerprint=self.backbone.fingerprint,
        )

    @property
    def status(self) -> EngineStatus:
        reasons = []
        if not self.predictions.started:
            reasons.append("the backbone is warming up and the task store is being read")
        if self.predictions.draining:
            reasons.append("the server is shutting down")
        follower, snapshot = self._follower, self._follower.snapshot
        return EngineStatus(
            reasons=tuple(dict.fromkeys([*reasons, *self._workers.failures, *self.broken])),
            generation=snapshot.generation,
            generation_seen=follower.generation_seen,
            seconds_since_read=follower.seconds_since_poll,
            store_error=follower.store_error,
            tasks_ready=len(snapshot.ready_names),
            versions_failed=snapshot.count_versions(self._loader.failed),
            pending_images=self.predictions.pending_images,
        )

    @property
    def queued_images(self) -> int:
        """Decoded images that wait for a worker."""
        return len(self._queue)

    @property
    def broken(self) -> tuple[str, ...]:
        """Failures that only a restart of the process fixes."""
        broken = list(self._workers.lost)
        if not self._follower.alive:
            broken.append("the thread that follows the task store has died")
        if self.replicas is not None and not self.replicas.alive:
            broken.append("the thread that writes heartbeats has died")
        return tuple(broken)


def _delete_expired(store: TaskStore, days: float | None) -> None:
    store.delete_expired()
    if days is not None:
        store.delete_old_corrections(timedelta(days=days))


def _make_workers(
    backbones: Mapping[torch.device, Backbone],
    config: EngineConfig,
    queue: JobQueue,
    observer: EngineObserver,
    rollouts: Rollouts,
    run_pass: Pass,
) -> Workers:
    makers = [
        partial(
            Worker,
            f"engram-worker-{number}",
            backbones[device_named(name)],
            queue,
            observer,
            budget_rows=config.budget_rows,
            compiled=config.compiled,
            rollouts=rollouts,
            run_pass=run_pass,
        )
        for number, name in enumerate(config.devices)
    ]
    return Workers(makers, queue, observer)


def place_backbone(backbone: Backbone, config: EngineConfig) -> dict[torch.device, Backbone]:
    """The backbone on each device of an engine."""
    devices = {device_named(name) for name in config.devices}
    return {device: _place(backbone, device, config) for device in devices}


def _place(backbone: Backbone, device: torch.device, config: EngineConfig) -> Backbone:
    """The backbone on a device, with packed matrices where that is faster."""
    placed = backbone.to(device, config.dtype)
    # torch.compile needs plain matrices.
    in_float32 = config.dtype == torch.float32 and not config.compiled
    if device.type == "cpu" and (config.int8 or in_float32):
        return placed.packed(int8=config.int8)
    return placed


def device_named(name: str) -> torch.device:
    device = torch.device(name)
    # "cuda" and "cuda:0" are the same device; tensors report the latter.
    return torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device
