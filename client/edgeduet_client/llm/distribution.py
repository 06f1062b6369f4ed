"""From raw logits to the distribution a token is drawn from: one pure function for plain and speculative decoding.

The order (methods/lcg-and-p-less.md, C1) is part of the definition and fixed by tests:

1. float32; logits of padded ids are left out.
2. logit bias, repetition, presence and frequency penalties, bad words, minimum length, grammar. Hard constraints come
   before truncation, so that truncation can never remove everything that is legal.
3. the gate's prediction from the hidden state.
4. temperature.
5. nominal set S: the sampler's truncation of softmax(z / T).
6. the gate's decision from S, its high-confidence sets, its prediction and the answer so far.
7. if it fires: ``retruncate`` (the truncation applied once to z / T of the families that are not banned) or ``union``
   ((S + high-confidence sets) without the banned families, as in the paper); otherwise S is untouched.
8. softmax over what is kept. Temperature 0 is one-hot at the best token, after step 6 with S = {best}.

Axes: R positions, V width of the logits, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm import penalties, truncation
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.gate import Decision, allowed_mask, decide
from edgeduet_client.llm.plan import Ids, SamplingPlan
from edgeduet_client.llm.sampler_state import SamplerState, advance

Row = truncation.Row

CERTAIN = np.ones(1)
"""The probabilities of a single token."""
CERTAIN.flags.writeable = False


@dataclass(frozen=True)
class Distribution:
    """What one token is drawn from.

    Attributes:
        ids: (N,) tokens that can be drawn, ascending.
        probabilities: (N,) float64, all positive, sum 1.
        gate_fired: whether the language confusion gate changed it.
        kept_mass: share of the untruncated distribution that was kept; computed for mirostat only.
    """

    ids: Ids
    probabilities: NDArray[np.float64]
    gate_fired: bool = False
    kept_mass: float | None = None

    def probability(self, token: int) -> float:
        """Return the probability of ``token``."""
        place = int(self.ids.searchsorted(token))
        if place == len(self.ids) or self.ids[place] != token:
            return 0.0
        return float(self.probabilities[place])


def sampling_distributions(
    logits_RV: NDArray[np.floating],
    hidden_RH: NDArray[np.float32] | None,
    generated: Sequence[int],
    drafts: Sequence[int],
    plan: SamplingPlan,
    state: SamplerState,
) -> tuple[list[Distribution], list[SamplerState]]:
    """Return the distribution of each position and the state it was computed with.

    Position r follows ``generated + drafts[:r]``. A draft of probability 0 is certain to be rejected, so the
    positions after it cannot be reached and are left out: both lists are R long unless there is such a draft.

    Args:
        logits_RV: raw logits; never written into.
        hidden_RH: what the output matrix multiplied; needed iff ``plan.needs_hidden``.
        generated: the answer so far, without the prompt.
        drafts: R - 1 proposed tokens.
        plan: the request's.
        state: after ``generated``: of the last call, advanced by what was committed.

    Raises:
        RequestError: the constraints leave no token at all; the message names them.
        ModelError: logits that are NaN or +inf, or all -inf.
        ValueError: shapes, lengths or state that do not belong together.
    """
    _check_shapes(logits_RV, hidden_RH, generated, drafts, plan, state)
    predicted_RF = plan.gate.predict(hidden_RH) if plan.gate is not None and hidden_RH is not None else None
    distributions: list[Distribution] = []
    states = [state]
    for position, logits in enumerate(logits_RV):
        predicted = None if predicted_RF is None else predicted_RF[position]
        distributions.append(_distribution(logits, predicted, plan, states[-1]))
        if position < len(drafts):
            if distributions[-1].probability(drafts[position]) == 0:
                break
            states.append(advance(states[-1], plan, drafts[position], distributions[-1]))
    return distributions, states


def _distribution(
    logits: NDArray[np.floating], predicted: NDArray[np.bool_] | None, plan: SamplingPlan, state: SamplerState
) -> Distribution:
    """Return the distribution of one position: steps 1 to 8."""
    raw: Row = np.asarray(logits[: plan.vocab_size], dtype=np.float32)
    peak = _model_peak(raw)
    edited = edited_logits(raw, plan, state)
    if edited is not raw:
        peak = _legal_peak(edited, plan, state)
    if plan.greedy:
        return _greedy(edited, predicted, plan, state)
    shifted = truncation.shifted_from(edited, peak, plan.request.temperature)
    nominal = nominal_ids(shifted, plan, state)
    if predicted is not None and plan.families is not None:
        # At temperature 1 the high-confidence sets do not depend on the shift.
        watched = shifted if plan.request.gate_confidence == "tempered" else edited
        decision = decide(predicted, state.history, watched, _mask_of(nominal, len(shifted)), plan.families)
        if decision.intervenes:
            return _after_intervention(edited, shifted, nominal, decision, plan, state)
    return _softmax(shifted, nominal, plan)


def edited_logits(raw: Row, plan: SamplingPlan, state: SamplerState) -> Row:
    """Return the logits after step 2: ``raw`` itself where nothing applies, else a copy."""
    request = plan.request
    if not plan.edits_logits and state.length >= request.min_tokens:
        return raw
    banned = _banned_ids(plan, state)
    penalised = plan.counts_tokens and len(state.counts.ids)
    if not (len(plan.bias_ids) or penalised or any(len(ids) for ids in banned.values()) or state.grammar is not None):
        return raw
    row = raw.copy()
    penalties.add_bias(row, plan.bias_ids, plan.bias)
    if request.repetition_penalty != 1:
        penalties.penalise_repetition(row, state.counts.ids, request.repetition_penalty)
    if request.presence_penalty or request.frequency_penalty:
        penalties.penalise_presence_and_frequency(
            row, state.counts, request.presence_penalty, request.frequency_penalty
        )
    for ids in banned.values():
        row[ids] = -np.inf
    if state.grammar is not None:
        np.copyto(row, -np.inf, where=~state.grammar.allowed()[: len(row)])
    return row


def _banned_ids(plan: SamplingPlan, state: SamplerState) -> dict[str, Ids]:
    """Return the ids that may not come next, by the setting that says so (the grammar's are a mask of their own)."""
    banned: dict[str, Ids] = {"the vocabulary": plan.unknown_ids}
    if plan.bad_words is not None:
        banned["bad_words"] = plan.bad_words.banned(state.tail)
    if state.length < plan.request.min_tokens:
        banned["min_tokens"] = plan.eos_ids
    return banned


def nominal_ids(shifted: Row, plan: SamplingPlan, state: SamplerState) -> Ids:
    """Return the ids the sampler's own truncation keeps, ascending (step 5)."""
    if state.surprise_bound is not None:
        return truncation.surprise_below(shifted, state.surprise_bound).nonzero()[0]
    first, *others = plan.truncations
    mask = first(shifted)
    ids = plan.all_ids if first is truncation.possible and mask.all() else mask.nonzero()[0]
    for rule in others:
        ids = ids[rule(shifted[ids])]
    return ids


def _greedy(edited: Row, predicted: NDArray[np.bool_] | None, plan: SamplingPlan, state: SamplerState) -> Distribution:
    """Return one-hot at the best token; the gate sees S = {best} and high-confidence sets of temperature 1."""
    best = int(edited.argmax())
    if predicted is not None and plan.families is not None:
        nominal = _mask_of(np.array([best]), len(edited))
        decision = decide(predicted, state.history, edited, nominal, plan.families)
        if decision.intervenes:
            allowed = allowed_mask(decision.ban, plan.families)
            best = int(np.where(allowed, edited, -np.inf).argmax())
            return Distribution(np.array([best]), CERTAIN, gate_fired=True)
    return Distribution(np.array([best]), CERTAIN)


def _after_intervention(
    edited: Row, shifted: Row, nominal: Ids, decision: Decision, plan: SamplingPlan, state: SamplerState
) -> Distribution:
    """Return the distribution without the banned families (step 7)."""
    if plan.families is None:
        raise ValueError("a decision without families")
    allowed = allowed_mask(decision.ban, plan.families)
    legal = np.where(allowed, edited, np.float32(-np.inf))
    # The best token that is left is the new origin; at a low temperature the banned one may be too far above it.
    restricted = truncation.shifted_from(legal, legal.max(), plan.request.temperature)
    if plan.request.gate_rule == "retruncate":
        kept = nominal_ids(restricted, plan, state)
    else:
        candidates = _mask_of(nominal, len(shifted))
        if decision.high_confidence is not None:
            candidates |= decision.high_confidence
        kept = np.flatnonzero(candidates & allowed & truncation.possible(restricted))
    return replace(_softmax(restricted, kept, plan), gate_fired=True)


def _softmax(shifted: Row, ids: Ids, plan: SamplingPlan) -> Distribution:
    """Return softmax over ``ids``; what underflows to 0 is no longer part of the support."""
    if len(ids) == 1 and not plan.mirostat:
        return Distribution(ids, CERTAIN)
    weights = np.exp(shifted if len(ids) == len(shifted) else shifted[ids], dtype=np.float64)
    total = float(weights.sum())
    kept_mass = None
    if plan.mirostat:
        kept_mass = min(total / float(np.exp(shifted).sum()), 1.0)
    if not weights.all():
        positive = weights > 0
        ids, weights = ids[positive], weights[positive]
    np.divide(weights, total, out=weights)
    return Distribution(ids, weights, kept_mass=kept_mass)


def _mask_of(ids: Ids, size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, dtype=np.bool_)
    mask[ids] = True
    return mask


def _model_peak(raw: Row) -> np.float32:
    """Return the largest raw logit."""
    try:
        return truncation.peak_of(raw)
    except ValueError as error:
        raise ModelError(
            f"the model's output cannot be sampled: {error}; verify the model (edgeduet-client llm verify)"
        ) from None


def _legal_peak(edited: Row, plan: SamplingPlan, state: SamplerState) -> np.float32:
    """Return the largest logit that the constraints leave."""
    peak: np.float32 = edited.max()
    if peak == -np.inf:
        names = [name for name, ids in _banned_ids(plan, state).items() if len(ids)]
        names += [state.grammar.field] if state.grammar is not None else []
        place = f"after {state.length} tokens"
        raise RequestError(
            f"{' and '.join(names)} leave no token that may come next {place}; loosen one of them",
            names[0] if len(names) == 1 else None,
        )
    if not math.isfinite(peak):
        raise ModelError("the model's output cannot be sampled after penalties: the largest logit is not finite")
    return peak


def _check_shapes(
    logits_RV: NDArray[np.floating],
    hidden_RH: NDArray[np.float32] | None,
    generated: Sequence[int],
    drafts: Sequence[int],
    plan: SamplingPlan,
    state: SamplerState,
) -> None:
    rows = len(drafts) + 1
    if logits_RV.shape != (rows, plan.vocab_width):
        raise ValueError(f"expected logits of shape {(rows, plan.vocab_width)}, got {logits_RV.shape}")
    if plan.needs_hidden and (hidden_RH is None or len(hidden_RH) != rows):
        raise ValueError(f"the gate needs {rows} rows of hidden states")
    if state.length != len(generated):
        raise ValueError(f"the state is that of {state.length} tokens, but {len(generated)} were generated")
