"""Ctrl-C that lets a run finish its step: the first asks it to stop, the second stops it."""

import signal
import threading
from types import FrameType


class Interruption:
    """While open, the first SIGINT sets `requested`; the next one interrupts as usual.

    Signals belong to the main thread; in any other this does nothing.
    """

    def __init__(self) -> None:
        self._requested = False
        self._installed = False

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Interruption":
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
