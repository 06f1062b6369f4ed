"""F, the function from raw logits to the sampling distribution: its order, its invariants, the gate inside it.

Numbers in test names refer to the invariants of the methods, C4.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeduet_client.llm import truncation
from edgeduet_client.llm.distribution import Distribution, sampling_distributions
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import History
from edgeduet_client.llm.plan import SamplingPlan
from edgeduet_client.llm.request import REQUIRED, SAMPLERS
from edgeduet_client.llm.sampler_state import SamplerState, advance, initial_state
from toy_sampling import (
    EOS,
    FAMILIES,
    PADDING,
    PIECES,
    SIZE,
    dense,
    hidden,
    one,
    replayed,
    row_of,
    toy_plan,
)

CJ, LATIN, SYMBOLS, LOW_RES = Family
CJ_IDS, LATIN_IDS = np.flatnonzero(FAMILIES == CJ), np.flatnonzero(FAMILIES == LATIN)
SETTINGS: dict[str, dict[str, Any]] = REQUIRED | {"top-k": {"top_k": 4}, "typical": {"typical_p": 0.7}}
TEMPERATURES = [0.0, 1e-6, 1.0, 10.0, 1e4]


@st.composite
def logit_rows(draw_from: st.DrawFn, count: int = 1) -> NDArray[np.float32]:
    """Adversarial rows: ties, one possible token, one token with nearly everything, wide and narrow spreads."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    rows = []
    for _ in range(count):
        values = rng.standard_normal(SIZE) * draw_from(st.sampled_from([0.0, 0.1, 2.0, 20.0]))
        shape = draw_from(st.sampled_from(["smooth", "ties", "one possible", "confused", "some impossible"]))
        if shape == "ties":
            values = np.round(values)
        elif shape == "one possible":
            values[np.arange(SIZE) != rng.integers(SIZE)] = -np.inf
        elif shape == "confused":
            values[rng.choice(CJ_IDS)] = values.max() + 9.3  # 99.99 % of the mass
        elif shape == "some impossible":
            values[rng.choice(SIZE, 5, replace=False)] = -np.inf
        rows.append(row_of(values, padding=rng.choice([1e4, np.nan, np.inf, -np.inf])))
    return np.stack(rows)


predictions = st.lists(st.sampled_from(list(Family)), unique=True)
answers = st.lists(st.integers(0, SIZE - 1), max_size=4)


def same(first: Distribution, second: Distribution) -> bool:
    return (
        np.array_equal(first.ids, second.ids)
        and first.probabilities.tobytes() == second.probabilities.tobytes()
        and first.gate_fired == second.gate_fired
        and first.kept_mass == second.kept_mass
    )


# --- invariant 1: always a distribution ------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("gate_rule", ["retruncate", "union"])
@settings(max_examples=20)
@given(
    rows=logit_rows(),
    temperature=st.sampled_from(TEMPERATURES),
    predicted=predictions,
    answer=answers,
    half=st.booleans(),
)
def test_1_the_result_is_a_distribution_over_tokens_whatever_the_logits(
    sampler: str, gate_rule: str, rows: NDArray[np.float32], temperature: float, predicted: list[Family],
    answer: list[int], half: bool,
) -> None:  # fmt: skip
    heat = {} if sampler == "greedy" else {"temperature": temperature}
    plan = toy_plan(gated=True, sampler=sampler, gate_rule=gate_rule, **heat, **SETTINGS.get(sampler, {}))
    logits = rows[0].astype(np.float16) if half else rows[0]
    logits.flags.writeable = False
    before = logits.tobytes()
    distribution = one(plan, logits, generated=answer, hidden_row=hidden(predicted))
    assert distribution.ids.dtype == np.int64 and distribution.probabilities.dtype == np.float64
    assert (np.diff(distribution.ids) > 0).all()
    assert distribution.ids[0] >= 0 and distribution.ids[-1] < SIZE
    assert (distribution.probabilities > 0).all()
    np.testing.assert_allclose(distribution.probabilities.sum(), 1, atol=1e-9)
    assert (logits[distribution.ids] > -np.inf).all()
    assert logits.tobytes() == before


