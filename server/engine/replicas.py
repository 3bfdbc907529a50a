"""The servers of one store: this one says what it serves, and reads what the others say.

Each writes a heartbeat every few seconds, and at once when it serves another generation. One that
has missed several is gone: nobody waits for it any more. Ages are counted on the store's clock:
our own heartbeat is there too, and we know how long ago we wrote it.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from server.engine.observer import EngineObserver
from task_store import Heartbeat, Heartbeats, TaskStoreError

# A replica that has not written for so many of its intervals is gone.
MISSED: Final = 3
# The longest interval there may be; heartbeats so old that it cannot matter are not even read.
LONGEST_INTERVAL_SECONDS: Final = 60.0
_RETRY_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0

_log = logging.getLogger("engram.replicas")


@dataclass(frozen=True, slots=True)
class Replica:
    """A server of this store, as its last heartbeat tells it."""

    beat: Heartbeat
    age_seconds: float
    me: bool


class Replicas:
    """This server among the others. Safe to use from any thread; all but `wake` may block."""

    def __init__(
        self,
        heartbeats: Heartbeats,
        describe: Callable[[], Heartbeat],
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._heartbeats = heartbeats
        self._describe = describe  # what we serve now
        self._observer = observer
        self._clock = clock
        self._beating = threading.Lock()
        self._beat_at: float | None = None  # when our heartbeat was written; None: not known
        self._written_at: float | None = None  # when that was known last
        self._outage = 0.0  # how long it could not be written, the last time it was long
        self._outage_forgiven_until = 0.0
        self._failing = False
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._heart: threading.Thread | None = None

    # Our own

    def start(self) -> None:
        """Go on writing heartbeats, in a thread."""
        self._heart = threading.Thread(target=self._run, name="engram-heart", daemon=True)
        self._heart.start()

    @property
    def alive(self) -> bool:
        """Whether heartbeats are written, if that was begun."""
        return self._heart is None or self._stopping.is_set() or self._heart.is_alive()

    def wake(self) -> None:
        """We serve another generation: say so now."""
        self._wake.set()

    def stop(self) -> None:
        """Leave, so that nobody waits for us."""
        self._stopping.set()
        self._wake.set()
        if self._heart is not None:
            self._heart.join(_STOP_SECONDS)

    def beat(self) -> bool:
        """Write our heartbeat now. False if the store cannot be written to; it is tried again."""
        with self._beating:
            beat = self._describe()
            try:
                self._heartbeats.write(beat)
            except TaskStoreError as error:
                self._beat_at = None  # it may have been written all the same
                if not self._failing:
                    _log.warning("this replica cannot say that it is there: %s", error)
                self._failing = True
                return False
            # Counted from when it was surely written: others may seem a little too young, never
            # too old, and nobody who is there is overlooked.
            now = self._clock()
            pause = 0.0 if self._written_at is None else now - self._written_at
            if pause > MISSED * beat.interval:
                self._outage, self._outage_forgiven_until = pause, now + beat.interval
            self._beat_at = self._written_at = now
            self._failing = False
        self._observer.heartbeat_sent()
        return True

    def _try_to_beat(self) -> bool:
        try:
            return self.beat()
        except Exception:  # noqa: BLE001 - the boundary: the heart must go on
            _log.exception("writing this replica's heartbeat failed")
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
            _log.warning("this replica leaves and cannot say so: %s", error)

    # All of us

    def live(self) -> list[Replica]:
        """Every replica that is there, this one too, by id. StoreUnavailable if the store is not.

        Those that have missed several heartbeats are left out. After an outage of the store, in
        which nobody could write, all get the time to do so again.
        """
        me = self._describe()
        if self._beat_at is None or self._clock() - self._beat_at > me.interval:
            self.beat()
        # Not while ours is being written: then it would be younger than we think.
        with self._beating:
            seen = {one.id: one.modified for one in self._heartbeats.listing()}
            clock, beat_at = self._clock(), self._beat_at
        if me.id not in seen or beat_at is None:
            return [Replica(me, 0.0, me=True)]  # nothing to tell the age of the others by
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
