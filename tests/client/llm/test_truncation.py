"""Samplers: p-less by its properties 1 to 14 (methods, B1), the others against their definitions.

Random rows mix smooth logits, ties, masks and single tokens. Where a property is about real numbers, a token whose
probability is within rounding of the border may fall on either side; everything else must hold exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeduet_client.llm import truncation
from edgeduet_client.llm.truncation import Mask, Row, shifted_logits

# Relative error of sums of up to a few hundred float32 terms, with a margin.
ROUNDING = 1e-5

RULES: dict[str, Callable[[Row], Mask]] = {
    "possible": truncation.possible,
    "p-less": truncation.p_less,
    "p-less-norm": truncation.p_less_norm,
    "top-k 1": lambda d: truncation.top_k(d, 1),
    "top-k 7": lambda d: truncation.top_k(d, 7),
    "top-p 0.3": lambda d: truncation.top_p(d, 0.3),
    "top-p 0.95": lambda d: truncation.top_p(d, 0.95),
    "top-p tiny": lambda d: truncation.top_p(d, 1e-9),
    "top-p 1": lambda d: truncation.top_p(d, 1.0),
    "min-p": lambda d: truncation.min_p(d, 0.1),
    "typical": lambda d: truncation.typical(d, 0.9),
    "typical tiny": lambda d: truncation.typical(d, 1e-9),
    "typical 1": lambda d: truncation.typical(d, 1.0),
    "epsilon": lambda d: truncation.epsilon(d, 0.01),
    "epsilon huge": lambda d: truncation.epsilon(d, 0.999),
    "eta": lambda d: truncation.eta(d, 0.01),
    "surprise": lambda d: truncation.surprise_below(d, 2.0),
    "surprise negative": lambda d: truncation.surprise_below(d, -50.0),
    "surprise huge": lambda d: truncation.surprise_below(d, 5000.0),
    "top-n-sigma": lambda d: truncation.top_n_sigma(d, 1.0),
    "top-n-sigma wide": lambda d: truncation.top_n_sigma(d, 100.0),
}


@st.composite
def rows(draw: st.DrawFn, max_size: int = 200, masked: bool = True) -> NDArray[np.float32]:
    """Rows of logits: a spread, with ties, masks, leaders and a tail as they come."""
    size = draw(st.integers(1, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0]))
    shape = draw(st.sampled_from(["smooth", "integers", "leaders", "two levels"]))
    if shape == "integers":
        logits = np.round(logits)
    elif shape == "leaders":
        logits[: draw(st.integers(1, size))] = logits.max()
    elif shape == "two levels":
        logits = np.where(logits > 0, 3.0, -1.0)
    if masked and draw(st.booleans()):
        hidden = rng.random(size) < draw(st.sampled_from([0.1, 0.9]))
        hidden[rng.integers(size)] = False
        logits[hidden] = -np.inf
    return (rng.permutation(logits) + draw(st.sampled_from([0.0, 100.0, -1000.0]))).astype(np.float32)


temperatures = st.sampled_from([1e-6, 0.1, 0.5, 1.0, 1.5, 10.0, 1e4])


def probabilities(logits: NDArray[np.floating], temperature: float = 1.0) -> NDArray[np.float64]:
    """Softmax in double precision of what the float32 pipeline sees."""
    e = np.exp(shifted_logits(logits, temperature).astype(np.float64))
    return e / e.sum()


def kept(logits: NDArray[np.floating], temperature: float = 1.0) -> Mask:
    return truncation.p_less(shifted_logits(logits, temperature))


def collision(logits: NDArray[np.floating], temperature: float = 1.0) -> float:
    return float((probabilities(logits, temperature) ** 2).sum())


def clear_of(values: NDArray[np.float64], border: float) -> NDArray[np.bool_]:
    """Which values are not within rounding of the border."""
    return np.abs(values - border) > ROUNDING * abs(border) + 1e-300


# --- p-less: the definition and its properties, numbered as in the methods -----------------------------


@given(rows(), temperatures)
def test_p_less_keeps_what_is_at_least_as_probable_as_two_draws_agreeing(logits: Row, temperature: float) -> None:
    p = probabilities(logits, temperature)
    border = collision(logits, temperature)
    sure = clear_of(p, border)
    np.testing.assert_array_equal(kept(logits, temperature)[sure], (p >= border)[sure])


@given(rows(), temperatures)
def test_property_1_the_threshold_is_between_1_over_m_and_the_largest_probability_so_the_argmax_is_kept(
    logits: Row, temperature: float
) -> None:
    p = probabilities(logits, temperature)
    border = collision(logits, temperature)
    assert 1 / np.count_nonzero(p) <= border * (1 + 1e-12)
    assert border <= p.max() * (1 + 1e-12)
    mask = kept(logits, temperature)
    assert mask[logits == logits.max()].all()


@given(rows(), temperatures)
def test_property_2_the_threshold_lies_between_powers_of_the_best_and_of_the_entropy(
    logits: Row, temperature: float
) -> None:
    p = probabilities(logits, temperature)
    positive = p[p > 0]
    shannon = float(-(positive * np.log(positive)).sum())
    border = collision(logits, temperature)
    assert p.max() ** 2 <= border * (1 + 1e-12)
    assert math.exp(-shannon) <= border * (1 + 1e-9)


@given(rows(), temperatures)
def test_property_3_no_more_tokens_are_kept_than_one_over_the_threshold(logits: Row, temperature: float) -> None:
    assert kept(logits, temperature).sum() <= math.floor(1 / collision(logits, temperature) * (1 + ROUNDING))


@given(st.integers(1, 5000), st.integers(0, 20), st.sampled_from([0.0, -5.0, 1e4]), temperatures)
def test_property_4_a_uniform_distribution_keeps_everything_whatever_its_size(
    size: int, impossible: int, level: float, temperature: float
) -> None:
    logits = np.full(size + impossible, level, dtype=np.float32)
    logits[size:] = -np.inf
    np.testing.assert_array_equal(kept(logits, temperature), logits > -np.inf)


@given(rows(), st.sampled_from([0.1, 0.5, 1.0, 10.0]), st.floats(0.5, 0.99, exclude_min=True))
def test_property_5_a_token_with_more_than_half_the_mass_stands_alone(
    logits: Row, temperature: float, share: float
) -> None:
    z = logits / np.float64(temperature)
    best = int(z.argmax())
    others = float(np.logaddexp.reduce(np.delete(z, best), initial=-np.inf))
    if others > -np.inf:
        logits[best] = temperature * (others + math.log(share / (1 - share)))
    assume(probabilities(logits, temperature).max() > 0.5 + 1e-6)
    assert kept(logits, temperature).sum() == 1


@given(st.floats(1e-4, 20), temperatures)
def test_property_5_of_two_tokens_that_are_not_tied_only_the_better_is_kept(gap: float, temperature: float) -> None:
    assume(gap / temperature > 1e-3)
    assert kept(np.array([0.0, gap], dtype=np.float32), temperature).tolist() == [False, True]


@given(rows(), temperatures)
def test_property_6_p_less_is_min_p_with_a_base_of_its_own(logits: Row, temperature: float) -> None:
    shifted = shifted_logits(logits, temperature)
    p = probabilities(logits, temperature)
    base = collision(logits, temperature) / p.max()
    assert p.max() * (1 - 1e-12) <= base <= 1 + 1e-12
    sure = clear_of(p, collision(logits, temperature))
    np.testing.assert_array_equal(truncation.min_p(shifted, min(base, 1.0))[sure], truncation.p_less(shifted)[sure])


@given(rows(), st.floats(0.05, 50), st.floats(0.05, 50))
def test_property_7_the_threshold_does_not_rise_with_temperature(logits: Row, one: float, other: float) -> None:
    cold, hot = sorted((one, other))
    assert collision(logits, hot) <= collision(logits, cold) * (1 + ROUNDING)


@given(rows())
def test_property_7_at_temperature_to_0_the_threshold_is_one_over_the_tied_leaders(logits: Row) -> None:
    leaders = int((logits == logits.max()).sum())
    assume(not ((logits < logits.max()) & (logits > logits.max() - 1e-3)).any())
    np.testing.assert_allclose(collision(logits, 1e-6), 1 / leaders, rtol=1e-9)
    assert kept(logits, 1e-6).sum() == leaders


@given(rows(), st.floats(0.05, 50), st.floats(0.05, 50))
def test_property_8_what_a_lower_temperature_keeps_a_higher_one_keeps_too(
    logits: Row, one: float, other: float
) -> None:
    cold, hot = sorted((one, other))
    lost = kept(logits, cold) & ~kept(logits, hot)
    p = probabilities(logits, hot)
    assert not (lost & clear_of(p, collision(logits, hot))).any()


@given(rows(), st.floats(0.1, 50))
def test_property_9_the_kept_set_is_between_two_expectations_of_the_logits(logits: Row, temperature: float) -> None:
    finite = logits > -np.inf
    z = logits.astype(np.float64)
    safe = np.where(finite, z, 0.0)
    near = float((probabilities(logits, temperature / 2) * safe).sum())
    far = float((probabilities(logits, temperature) * safe).sum())
    slack = 1e-4 * max(1.0, float(np.abs(safe).max()))
    mask = kept(logits, temperature)
    assert mask[finite & (z >= near + slack)].all()
    assert not mask[~finite | (z < far - slack)].any()
    assert far >= safe[finite].mean() - slack


@given(st.integers(0, 2**32 - 1))
def test_property_10_at_high_temperature_what_is_above_the_mean_logit_is_kept_not_everything(seed: int) -> None:
    logits = np.random.default_rng(seed).standard_normal(1000).astype(np.float32)
    mean = float(logits.astype(np.float64).mean())
    clear = np.abs(logits - mean) > 1e-2
    np.testing.assert_array_equal(kept(logits, 1e3)[clear], (logits >= mean)[clear])


@given(rows(), temperatures)
def test_property_11_applying_it_twice_keeps_a_subset(logits: Row, temperature: float) -> None:
    once = kept(logits, temperature)
    again = kept(np.where(once, logits, -np.inf), temperature)
    assert not (again & ~once).any()
    values = shifted_logits(logits, temperature)[once]
    if (values == values[0]).all():
        np.testing.assert_array_equal(again, once)


def test_property_11_applying_it_twice_keeps_less_where_the_kept_are_not_tied() -> None:
    logits = np.log(np.array([0.3, 0.25, 0.2, 0.15, 0.1], dtype=np.float32))
    once = kept(logits)
    assert once.tolist() == [True, True, False, False, False]
    assert kept(np.where(once, logits, -np.inf)).sum() == 1


@given(rows(), temperatures, st.integers(0, 2**32 - 1), st.sampled_from([-64.0, 0.5, 512.0]), st.integers(1, 300))
def test_property_12_order_shift_and_impossible_tokens_do_not_matter(
    logits: Row, temperature: float, seed: int, shift: float, padding: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(logits))
    moved = (logits + np.float32(shift)).astype(np.float32)
    assume(np.array_equal(moved - moved.max(), logits - logits.max(), equal_nan=True))
    padded = np.concatenate([logits, np.full(padding, -np.inf, dtype=np.float32)])
    p = probabilities(logits, temperature)
    for rule in (truncation.p_less, truncation.p_less_norm):
        reference = rule(shifted_logits(logits, temperature))
        border = norm_threshold(p, logits) if rule is truncation.p_less_norm else collision(logits, temperature)
        sure = np.abs(p - border) > ROUNDING * max(border, 1 / len(p))
        np.testing.assert_array_equal(rule(shifted_logits(moved, temperature)), reference)
        np.testing.assert_array_equal(
            rule(shifted_logits(logits[order], temperature))[sure[order]], reference[order][sure[order]]
        )
        np.testing.assert_array_equal(rule(shifted_logits(padded, temperature))[: len(p)][sure], reference[sure])


def norm_threshold(p: NDArray[np.float64], logits: Row) -> float:
    """(V L - 1) / (V - 1) over the finite logits."""
    count = int((logits > -np.inf).sum())
    return float((count * (p**2).sum() - 1) / (count - 1)) if count > 1 else 1.0


@given(rows(), temperatures)
def test_property_13_p_less_norm_keeps_a_superset_above_its_own_threshold(logits: Row, temperature: float) -> None:
    shifted = shifted_logits(logits, temperature)
    p = probabilities(logits, temperature)
    plain, norm = truncation.p_less(shifted), truncation.p_less_norm(shifted)
    border = norm_threshold(p, logits)
    count = int((logits > -np.inf).sum())
    assert -1e-12 <= border <= collision(logits, temperature) * (1 + 1e-12)
    if count > 1:
        sliver = (1 - collision(logits, temperature)) / (count - 1)
        np.testing.assert_allclose(collision(logits, temperature) - border, sliver, rtol=1e-6, atol=1e-12)
    # The difference of two sums of order 1 is off by their rounding, not by its own.
    sure = np.abs(p - border) > ROUNDING * max(border, 1 / count)
    np.testing.assert_array_equal(norm[sure], ((p >= border) & (p > 0))[sure])
    assert not (plain & ~norm & sure).any()


def test_property_13_p_less_norm_keeps_everything_possible_of_a_uniform_and_one_of_a_degenerate_row() -> None:
    uniform = np.zeros(977, dtype=np.float32)
    assert truncation.p_less_norm(shifted_logits(uniform, 1.0)).all()
    degenerate = np.array([-np.inf, 3.0, -np.inf], dtype=np.float32)
    assert truncation.p_less_norm(shifted_logits(degenerate, 1.0)).tolist() == [False, True, False]


def test_property_13_p_less_norm_differs_from_p_less_inside_its_sliver() -> None:
    p = np.array([0.34, 0.3335, 0.3265])
    border = float((p**2).sum())
    logits = np.log(p).astype(np.float32)
    assert [value >= border for value in p] == truncation.p_less(shifted_logits(logits, 1.0)).tolist()
    assert truncation.p_less_norm(shifted_logits(logits, 1.0)).all()


def test_property_14_the_kept_mass_has_no_lower_bound() -> None:
    tail = 200_000
    logits = np.zeros(tail + 1, dtype=np.float32)
    logits[0] = math.log(0.1 / 0.9 * tail)
    mask = kept(logits)
    assert mask.sum() == 1
    np.testing.assert_allclose(probabilities(logits)[mask].sum(), 0.1, rtol=1e-3)


@given(st.integers(1, 3000), st.integers(0, 3000), st.floats(5, 40))
def test_tied_leaders_over_a_tail_all_survive(leaders: int, tail: int, depth: float) -> None:
    """The case in which probabilities compared with their own sum of squares lose every token to rounding."""
    logits = np.concatenate([np.zeros(leaders), np.full(tail, -depth)]).astype(np.float32)
    assert kept(logits)[:leaders].all()


# --- all samplers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@given(logits=rows(), temperature=temperatures)
def test_no_sampler_is_ever_empty_or_keeps_the_impossible_or_writes_into_its_row(
    name: str, logits: Row, temperature: float
) -> None:
    before = logits.copy()
    shifted = shifted_logits(logits, temperature)
    copy = shifted.copy()
    mask = RULES[name](shifted)
    assert mask.dtype == np.bool_ and mask.shape == logits.shape
    assert mask.any()
    assert not mask[logits == -np.inf].any()
    np.testing.assert_array_equal(logits, before)
    np.testing.assert_array_equal(shifted, copy)


@pytest.mark.parametrize("name", [name for name in RULES if "typical" not in name])
@given(logits=rows(), temperature=temperatures)
def test_all_samplers_but_typical_keep_the_best_and_cut_by_probability(
    name: str, logits: Row, temperature: float
) -> None:
    mask = RULES[name](shifted_logits(logits, temperature))
    assert mask[logits.argmax()]
    if not mask.all():
        shifted = shifted_logits(logits, temperature)
        assert shifted[mask].min() > shifted[~mask].max() or shifted[~mask].max() == -np.inf


@pytest.mark.parametrize("name", RULES)
@given(logits=rows(max_size=60), seed=st.integers(0, 2**32 - 1))
def test_the_order_of_the_vocabulary_does_not_matter(name: str, logits: Row, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(logits))
    # Sums in another order differ in the last bits, so only rows without a token on a border are comparable.
    mask, shuffled = RULES[name](shifted_logits(logits, 1.0)), RULES[name](shifted_logits(logits[order], 1.0))
    different = np.flatnonzero(mask[order] != shuffled)
    values = logits[order][different]
    assert len(different) == 0 or (values == values[0]).all() or np.ptp(values) < 1e-3


# --- against the definitions by sorting -----------------------------------------------------------------


def sorted_top_p(shifted: Row, p: float) -> Mask:
    """The definition: the whole row sorted, ties with the crossing token included."""
    if p >= 1:
        return shifted > -np.inf
    e = np.exp(shifted)
    descending = np.sort(e)[::-1].astype(np.float64)
    before = np.concatenate([[0.0], np.cumsum(descending)[:-1]])
    inside = descending[before < p * float(e.sum())]
    return (e >= inside.min()) & (e > np.finfo(np.float32).tiny)


@st.composite
def long_rows(draw: st.DrawFn) -> Row:
    """Rows long enough that prefixes have to grow."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([1023, 1024, 1025, 5000, 20_000]))
    logits = rng.standard_normal(size) * draw(st.sampled_from([0.0, 0.05, 1.0, 4.0]))
    if draw(st.booleans()):
        logits = np.round(logits, 1)
    if draw(st.booleans()):
        logits[rng.random(size) < 0.3] = -np.inf
        logits[0] = 0.0
    return logits.astype(np.float32)


