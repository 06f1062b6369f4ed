"""Log-probabilities are the raw model's, at temperature 1."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.logprobs import token_logprob

VOCABULARY = 9
rows = st.lists(
    st.one_of(st.floats(-30, 30, width=32), st.just(-np.inf)), min_size=VOCABULARY, max_size=VOCABULARY
).filter(lambda row: max(row) > -np.inf)


@given(rows, st.integers(0, 12), st.integers(0, VOCABULARY - 1))
def test_a_logprob_is_log_softmax_and_the_alternatives_are_its_best(row: list[float], top: int, token: int) -> None:
    z = np.array(row, dtype=np.float64)
    expected = z - z.max() - np.log(np.exp(z - z.max()).sum())
    found = token_logprob(np.array(row, dtype=np.float32), token, top)
    np.testing.assert_allclose(found.logprob, expected[token], rtol=1e-5, atol=1e-5)
    order = sorted(range(VOCABULARY), key=lambda place: (-z[place], place))[:top]
    assert [place for place, _ in found.top] == order
    np.testing.assert_allclose([value for _, value in found.top], expected[order], rtol=1e-5, atol=1e-5)


def test_a_masked_token_has_minus_infinity() -> None:
    found = token_logprob(np.array([0.0, -np.inf], np.float32), 0, 2)
    assert found.top == ((0, 0.0), (1, -np.inf))


def test_the_row_is_not_written_into() -> None:
    row = np.arange(5, dtype=np.float32)
    row.flags.writeable = False
    token_logprob(row, 1, 3)
