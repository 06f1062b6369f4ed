"""A program under supervision: started, restarted after a growing pause, logged, ended with its family."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgeduet_shared.supervision.child import FIRST_PAUSE, Child, Program
from edgeduet_shared.supervision.log_files import LogConfig


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def wait_until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def child(folder: Path, code: str, clock: Clock, **log: int) -> Child:
    program = Program("program", lambda: [sys.executable, "-c", code], dict(os.environ), folder)
    return Child(program, folder / "logs", LogConfig(**log), clock=clock)  # type: ignore[arg-type]


@pytest.fixture
def sleeper(tmp_path: Path, clock: Clock) -> Iterator[Child]:
    """A program that starts a child of its own, which ignores SIGTERM, and sleeps."""
    code = (
        "import subprocess, sys, time\n"
        "inner = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "inner += 'print(1, flush=True); time.sleep(99)'\n"
        "worker = subprocess.Popen([sys.executable, '-c', inner], stdout=subprocess.PIPE)\n"
        "worker.stdout.readline()\n"
        "print(worker.pid, flush=True)\n"
        "time.sleep(99)\n"
    )
    made = child(tmp_path, code, clock)
    yield made
    made.end()


def test_what_it_prints_is_logged_with_the_time_and_without_control_characters(tmp_path: Path, clock: Clock) -> None:
    made = child(tmp_path, "print('line\\x1b[31m red'); print('fine')", clock)
    made.tend()
    wait_until(lambda: not made.running)
    clock.now += 1
    made.tend()
    lines = made.log_file.read_text().splitlines()
    assert [line.endswith(end) for line, end in zip(lines, ["line\ufffd[31m red", "fine"], strict=True)] == [True] * 2
    assert "\x1b" not in made.log_file.read_text()


def test_a_program_that_dies_is_started_again_after_a_pause_that_doubles(tmp_path: Path, clock: Clock) -> None:
    made = child(tmp_path, "raise SystemExit(7)", clock)
    pause = FIRST_PAUSE
    for restarts in (1, 2, 3):
        made.tend()
        wait_until(lambda: not made.running)
        made.tend()  # notes the end
        assert (made.restarts, made.last_exit) == (restarts, 7)
        clock.now += pause - 0.01
        made.tend()
        assert not made.running, "started before its pause was over"
        clock.now += 0.01
        pause *= 2


def test_ending_takes_the_whole_family_along_even_who_ignores_a_polite_word(
    sleeper: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeduet_shared.supervision.child.GRACE", 1.0)
    sleeper.tend()
    wait_until(lambda: sleeper.log_file.exists() and sleeper.log_file.read_text().strip())
    inner = int(sleeper.log_file.read_text().split()[-1])
    assert psutil.pid_exists(inner)
    sleeper.end()
    wait_until(lambda: not psutil.pid_exists(inner) or psutil.Process(inner).status() == psutil.STATUS_ZOMBIE)


def test_what_a_killed_program_left_behind_is_ended_before_it_is_started_again(
    sleeper: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeduet_shared.supervision.child.GRACE", 1.0)
    sleeper.tend()
    wait_until(lambda: sleeper.log_file.exists() and sleeper.log_file.read_text().strip())
    inner = int(sleeper.log_file.read_text().split()[-1])
    assert sleeper.pid is not None
    psutil.Process(sleeper.pid).kill()
    wait_until(lambda: not sleeper.running)
    sleeper.tend()
    wait_until(lambda: not psutil.pid_exists(inner) or psutil.Process(inner).status() == psutil.STATUS_ZOMBIE)
    assert sleeper.last_exit == -9


def test_logs_are_rotated(tmp_path: Path, clock: Clock) -> None:
    made = child(tmp_path, "for number in range(400): print('x' * 100)", clock, max_bytes=10_000, kept=2)
    made.tend()
    wait_until(lambda: not made.running)
    made.tend()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "program.log",
        "program.log.1",
        "program.log.2",
    ]


def test_a_program_that_cannot_be_started_is_tried_again_later(tmp_path: Path, clock: Clock) -> None:
    made = Child(Program("none", lambda: ["/nonexistent"], {}, tmp_path), tmp_path / "logs", LogConfig(), clock=clock)
    made.tend()
    assert not made.running
