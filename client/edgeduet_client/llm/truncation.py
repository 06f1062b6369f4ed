"""Which tokens a sampler keeps: one plain function per sampler, from a row of logits to a mask.

Every function takes a row of *shifted* logits, ``d = (z - max z) / T`` as :func:`shifted_logits` returns it: float32,
largest value exactly 0, -inf for what cannot come next. It returns a bool mask of the same length that holds at
least one token, never one at -inf, and it never writes into the row. Notation: ``e = exp(d)``, ``S = sum e``,
``P = e / S``, H the entropy of P in nats.

Ties stand or fall together: a rule is "at least as good as the border", so that the order of the vocabulary does not
matter. For top-k, top-p and typical this means that a token is kept iff the tokens strictly better than it are fewer
than k, or hold less mass than p; without ties that is the usual definition by sorting (crossing token included).

=================  ===========================================================  ==================================
function           keep iff                                                     source
=================  ===========================================================  ==================================
p_less             P >= sum P^2                                                 Tan, Wu, Howard, arXiv 2509.23234
p_less_norm        P >= (V sum P^2 - 1) / (V - 1), V = number of finite logits  the same
top_k              among the k largest                                          Fan et al., arXiv 1805.04833
top_p              among the smallest set of mass >= p                          Holtzman et al., arXiv 1904.09751
min_p              P >= a max P                                                 Nguyen et al., arXiv 2407.01082
typical            smallest set of mass >= t by ascending abs(-log P - H)       Meister et al., arXiv 2202.00666
epsilon            P >= eps, else the best                                      Hewitt et al., arXiv 2210.15191
eta                P >= min(eps, sqrt(eps) exp(-H)), else the best              the same
surprise_below     -log2 P <= mu, else the best (Mirostat v2's step)            Basu et al., arXiv 2007.14966
top_n_sigma        d >= -n std(d)                                               Tang et al., arXiv 2411.07641
=================  ===========================================================  ==================================

p-less must be applied once, to a whole distribution: on its own result it truncates further.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Mask = NDArray[np.bool_]

# Smaller than any exp of a float32 logit that is worth keeping, larger than the 0 of a -inf.
_TINY = float(np.finfo(np.float32).tiny)
_LOWEST, _HIGHEST = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)
_FIRST_PREFIX = 1024
_PREFIX_GROWTH = 8


def shifted_logits(logits: NDArray[np.floating], temperature: float) -> Row:
    """Return ``(logits - max) / temperature`` as float32; the best token is exactly at 0.

    Shifting first keeps tiny temperatures harmless: what overflows is far below the best token and becomes -inf.

    Args:
        logits: (V,) row, not written into; -inf marks what cannot come next.
        temperature: positive.

    Raises:
        ValueError: the row is empty, holds NaN or +inf, or nothing but -inf.
    """
    row = np.asarray(logits, dtype=np.float32)
    return shifted_from(row, peak_of(row), temperature)


def peak_of(row: Row) -> np.float32:
    """Return the largest logit; raise ``ValueError`` for a row without one."""
    if row.size == 0:
        raise ValueError("the row of logits is empty")
    # argmax takes NaN for the largest, as it should here, and needs less Python than max.
    peak: np.float32 = row[row.argmax()]
    if not math.isfinite(peak):
        raise ValueError(
            "no token is possible: every logit is -inf" if peak == -np.inf else "the logits hold NaN or +inf"
        )
    return peak


def shifted_from(row: Row, peak: np.float32, temperature: float) -> Row:
    """As :func:`shifted_logits` for a float32 row whose largest value is known."""
    shifted: Row = row - peak
    if temperature != 1.0:
        with np.errstate(over="ignore"):
            np.divide(shifted, np.float32(temperature), out=shifted)
    return shifted


def possible(shifted: Row) -> Mask:
    """Return which tokens can come next at all (plain temperature sampling)."""
    mask: Mask = shifted > -np.inf
    return mask


def p_less(shifted: Row) -> Mask:
    """Keep P >= sum P^2, the probability that two independent draws agree.

    Compared as ``e >= Q / S`` with ``Q = sum e^2``: every e is at most 1, so Q <= S but for rounding, which the bound
    by 1 takes care of, and the best token (e = 1) always stays. In terms of probabilities, rounding alone empties the
    set whenever the leaders are tied.
    """
    e = np.exp(shifted)
    threshold = min(float(e.dot(e)) / float(e.sum()), 1.0)
    mask: Mask = e >= threshold
    return mask


def p_less_norm(shifted: Row) -> Mask:
    """Keep P >= (V sum P^2 - 1) / (V - 1): p-less less the chance of a wrong guess, a set at least as large.

    V counts the finite logits, so that ids which are masked or padded change nothing.
    """
    e = np.exp(shifted)
    total, squares = float(e.sum()), float(e.dot(e))
    count = int(np.count_nonzero(shifted > -np.inf))
    if count == 1:
        return possible(shifted)
    threshold = (count * squares - total * total) / (total * (count - 1))
    mask: Mask = e >= min(max(threshold, _TINY), 1.0)
    return mask


def top_k(shifted: Row, k: int) -> Mask:
    """Keep the k largest, and all ties with the k-th."""
    if k >= len(shifted):
        return possible(shifted)
    border = np.partition(shifted, len(shifted) - k)[len(shifted) - k]
    mask: Mask = shifted >= border if border > -np.inf else possible(shifted)
    return mask


def top_p(shifted: Row, p: float) -> Mask:
    """Keep the smallest set of most probable tokens that holds mass p, the crossing token included."""
    if p >= 1:
        return possible(shifted)
    e = np.exp(shifted)
    total = float(e.sum())
    # All tokens below (1 - p) / V together hold less than 1 - p, so the set lies among the others: usually few.
    likely = e[np.flatnonzero(e >= (1 - p) * total / len(e))]
    border = _mass_border(likely, p * total) or _mass_border(e, p * total)
    mask: Mask = e >= max(border, _TINY)
    return mask


def _mass_border(e: Row, mass: float) -> float:
    """Return the value of ``e`` at which the sum of the largest values reaches ``mass``, or 0 if it never does.

    Sorts only a prefix of the largest values and grows it where that is not enough.
    """
    size = _FIRST_PREFIX
    while size < len(e):
        largest = np.sort(np.partition(e, len(e) - size)[len(e) - size :])[::-1]
        reached = _first_reaching(largest, mass)
        if reached < size:
            return float(largest[reached])
        size *= _PREFIX_GROWTH
    largest = np.sort(e)[::-1]
    reached = _first_reaching(largest, mass)
    return float(largest[reached]) if reached < len(e) else 0.0


def _first_reaching(weights: Row, mass: float) -> int:
    """Return the first place at which the running sum of ``weights`` is at least ``mass``; their number if none is."""
    # The copy first: summing up a reversed float32 view in float64 is 20 times slower.
    return int(np.searchsorted(np.cumsum(weights.astype(np.float64)), mass))


def min_p(shifted: Row, share: float) -> Mask:
    """Keep P >= share times the largest P; a comparison of logits, no exp."""
    mask: Mask = shifted >= math.log(share)
    return mask


def typical(shifted: Row, mass: float) -> Mask:
    """Keep the tokens whose surprise is closest to the entropy, as many as hold ``mass``.

    The most probable token need not be among them.
    """
    if mass >= 1:
        return possible(shifted)
    e = np.exp(shifted)
    total = float(e.sum())
    distance = math.log(total) - _entropy(shifted, e, total) - shifted
    np.abs(distance, out=distance)
    mask: Mask = distance <= min(_distance_border(distance, e, mass * total), _HIGHEST)
    return mask


def _distance_border(distance: Row, e: Row, mass: float) -> float:
    """Return the distance within which ``e`` sums up to ``mass``; infinite if it never does."""
    size = _FIRST_PREFIX
    while size < len(e):
        within = np.flatnonzero(distance <= np.partition(distance, size - 1)[size - 1])
        ascending = within[np.argsort(distance[within])]
        reached = _first_reaching(e[ascending], mass)
        if reached < len(ascending):
            return float(distance[ascending[reached]])
        size *= _PREFIX_GROWTH
    ascending = np.argsort(distance)
    reached = _first_reaching(e[ascending], mass)
    return float(distance[ascending[reached]]) if reached < len(e) else math.inf


def epsilon(shifted: Row, least: float) -> Mask:
    """Keep P >= least, or the most probable token if there is no such."""
    e = np.exp(shifted)
    mask: Mask = e >= _at_least_best(least * float(e.sum()))
    return mask


def eta(shifted: Row, least: float) -> Mask:
    """Keep P >= min(least, sqrt(least) exp(-H)), or the most probable token if there is no such."""
    e = np.exp(shifted)
    total = float(e.sum())
    border = min(least, math.sqrt(least) * math.exp(-_entropy(shifted, e, total)))
    mask: Mask = e >= _at_least_best(border * total)
    return mask


def surprise_below(shifted: Row, bits: float) -> Mask:
    """Keep -log2 P <= bits, or the most probable token if there is no such."""
    e = np.exp(shifted)
    mask: Mask = e >= _at_least_best(float(e.sum()) * 2.0 ** min(-bits, 0.0))
    return mask


def top_n_sigma(shifted: Row, n: float) -> Mask:
    """Keep what is at most n standard deviations of the finite logits below the best; any temperature, same set."""
    finite = shifted[np.isfinite(shifted)] if shifted.min() == -np.inf else shifted
    centred = finite - finite.mean(dtype=np.float64).astype(np.float32)
    deviation = math.sqrt(float(np.dot(centred, centred)) / len(finite))
    mask: Mask = shifted >= max(-n * deviation, _LOWEST)
    return mask


def _at_least_best(border: float) -> float:
    """Return a border on ``e`` that the best token (e = 1) always passes and -inf (e = 0) never does."""
    return min(max(border, _TINY), 1.0)


def _entropy(shifted: Row, e: Row, total: float) -> float:
    """Return H in nats: log S - sum(e d) / S, where tokens of e = 0 count nothing."""
    with np.errstate(invalid="ignore"):
        weighted = float(np.dot(e, shifted))
    if math.isnan(weighted):  # 0 times -inf
        weighted = float(np.dot(e, np.maximum(shifted, _LOWEST)))
    return math.log(total) - weighted / total
