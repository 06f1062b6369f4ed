"""Intervals for rates and means that rest on few events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z95 = 1.959963984540054  # 97.5 % point of the normal distribution
_RESAMPLES = 2000


@dataclass(frozen=True)
class Rate:
    """A share of trials, with the 95 % interval of Wilson (1927).

    Attributes:
        events, trials: what was counted.
    """

    events: int
    trials: int

    @property
    def value(self) -> float | None:
        """The share; ``None`` without a trial."""
        return self.events / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end; (0, 1) without a trial."""
        n = self.trials
        if n == 0:
            return 0.0, 1.0
        share, z2 = self.events / n, _Z95**2
        centre = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # At the ends the formula gives 0 and 1 but for rounding.
        lower = 0.0 if self.events == 0 else max(centre - half, 0.0)
        return lower, 1.0 if self.events == n else min(centre + half, 1.0)

    def __str__(self) -> str:
        if self.value is None:
            return "none observed"
        low, high = self.interval
        return f"{self.value:.2%} [{low:.2%}, {high:.2%}] of {self.trials}"


@dataclass(frozen=True)
class Mean:
    """A mean over values that come in groups, with a 95 % interval from resampling whole groups (bootstrap).

    Attributes:
        value: mean of all values; ``None`` where there are none.
        low, high: 2.5 % and 97.5 % quantiles over resamples.
        count: how many values.
    """

    value: float | None
    low: float
    high: float
    count: int

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[float]], *, seed: int = 0) -> Mean:
        """Return the mean of all values; values of one group (positions of one text) are not independent."""
        sums = np.array([sum(group) for group in groups if len(group)])
        counts = np.array([len(group) for group in groups if len(group)])
        if not len(counts):
            return cls(None, -math.inf, math.inf, 0)
        picks = np.random.default_rng(seed).integers(0, len(counts), (_RESAMPLES, len(counts)))
        means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return cls(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()))

    @classmethod
    def ratio(cls, groups: Sequence[Sequence[float]], base: Sequence[Sequence[float]], *, seed: int = 0) -> Mean:
        """Return the sum of ``groups`` over that of ``base``, group by group about the same thing (paired).

        Resamples in which the base sums to nothing are left out.
        """
        pairs = [(sum(group), sum(other), len(group)) for group, other in zip(groups, base, strict=True) if len(group)]
        sums = np.array([pair[:2] for pair in pairs]).reshape(-1, 2)
        if sums[:, 1].sum() == 0:
            return cls(None, -math.inf, math.inf, 0)
        picks = np.random.default_rng(seed).integers(0, len(sums), (_RESAMPLES, len(sums)))
        totals = sums[picks].sum(axis=1)
        low, high = np.quantile(totals[totals[:, 1] > 0, 0] / totals[totals[:, 1] > 0, 1], [0.025, 0.975])
        value = float(sums[:, 0].sum() / sums[:, 1].sum())
        return cls(value, float(low), float(high), sum(pair[2] for pair in pairs))

    def __str__(self) -> str:
        if self.value is None:
            return "none observed"
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"
