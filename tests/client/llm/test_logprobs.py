"""Log-probabilities: the raw model's and the sampling distribution's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.logprobs import token_logprobs

VOCABULARY = 9
rows = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.just(-np.inf)), min_size=VOCABULARY, max_size=VOCABULARY
).filter(lambda row: max(row) > -np.inf)


@given(rows, st.integers(0, 12), st.data())
def test_raw_is_log_softmax_at_temperature_1_and_alternatives_are_its_best(
    row: list[float], top: int, data: st.DataObject
) -> None:
    padded = np.array([*row, 1e6], dtype=np.float32)  # one padded id that would dwarf everything
    z = padded[:VOCABULARY].astype(np.float64)
    expected = z - z.max() - np.log(np.exp(z - z.max()).sum())
    token = data.draw(st.integers(0, VOCABULARY - 1))
    distribution = Distribution(np.array([token]), np.ones(1))
    found = token_logprobs(padded, distribution, token, top, VOCABULARY)
    np.testing.assert_allclose(found.raw, expected[token], rtol=1e-5, atol=1e-5)
    order = sorted((i for i in range(VOCABULARY) if row[i] > -np.inf), key=lambda i: (-padded[i], i))[:top]
    assert [place for place, _ in found.top_raw] == order
    np.testing.assert_allclose([value for _, value in found.top_raw], expected[order], rtol=1e-5, atol=1e-5)


def test_the_sampling_distributions_own_are_beside_them() -> None:
    distribution = Distribution(np.array([1, 4, 6]), np.array([0.2, 0.5, 0.3]))
    found = token_logprobs(np.zeros(8, dtype=np.float32), distribution, 6, 2, 8)
    assert found.token == 6
    np.testing.assert_allclose(found.raw, np.log(1 / 8), rtol=1e-6)
    np.testing.assert_allclose(found.sampled, np.log(0.3))
    assert [place for place, _ in found.top_sampled] == [4, 6]
    np.testing.assert_allclose([value for _, value in found.top_sampled], np.log([0.5, 0.3]))


def test_a_token_that_cannot_have_been_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="not drawn"):
        token_logprobs(np.zeros(4, dtype=np.float32), Distribution(np.array([1]), np.ones(1)), 2, 0, 4)


def test_the_row_is_not_written_into() -> None:
    row = np.arange(5, dtype=np.float32)
    row.flags.writeable = False
    token_logprobs(row, Distribution(np.array([1]), np.ones(1)), 1, 3, 5)
