"""How much memory this process may still take: the machine's, or its container's where that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes that can be taken without swapping.

    Args:
        cgroup: where the limits of the own container are mounted (cgroup version 2).
    """
    free: int = psutil.virtual_memory().available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    # The pages of files count as used, but the system gives them back.
    return min(free, limit - used + (_statistic(cgroup / "memory.stat", "inactive_file") or 0))


def _number(file: Path) -> int | None:
    """The number in a file; ``None`` for the word ``max``, or where there is no such file."""
    try:
        text = file.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _statistic(file: Path, key: str) -> int | None:
    try:
        entries = dict(line.split() for line in file.read_text("ascii").splitlines())
    except (OSError, ValueError):
        return None
    return int(entries[key]) if key in entries else None
