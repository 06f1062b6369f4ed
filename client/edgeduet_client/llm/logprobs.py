"""How likely the model itself found a token: log softmax of its own logits at temperature 1.

Before bias, penalties, constraints, truncation and gate: what the OpenAI interface reports. Padded ids do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of one drawn token.

    Attributes:
        top: the likeliest ids and their log-probabilities, likeliest first, ties by id, as many as the request
            wanted; an id the model excludes has minus infinity.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprob(logits_V: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """Return the log-probability of ``token`` and of the ``top`` likeliest ids under softmax(logits).

    Args:
        logits_V: raw, of the ids that are tokens; not written into.
    """
    # Exponentials in float32, which a wide vocabulary makes worth while; their sum and its logarithm in float64.
    shifted = logits_V - logits_V.max()
    total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))
    best = tuple((place, float(shifted[place]) - total) for place in _best(logits_V, top))
    return TokenLogprob(token, float(shifted[token]) - total, best)


def _best(values: NDArray[np.float32], count: int) -> list[int]:
    """Return the places of the ``count`` largest values, best first, ties by place."""
    count = min(count, len(values))
    if count == 0:
        return []
    border = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero(values >= border)
    return [int(place) for place in places[np.lexsort((places, -values[places]))][:count]]
