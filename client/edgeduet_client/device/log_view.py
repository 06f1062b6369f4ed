"""Look at a log file that another process writes and rotates."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL = 0.5


def last_lines(file: Path, count: int) -> list[str]:
    """Return the last lines of a file."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        return [line.rstrip("\n") for line in deque(stream, maxlen=count)]


def follow_file(file: Path, *, wait: Callable[[], None] = lambda: time.sleep(_POLL)) -> Iterator[str]:
    """Yield whole lines as they are appended, also over rotations.

    Args:
        wait: called while there is nothing new; what it raises ends the iteration.
    """
    stream = file.open(encoding="utf-8", errors="replace")
    stream.seek(0, 2)
    try:
        begun = ""
        while True:
            begun += stream.readline()
            if begun.endswith("\n"):
                yield begun.rstrip("\n")
                begun = ""
                continue
            wait()
            if _rotated(file, stream.fileno()):
                rest = stream.read()
                yield from (begun + rest).splitlines()
                begun = ""
                stream.close()
                stream = file.open(encoding="utf-8", errors="replace")
    finally:
        stream.close()


def _rotated(file: Path, descriptor: int) -> bool:
    import os

    try:
        return file.stat().st_ino != os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False  # between two renames of the writer