# --- invariants 2, 3, 4: the gate inside F, against a reference written from the methods ------------------


def reference_truncation(p: NDArray[np.float64], sampler: str) -> set[int]:
    """Definitions in double precision over a whole distribution."""
    if sampler == "p-less":
        border = (p**2).sum()
        return {int(token) for token in np.flatnonzero(p >= border * (1 - 1e-12))}
    if sampler == "top-k":
        order = sorted(range(len(p)), key=lambda token: -p[token])
        return {token for token in order[:4] if p[token] > 0}
    if sampler == "min-p":
        return {int(token) for token in np.flatnonzero(p >= 0.05 * p.max())}
    return {int(token) for token in np.flatnonzero(p > 0)}


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    e: NDArray[np.float64] = np.exp(z - z.max())
    return e / e.sum()


def reference(
    values: NDArray[np.float64], sampler: str, rule: str, temperature: float, predicted: set[Family], last: History
) -> tuple[NDArray[np.float64], bool]:
    """The distribution by C1 steps 4 to 8 and A4, with sets."""
    z = values / (temperature or 1.0)
    p = softmax(z)
    nominal = {int(values.argmax())} if temperature == 0 else reference_truncation(p, sampler)
    ban = {family for family in (CJ, LATIN) if family not in predicted and family != last}
    if last in (History.EMPTY, History.SYMBOLS_ONLY):
        ban = set()
    confident = set()
    for k, mass in ((5, 0.999), (20, 0.95)):
        for token in range(SIZE):
            above = p[p > p[token]]
            if p[token] > 0 and len(above) < k and above.sum() < mass:
                confident.add(token)
    family = [Family(int(value)) for value in FAMILIES]
    fires = any(family[token] in ban for token in nominal) and any(family[token] in predicted for token in confident)
    if fires:
        allowed = {token for token in range(SIZE) if family[token] not in ban}
        restricted = softmax(np.where([token in allowed for token in range(SIZE)], z, -np.inf))
        if temperature == 0:
            nominal = {int(restricted.argmax())}
        elif rule == "union":
            nominal = (nominal | confident) & allowed
        else:
            nominal = reference_truncation(restricted, sampler)
    kept = np.array([token in nominal for token in range(SIZE)])
    return softmax(np.where(kept, z, -np.inf)), fires


HISTORIES: dict[History, list[int]] = {
    History.EMPTY: [],
    History.SYMBOLS_ONLY: [6, 7],
    History.CJ: [3, 1, 6],
    History.LATIN: [8, 4, 10],
    History.LOW_RES: [1, 8],
}


@pytest.mark.parametrize("rule", ["retruncate", "union"])
@pytest.mark.parametrize("sampler", ["p-less", "top-k", "min-p", "temperature"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 2.0])
def test_4_every_combination_of_prediction_history_and_logits_is_as_the_rule_says(
    rule: str, sampler: str, temperature: float
) -> None:
    plan = toy_plan(gated=True, sampler=sampler, gate_rule=rule, temperature=temperature, **SETTINGS.get(sampler, {}))
    rng = np.random.default_rng(5)
    fired = 0
    for bits in itertools.product([False, True], repeat=4):
        predicted = {family for family, bit in zip(Family, bits, strict=True) if bit}
        for last, answer in HISTORIES.items():
            for leader in (1, 3, 6, 8, None):
                values = rng.standard_normal(SIZE) * 2
                if leader is not None:
                    values[leader] += rng.choice([3.0, 9.0])
                values = values.astype(np.float32).astype(np.float64)
                found = one(plan, row_of(values), generated=answer, hidden_row=hidden(sorted(predicted)))
                # A gate that predicts nothing predicts its largest logit; all are equal here, so the first.
                expected, fires = reference(values, sampler, rule, temperature, predicted or {CJ}, last)
                assert found.gate_fired == fires
                np.testing.assert_allclose(dense(found), expected, rtol=1e-5, atol=1e-9)
                fired += fires
    assert fired > 10, "the table covers interventions"


