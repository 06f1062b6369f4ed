"""Losses whose least sum is the highest rate: for learners with a guarantee (W. Dinkelbach, 1967).

With lambda the highest rate, in tokens per second, an arm that emits L tokens in C seconds loses lambda C - L tokens
against it: 0 on average for the best arm, more for every other. Scaled to [0, 1]:

    loss = (lambda C - L - low) / (high - low)

with low and high the least and greatest values L in [1, g + 1] allows. Regret in this loss times (high - low) / lambda
is seconds lost. lambda is refreshed from the running means, so it settles with them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def dinkelbach_losses(
    tokens_A: NDArray[np.float64], seconds_A: NDArray[np.float64], lengths_A: NDArray[np.int64], rate: float
) -> NDArray[np.float64]:
    """Return (A,) losses in [0, 1].

    Args:
        tokens_A: estimated at one start; NaN where an arm was not scored.
        seconds_A: expected of a round.
        lengths_A: drafted tokens.
        rate: lambda, tokens per second.
    """
    low = float((rate * seconds_A - (lengths_A + 1)).min())
    high = float((rate * seconds_A - 1).max())
    return (rate * seconds_A - tokens_A - low) / max(high - low, np.finfo(float).tiny)


def length_losses(tokens_A: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    """Return (A,) ``1 - L / (K + 1)``: the loss that looks at accepted tokens only, as HedgeSpec reports it."""
    return 1 - tokens_A / (depth + 1)
