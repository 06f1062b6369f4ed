"""The default: most tokens per second, follow the leader on the ratio of sums.

With full information no exploration of drafters is needed: evidence about all of them comes with every committed
token. What is compared is (1 + sum of discounted survival) / seconds of every arm, no draft included.

* Hysteresis: another arm that promises more than ``hysteresis`` times the rate of the one in use is taken at once.
  A smaller advantage must add up to the worth of ``patience`` rounds of such an advantage first, so that noise does
  not make it jump, yet no arm that is a little slower than another stays in use.
* Costs of steps that were not made for a while may be wrong (another process slowed the machine down). Such a step is
  made now and then: no draft while drafting, the best draft while not. What that may lose is ``probe_share`` of the
  time.
* Rounds start at harder places than the average position (:mod:`..round_starts`); that is allowed for.
* Where rounds emit far more or less than was expected (3 standard errors over the last 24), the text has changed: what
  this request showed before counts for a quarter, and everybody is scored again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.evidence import Evidence
from edgeduet_client.llm.speculation.rates import ArmRates
from edgeduet_client.llm.speculation.round_starts import RoundStarts

_OLD = 32
"""Rounds after which what a step costs is looked at again."""
_HOPE = 2.0
"""A step is looked at again only where it would pay if it took this much less time."""
_CREDIT_ROUNDS = 2.0
_WATCHED = 24
"""Rounds in which a change of the text is looked for."""
_SURPRISE = 3.0
_KEPT_AFTER_CHANGE = 0.25


class RatioSelector:
    """Maximises tokens per second.

    Args:
        arms: to choose from.
        discount: weight of evidence one scored start older.
        carry_over: scored starts that earlier requests count for.
        hysteresis: another arm that is so much faster is taken at once.
        patience: rounds of such an advantage that smaller ones must add up to.
        probe_share: of the time that looking again at costs may lose.
        first_parts: of cascades among the drafters, the name of the first part.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        discount: float = 0.995,
        carry_over: float = 4.0,
        hysteresis: float = 1.05,
        patience: float = 8.0,
        probe_share: float = 0.005,
        first_parts: Mapping[str, str] | None = None,
    ) -> None:
        self.table = ArmRates(arms)
        self.evidence = Evidence(
            self.table.drafters,
            self.table.depth,
            discount=discount,
            carry_over=carry_over,
            first_parts=first_parts,
        )
        self._hysteresis = hysteresis
        self._patience = patience
        self._probe_share = probe_share
        self._current = NO_DRAFT
        self._missed = 0.0
        self._probe_seconds = 0.0
        self._jumps = 0
        self._expected: tuple[Arm, float] = (NO_DRAFT, 1.0)
        self._starts = RoundStarts(self.table)
        self._surprises: deque[float] = deque(maxlen=_WATCHED)
        self._changes = 0
        self._standing: dict[str, float] = {}

    def start_request(self) -> None:
        """Begin with what the latest requests showed."""
        self.evidence.start_request()
        self._starts.start_request()
        self._surprises.clear()
        self._missed = 0.0
        self._current = NO_DRAFT

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Return the arm that promises most tokens per second, or the one in use if it is about as good."""
        if costs is None:
            raise ValueError("the ratio selector needs costs")
        survival, reach = self.evidence.survival(), self.evidence.reach()
        accepted_A, proposed_A = self._starts.factors()
        tokens_A = 1 + (self.table.tokens(survival) - 1) * accepted_A
        seconds_A = self.table.seconds(reach, costs, context_length, self._current, proposed_A)
        rates_A = tokens_A / seconds_A
        self._standing = self.table.standing(rates_A)
        self._settle(rates_A)
        place = self.table.place(self._current)
        self._probe_seconds += self._probe_share * float(seconds_A[place])
        place = self._probe(place, tokens_A, seconds_A, costs, context_length)
        self._expected = self.table.arms[place], float(tokens_A[place])
        return self.table.arms[place]

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Take up one start."""
        self.evidence.add(survival, proposed)
        if start is not None:
            self._starts.add(start, survival, proposed or {})

    def played(self, round: Round) -> None:
        """Take up what the drafter in use did, and look for a change of the text."""
        arm, expected = self._expected
        if round.arm.drafter is None or round.arm != arm:
            return
        self._surprises.append(round.emitted - expected)
        accepted_A, proposed_A = self._starts.factors()
        place = self.table.place(arm)
        self.evidence.add_round(
            round.arm.drafter,
            arm.length,
            round.proposed,
            round.accepted,
            factors=(float(accepted_A[place]), float(proposed_A[place])),
            spoke=round.spoke,
        )
        if len(self._surprises) == _WATCHED:
            off = np.array(self._surprises)
            if abs(off.mean()) > _SURPRISE * max(off.std(ddof=1), 0.1) / math.sqrt(_WATCHED):
                self._changes += 1
                self._surprises.clear()
                self.evidence.forget(_KEPT_AFTER_CHANGE)

    def standing(self) -> Mapping[str, float]:
        """Return each drafter's best rate as a share of the best of all, as of the last choice."""
        return self._standing

    def changes(self) -> int:
        """Return how often the text was found to have changed."""
        return self._changes

    def _settle(self, rates_A: NDArray[np.float64]) -> None:
        best, now = int(rates_A.argmax()), self.table.place(self._current)
        advantage = float(rates_A[best] / rates_A[now])
        self._missed = self._missed + advantage - 1 if best != now else 0.0
        if advantage > self._hysteresis or self._missed > self._patience * (self._hysteresis - 1):
            self._current = self.table.arms[best]
            self._missed = 0.0

    def _probe(
        self,
        place: int,
        tokens_A: NDArray[np.float64],
        seconds_A: NDArray[np.float64],
        costs: CostModel,
        context_length: int,
    ) -> int:
        """Return the arm to play instead of ``place`` to see what its step costs now, or ``place``."""
        drafting = self.table.arms[place] != NO_DRAFT
        rates_A = tokens_A / seconds_A
        # The first arm is no draft.
        other = 0 if drafting else 1 + int(rates_A[1:].argmax()) if len(rates_A) > 1 else 0
        changed, self._jumps = costs.jumps != self._jumps, costs.jumps
        lost = float(seconds_A[other] - tokens_A[other] / rates_A[place])
        old = costs.age(self.table.arms[other].length + 1, context_length) > _OLD
        # What a step takes has changed: whether all do is worth knowing at once, on credit.
        credit = _CREDIT_ROUNDS * float(seconds_A[place]) if changed else 0.0
        if other == place or not (old or changed) or lost > self._probe_seconds + credit:
            return place
        if rates_A[other] * _HOPE <= rates_A[place]:
            return place
        self._probe_seconds -= max(lost, 0.0)
        return other
