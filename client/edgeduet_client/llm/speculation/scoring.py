"""Scoring every drafter on the committed text, whichever of them was in use, within a share of the time.

Starts are released once the whole horizon behind them is committed (no censoring), gathered, and scored in batches:
one call of each drafter for many starts. A batch is due when enough starts have been released and the time spent on
scoring, this batch included, stays within the budget. When that is decides which starts are scored, never what the
text says there, so the means stay unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.delay_queue import DelayQueue
from edgeduet_client.llm.speculation.draft import Redraft
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.estimators import Form, survival
from edgeduet_client.llm.speculation.text import CommittedText

BATCH = 16
"""Starts that are gathered before drafters are asked."""
_LARGEST_BATCH = 64


def unguarded(name: str) -> AbstractContextManager[None]:
    """Let everything through that goes wrong with drafter ``name``."""
    return nullcontext()


class Scoring:
    """Survival curves of all drafters at released starts.

    Args:
        drafters: by name.
        depth: tokens of the horizon; the longest draft that may be chosen.
        form: of the estimator.
        budget: share of the time of all rounds, over all requests, that scoring may take on top.
        clock: seconds.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        depth: int,
        form: Form = "rao-blackwell",
        budget: float = 0.04,
        clock: Callable[[], float],
    ) -> None:
        self._drafters = drafters
        self._depth = depth
        self._form = form
        self._budget = budget
        self._clock = clock
        self._queue = DelayQueue(depth)
        self._released: list[int] = []
        self._known = 0
        self._elapsed = 0.0
        self._spent = 0.0
        self._seconds_per_start: float | None = None

    def start(self, text: CommittedText) -> None:
        """Begin a request, whose first token is committed or about to be."""
        self._queue = DelayQueue(self._depth)
        self._released = []
        # Behind the prompt itself there is no hidden state to draft from.
        self._known = text.prompt_length + 1

    def advance(
        self,
        text: CommittedText,
        seconds: float,
        *,
        left_out: Container[str] = (),
        guard: Callable[[str], AbstractContextManager[None]] = unguarded,
    ) -> list[dict[str, NDArray[np.float64]]]:
        """Take up what was committed since the last call; return curves by drafter, for each start that was scored.

        Args:
            text: the request's.
            seconds: what the round took.
            left_out: drafters not to ask.
            guard: each drafter is asked inside ``guard(name)``, which may swallow what goes wrong.
        """
        for start in range(self._known, len(text) + 1):
            self._queue.push(start)
        self._known = max(self._known, len(text) + 1)
        # A drafter that reads hidden states looks one position back.
        released = [*self._released, *self._queue.release(len(text))]
        self._released = [start for start in released if start > text.first_kept][-_LARGEST_BATCH:]
        self._elapsed += seconds
        if len(self._released) < BATCH or not self._affordable():
            return []
        began = self._clock()
        starts, self._released = self._released, []
        curves: list[dict[str, NDArray[np.float64]]] = [{} for _ in starts]
        for name, drafter in self._drafters.items():
            if name in left_out:
                continue
            with guard(name):
                for redraft, known in zip(self._redrafts(drafter, text, starts), curves, strict=True):
                    known[name] = survival(redraft, text, self._depth, form=self._form)
        self._note(self._clock() - began, len(starts))
        return curves

    def _redrafts(self, drafter: Drafter, text: CommittedText, starts: list[int]) -> list[Redraft]:
        return drafter.redraft(text, starts, min(self._depth, drafter.longest))

    def _affordable(self) -> bool:
        if self._budget == 0:
            return False
        if self._seconds_per_start is None:
            # The first batch shows what a batch costs.
            return True
        return self._spent + self._seconds_per_start * len(self._released) <= self._budget * self._elapsed

    def _note(self, seconds: float, starts: int) -> None:
        self._spent += seconds
        latest = seconds / starts
        before = self._seconds_per_start
        self._seconds_per_start = latest if before is None else 0.8 * before + 0.2 * latest
