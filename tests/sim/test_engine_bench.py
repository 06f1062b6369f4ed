"""The engine benchmark counts memory of a group of processes as if it were alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "simulations" / "benchmarks"
MEGABYTE = 2**20
FILE, PRIVATE = 64, 32
HOLDER = f"""
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
touched = sum(mapped[i] for i in range(0, len(mapped), 4096))
own = bytearray(b"x" * ({PRIVATE} * {MEGABYTE}))
print("ready", flush=True)
sys.stdin.readline()
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's /proc")


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine_bench

    return engine_bench.resident


@contextmanager
def holder(file: Path) -> Iterator[int]:
    """A process that maps and reads ``file`` and holds memory of its own."""
    command = [sys.executable, "-c", HOLDER, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def test_shared_pages_count_once_in_a_group_and_fully_for_each_alone(tmp_path: Path, resident) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "shared.bin"
    file.write_bytes(bytes(FILE * MEGABYTE))
    with ExitStack() as stack:
        first = stack.enter_context(holder(file))
        alone = resident([first])
        second = stack.enter_context(holder(file))

        assert alone > (FILE + PRIVATE) * MEGABYTE
        # A stranger that maps the same file takes nothing off.
        assert resident([first]) == pytest.approx(alone, rel=0.05)
        both = resident([first, second])
        assert PRIVATE * MEGABYTE < both - alone < (PRIVATE + FILE / 2) * MEGABYTE


def test_a_process_that_ended_holds_nothing(resident) -> None:  # type: ignore[no-untyped-def]
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()

    assert resident([done.pid]) == 0
