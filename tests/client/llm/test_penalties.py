"""Bias and penalties against their formulas, and counts that are values."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.penalties import (
    TokenCounts,
    add_bias,
    penalise_presence_and_frequency,
    penalise_repetition,
)

VOCABULARY = 12
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
logits = st.lists(st.one_of(st.floats(-50, 50, width=32), st.just(-np.inf)), min_size=VOCABULARY, max_size=VOCABULARY)


@given(tokens, tokens)
def test_counts_grow_by_values_and_equal_counting_at_once(prompt: list[int], generated: list[int]) -> None:
    grown = TokenCounts.of(prompt)
    assert grown.ids.tolist() == sorted(set(prompt)) and not grown.counts.any()
    for place, token in enumerate(generated):
        ids, counts = grown.ids.tolist(), grown.counts.tolist()
        after = grown.plus(token)
        assert (grown.ids.tolist(), grown.counts.tolist()) == (ids, counts), "never changed"
        counted = Counter(generated[: place + 1])
        assert after.ids.tolist() == sorted({*prompt, *counted})
        assert after.counts.tolist() == [counted[token] for token in after.ids.tolist()]
        grown = after
    at_once = TokenCounts.of(prompt, generated)
    np.testing.assert_array_equal(grown.ids, at_once.ids)
    np.testing.assert_array_equal(grown.counts, at_once.counts)


@given(logits, tokens, st.floats(0.1, 5))
def test_repetition_divides_positive_and_multiplies_negative_logits_once(
    row: list[float], seen: list[int], penalty: float
) -> None:
    edited = np.array(row, dtype=np.float32)
    penalise_repetition(edited, np.unique(np.array(seen, dtype=np.int64)), penalty)
    for token, z in enumerate(row):
        expected = z if token not in seen else z / penalty if z > 0 else z * penalty
        np.testing.assert_allclose(edited[token], expected, rtol=1e-6, atol=1e-30)


@given(logits, tokens, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_counts_once_and_frequency_every_time_and_the_prompt_never(
    row: list[float], prompt: list[int], generated: list[int], presence: float, frequency: float
) -> None:
    edited = np.array(row, dtype=np.float32)
    penalise_presence_and_frequency(edited, TokenCounts.of(prompt, generated), presence, frequency)
    counted = Counter(generated)
    for token, z in enumerate(row):
        expected = z - (presence + frequency * counted[token] if token in counted else 0.0)
        np.testing.assert_allclose(edited[token], expected, rtol=1e-5, atol=1e-5)


@given(logits, st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32)))
def test_bias_is_added(row: list[float], bias: dict[int, float]) -> None:
    edited = np.array(row, dtype=np.float32)
    add_bias(edited, np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32))
    np.testing.assert_allclose(edited, [z + bias.get(token, 0.0) for token, z in enumerate(row)], rtol=1e-6, atol=1e-30)
