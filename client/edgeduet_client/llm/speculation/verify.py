"""Exact verification of one proposed token against the distribution plain decoding would draw from.

Leviathan, Kalman, Matias 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). With p the sampling
distribution of the position (the runtime's own, penalties, truncation and gate included) and x a proposed token:

* x drawn from q: accept if u < p(x) / q(x), u uniform in [0, 1); else draw from the residual
  max(0, p - q) / sum max(0, p - q). Strict, so that p(x) = 0 is never accepted.
* x certain (a lookup, an argmax): q is a point mass, and the same rule is "draw y ~ p, keep y, go on iff y = x". One
  uniform number a token, taken as plain decoding takes it: for the same seed the answers are equal bit for bit.
* greedy target: p is a point mass, and both rules are "go on while the draft is the best token".

A drawn draft may be verified as a certain one: given x, "draw y ~ p, keep y" has law p all the same. It accepts
sum p q instead of sum min(p, q), in exchange for that equality.

Whatever q is, the token that comes out has law p, since min(p, q) + max(0, p - q) = p. The residual is never
truncated or tempered again: its support lies inside that of p.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.plan import SamplingPlan
from edgeduet_client.llm.sampler_state import SamplerState, advance
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.positions import Emission, Positions

_ROUNDING = 1e-12
"""A residual of less mass is the rounding of p = q, where exact arithmetic would have accepted."""


def verify(
    positions: Positions, draft: Draft, plan: SamplingPlan, state: SamplerState, rng: np.random.Generator
) -> Iterator[Emission]:
    """Yield the tokens of one round: accepted drafts, then the target's own; each when it is asked for.

    Whoever stops asking (the text has ended) leaves the generator where plain decoding would have left it.

    Args:
        positions: the target's view of ``draft``.
        draft: g >= 0 proposed tokens.
        plan: the request's.
        state: the sampler's, before the first position.
        rng: the request's.
    """
    for row in range(len(draft) + 1):
        target = positions.target(row, plan, state)
        if row < len(draft):
            verdict = decide(target, draft.tokens[row], draft.laws[row], rng)
        else:
            verdict = Verdict(draw(target, rng), False)
        state = advance(state, plan, verdict.token, target)
        yield Emission(verdict.token, row, target, state, drafted=verdict.accepted)
        if not verdict.accepted:
            return


@dataclass(frozen=True)
class Verdict:
    """What a position emits.

    Attributes:
        token: the token to commit; has law p.
        accepted: whether it is the proposed one, so that the next proposal can be looked at.
    """

    token: int
    accepted: bool


def decide(target: Distribution, proposed: int, law: Distribution | None, rng: np.random.Generator) -> Verdict:
    """Accept or replace one proposed token.

    Args:
        target: p, given everything before this position, earlier proposals of the round included.
        proposed: the token.
        law: q, what it was drawn from; ``None`` where it was certain.
        rng: the request's; takes one number, or two where a drawn token is replaced.

    Raises:
        ValueError: ``law`` gives the token probability 0, so it was not drawn from it.
    """
    if law is None:
        token = draw(target, rng)
        return Verdict(token, token == proposed)
    chance = law.probability(proposed)
    if chance <= 0:
        raise ValueError(f"token {proposed} has probability 0 in the law it is said to be drawn from")
    if rng.random() < target.probability(proposed) / chance:
        return Verdict(proposed, True)
    return Verdict(draw(residual(target, law), rng), False)


def residual(target: Distribution, law: Distribution) -> Distribution:
    """Return max(0, p - q), normalised, in float64; p itself where p and q differ by rounding only."""
    places = law.ids.searchsorted(target.ids)
    places[places == len(law.ids)] = 0
    shared = law.ids[places] == target.ids
    left = target.probabilities - np.where(shared, law.probabilities[places], 0.0)
    positive = left > 0
    mass = float(left[positive].sum())
    if mass <= _ROUNDING:
        return target
    return Distribution(target.ids[positive], left[positive] / mass, gate_fired=target.gate_fired)
