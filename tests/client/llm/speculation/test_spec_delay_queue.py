"""Starts wait for their whole horizon; scoring them sooner is biased."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.speculation.delay_queue import DelayQueue


@given(st.integers(1, 8), st.lists(st.integers(1, 9), max_size=40))
def test_every_start_is_released_once_as_soon_as_its_horizon_is_committed(depth: int, emitted: list[int]) -> None:
    queue, length, released = DelayQueue(depth), 1, []
    for tokens in emitted:
        for start in range(length, length + tokens):
            queue.push(start)
        length += tokens
        now = queue.release(length)
        assert all(start + depth <= length for start in now)
        released += now
        assert released == list(range(1, length - depth + 1))
    assert released + queue.flush() == list(range(1, length))
    assert len(queue) == 0


def test_a_new_request_starts_over() -> None:
    queue = DelayQueue(2)
    queue.push(5)
    assert queue.flush() == [5]
    queue.push(1)
    assert queue.release(3) == [1]


def test_starts_come_once_and_in_order() -> None:
    queue = DelayQueue(2)
    queue.push(4)
    with pytest.raises(ValueError, match="start 4 after start 4"):
        queue.push(4)
    with pytest.raises(ValueError, match="horizon of 0"):
        DelayQueue(0)


def tokens_per_round(acceptance: float, depth: int) -> float:
    return sum(acceptance**k for k in range(depth + 1))


def seen_through(in_use: float, rival: float, depth: int) -> float:
    """What a horizon cut at the block of the drafter in use shows of a rival, both accepting independently."""
    total = 0.0
    for accepted in range(depth + 1):
        chance = in_use**accepted * (1 if accepted == depth else 1 - in_use)
        # The block holds the accepted tokens and the target's own: so many positions can be looked at.
        visible = min(accepted + 1, depth)
        total += chance * tokens_per_round(rival, visible)
    return total


@pytest.mark.parametrize(("rival", "truth", "cut"), [(0.85, 3.71, 2.14), (0.6, 2.31, 1.73)])
def test_a_horizon_cut_at_the_accepted_block_is_biased_against_rivals(rival: float, truth: float, cut: float) -> None:
    assert tokens_per_round(rival, 4) == pytest.approx(truth, abs=0.005)
    assert seen_through(0.3, rival, 4) == pytest.approx(cut, abs=0.006)
