"""One program that the supervisor keeps running: started, watched, logged, restarted, ended with its family."""

from __future__ import annotations

import logging
import logging.handlers
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from edgeduet_shared.supervision.log_files import LogConfig

log = logging.getLogger("edgeduet.supervision")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
# A program that ran this long was healthy: the next failure is a new one.
HEALTHY_AFTER = 120.0
# Seconds a program has to end by itself.
GRACE = 15.0


@dataclass(frozen=True)
class Program:
    """What to run.

    Attributes:
        command: makes the command line, anew at every start.
        environment: of the program, whole.
    """

    name: str
    command: Callable[[], Sequence[str]]
    environment: Mapping[str, str] = field(repr=False)
    folder: Path


class Child:
    """A program under supervision. :meth:`tend` is called again and again; nothing else starts it.

    What it prints goes to ``logs/NAME.log``, rotated.
    """

    def __init__(self, program: Program, logs: Path, config: LogConfig, *, clock: Callable[[], float] = time.monotonic):
        self.program = program
        self.restarts = 0
        self.last_exit: int | None = None
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._started = 0.0
        self._pause = FIRST_PAUSE
        self._not_before = 0.0
        logs.mkdir(parents=True, exist_ok=True)
        self.log_file = logs / f"{program.name}.log"
        self._output = logging.handlers.RotatingFileHandler(
            self.log_file, maxBytes=config.max_bytes, backupCount=config.kept, encoding="utf-8"
        )
        self._output.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    @property
    def pid(self) -> int | None:
        """Of the running program, or ``None``."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return self.pid is not None

    def facts(self) -> dict[str, Any]:
        """Return what ``status`` shows of it; ``created`` tells its process from a later one of the same pid."""
        pid = self.pid
        try:
            created = None if pid is None else psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            pid = created = None
        return {"pid": pid, "created": created, "restarts": self.restarts, "last_exit": self.last_exit}

    def tend(self) -> None:
        """Start it if it does not run and its pause is over; note it if it has just ended."""
        now = self._clock()
        if self._process is not None and self._process.poll() is not None:
            self._note_end(now)
        if self._process is None and now >= self._not_before:
            self._start(now)

    def restart(self, why: str) -> None:
        """End it now; :meth:`tend` starts it again."""
        log.warning("%s is restarted: %s", self.program.name, why)
        self.end()
        self._not_before = 0.0
        self.restarts += 1

    def end(self) -> None:
        """End it and everything it started, politely first."""
        process, self._process = self._process, None
        if process is None:
            return
        end_family(process.pid)
        process.wait()
        if self._reader is not None:
            self._reader.join(timeout=GRACE)

    def last_lines(self, count: int = 1) -> str:
        """Return the end of its log, on one line."""
        if not self.log_file.is_file():
            return ""
        lines = self.log_file.read_text("utf-8", errors="replace").splitlines()[-count:]
        return " | ".join(line.strip() for line in lines)

    def _start(self, now: float) -> None:
        try:
            self._process = subprocess.Popen(
                list(self.program.command()),
                cwd=self.program.folder,
                env=dict(self.program.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.error("%s cannot be started: %s", self.program.name, error)
            self._back_off(now)
            return
        self._started = now
        self._reader = threading.Thread(target=self._copy_output, args=(self._process,), daemon=True)
        self._reader.start()
        log.info("%s started, pid %d", self.program.name, self._process.pid)

    def _note_end(self, now: float) -> None:
        assert self._process is not None
        self.last_exit = self._process.returncode
        # What it left behind would hold its port.
        end_family(self._process.pid)
        if self._reader is not None:
            self._reader.join(timeout=1.0)
        log.error("%s ended with exit code %s: %s", self.program.name, self.last_exit, self.last_lines())
        self._process = None
        self.restarts += 1
        if now - self._started > HEALTHY_AFTER:
            self._pause = FIRST_PAUSE
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._not_before = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _copy_output(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode("utf-8", errors="replace").rstrip("\n")
            record = logging.LogRecord(self.program.name, logging.INFO, "", 0, "%s", (_printable(text),), None)
            self._output.emit(record)


def end_family(pid: int) -> None:
    """End a process, and every process it started, politely first; also those it left when it died."""
    family = _family(pid)
    for member in family:
        _signal(member, "terminate")
    _, alive = psutil.wait_procs(family, timeout=GRACE)
    for member in alive:
        _signal(member, "kill")
    psutil.wait_procs(alive, timeout=GRACE)


def _family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; for one that has died, the members of the session it led."""
    try:
        leader = psutil.Process(pid)
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [process for process in psutil.process_iter() if _session(process.pid) == pid]


def _session(pid: int) -> int | None:
    import os

    try:
        return os.getsid(pid)
    except OSError:
        return None


def _signal(process: psutil.Process, verb: str) -> None:
    try:
        getattr(process, verb)()
    except psutil.NoSuchProcess:
        log.debug("process %d had ended already", process.pid)


def _printable(text: str) -> str:
    """Keep control characters of a program's output from forging lines or colours in a log."""
    return "".join(character if character.isprintable() or character == "\t" else "\ufffd" for character in text)
