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
        known = [name for name in survival if name in self._row]
        if not known:
            return
        rows = np.array([self._row[name] for name in known])
        curves_RK = np.zeros((len(rows), self._table.depth))
        for place, name in enumerate(known):
            curves_RK[place, : len(survival[name])] = survival[name]
        drafted_R = np.array([proposed.get(name, self._table.depth) for name in known])
        self._follow(rows, start, curves_RK, drafted_R)
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

    def _follow(
        self, rows: NDArray[np.int64], start: int, curves_RK: NDArray[np.float64], drafted_R: NDArray[np.int64]
    ) -> None:
        """Take up a start for the drafters ``rows``."""
        lengths_G = self._lengths_G
        neighbour_R = self._latest_D[rows] == start - 1
        self._latest_D[rows] = start
        ahead_RGK = np.zeros((len(rows), *self._ahead_DGK.shape[1:]))
        ahead_RGK[neighbour_R, :, :-1] = self._ahead_DGK[rows[neighbour_R], :, 1:]
        # Elsewhere a round is let start here; it is no typical start of a round, so it does not count.
        ahead_RGK[~neighbour_R, :, 0] = 1
        survives_RK = np.zeros((len(rows), self._table.depth + 2))
        survives_RK[:, 0] = 1
        # Averaged last factors can make single curves rise.
        survives_RK[:, 1:-1] = np.minimum.accumulate(curves_RK, axis=1)
        visits_RG = ahead_RGK[:, :, 0].copy()
        stops_RGK = np.where(self._below_GK, (survives_RK[:, :-1] - survives_RK[:, 1:])[:, None], 0.0)
        stops_RGK[:, np.arange(len(lengths_G)), lengths_G] = survives_RK[:, lengths_G]
        # After n accepted tokens the next round starts n + 1 positions on; the shift of the next call takes one off.
        ahead_RGK[:, :, 1:] += visits_RG[:, :, None] * stops_RGK
        self._ahead_DGK[rows] = ahead_RGK
        sums_RK = np.zeros((len(rows), self._table.depth + 1))
        np.cumsum(curves_RK, axis=1, out=sums_RK[:, 1:])
        brought = np.array([sums_RK[:, lengths_G], np.minimum(lengths_G, drafted_R[:, None])])
        counted, visits_RG, brought = rows[neighbour_R], visits_RG[neighbour_R], brought[:, neighbour_R]
        self._visited_DG[counted] = _KEPT * self._visited_DG[counted] + visits_RG
        self._all_D[counted] = _KEPT * self._all_D[counted] + 1
        self._at_visits[:, counted] = _KEPT * self._at_visits[:, counted] + visits_RG * brought
        self._at_all[:, counted] = _KEPT * self._at_all[:, counted] + brought