@given(st.one_of(rows(), long_rows()), st.one_of(st.floats(1e-9, 1.0), st.sampled_from([0.5, 0.9, 0.999999, 1.0])))
def test_top_p_without_sorting_everything_is_exactly_top_p_by_sorting(logits: Row, p: float) -> None:
    shifted = shifted_logits(logits, 1.0)
    np.testing.assert_array_equal(truncation.top_p(shifted, p), sorted_top_p(shifted, p))


@given(rows(), st.floats(0.01, 0.99))
def test_top_p_keeps_a_token_iff_those_more_probable_hold_less_than_p(logits: Row, p: float) -> None:
    probability = probabilities(logits)
    mask = truncation.top_p(shifted_logits(logits, 1.0), p)
    for token, own in enumerate(probability):
        above = float(probability[probability > own].sum())
        if abs(above - p) > 1e-5:
            assert mask[token] == (above < p and own > 0)


def test_top_p_keeps_the_token_that_crosses() -> None:
    shifted = shifted_logits(np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32)), 1.0)
    assert truncation.top_p(shifted, 0.49).tolist() == [True, False, False]
    assert truncation.top_p(shifted, 0.51).tolist() == [True, True, False]
    assert truncation.top_p(shifted, 0.81).tolist() == [True, True, True]


