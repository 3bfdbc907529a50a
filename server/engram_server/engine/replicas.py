"""The replicas of one store: writes this server's heartbeat and reads those of the others.

Each replica writes a heartbeat every few seconds, and at once when it serves a new generation. A
replica that misses several heartbeats counts as gone. Ages are measured on the store's clock, using
this server's own heartbeat, whose age is known.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from engram_bundle import TaskStoreError
from engram_store import Heartbeat, Heartbeats

from engram_server.engine.observer import HEARTBEAT_AGE, EngineObserver

# A replica that misses this many heartbeats is gone.
MISSED: Final = 3
# The longest interval allowed; older heartbeats are not read.
LONGEST_INTERVAL_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0

_log = logging.getLogger("engram.replicas")


@dataclass(frozen=True, slots=True)
class Replica:
    """A server of this store, as described by its last heartbeat."""

    beat: Heartbeat
    age_seconds: float
    me: bool


class Replicas:
    """The replicas of a store. Thread-safe; every method but `wake` may block."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        describe: Callable[[], Heartbeat],
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeats = heartbeats
        self._describe = describe  # the present heartbeat of this server
        self._observer = observer
        self._clock = clock
        self._beating = threading.Lock()
        self._beat_at: float | None = None  # when our heartbeat was written; None: unknown
        self._written_at: float | None = None  # the last known value of that
        self._outage = 0.0  # length of the last long outage
        self._outage_forgiven_until = 0.0
        self._failing = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._heart: threading.Thread | None = None

    def start(self) -> None:
        self._heart = threading.Thread(target=self._run, name="engram-heart", daemon=True)
        self._heart.start()

    @property
    def alive(self) -> bool:
        return self._heart is None or self._stopping.is_set() or self._heart.is_alive()

    def wake(self) -> None:
        """Write the next heartbeat now, because the generation has changed."""
        self._wake.set()

    def stop(self) -> None:
        """Stop, and remove the heartbeat so that other replicas do not wait for this one."""
        self._stopping.set()
        self._wake.set()
        if self._heart is not None:
            self._heart.join(_STOP_SECONDS)

    def beat(self) -> bool:
        """Write the heartbeat now. Returns False if the store cannot be written."""
        with self._beating:
            beat = self._describe()
            try:
                self._heartbeats.write(beat)
            except TaskStoreError as error:
                self._beat_at = None  # it may have been written nevertheless
                if not self._failing:
                    _log.warning("cannot write heartbeat: %s", error)
                self._failing = True
                return False
            # Measured after the write: other replicas may seem a little too young, never too old,
            # so no live replica is missed.
            now = self._clock()
            pause = 0.0 if self._written_at is None else now - self._written_at
            if pause > MISSED * beat.interval:
                self._outage, self._outage_forgiven_until = pause, now + beat.interval
            self._beat_at = self._written_at = now
            self._failing = False
        self._observer.record(HEARTBEAT_AGE)
        return True

    def _try_to_beat(self) -> bool:
        try:
            return self.beat()
        except Exception:  # noqa: BLE001 - thread boundary: keep beating
            _log.exception("writing the heartbeat failed")
            return False

    def _run(self) -> None:
        written = True
        while not self._stopping.is_set():
            interval = self._describe().interval
            self._wake.wait(interval if written else min(interval, _RETRY_SECONDS))
            self._wake.clear()
            if not self._stopping.is_set():
                written = self._try_to_beat()
        try:
            self._heartbeats.remove(self._describe().id)
        except TaskStoreError as error:
            _log.warning("cannot remove heartbeat: %s", error)

    def live(self) -> list[Replica]:
        """All live replicas including this one, by id. StoreUnavailable if the store is down.

        Replicas that missed several heartbeats are left out. After an outage of the store, all get
        time to write again.
        """
        me = self._describe()
        if self._beat_at is None or self._clock() - self._beat_at > me.interval:
            self.beat()
        # Not while our heartbeat is being written: it would be younger than we assume.
        with self._beating:
            seen = {one.id: one.modified for one in self._heartbeats.listing()}
            clock, beat_at = self._clock(), self._beat_at
        if me.id not in seen or beat_at is None:
            return [Replica(me, 0.0, me=True)]  # without ours, the age of the others is unknown
        now = seen[me.id] + timedelta(seconds=clock - beat_at)
        ages = {id: max(0.0, (now - modified).total_seconds()) for id, modified in seen.items()}
        outage = self._outage + me.interval if clock <= self._outage_forgiven_until else 0.0
        longest = max(MISSED * LONGEST_INTERVAL_SECONDS, outage)
        near = [id for id, age in ages.items() if id != me.id and age <= longest]
        others = [
            Replica(beat, ages[beat.id], me=False)
            for beat in self._heartbeats.read(near)
            if ages[beat.id] <= max(MISSED * beat.interval, outage)
        ]
        return sorted([Replica(me, ages[me.id], me=True), *others], key=lambda each: each.beat.id)
