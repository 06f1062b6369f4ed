"""Clocks of a run, passed in so that nothing in the round loop reads the wall clock by itself.

A federation lives in real time. A simulated one does not: its clients work one after another on one
machine, and a deadline counted in wall seconds would make results depend on how fast that machine is.
An engine that simulates time offers its clock as ``grid.clock``; see :func:`clock_of`.
"""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

from flwr.serverapp import Grid


class Clock(Protocol):
    """Seconds since some start, and a way to let them pass."""

    def now(self) -> float:
        """Seconds; never runs backwards."""
        ...

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block for ``seconds``."""
        time.sleep(seconds)


class SimulatedClock:
    """Time that passes only when somebody sleeps.

    While a simulated client computes, no time passes: real clients would work side by side. Waiting
    for a client that never answers costs nothing but moves the clock to the deadline.
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds slept so far."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move the clock on by ``seconds`` at once."""
        self._now += seconds


@runtime_checkable
class TimedGrid(Protocol):
    """A Grid that runs in its own time."""

    @property
    def clock(self) -> Clock:
        """The clock that deadlines of messages over this Grid are counted on."""
        ...


def clock_of(grid: Grid) -> Clock:
    """Return the Grid's own clock where it has one, else the wall clock."""
    return grid.clock if isinstance(grid, TimedGrid) else WallClock()
