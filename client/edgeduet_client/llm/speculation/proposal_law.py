"""What drafters draw from, and where their drafts end."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm import truncation
from edgeduet_client.llm.distribution import Distribution


def law_of(
    logits_N: NDArray[np.float32], vocabulary_N: NDArray[np.int64] | None, *, temperature: float, threshold: float
) -> Distribution | None:
    """Return p-less of softmax(logits / temperature), or ``None`` where its best token is not probable enough.

    p-less keeps a handful of tokens, as the target's sampler does by default; a law over a whole vocabulary would
    lose more acceptance to tokens the target never draws than it could win.

    Args:
        logits_N: of a drafter.
        vocabulary_N: which ids they stand for, ascending; ``None``: 0 to N - 1.
        temperature: > 0.
        threshold: least probability of the best token, before truncation. The rule looks at the law only, so a draft
            may end by it.
    """
    shifted = truncation.shifted_logits(logits_N, temperature)
    weights = np.exp(shifted)
    if threshold * float(weights.sum()) > 1.0:
        return None
    kept = truncation.p_less(shifted).nonzero()[0]
    masses = weights[kept].astype(np.float64)
    return Distribution(kept if vocabulary_N is None else vocabulary_N[kept], masses / masses.sum())


def until_end_of_text(tokens: Sequence[int], eos_ids: Container[int]) -> tuple[int, ...]:
    """Return ``tokens`` up to and with the first end of text."""
    for place, token in enumerate(tokens):
        if token in eos_ids:
            return tuple(tokens[: place + 1])
    return tuple(tokens)
