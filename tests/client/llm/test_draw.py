"""Drawing: inverse CDF on the support, one uniform number a token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw, generator


@st.composite
def distributions(draw_from: st.DrawFn) -> Distribution:
    weights = np.array(draw_from(st.lists(st.floats(1e-12, 1.0), min_size=1, max_size=20)))
    ids = np.cumsum(draw_from(st.lists(st.integers(1, 9), min_size=len(weights), max_size=len(weights))))
    return Distribution(ids.astype(np.int64), weights / weights.sum())


class Fixed(np.random.Generator):
    """A generator that returns one chosen uniform number."""

    def __init__(self, uniform: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.uniform = uniform

    def random(self, *args: object, **kwargs: object) -> float:  # type: ignore[override]
        return self.uniform


@given(distributions(), st.floats(0, 1, exclude_max=True))
def test_the_token_is_where_the_running_sum_passes_the_uniform_number(
    distribution: Distribution, uniform: float
) -> None:
    token = draw(distribution, Fixed(uniform))
    place = distribution.ids.tolist().index(token)
    below = float(distribution.probabilities[:place].sum())
    assert below - 1e-12 <= uniform <= below + float(distribution.probabilities[place]) + 1e-12


def test_a_uniform_number_on_a_border_belongs_to_the_token_above_it() -> None:
    distribution = Distribution(np.array([3, 7]), np.array([0.5, 0.5]))
    assert [draw(distribution, Fixed(u)) for u in (0.0, np.nextafter(0.5, 0.0), 0.5)] == [3, 3, 7]


@given(distributions())
def test_nothing_outside_the_support_comes_out_at_either_end(distribution: Distribution) -> None:
    assert draw(distribution, Fixed(0.0)) == distribution.ids[0]
    assert draw(distribution, Fixed(np.nextafter(1.0, 0.0))) in distribution.ids


@given(st.integers(0, 2**32 - 1), st.integers(1, 50_000))
def test_large_supports_follow_the_same_rule(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(size) ** 4 + 1e-9
    distribution = Distribution(np.arange(size) * 3, weights / weights.sum())
    uniform = float(rng.random())
    place = draw(distribution, Fixed(uniform)) // 3
    running = np.cumsum(distribution.probabilities)
    assert running[place] >= uniform - 1e-9
    assert place == 0 or running[place - 1] <= uniform + 1e-9


@given(distributions(), st.integers(0, 2**64 - 1))
def test_every_draw_takes_exactly_one_number_so_seeds_do_not_depend_on_the_support(
    distribution: Distribution, seed: int
) -> None:
    ours, numbers = generator(seed), generator(seed)
    for _ in range(3):
        draw(distribution, ours)
        numbers.random()
    assert ours.bit_generator.state == numbers.bit_generator.state


def test_the_same_seed_draws_the_same_and_none_draws_afresh() -> None:
    assert generator(7).random(4).tolist() == generator(7).random(4).tolist()
    assert generator(None).random(4).tolist() != generator(None).random(4).tolist()


def test_frequencies_follow_the_probabilities() -> None:
    distribution = Distribution(np.array([2, 5, 9]), np.array([0.7, 0.2, 0.1]))
    rng = generator(1)
    drawn = np.bincount([draw(distribution, rng) for _ in range(20_000)], minlength=10) / 20_000
    # Five standard deviations of a share of 20 000 draws.
    np.testing.assert_allclose(drawn[[2, 5, 9]], [0.7, 0.2, 0.1], atol=5 * np.sqrt(0.25 / 20_000))
    assert drawn.sum() == drawn[[2, 5, 9]].sum()