@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(max_examples=20)
@given(rows=logit_rows(), temperature=st.sampled_from(TEMPERATURES), predicted=predictions, answer=answers)
def test_2_without_an_intervention_the_result_is_bitwise_that_of_the_plain_sampler(
    sampler: str, rows: NDArray[np.float32], temperature: float, predicted: list[Family], answer: list[int]
) -> None:
    heat = {} if sampler == "greedy" else {"temperature": temperature}
    wishes = {"sampler": sampler, **heat, **SETTINGS.get(sampler, {})}
    plain = one(toy_plan(**wishes), rows[0], generated=answer)
    gated_plan = toy_plan(gated=True, **wishes)
    off = one(toy_plan(gated=True, gate="off", **wishes), rows[0], generated=answer, hidden_row=hidden(predicted))
    assert same(off, plain)
    everything = one(gated_plan, rows[0], generated=answer, hidden_row=hidden(list(Family)))
    assert same(everything, plain)
    gated = one(gated_plan, rows[0], generated=answer, hidden_row=hidden(predicted))
    assert gated.gate_fired or same(gated, plain)
    start = one(gated_plan, rows[0], hidden_row=hidden(predicted))
    assert same(start, one(toy_plan(**wishes), rows[0])), "nothing generated yet: never intervene"


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("gate_rule", ["retruncate", "union"])
@settings(max_examples=20)
@given(rows=logit_rows(), temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]), predicted=predictions, answer=answers)
def test_3_an_intervention_removes_banned_families_only_and_keeps_odds(
    sampler: str, gate_rule: str, rows: NDArray[np.float32], temperature: float, predicted: list[Family],
    answer: list[int],
) -> None:  # fmt: skip
    heat = {} if sampler == "greedy" else {"temperature": temperature}
    wishes = {"sampler": sampler, **heat, **SETTINGS.get(sampler, {})}
    plan = toy_plan(gated=True, gate_rule=gate_rule, **wishes)
    found = one(plan, rows[0], generated=answer, hidden_row=hidden(predicted))
    if not found.gate_fired:
        return
    last = replayed(plan, answer).history
    seen = {Family(int(FAMILIES[token])) for token in found.ids}
    banned = {family for family in (CJ, LATIN) if family not in (predicted or [CJ]) and family != last}
    assert banned and not seen & banned
    assert last not in (History.EMPTY, History.SYMBOLS_ONLY)
    z = rows[0, found.ids].astype(np.float64) / (temperature or 1.0)
    np.testing.assert_allclose(np.log(found.probabilities) - np.log(found.probabilities[0]), z - z[0], atol=1e-4)
    if gate_rule == "union":
        nominal = one(toy_plan(**wishes), rows[0])
        kept = {int(token) for token in nominal.ids if FAMILIES[token] not in banned}
        assert sampler in ("greedy", "mirostat") or temperature == 0 or kept <= set(found.ids.tolist())


def test_the_released_plug_ins_nan_case_gives_the_right_language() -> None:
    """A banned token with 96 %, the right one only in the tighter high-confidence set: all -inf there."""
    values = np.full(SIZE, -np.inf)
    values[[1, 8, 9, 6, 7]] = np.log([0.96, 0.03, 0.005, 0.003, 0.002])
    for rule, expected in (("retruncate", {8}), ("union", {8, 9, 6, 7})):
        for sampler in ("p-less", "temperature"):
            plan = toy_plan(gated=True, gate_rule=rule, sampler=sampler)
            found = one(plan, row_of(values), generated=[8], hidden_row=hidden([LOW_RES]))
            assert found.gate_fired
            assert np.isfinite(found.probabilities).all()
            if sampler == "p-less":
                assert set(found.ids.tolist()) <= expected and 8 in found.ids
    plan = toy_plan(gated=True, temperature=0)
    assert one(plan, row_of(values), generated=[8], hidden_row=hidden([LOW_RES])).ids.tolist() == [8]


