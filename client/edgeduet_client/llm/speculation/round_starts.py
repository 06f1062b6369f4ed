"""How the starts of rounds differ from the average position, for every arm, whichever is played.

Survival is estimated at positions of the text, but rounds start where the last one ended: right behind a rejection,
unless everything was accepted. Where hard stretches of text hold on, the start of a round is a harder place than
the average, the more so the longer the drafts. On made-up text whose difficulty has a correlation of .7 from position
to position, drafts of 1 token brought 91 % of the accepted tokens that positions promise, drafts of 8 tokens 67 %:
enough to prefer drafts that are far too long. The same goes for how much is proposed.

Where neighbouring starts are scored, the rounds of every arm can be followed: with v_t the chance that one of its
rounds starts at t, and P_t(n) = S_t(n) - S_t(n + 1) that n drafted tokens are accepted there (S_t(g) for n = g),

    v_(t+n+1) += v_t P_t(n),

and what its rounds bring is the mean of L_t weighted by v_t instead of the plain mean. The quotient of the two is a
property of text and drafter that holds for long and varies little, so it is learnt slowly, over requests, and applied
to means over few starts.

Axes: D drafters, A arms, G lengths, K tokens of the horizon.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.rates import ArmRates

_KEPT = 0.998
"""Weight of what is one start older."""
_PRIOR = 48.0
"""Starts that a factor of 1 counts for."""
_BOUNDS = (0.3, 1.5)


class RoundStarts:
    """Factors of the arms of ``table``."""

    def __init__(self, table: ArmRates) -> None:
        self._table = table
        self._lengths_G = np.array(sorted({arm.length for arm in table.arms if arm.length}) or [1])
        self._row = {name: row for row, name in enumerate(table.drafters)}
        count, lengths, depth = len(table.drafters), len(self._lengths_G), table.depth
        # Chances that a round starts here, at the next position, ..., one past the longest draft.
        self._ahead_DGK = np.zeros((count, lengths, depth + 2))
        self._latest_D = np.full(count, -2)
        # Of accepted and of proposed tokens: (sum over starts of rounds, sum over all starts).
        self._visited_DG, self._all_D = np.zeros((count, lengths)), np.zeros(count)
        self._at_visits = np.zeros((2, count, lengths))
        self._at_all = np.zeros((2, count, lengths))
        self._below_GK = np.arange(depth + 1) < self._lengths_G[:, None]
        self._length_at_A = np.array(
            [int(np.flatnonzero(self._lengths_G == arm.length)[0]) if arm.length else 0 for arm in table.arms]
        )
        self._factors: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    def start_request(self) -> None:
        """Rounds of another text are not followed into this one."""
        self._latest_D[:] = -2

    def add(self, start: int, survival: Mapping[str, NDArray[np.float64]], proposed: Mapping[str, int]) -> None:
        """Take up one scored start; only neighbours of the one before it say something.

        Args:
            start: how many tokens were there.
            survival: by drafter that was scored, (K,).
            proposed: by drafter, how many tokens it would have proposed.
        """
        for name, curve in survival.items():
            if (row := self._row.get(name)) is not None:
                self._follow(row, start, curve, proposed.get(name, self._table.depth))
        self._factors = None

    def factors(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (A,) factors of accepted and of proposed tokens; 1 for no draft and where nothing is known."""
        if self._factors is None:
            visited, everywhere = self._visited_DG + _PRIOR, self._all_D[:, None] + _PRIOR
            # The prior's starts have the mean of all starts.
            typical = self._at_all / np.maximum(self._all_D[:, None], 1e-12)
            at_visits = (self._at_visits + _PRIOR * typical) / visited
            at_all = (self._at_all + _PRIOR * typical) / everywhere
            factors = np.where(at_all > 1e-9, at_visits / np.maximum(at_all, 1e-9), 1.0)
            np.clip(factors, *_BOUNDS, out=factors)
            accepted, drafted = (self._table.by_arm(one, self._length_at_A) for one in factors)
            self._factors = accepted, drafted
        return self._factors

    def _follow(self, row: int, start: int, curve: NDArray[np.float64], proposed: int) -> None:
        depth, ahead_GK = self._table.depth, self._ahead_DGK[row]
        neighbour = start == self._latest_D[row] + 1
        self._latest_D[row] = start
        if neighbour:
            ahead_GK[:, :-1] = ahead_GK[:, 1:]
            ahead_GK[:, -1] = 0
        else:
            # A round is let start here; it is no typical start of a round, so it does not count.
            ahead_GK[:] = 0
            ahead_GK[:, 0] = 1
        survives = np.zeros(depth + 2)
        survives[0] = 1
        # Averaged last factors can make single curves rise.
        survives[1 : len(curve) + 1] = np.minimum.accumulate(curve)
        visits_G = ahead_GK[:, 0].copy()
        stops_GK = np.where(self._below_GK, survives[:-1] - survives[1:], 0.0)
        stops_GK[np.arange(len(self._lengths_G)), self._lengths_G] = survives[self._lengths_G]
        # After n accepted tokens the next round starts n + 1 positions on; the shift of the next call takes one off.
        ahead_GK[:, 1:] += visits_G[:, None] * stops_GK
        if not neighbour:
            return
        accepted_G = np.append(0.0, np.cumsum(curve))[self._lengths_G]
        drafted_G = np.minimum(self._lengths_G, proposed)
        self._visited_DG[row] = _KEPT * self._visited_DG[row] + visits_G
        self._all_D[row] = _KEPT * self._all_D[row] + 1
        for what, values_G in enumerate((accepted_G, drafted_G)):
            self._at_visits[what, row] = _KEPT * self._at_visits[what, row] + visits_G * values_G
            self._at_all[what, row] = _KEPT * self._at_all[what, row] + values_G
