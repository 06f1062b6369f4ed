"""Loosely speculative verification: keeps a draft token where the target was unsure and then agrees. LOSSY, opt-in.

FLy: Li et al., arXiv 2511.22972. Draft d_1..d_K, native decisions m_j = [d_j is what exact verification emits]. At a
mismatch j the draft token is kept all the same iff

1. the target was unsure: h_j >= theta,
2. the window fits into the draft: j + W <= K, and
3. none of j+1 .. j+W is a mismatch (raw decisions, each given the draft before it).

Otherwise the round ends at j as exact verification ends it. With W >= K or theta = inf this is exact verification.

``h`` comes in two forms, which differ much: ``topk`` (the released code and vLLM) is the sum of -p ln p over the k
most probable tokens, not renormalised, at most ln k nats for k = 3; ``full-normalised`` (the paper) is H(p) / ln |V|.

The window rule is the paper's; the released code counts the mismatch into its window, so it checks one token less.
Ours beyond both: an end-of-text token is never relaxed, on either side, and neither is a token that hard constraints
or truncation leave no probability. At temperature 0, where every other token has none, p for ``h`` and for that
question is the distribution at temperature 1 after the hard constraints and the gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm import truncation
from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.plan import SamplingPlan
from edgeduet_client.llm.sampler_state import SamplerState, advance
from edgeduet_client.llm.speculation import verify
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.positions import Emission, Positions

EntropyMode = Literal["topk", "full-normalised"]


_EXCLUDED = 1e-12
"""Less probability is none: a logit bias of -100 leaves 1e-44."""


@dataclass(frozen=True)
class FlyRule:
    """When a mismatch may stand.

    Attributes:
        window: W, positions after a mismatch that must agree.
        theta: least uncertainty of the target.
        entropy: which uncertainty.
        top_k: k of ``topk``.
    """

    window: int = 6
    theta: float = 0.3
    entropy: EntropyMode = "topk"
    top_k: int = 3

    def may_stand(self, doubt: Distribution, proposed: int, *, position: int, length: int, vocabulary: int) -> bool:
        """Return whether a mismatch could be kept, if the window behind it agrees: rules 1 and 2.

        Args:
            doubt: the target's distribution for ``h``; see :func:`doubting_plan`.
            proposed: d_j.
            position: j, from 1.
            length: K.
            vocabulary: |V|, tokens that exist.
        """
        if position + self.window > length or doubt.probability(proposed) < _EXCLUDED:
            return False
        return self.uncertainty(doubt.probabilities, vocabulary) >= self.theta

    def uncertainty(self, probabilities: NDArray[np.float64], vocabulary: int) -> float:
        """Return h of (N,) positive probabilities: nats for ``topk``, between 0 and 1 for ``full-normalised``."""
        if self.entropy == "full-normalised":
            return float(-(probabilities * np.log(probabilities)).sum()) / math.log(max(vocabulary, 2))
        best = probabilities
        if len(best) > self.top_k:
            best = np.partition(best, len(best) - self.top_k)[-self.top_k :]
        return float(-(best * np.log(best)).sum())


def doubting_plan(plan: SamplingPlan) -> SamplingPlan:
    """Return the plan whose distributions say how unsure the target is: ``plan`` itself unless it is greedy."""
    if not plan.greedy:
        return plan
    request = plan.request.model_copy(update={"sampler": "temperature", "temperature": 1.0})
    return replace(plan, request=request, truncations=(truncation.possible,))


@dataclass
class _Pending:
    """A mismatch that may stand, until its window is through."""

    row: int
    instead: Emission
    held: list[Emission]
    random: Mapping[str, Any]


def verify_loosely(
    positions: Positions,
    draft: Draft,
    plan: SamplingPlan,
    state: SamplerState,
    rng: np.random.Generator,
    *,
    rule: FlyRule,
) -> Iterator[Emission]:
    """Yield the tokens of one round as :func:`.verify.verify` does, but let mismatches stand that ``rule`` allows.

    A rejected mismatch leaves ``rng`` as exact verification leaves it. A relaxed token's ``target`` is what its
    position says, and at temperature 0, where that is another token for certain, a point mass at what was kept.
    """
    pending: _Pending | None = None
    doubts = doubting_plan(plan)
    for row, (proposed, law) in enumerate(zip(draft.tokens, draft.laws, strict=True)):
        target = positions.target(row, plan, state)
        verdict = verify.decide(target, proposed, law, rng)
        after = advance(state, plan, verdict.token, target)
        native = Emission(verdict.token, row, target, after, drafted=verdict.accepted)
        ends = proposed in plan.eos_ids or verdict.token in plan.eos_ids
        if pending is not None and (not verdict.accepted or ends):
            # The window does not agree, or the text would end inside it.
            rng.bit_generator.state = pending.random
            yield pending.instead
            return
        if verdict.accepted:
            state = after
        else:
            doubt = target if doubts is plan else positions.target(row, doubts, state)
            stands = rule.may_stand(doubt, proposed, position=row + 1, length=len(draft), vocabulary=len(plan.all_ids))
            if ends or not stands:
                yield native
                return
            pending = _Pending(row, native, [], rng.bit_generator.state)
            state = advance(state, plan, proposed, doubt)
            kept = target if doubts is plan else Distribution(np.array([proposed]), CERTAIN)
            native = Emission(proposed, row, kept, state, drafted=True, relaxed=True)
        if pending is None:
            yield native
            continue
        pending.held.append(native)
        if row == pending.row + rule.window:
            yield from pending.held
            pending = None
    target = positions.target(len(draft), plan, state)
    token = draw(target, rng)
    yield Emission(token, len(draft), target, advance(state, plan, token, target), drafted=False)