def test_untempered_confidence_looks_at_the_logits_before_temperature() -> None:
    """At T = 10 twenty tokens are confident, so a low-resource tail token lets the gate fire; at T = 1 none is."""
    values = np.full(SIZE, 0.0)
    values[1], values[8] = 30.0, 0.0
    tempered = toy_plan(gated=True, temperature=10.0, sampler="temperature")
    untempered = toy_plan(gated=True, temperature=10.0, sampler="temperature", gate_confidence="untempered")
    arguments = {"generated": [8], "hidden_row": hidden([LOW_RES])}
    assert one(tempered, row_of(values), **arguments).gate_fired  # type: ignore[arg-type]
    assert not one(untempered, row_of(values), **arguments).gate_fired  # type: ignore[arg-type]


def test_retruncation_is_one_truncation_of_the_allowed_distribution_not_of_what_was_kept() -> None:
    values = np.full(SIZE, -30.0)
    values[[1, 8, 9]] = [5.0, 1.0, 0.9]
    plan = toy_plan(gated=True)
    found = one(plan, row_of(values), generated=[8], hidden_row=hidden([LOW_RES]))
    assert one(toy_plan(), row_of(values)).ids.tolist() == [1], "p-less alone would have kept the banned token only"
    assert found.gate_fired and found.ids.tolist() == [8]


# --- the order of steps (C1) ------------------------------------------------------------------------------


def test_hard_constraints_come_before_truncation_so_something_legal_always_remains() -> None:
    values = np.zeros(SIZE)
    values[EOS], values[4] = 20.0, 3.0
    plan = toy_plan(min_tokens=2, sampler="top-k", top_k=1)
    assert one(plan, row_of(values)).ids.tolist() == [4]
    assert one(plan, row_of(values), generated=[4, 4]).ids.tolist() == [EOS]
    assert one(toy_plan(bad_words=[" the"], min_tokens=1), row_of(values)).ids.tolist() != [4]


def test_bias_then_repetition_then_presence_then_temperature() -> None:
    values = np.zeros(SIZE)
    values[3], values[4] = -1.0, 2.0
    plan = toy_plan(
        sampler="temperature", temperature=2.0, logit_bias={3: 2.0}, repetition_penalty=2.0, presence_penalty=0.5,
        frequency_penalty=0.25,
    )  # fmt: skip
    found = one(plan, row_of(values), generated=[3, 3, 4])
    edited = values.copy()
    edited[3] = (-1.0 + 2.0) / 2.0 - 0.5 - 2 * 0.25  # after the bias it is positive, so the penalty divides
    edited[4] = 2.0 / 2.0 - 0.5 - 0.25
    np.testing.assert_allclose(dense(found), softmax(edited / 2.0), rtol=1e-5)


def test_temperature_comes_before_truncation() -> None:
    values = np.linspace(0, 4, SIZE)
    cold, hot = one(toy_plan(temperature=0.5), row_of(values)), one(toy_plan(temperature=5.0), row_of(values))
    assert len(cold.ids) < len(hot.ids)


def test_the_gate_decides_on_what_the_constraints_left() -> None:
    """The banned family's leader is a bad word, so the sampling set holds none of it: nothing to intervene on."""
    values = np.full(SIZE, -30.0)
    values[[1, 8]] = [9.0, 5.0]
    gated = {"generated": [8], "hidden_row": hidden([LOW_RES])}
    assert one(toy_plan(gated=True), row_of(values), **gated).gate_fired  # type: ignore[arg-type]
    found = one(toy_plan(gated=True, bad_words=["日"]), row_of(values), **gated)  # type: ignore[arg-type]
    assert not found.gate_fired and found.ids.tolist() == [8]


def test_the_prompt_counts_for_repetition_and_only_for_that() -> None:
    values = np.ones(SIZE)
    without = dense(one(toy_plan(sampler="temperature", repetition_penalty=2.0), row_of(values)))
    repeated = dense(
        one(toy_plan(sampler="temperature", repetition_penalty=2.0, prompt_ids=[4, 4, 999]), row_of(values))
    )
    assert repeated[4] < without[4] == without[3]
    present = dense(one(toy_plan(sampler="temperature", presence_penalty=2.0, prompt_ids=[4]), row_of(values)))
    np.testing.assert_allclose(present, 1 / SIZE)


