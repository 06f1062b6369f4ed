"""Scoring every drafter on the committed text, whichever of them was in use, within a share of the time.

When and where is settled by :class:`~.evaluation_budget.EvaluationBudget`; here drafters are asked, once for a block
of starts, and what they say becomes survival curves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.estimators import Form, proposed_tokens, survival
from edgeduet_client.llm.speculation.evaluation_budget import Block, EvaluationBudget
from edgeduet_client.llm.speculation.text import CommittedText


def unguarded(name: str) -> AbstractContextManager[None]:
    """Let everything through that goes wrong with drafter ``name``."""
    return nullcontext()


@dataclass(frozen=True)
class Scored:
    """What is known about one start.

    Attributes:
        start: how many tokens were there.
        survival: by drafter that was scored there, its curve.
        proposed: by the same drafters, how many tokens they would have proposed.
    """

    start: int
    survival: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    proposed: dict[str, int] = field(default_factory=dict)


class Scoring:
    """Survival curves of drafters at released starts.

    Args:
        drafters: by name.
        budget: says who is scored where; of the same drafters and depth.
        form: of the estimator.
        clock: seconds.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        budget: EvaluationBudget,
        form: Form = "rao-blackwell",
        clock: Callable[[], float],
    ) -> None:
        self._drafters = drafters
        self._budget = budget
        self._depth = budget.depth
        self._form = form
        self._clock = clock
        self._known = 0
        self._coupled = False

    def start(self, text: CommittedText, *, coupled: bool = False) -> None:
        """Begin a request, whose first token is committed or about to be.

        Args:
            text: the request's.
            coupled: drawn drafts are verified as if they were certain.
        """
        self._budget.begin()
        self._coupled = coupled
        # Behind the prompt itself there is no hidden state to draft from.
        self._known = text.prompt_length + 1

    def advance(
        self,
        text: CommittedText,
        seconds: float,
        *,
        left_out: Container[str] = (),
        guard: Callable[[str], AbstractContextManager[None]] = unguarded,
    ) -> list[Scored]:
        """Take up what was committed since the last call; return what is known about each start that was scored.

        Args:
            text: the request's.
            seconds: what the round took.
            left_out: drafters not to ask.
            guard: each drafter is asked inside ``guard(name)``, which may swallow what goes wrong.
        """
        self._budget.paid(seconds)
        for start in range(self._known, len(text) + 1):
            self._budget.push(start)
        self._known = max(self._known, len(text) + 1)
        found = []
        for block in self._budget.due(len(text)):
            # A drafter that reads hidden states looks one position back.
            if block.starts[0] > text.first_kept:
                found += self._score(text, block, left_out, guard)
        return found

    def _score(
        self,
        text: CommittedText,
        block: Block,
        left_out: Container[str],
        guard: Callable[[str], AbstractContextManager[None]],
    ) -> list[Scored]:
        scored = [Scored(start) for start in block.starts]
        for name in block.drafters:
            if name in left_out:
                continue
            began = self._clock()
            with guard(name):
                drafter = self._drafters[name]
                redrafts = drafter.redraft(text, block.starts, min(self._depth, drafter.longest))
                for redraft, known in zip(redrafts, scored, strict=True):
                    known.survival[name] = survival(redraft, text, self._depth, self._form, coupled=self._coupled)
                    known.proposed[name] = proposed_tokens(redraft, self._depth)
            self._budget.took(name, len(block.starts), self._clock() - began)
        return scored