@given(st.one_of(rows(), long_rows()), st.integers(1, 3000))
def test_top_k_is_the_k_largest_by_sorting_and_their_ties(logits: Row, k: int) -> None:
    border = np.sort(logits)[::-1][min(k, len(logits)) - 1]
    expected = (logits >= border) & (logits > -np.inf)
    np.testing.assert_array_equal(truncation.top_k(shifted_logits(logits, 1.0), k), expected & (logits > -np.inf))


@given(st.one_of(rows(), long_rows()), st.floats(0.01, 0.99))
def test_typical_is_the_smallest_set_closest_to_the_entropy(logits: Row, mass: float) -> None:
    shifted = shifted_logits(logits, 1.0)
    p = probabilities(logits)
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(p) + (p[p > 0] * np.log(p[p > 0])).sum())
    mask = truncation.typical(shifted, mass)
    reach = distance[mask].max()
    inside, edge = distance < reach - 1e-3, distance <= reach + 1e-3
    assert p[inside].sum() < mass + 1e-3, "a smaller set would have done"
    assert p[edge].sum() >= mass - 1e-3, "the set holds the mass"
    assert mask[inside & (p > 0)].all() and not mask[~edge].any()


@given(rows(), st.floats(1e-4, 0.9))
def test_epsilon_keeps_probabilities_of_at_least_that_or_the_best(logits: Row, least: float) -> None:
    p = probabilities(logits)
    border = min(least, p.max())
    sure = clear_of(p, border)
    np.testing.assert_array_equal(truncation.epsilon(shifted_logits(logits, 1.0), least)[sure], (p >= border)[sure])