def test_temperature_0_takes_the_best_of_what_is_legal_and_the_first_of_ties() -> None:
    values = np.zeros(SIZE)
    values[[EOS, 5, 7]] = [9.0, 4.0, 4.0]
    assert one(toy_plan(temperature=0, min_tokens=1), row_of(values)).ids.tolist() == [5]
    assert one(toy_plan(sampler="greedy"), row_of(values)).ids.tolist() == [EOS]


# --- drafts, states, rows (C2, C3, invariant 8) -----------------------------------------------------------

HISTORY_DEPENDENT: list[dict[str, Any]] = [
    {},
    {"gated": True},
    {"gated": True, "gate_rule": "union", "temperature": 0},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.7, "presence_penalty": 0.2, "prompt_ids": [3]},
    {"min_tokens": 2},
    {"sampler": "mirostat", "mirostat_tau": 1.0, "mirostat_eta": 0.5},
    {"bad_words": ["aa", " the1", "日本"], "sampler": "temperature"},
    {"regex": "(a|ж|1| ){1,3}", "sampler": "temperature"},
    {"grammar": 'start: ("a" "1")+', "gated": True},
]


@pytest.mark.parametrize("wishes", HISTORY_DEPENDENT, ids=str)
@given(
    rows=logit_rows(count=4), predicted=st.lists(predictions, min_size=4, max_size=4), seed=st.integers(0, 2**32 - 1)
)
def test_8_rows_with_drafts_are_bitwise_what_single_steps_give(
    wishes: dict[str, Any], rows: NDArray[np.float32], predicted: list[list[Family]], seed: int
) -> None:
    plan = toy_plan(**wishes)
    states_RH = hidden(*predicted)
    rng = np.random.default_rng(seed)
    rows[:, :SIZE] = np.maximum(rows[:, :SIZE], -60.0)  # nothing impossible: constraints must be able to go on
    state, committed = initial_state(plan), []
    steps, states = [], []
    for row, h in zip(rows, states_RH, strict=True):
        distributions, before = sampling_distributions(row[None], h[None], committed, (), plan, state)
        steps.append(distributions[0])
        states.append(before[0])
        token = draw(distributions[0], rng)
        state = advance(state, plan, token, distributions[0])
        committed = [*committed, token]
    drafts = committed[:3]
    block, block_states = sampling_distributions(rows, states_RH, (), drafts, plan, initial_state(plan))
    assert len(block) == len(block_states) == 4
    assert all(map(same, block, steps))
    assert [s.length for s in block_states] == [0, 1, 2, 3]
    assert [s.history for s in block_states] == [s.history for s in states]
    assert [s.surprise_bound for s in block_states] == [s.surprise_bound for s in states]
    # The tail of the block, started in the middle, is the same again.
    tail, _ = sampling_distributions(rows[2:], states_RH[2:], drafts[:2], drafts[2:], plan, block_states[2])
    assert all(map(same, tail, block[2:]))


@pytest.mark.parametrize("wishes", HISTORY_DEPENDENT, ids=str)
def test_computing_drafts_that_are_thrown_away_changes_nothing(wishes: dict[str, Any]) -> None:
    plan = toy_plan(**wishes)
    rng = np.random.default_rng(3)
    rows = np.stack([row_of(rng.standard_normal(SIZE)) for _ in range(3)])
    states_RH = hidden([LOW_RES], [LATIN], [CJ])
    state = initial_state(plan)
    first, _ = sampling_distributions(rows[:1], states_RH[:1], (), (), plan, state)
    for token in first[0].ids:
        sampling_distributions(rows, states_RH, (), [int(token), int(token)], plan, state)
    again, _ = sampling_distributions(rows[:1], states_RH[:1], (), (), plan, state)
    assert same(first[0], again[0])


