"""One supervisor per home folder, and what it last noted about itself, for ``status`` and ``stop``."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from edgeduet_shared.atomic_files import atomic_write_json
from edgeduet_shared.errors import ConfigError, EdgeDuetError
from edgeduet_shared.supervision.child import end_family

log = logging.getLogger("edgeduet.supervision")


@dataclass
class RunningState:
    """Lock and state file of one kind of supervisor in one home.

    Attributes:
        kind: "server" or "device": names files and command.
    """

    home: Path
    kind: str
    _unwritten: bool = field(default=False, init=False, repr=False)

    @property
    def path(self) -> Path:
        """The state file; it is there while a supervisor runs, and after one was killed."""
        return self.home / f"{self.kind}.state.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Be the one supervisor of the home.

        Raises:
            ConfigError: there is another.
        """
        lock = FileLock(self._lock_file(), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ConfigError(
                f"a {self.kind} is running in {self.home} already; see `{self._command()} status {self.home}`"
            ) from None
        try:
            # What a killed one noted is not how things stand now; which programs it left is still needed.
            if self.path.exists():
                os.replace(self.path, self._leftovers)
            for half_written in self.home.glob(f".{self.path.name}.*.tmp"):
                half_written.unlink()
            yield
        finally:
            self.path.unlink(missing_ok=True)
            lock.release()

    def end_leftovers(self) -> None:
        """End the programs that a supervisor left running when it was killed; only for who holds the home."""
        try:
            programs = json.loads(self._leftovers.read_text("utf-8"))["programs"].values()
            left = [(facts["pid"], facts["created"]) for facts in programs if facts["pid"] is not None]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s: what an earlier one left running is not known (%s)", self._leftovers, error)
            left = []
        for pid, created in left:
            try:
                same = psutil.Process(pid).create_time() == created
            except psutil.NoSuchProcess:
                continue
            if same:
                log.warning("ending process %d, left by a %s that was killed", pid, self.kind)
                end_family(pid)
        self._leftovers.unlink(missing_ok=True)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Write down how things stand; while the disk is full, what was noted before stays, and the log says so."""
        try:
            atomic_write_json(self.path, {"pid": os.getpid(), **facts})
            self._unwritten = False
        except EdgeDuetError as error:
            if not self._unwritten:
                log.error("%s; status shows how things stood before", error)
            self._unwritten = True

    def read(self) -> dict[str, Any] | None:
        """Return what the running supervisor last noted, or ``None`` where none runs."""
        try:
            state: dict[str, Any] = json.loads(self.path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            raise ConfigError(f"{self.path} is damaged; remove it if no {self.kind} runs in {self.home}") from None
        # The lock is what a running supervisor holds: a pid alone may be another program's by now.
        try:
            with FileLock(self._lock_file(), timeout=0):
                return None
        except Timeout:
            return state

    def stop(self, *, limit: float = 60.0) -> bool:
        """Tell the running supervisor to end and wait for it; return whether there was one.

        Raises:
            ConfigError: it did not end in time.
        """
        state = self.read()
        if state is None:
            return False
        process = psutil.Process(state["pid"])
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=limit)
        except psutil.TimeoutExpired:
            raise ConfigError(
                f"the {self.kind} of {self.home} (pid {state['pid']}) did not end within {limit:.0f} s"
            ) from None
        return True

    def _command(self) -> str:
        return "edgeduet-server" if self.kind == "server" else "edgeduet-client"

    @property
    def _leftovers(self) -> Path:
        return self.home / f".{self.kind}.leftovers.json"

    def _lock_file(self) -> Path:
        return self.home / f".{self.kind}.lock"
