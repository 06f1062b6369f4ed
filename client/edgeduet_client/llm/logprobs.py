"""Log-probabilities beside a token: what the model itself thinks, and what the draw was made from.

``raw`` is log softmax of the model's own logits at temperature 1, before bias, penalties, constraints, truncation
and gate: what the OpenAI interface reports, and what we report. ``sampled`` belongs to the distribution the token was
drawn from. Padded ids are in neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.distribution import Distribution

Alternatives = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities of one drawn token and of the best alternatives, best first, ties by id.

    Attributes:
        token: the id drawn.
        raw: under the raw model; finite, or -inf where the model itself excludes the token.
        top_raw: the best tokens under the raw model.
        sampled: under the sampling distribution.
        top_sampled: the best tokens under it; fewer where its support is smaller.
    """

    token: int
    raw: float
    top_raw: Alternatives
    sampled: float
    top_sampled: Alternatives


def token_logprobs(
    logits: NDArray[np.floating], distribution: Distribution, token: int, top: int, vocab_size: int
) -> TokenLogprobs:
    """Return the log-probabilities of ``token``.

    Args:
        logits: (V,) raw logits the distribution was made from; not written into.
        distribution: what ``token`` was drawn from.
        token: the id drawn.
        top: how many alternatives, 0 or more.
        vocab_size: ids below it are tokens.

    Raises:
        ValueError: ``token`` has probability 0 in ``distribution``, or the logits cannot be normalised.
    """
    probability = distribution.probability(token)
    if probability <= 0:
        raise ValueError(f"token {token} was not drawn from this distribution")
    row = np.asarray(logits[:vocab_size], dtype=np.float32)
    peak = float(row.max())
    if not math.isfinite(peak):
        raise ValueError("the logits cannot be normalised: the largest is not finite")
    normaliser = peak + math.log(float(np.exp(row - np.float32(peak)).sum()))
    sampled = np.log(distribution.probabilities)
    return TokenLogprobs(
        token=token,
        raw=float(row[token]) - normaliser,
        top_raw=tuple((place, float(row[place]) - normaliser) for place in _best(row, top)),
        sampled=math.log(probability),
        top_sampled=tuple((int(distribution.ids[place]), float(sampled[place])) for place in _best(sampled, top)),
    )


def _best(values: NDArray[np.floating], count: int) -> list[int]:
    """Return the places of the ``count`` largest values, best first, ties by place, none at -inf."""
    count = min(count, len(values))
    if count == 0:
        return []
    border = np.partition(values, len(values) - count)[len(values) - count]
    places = np.flatnonzero((values >= border) & (values > -np.inf))
    return [int(place) for place in places[np.lexsort((places, -values[places]))][:count]]