@given(rows(), st.floats(1e-4, 0.9))
def test_eta_lowers_the_bound_where_the_entropy_is_high(logits: Row, least: float) -> None:
    p = probabilities(logits)
    entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
    border = min(least, math.sqrt(least) * math.exp(-entropy), p.max())
    sure = np.abs(p - border) > 1e-4 * border
    np.testing.assert_array_equal(truncation.eta(shifted_logits(logits, 1.0), least)[sure], (p >= border)[sure])


@given(rows(), st.floats(0.0, 12.0))
def test_mirostats_step_keeps_surprises_up_to_the_bound_or_the_best(logits: Row, bits: float) -> None:
    p = probabilities(logits)
    border = min(2.0**-bits, p.max())
    sure = clear_of(p, border)
    mask = truncation.surprise_below(shifted_logits(logits, 1.0), bits)
    np.testing.assert_array_equal(mask[sure], (p >= border)[sure])


@given(rows(), st.floats(0.1, 3.0), st.floats(0.1, 20.0))
def test_top_n_sigma_keeps_the_same_set_at_every_temperature(logits: Row, n: float, temperature: float) -> None:
    finite = logits[logits > -np.inf].astype(np.float64)
    border = finite.max() - n * finite.std()
    sure = np.abs(logits - border) > 1e-3 * max(1.0, float(np.abs(finite).max()))
    for t in (1.0, temperature):
        mask = truncation.top_n_sigma(shifted_logits(logits, t), n)
        np.testing.assert_array_equal(mask[sure], (logits >= border)[sure])


