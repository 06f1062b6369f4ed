"""What the pipeline remembers of an answer so far, as a value: one per position, never changed, thrown away freely.

Speculative decoding computes positions that may be rejected. Since a state is never written to, rolling back means
keeping an older one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeduet_client.llm.gate import History, advance_history
from edgeduet_client.llm.grammar import GrammarState
from edgeduet_client.llm.penalties import TokenCounts
from edgeduet_client.llm.plan import SamplingPlan

if TYPE_CHECKING:
    from edgeduet_client.llm.distribution import Distribution


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The state before a position.

    Attributes:
        length: tokens generated so far (the prompt does not count).
        counts: tokens of prompt and answer; kept up only while a penalty needs it.
        history: what they say about the language of the answer; kept only with a gate.
        surprise_bound: mirostat's mu in bits; ``None`` for other samplers.
        tail: the answer's last bytes; kept only for bad words.
        grammar: the place in the constraint, if there is one.
    """

    length: int
    counts: TokenCounts
    history: History
    surprise_bound: float | None
    tail: bytes
    grammar: GrammarState | None


def initial_state(plan: SamplingPlan) -> SamplerState:
    """Return the state of an empty answer."""
    tau = plan.request.mirostat_tau
    return SamplerState(
        length=0,
        counts=TokenCounts.of(plan.prompt_ids),
        history=History.EMPTY,
        surprise_bound=2 * tau if plan.mirostat and tau is not None else None,
        tail=b"",
        grammar=plan.grammar,
    )


def advance(state: SamplerState, plan: SamplingPlan, token: int, distribution: Distribution) -> SamplerState:
    """Return the state after ``token`` was committed at the position of ``state``.

    Args:
        state: before the position.
        plan: the request's.
        token: what was drawn from ``distribution``, or a draft accepted against it.
        distribution: of that position.

    Raises:
        ValueError: ``token`` has probability 0.
    """
    probability = distribution.probability(token)
    if probability <= 0:
        raise ValueError(f"token {token} cannot follow: its probability is 0")
    return SamplerState(
        length=state.length + 1,
        counts=state.counts.plus(token) if plan.counts_tokens else state.counts,
        history=advance_history(state.history, int(plan.families[token]))
        if plan.families is not None
        else state.history,
        surprise_bound=_next_bound(state.surprise_bound, plan, probability, distribution),
        tail=plan.bad_words.extend_tail(state.tail, token) if plan.bad_words is not None else state.tail,
        grammar=state.grammar.after(token) if state.grammar is not None else None,
    )


def _next_bound(
    bound: float | None, plan: SamplingPlan, probability: float, distribution: Distribution
) -> float | None:
    """Mirostat v2: mu - rate (surprise - tau), the surprise being that of the untruncated distribution.

    As in the authors' algorithm; llama.cpp measures it after renormalising what the truncation kept.
    """
    rate, tau = plan.request.mirostat_eta, plan.request.mirostat_tau
    if bound is None or rate is None or tau is None:
        return None
    if distribution.kept_mass is None:
        raise ValueError("mirostat needs the mass its truncation kept")
    surprise = -math.log2(probability) - math.log2(distribution.kept_mass)
    return bound - rate * (surprise - tau)
