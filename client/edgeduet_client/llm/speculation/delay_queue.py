"""Starts that wait until the whole horizon behind them is committed.

Scoring a start sooner, on as many tokens as the drafter in use got accepted, is biased: with acceptance .3 in use, a
rival of acceptance .85 would look like 2.14 tokens a round instead of 3.71 (4 drafted tokens). There is no way to
get a start out of this queue before its time.
"""

from __future__ import annotations

from collections import deque


class DelayQueue:
    """Starts of one request.

    Args:
        depth: committed tokens a start needs behind it.
    """

    def __init__(self, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"a horizon of {depth} tokens shows nothing")
        self.depth = depth
        self._waiting: deque[int] = deque()
        self._latest = -1

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, start: int) -> None:
        """Let ``start`` (how many tokens were there) wait; starts come in ascending order, each once."""
        if start <= self._latest:
            raise ValueError(f"start {start} after start {self._latest}")
        self._latest = start
        self._waiting.append(start)

    def release(self, length: int) -> list[int]:
        """Return the starts whose horizon lies within the first ``length`` tokens; each is returned once."""
        released = []
        while self._waiting and self._waiting[0] + self.depth <= length:
            released.append(self._waiting.popleft())
        return released

    def flush(self) -> list[int]:
        """End the request: return what still waits; it can no longer be scored without bias."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self._latest = -1
        return waiting
