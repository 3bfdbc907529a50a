"""The memory of images while they are decoded: counted before it is taken, whoever decodes.

A photo of a few hundred kilobytes may be hundreds of megabytes when it is decoded. An image waits
until there is room for it beside those being decoded now; one larger than all the room is refused.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from server.engine.observer import EngineObserver
from server.errors import DeadlineExceeded, ImageTooLarge


class DecodingMemory:
    """So many bytes for all decoding threads together."""

    def __init__(self, capacity_bytes: int, observer: EngineObserver) -> None:
        self._capacity = capacity_bytes
        self._observer = observer
        self._used = 0
        self._freed = threading.Condition()
        # Held while waiting: whoever came first goes first, or many small images would keep a
        # large one waiting for ever.
        self._turn = threading.Lock()

    @contextmanager
    def reserved(self, nbytes: int, deadline: float | None) -> Iterator[None]:
        """Room for one image, when there is some. Blocks, until the deadline at most."""
        if nbytes > self._capacity:
            raise ImageTooLarge(
                f"The image takes {nbytes} bytes while it is decoded, and at most "
                f"{self._capacity} are allowed: send it smaller, or in another format."
            )
        with self._turn, self._freed:
            left = None if deadline is None else deadline - time.monotonic()
            if not self._freed.wait_for(lambda: self._used + nbytes <= self._capacity, left):
                raise DeadlineExceeded("the deadline passed while the image waited to be decoded")
            self._note(nbytes)
        try:
            yield
        finally:
            with self._freed:
                self._note(-nbytes)
                self._freed.notify_all()

    def _note(self, nbytes: int) -> None:
        self._used += nbytes
        self._observer.decoding_bytes(self._used)
