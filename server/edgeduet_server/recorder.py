"""What happened in a run, one JSON event per line.

The file is append-only. A checkpoint notes how long it was; resuming cuts the file back to that length,
so that the events of rounds that are run again appear once, and a line torn by a crash disappears.
Wall-clock figures stand under the key ``timing`` and nowhere else: without them, an interrupted and
resumed run leaves the same file as an uninterrupted one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edgeduet_shared.atomic_files import write_failure
from edgeduet_shared.errors import StateError

log = logging.getLogger("edgeduet.server")

Listener = Callable[[Mapping[str, Any]], None]


@runtime_checkable
class RewindingListener(Protocol):
    """A listener that keeps events and must follow when the file is cut back."""

    def rewind(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Hold ``events``, which are all that are left, and no others."""
        ...


class Recorder(Protocol):
    """Takes the events of a run and can go back to where a checkpoint was made."""

    def record(self, event: str, **fields: Any) -> None:
        """Note ``event`` with JSON ``fields``."""
        ...

    def position(self) -> int:
        """Make all events so far durable; return where they end."""
        ...

    def rewind(self, position: int) -> None:
        """Drop all events after ``position``."""
        ...


class JsonlRecorder:
    """Appends events to a JSON-lines file, and shows each to the listeners.

    Raises:
        EdgeDuetError: the file cannot be written (disk full, no permission).
    """

    def __init__(self, path: Path, listeners: Sequence[Listener] = ()) -> None:
        self.path = Path(path)
        self._listeners = tuple(listeners)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")
        except OSError as error:
            raise write_failure(self.path, error) from error

    def record(self, event: str, **fields: Any) -> None:
        """Append one line and flush it; NaN and infinities are errors (write None instead)."""
        entry = {"event": event, **fields}
        line = json.dumps(entry, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
        try:
            self._file.write(line.encode("utf-8"))
            self._file.flush()
        except OSError as error:
            raise write_failure(self.path, error) from error
        for listener in self._listeners:
            listener(entry)

    def position(self) -> int:
        """Flush the file to the disk; return its length in bytes."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failure(self.path, error) from error
        return os.fstat(self._file.fileno()).st_size

    def rewind(self, position: int) -> None:
        """Cut the file to ``position`` bytes.

        Raises:
            StateError: the file is shorter than the checkpoint says; events have been lost.
        """
        length = os.fstat(self._file.fileno()).st_size
        if length < position:
            raise StateError(
                f"{self.path}: has {length} bytes, but the checkpoint was made at {position}; "
                "put the file of that run back, or start again in a new folder"
            )
        self._file.truncate(position)
        self._file.seek(position)
        followers: tuple[object, ...] = self._listeners
        for follower in followers:
            if isinstance(follower, RewindingListener):
                follower.rewind(read_events(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a JSON-lines file; a torn last line (crash while writing) is left out and logged.

    Raises:
        StateError: a line that is not the last is not JSON.
    """
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):
                log.warning("%s: the last line is torn and left out", path)
                return
            raise StateError(f"{path}: line {number} is not a JSON event ({error})") from error