def test_the_gate_fires_at_a_draft_because_of_the_draft_before_it() -> None:
    plan = toy_plan(gated=True)
    values = np.full(SIZE, -30.0)
    values[[1, 8]] = [6.0, 5.0]
    first = np.full(SIZE, -30.0)
    first[[8, 1]] = [1.0, 1.0]  # tied: p-less keeps both
    rows = np.stack([row_of(first), row_of(values)])
    states_RH = hidden([LOW_RES], [LOW_RES])
    low, _ = sampling_distributions(rows, states_RH, (), [8], plan, initial_state(plan))
    assert [d.gate_fired for d in low] == [False, True] and low[1].ids.tolist() == [8]
    cj, _ = sampling_distributions(rows, states_RH, (), [1], plan, initial_state(plan))
    assert [d.gate_fired for d in cj] == [False, False] and cj[1].ids.tolist() == [1]


def test_positions_after_an_impossible_draft_are_left_out() -> None:
    plan = toy_plan(sampler="top-k", top_k=1, regex="a1")
    rows = np.stack([row_of(np.zeros(SIZE))] * 3)
    found, states = sampling_distributions(rows, None, (), [7, 7], plan, initial_state(plan))
    assert len(found) == len(states) == 1
    found, states = sampling_distributions(rows, None, (), [3, 3], plan, initial_state(plan))
    assert len(found) == len(states) == 2


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([31, 1000, 4099]), offset=st.integers(0, 17))
def test_8_a_row_is_bitwise_the_same_alone_in_a_batch_and_at_any_address(seed: int, size: int, offset: int) -> None:
    rng = np.random.default_rng(seed)
    batch = rng.standard_normal((5, size)).astype(np.float32) * 3
    memory = np.empty(size + 32, dtype=np.float32)
    elsewhere = memory[offset : offset + size]
    for row in batch:
        elsewhere[:] = row
        strided = np.stack([row, row], axis=1)[:, 0]
        for rule in (truncation.p_less, truncation.p_less_norm, lambda d: truncation.top_p(d, 0.9)):
            alone = rule(truncation.shifted_logits(row.copy(), 1.3))
            np.testing.assert_array_equal(rule(truncation.shifted_logits(elsewhere, 1.3)), alone)
            np.testing.assert_array_equal(rule(truncation.shifted_logits(strided, 1.3)), alone)


# --- constraints along an answer --------------------------------------------------------------------------


def generated_by(plan: SamplingPlan, seed: int, most: int = 12) -> list[int]:
    rng = np.random.default_rng(seed)
    state, answer = initial_state(plan), []
    while len(answer) < most and EOS not in answer:
        rows = row_of(rng.standard_normal(SIZE) * 3)[None]
        distributions, states = sampling_distributions(rows, None, answer, (), plan, state)
        answer.append(draw(distributions[0], rng))
        state = advance(states[0], plan, answer[-1], distributions[0])
    return answer


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_the_text_does_not_end_before_the_minimum(seed: int, least: int) -> None:
    answer = generated_by(toy_plan(sampler="temperature", min_tokens=least, logit_bias={EOS: 5.0}), seed)
    assert EOS not in answer[:least]


@given(st.integers(0, 2**32 - 1))
def test_answers_never_hold_a_bad_word_across_tokens(seed: int) -> None:
    words = ["aa", "ba", "日本", ". "]
    answer = generated_by(toy_plan(sampler="temperature", bad_words=words, temperature=3.0), seed, most=40)
    text = b"".join(PIECES[token] or b"" for token in answer if token != EOS).decode()
    assert not any(word in text for word in words)


@given(st.integers(0, 2**32 - 1))
def test_answers_under_a_regex_match_it_and_end_by_themselves(seed: int) -> None:
    answer = generated_by(toy_plan(sampler="temperature", regex="(ab|日){2}1?"), seed)
    assert answer[-1] == EOS
    text = b"".join(PIECES[token] or b"" for token in answer[:-1]).decode()
    assert re.fullmatch("(ab|日){2}1?", text)


def test_constraints_that_leave_nothing_are_named_both() -> None:
    plan = toy_plan(regex="a", min_tokens=3)
    with pytest.raises(RequestError, match=r"min_tokens and regex leave no token .* after 1 tokens; loosen"):
        one(plan, row_of(np.zeros(SIZE)), generated=[3])
    plan = toy_plan(regex="1ab", bad_words=["ab"])
    with pytest.raises(RequestError, match="bad_words and regex leave no token"):
        one(plan, row_of(np.zeros(SIZE)), generated=[7])