@given(rows(), st.floats(1e-3, 1.0))
def test_min_p_keeps_a_share_of_the_best(logits: Row, share: float) -> None:
    p = probabilities(logits)
    sure = clear_of(p, share * p.max())
    mask = truncation.min_p(shifted_logits(logits, 1.0), share)
    np.testing.assert_array_equal(mask[sure], (p >= share * p.max())[sure])


# --- the row itself -------------------------------------------------------------------------------------


@given(rows(), temperatures)
def test_shifted_logits_put_the_best_at_exactly_0_and_keep_gaps(logits: Row, temperature: float) -> None:
    shifted = shifted_logits(logits, temperature)
    assert shifted.dtype == np.float32
    assert shifted.max() == 0
    gaps = (logits.astype(np.float64) - float(logits.max())) / temperature
    sure = gaps > -1e30
    np.testing.assert_allclose(shifted[sure], gaps[sure], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], []])
def test_rows_that_cannot_be_sampled_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match=r"NaN or \+inf|every logit is -inf|empty"):
        shifted_logits(np.array(bad, dtype=np.float32), 1.0)


@given(rows(max_size=50))
def test_half_precision_rows_are_cast_before_anything_is_squared(logits: Row) -> None:
    half = np.clip(logits, -6e4, 6e4).astype(np.float16)
    mask = truncation.p_less(shifted_logits(half, 1.0))
    np.testing.assert_array_equal(mask, truncation.p_less(shifted_logits(half.astype(np.float32), 1.0)))


def test_half_precision_would_have_lost_the_threshold_of_a_flat_row() -> None:
    half = np.zeros(8000, dtype=np.float16)
    half[0] = 0.5
    assert truncation.p_less(shifted_logits(half, 1.0)).sum() == 1
