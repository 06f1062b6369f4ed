"""Ctrl-C that stops an answer, not the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stops_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; a second one, in the same body, interrupts as always.

    The step in work ends as a step, so that the cache stays what it says it is. On the main thread only.
    """
    stop = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