# --- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_returns_nan_or_infinity_is_named_as_broken(bad: float, temperature: float) -> None:
    values = np.zeros(SIZE)
    values[5] = bad
    with pytest.raises(ModelError, match=r"NaN or \+inf; verify the model"):
        one(toy_plan(temperature=temperature), row_of(values))


def test_a_model_that_excludes_every_token_is_named_as_broken() -> None:
    with pytest.raises(ModelError, match="every logit is -inf"):
        one(toy_plan(), row_of([-np.inf] * SIZE))


def test_what_does_not_belong_together_is_refused() -> None:
    plan = toy_plan(gated=True)
    row, h = row_of(np.zeros(SIZE)), hidden([CJ])
    with pytest.raises(ValueError, match="shape"):
        sampling_distributions(row[None], h, (), [1], plan, initial_state(plan))
    with pytest.raises(ValueError, match="shape"):
        sampling_distributions(row[None, :-1], h, (), (), plan, initial_state(plan))
    with pytest.raises(ValueError, match="hidden"):
        sampling_distributions(row[None], None, (), (), plan, initial_state(plan))
    with pytest.raises(ValueError, match="state is that of 0 tokens, but 1"):
        sampling_distributions(row[None], h, [3], (), plan, initial_state(plan))
    with pytest.raises(ValueError, match="probability is 0"):
        advance(initial_state(plan), plan, 4, Distribution(np.array([1]), np.ones(1)))


def test_padded_ids_are_never_sampled() -> None:
    plan = toy_plan(sampler="temperature")
    assert one(plan, row_of(np.zeros(SIZE), padding=1e4)).ids.tolist() == list(range(SIZE))
    assert plan.vocab_width == SIZE + PADDING


# --- mirostat ---------------------------------------------------------------------------------------------


def surprise_of(values: NDArray[np.float64], token: int) -> float:
    return -math.log2(softmax(values)[token])


def test_mirostat_moves_its_bound_by_the_surprise_of_the_untruncated_distribution() -> None:
    plan = toy_plan(sampler="mirostat", mirostat_tau=1.5, mirostat_eta=0.3)
    values = np.linspace(0, 3, SIZE)
    state = initial_state(plan)
    assert state.surprise_bound == 3.0
    found = one(plan, row_of(values), state=state)
    kept = {token for token in range(SIZE) if surprise_of(values, token) <= 3.0}
    assert set(found.ids.tolist()) == kept and len(kept) < SIZE
    after = advance(state, plan, 11, found)
    np.testing.assert_allclose(after.surprise_bound, 3.0 - 0.3 * (surprise_of(values, 11) - 1.5), rtol=1e-6)
    assert state.surprise_bound == 3.0


def test_mirostat_settles_at_the_surprise_it_was_asked_for() -> None:
    plan = toy_plan(sampler="mirostat", mirostat_tau=2.3, mirostat_eta=0.1)
    values = np.linspace(0, 4, SIZE)
    rng = np.random.default_rng(0)
    state: SamplerState = initial_state(plan)
    surprises, answer = [], list[int]()
    for _ in range(1500):
        found = one(plan, row_of(values), state=state, generated=answer)
        answer.append(draw(found, rng))
        surprises.append(surprise_of(values, answer[-1]))
        state = advance(state, plan, answer[-1], found)
    assert abs(np.mean(surprises[300:]) - 2.3) < 0.05


@given(rows=logit_rows(), answer=answers)
def test_states_of_other_samplers_carry_nothing_they_do_not_need(
    rows: NDArray[np.float32], answer: Sequence[int]
) -> None:
    state = replayed(toy_plan(), answer)
    assert state.length == len(answer)
    assert (len(state.counts.ids), state.tail, state.grammar, state.surprise_bound) == (0, b"", None, None)
    assert state.history is History.EMPTY
