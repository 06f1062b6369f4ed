"""How far a draft would have survived, read off the committed text: survival curves of any drafter.

S(k) is the probability that the first k drafted tokens are all accepted; a round with g drafted tokens emits
L_g = 1 + S(1) + ... + S(g) tokens. In the coupling of exact verification, P(emit x and accept) = min(p(x), q(x)), so

    S(k) = sum over x_1..x_k of prod_j min(p_j(x_j), q_j(x_j)) = E over committed texts of prod_j a_j,

with a_j = min(1, q_j(x_j) / p_j(x_j)) of the token that was really emitted. Two unbiased forms:

* ``ratio``: a_1 ... a_k;
* ``rao-blackwell``: a_1 ... a_(k-1) gamma_k, with gamma = sum_x min(p(x), q(x)): the last factor averaged out.

For a certain draft d, a = 1[d = x] and gamma = p(d). The product gamma_1 ... gamma_k is not the survival, because
which token was emitted and whether it was accepted depend on each other; nothing here computes it.

Every token committed so far is evidence about every drafter, whichever was in use. A start may only be scored when
all ``depth`` tokens behind it are committed (:mod:`.delay_queue`): a shorter horizon would make the drafter in use
look worse where it failed early (censoring).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.speculation.draft import Redraft
from edgeduet_client.llm.speculation.text import CommittedText

Form = Literal["rao-blackwell", "ratio"]


def survival(
    redraft: Redraft, text: CommittedText, depth: int, form: Form = "rao-blackwell", *, coupled: bool = False
) -> NDArray[np.float64]:
    """Return S(1..depth), an unbiased estimate from one start.

    Args:
        redraft: what the drafter would have proposed.
        text: holds the ``depth`` positions behind the start, with their target distributions.
        depth: tokens of the horizon.
        form: ``rao-blackwell`` or ``ratio``.
        coupled: drawn drafts are verified as if they were certain (exact mode with a seed): accepted iff they equal a
            token drawn from the target by itself, so a = q(x) and gamma = sum_x p(x) q(x).

    Returns:
        (depth,) in [0, 1]; 0 behind the end of a shorter proposal.

    Raises:
        LookupError: a position is not there or no longer kept.
    """
    curve = np.zeros(depth)
    alive = 1.0
    for level in range(proposed_tokens(redraft, depth)):
        kept, averaged = _level(redraft, text, level, form == "rao-blackwell", coupled)
        curve[level] = alive * (averaged if form == "rao-blackwell" else kept)
        alive *= kept
        if alive == 0:
            break
    return curve


def chances(redraft: Redraft, text: CommittedText, depth: int, *, coupled: bool = False) -> NDArray[np.float64]:
    """Return a_1..a_depth: given the committed tokens, the chance that each drafted one is accepted.

    Verdicts are independent given the text, so these say everything about what a drafter would have done at this
    start; a replay draws verdicts from them.

    Returns:
        (depth,) in [0, 1]; 0 behind a level of chance 0, and behind the end of the proposal.
    """
    found = np.zeros(depth)
    for level in range(proposed_tokens(redraft, depth)):
        found[level], _ = _level(redraft, text, level, False, coupled)
        if found[level] == 0:
            break
    return found


def proposed_tokens(redraft: Redraft, depth: int) -> int:
    """Return how many tokens it would have proposed, at most ``depth``."""
    proposal = redraft.laws if redraft.tokens is None else redraft.tokens
    return min(len(proposal or ()), depth)


def accepted_mass(target: Distribution, law: Distribution) -> float:
    """Return sum_x min(p(x), q(x)): the chance that a token drawn from ``law`` is accepted."""
    p, q = _where_both(target, law)
    return float(np.minimum(p, q).sum())


def agreeing_mass(target: Distribution, law: Distribution) -> float:
    """Return sum_x p(x) q(x): the chance that independent draws from both are equal."""
    p, q = _where_both(target, law)
    return float(p @ q)


def _level(redraft: Redraft, text: CommittedText, level: int, averaged: bool, coupled: bool) -> tuple[float, float]:
    """Return a and, where ``averaged`` is asked for, gamma of one level (else 0)."""
    position = redraft.start + level
    target, token = text.target(position), text.tokens[position]
    if redraft.tokens is not None:
        drafted = redraft.tokens[level]
        return float(drafted == token), target.probability(drafted) if averaged else 0.0
    assert redraft.laws is not None
    law = redraft.laws[level]
    if coupled:
        return law.probability(token), agreeing_mass(target, law) if averaged else 0.0
    kept = min(1.0, law.probability(token) / target.probability(token))
    return kept, accepted_mass(target, law) if averaged else 0.0


def _where_both(first: Distribution, second: Distribution) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return both distributions' probabilities of the tokens that both can draw."""
    few, many = (first, second) if len(first.ids) <= len(second.ids) else (second, first)
    if len(few.ids) == len(many.ids) and np.array_equal(few.ids, many.ids):
        return few.probabilities, many.probabilities
    places = np.minimum(many.ids.searchsorted(few.ids), len(many.ids) - 1)
    both = many.ids[places] == few.ids
    return few.probabilities[both], many.probabilities[places[both]]
