"""One worker, a line of bounded length before it, first come first served."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from edgeduet_client.llm.serving.refusals import Draining, QueueFull, Stopped
from edgeduet_client.llm.serving.work_queue import Ticket, WorkQueue
from edgeduet_shared.errors import EdgeDuetError


class Task:
    """Work that waits for a sign, and notes what becomes of it."""

    def __init__(self, log: list[str], name: str = "task") -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.ended = threading.Event()
        self._log = log
        self._name = name

    def run(self, ticket: Ticket) -> None:
        self.begun.set()
        while not self.go.is_set() and not ticket.cancelled.is_set():
            time.sleep(0.001)
        self._note("cancelled" if ticket.cancelled.is_set() else "ran")

    def refuse(self, error: EdgeDuetError) -> None:
        self._note(type(error).__name__)

    def abandon(self) -> None:
        self._note("abandoned")

    def _note(self, what: str) -> None:
        self._log.append(f"{self._name} {what}")
        self.ended.set()


@pytest.fixture
def log() -> list[str]:
    return []


def started(capacity: int) -> Iterator[WorkQueue]:
    queue = WorkQueue(capacity)
    yield queue
    queue.stop()


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    yield from started(2)


def running(queue: WorkQueue, log: list[str]) -> Task:
    """Submit a task and wait until the worker is at it."""
    task = Task(log, "first")
    queue.submit(task)
    assert task.begun.wait(5)
    return task


def test_work_is_done_in_the_order_it_came(queue: WorkQueue, log: list[str]) -> None:
    first = running(queue, log)
    others = [Task(log, name) for name in ("second", "third")]
    for task in others:
        queue.submit(task)
    assert queue.waiting == 2 and queue.running
    for task in (*others, first):
        task.go.set()
    assert queue.wait_idle(5)
    assert log == ["first ran", "second ran", "third ran"]


def test_who_comes_while_the_line_is_full_is_refused_and_told_when_to_come_back(
    queue: WorkQueue, log: list[str]
) -> None:
    running(queue, log)
    for _ in range(2):
        queue.submit(Task(log))
    with pytest.raises(QueueFull) as refused:
        queue.submit(Task(log))
    assert refused.value.retry_after_s is not None and 1 <= refused.value.retry_after_s <= 60
    with pytest.raises(QueueFull):
        queue.check_room()


def test_a_line_of_length_zero_serves_one_at_a_time(log: list[str]) -> None:
    for queue in started(0):
        first = running(queue, log)
        with pytest.raises(QueueFull):
            queue.submit(Task(log))
        first.go.set()
        assert queue.wait_idle(5)
        queue.submit(Task(log)).cancel()


def test_the_estimate_follows_how_long_work_takes(log: list[str]) -> None:
    now = [0.0]
    queue = WorkQueue(0, clock=lambda: now[0])
    slow = running(queue, log)
    now[0] = 7.5
    slow.go.set()
    assert queue.wait_idle(5)
    running(queue, log)
    with pytest.raises(QueueFull) as refused:
        queue.check_room()
    assert refused.value.retry_after_s == 8
    queue.stop()


def test_refused_callers_are_told_times_one_after_the_other(log: list[str]) -> None:
    now = [0.0]
    queue = WorkQueue(0, clock=lambda: now[0])
    slow = running(queue, log)
    now[0] = 4.0
    slow.go.set()
    assert queue.wait_idle(5)
    running(queue, log)

    def told() -> int:
        with pytest.raises(QueueFull) as refused:
            queue.check_room()
        assert refused.value.retry_after_s is not None
        return refused.value.retry_after_s

    # Four seconds of work each: one place every four seconds, up to a minute.
    assert [told() for _ in range(4)] == [4, 8, 12, 16]
    assert [told() for _ in range(100)][-1] == 60
    now[0] = 1000.0
    assert told() == 4
    queue.stop()


def test_leaving_the_line_makes_room_and_the_work_is_never_begun(queue: WorkQueue, log: list[str]) -> None:
    first = running(queue, log)
    left, stayed = Task(log, "left"), Task(log, "stayed")
    ticket = queue.submit(left)
    queue.submit(stayed)
    ticket.cancel()
    ticket.cancel()
    assert queue.waiting == 1
    first.go.set()
    stayed.go.set()
    assert queue.wait_idle(5)
    assert log == ["left abandoned", "first ran", "stayed ran"]
    assert not left.begun.is_set()


def test_cancelling_running_work_frees_the_worker(queue: WorkQueue, log: list[str]) -> None:
    task = Task(log)
    ticket = queue.submit(task)
    assert task.begun.wait(5)
    ticket.cancel()
    assert queue.wait_idle(5)
    assert log == ["task cancelled"]


def test_draining_does_what_was_accepted_and_takes_nothing_new(queue: WorkQueue, log: list[str]) -> None:
    first = running(queue, log)
    second = Task(log, "second")
    queue.submit(second)
    queue.drain()
    with pytest.raises(Draining):
        queue.submit(Task(log))
    assert not queue.wait_idle(0.02)
    first.go.set()
    second.go.set()
    assert queue.wait_idle(5)
    assert log == ["first ran", "second ran"]


def test_stopping_refuses_what_waits_and_cancels_what_runs(queue: WorkQueue, log: list[str]) -> None:
    running(queue, log)
    queue.submit(Task(log, "second"))
    queue.stop()
    assert sorted(log) == ["first cancelled", f"second {Stopped.__name__}"]
    with pytest.raises(Draining):
        queue.submit(Task(log))


def test_many_threads_submit_and_leave_without_losing_count(log: list[str]) -> None:
    queue = WorkQueue(10_000)

    def busy(number: int) -> None:
        for turn in range(50):
            task = Task(log, f"{number}.{turn}")
            task.go.set()
            ticket = queue.submit(task)
            if turn % 3 == 0:
                ticket.cancel()

    threads = [threading.Thread(target=busy, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.wait_idle(20)
    # Whoever left before the turn was abandoned, all others ran: each exactly once.
    assert len(log) == 400 and len({line.split()[0] for line in log}) == 400
    queue.stop()
