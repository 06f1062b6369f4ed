"""One worker, a line of bounded length before it, first come first served.

Decoding is bound by the processor: two requests at the same time would each take twice as long and need
two caches. So one thread does the work of one model, and who comes while the line is full is refused at
once with an estimate of when to come back, rather than made to wait for an unknown time.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from edgeduet_client.llm.serving.refusals import Draining, QueueFull, Stopped
from edgeduet_shared.errors import EdgeDuetError

_LONGEST_RETRY_S = 60


class Work(Protocol):
    """What waits in the line."""

    def run(self, ticket: Ticket) -> None:
        """Do the work, on the worker's thread; return soon after ``ticket.cancelled`` is set. Raises nothing."""

    def refuse(self, error: EdgeDuetError) -> None:
        """Tell whoever waits that the work will not be done."""

    def abandon(self) -> None:
        """Take note that whoever waited left before the turn came."""


class Ticket:
    """A place in the line.

    Attributes:
        submitted: when the work came, in seconds of the queue's clock.
        cancelled: set when nobody wants the result any more.
    """

    def __init__(self, queue: WorkQueue, work: Work, submitted: float) -> None:
        self.submitted = submitted
        self.cancelled = threading.Event()
        self.work = work
        self._queue = queue

    def cancel(self) -> None:
        """Leave the line, or have the running work stop within a token. May be called twice and from any thread."""
        self.cancelled.set()
        self._queue.forget(self)


class WorkQueue:
    """The line and its worker thread.

    Args:
        capacity: how many may wait beside the one that is served; 0 = nobody waits.
        name: of the thread, for debuggers.
        clock: seconds, monotonic.
    """

    def __init__(self, capacity: int, *, name: str = "worker", clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: Ticket | None = None
        self._draining = False
        self._stopped = False
        self._mean_s: float | None = None
        self._next_return = 0.0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> bool:
        """Whether the worker is at work."""
        return self._running is not None

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    def check_room(self) -> None:
        """Refuse now what :meth:`submit` would refuse.

        Raises:
            QueueFull: no place is left in the line.
            Draining: the server is about to stop.
        """
        with self._changed:
            self._check_room()

    def check_open(self) -> None:
        """Refuse if nothing new is taken (``Draining``), however full the line is."""
        if self._draining:
            raise Draining("the server is stopping and takes no new request; try another, or try again", 5)

    def submit(self, work: Work) -> Ticket:
        """Put ``work`` at the end of the line; raises what :meth:`check_room` raises."""
        with self._changed:
            self._check_room()
            ticket = Ticket(self, work, self._clock())
            self._waiting.append(ticket)
            self._changed.notify_all()
            return ticket

    def forget(self, ticket: Ticket) -> None:
        """Take ``ticket`` out of the line, if it still waits."""
        with self._changed:
            waits = ticket in self._waiting
            if waits:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        if waits:
            ticket.work.abandon()

    def drain(self) -> None:
        """Take nothing new from now on; what runs and what waits is still done."""
        with self._changed:
            self._draining = True

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing runs and nothing waits; return whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._running is None, timeout_s)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Cancel what runs, refuse what waits, end the worker."""
        with self._changed:
            self._draining = self._stopped = True
            dropped, running = list(self._waiting), self._running
            self._waiting.clear()
            self._changed.notify_all()
        for ticket in dropped:
            ticket.work.refuse(Stopped("the server stopped before your turn; send the request again"))
        if running is not None:
            running.cancelled.set()
        self._thread.join(timeout_s)

    def _check_room(self) -> None:
        self.check_open()
        # Work that was just submitted waits for a moment even when the worker is free.
        if len(self._waiting) + (self._running is not None) > self.capacity:
            raise QueueFull(
                f"{len(self._waiting)} requests wait already, the most this server lets wait; try again later",
                self._retry_after_s(),
            )

    def _retry_after_s(self) -> int:
        """When the caller who is refused now may find a place: whole seconds, one to a minute.

        Each gets a time of its own, one mean duration of the work after the one before: told the same time, a
        thousand refused callers would come back at once, and answering them would be all the server does.
        """
        now, mean = self._clock(), self._mean_s or 1.0
        comes_back = max(now + mean, min(self._next_return, now + _LONGEST_RETRY_S))
        self._next_return = comes_back + mean
        return min(_LONGEST_RETRY_S, max(1, math.ceil(comes_back - now)))

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._stopped)
                if self._stopped:
                    return
                ticket = self._running = self._waiting.popleft()
            started = self._clock()
            try:
                if ticket.cancelled.is_set():
                    ticket.work.abandon()
                else:
                    ticket.work.run(ticket)
            finally:
                took = self._clock() - started
                with self._changed:
                    self._mean_s = took if self._mean_s is None else 0.8 * self._mean_s + 0.2 * took
                    self._running = None
                    self._changed.notify_all()
