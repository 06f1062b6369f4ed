"""Verification of single tokens: the law of what comes out, the random numbers it takes, and what it never does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.speculation import verify as verifying
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.verify import decide, residual
from table_model import (
    PROMPT,
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    enumerate_outcomes,
    enumerated_draw,
    never_interrupted,
    new_answer,
    new_sampling,
    plain_law,
    table_plan,
)

SIZE = 6


@st.composite
def distributions(draw_: st.DrawFn) -> Distribution:
    """Any support, any ratio of probabilities down to 1e-9."""
    ids = sorted(draw_(st.sets(st.integers(0, SIZE - 1), min_size=1)))
    weights = np.array([10 ** draw_(st.floats(-9, 0)) for _ in ids])
    return Distribution(np.array(ids), weights / weights.sum())


def dense(distribution: Distribution) -> np.ndarray:
    vector = np.zeros(SIZE)
    vector[distribution.ids] = distribution.probabilities
    return vector


@settings(deadline=None)
@given(target=distributions(), law=distributions())
def test_what_comes_out_has_the_targets_law_whatever_the_draft_was(target: Distribution, law: Distribution) -> None:
    def run(chance: Any) -> list[int]:
        proposed = enumerated_draw(law, chance)
        return [decide(target, proposed, law, chance).token]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "draw", enumerated_draw)
        found = enumerate_outcomes(run)
    vector = np.zeros(SIZE)
    for (token,), probability in found.items():
        vector[token] = probability
    np.testing.assert_allclose(vector, dense(target), atol=1e-12)


@settings(deadline=None)
@given(target=distributions(), law=distributions())
def test_the_share_that_is_accepted_is_one_minus_the_distance(target: Distribution, law: Distribution) -> None:
    def run(chance: Any) -> list[int]:
        return [decide(target, enumerated_draw(law, chance), law, chance).accepted]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifying, "draw", enumerated_draw)
        accepted = enumerate_outcomes(run).get((True,), 0.0)
    assert accepted == pytest.approx(np.minimum(dense(target), dense(law)).sum(), abs=1e-12)


@given(target=distributions(), law=distributions())
def test_the_residual_is_a_distribution_inside_the_targets_support(target: Distribution, law: Distribution) -> None:
    left = residual(target, law)
    assert left.probabilities.dtype == np.float64
    assert set(left.ids) <= set(target.ids)
    assert (left.probabilities > 0).all()
    assert left.probabilities.sum() == pytest.approx(1, abs=1e-12)
    excess = np.maximum(dense(target) - dense(law), 0)
    if excess.sum() > 1e-6:
        np.testing.assert_allclose(dense(left), excess / excess.sum(), atol=1e-9)


@given(target=distributions())
def test_where_target_and_law_agree_the_residual_is_the_target_itself(target: Distribution) -> None:
    assert residual(target, target) is target
    shaken = Distribution(target.ids, target.probabilities * (1 + 1e-15))
    assert residual(target, shaken) is target


def test_a_law_on_other_tokens_leaves_the_target_as_it_is() -> None:
    target = Distribution(np.array([0, 1]), np.array([0.25, 0.75]))
    left = residual(target, Distribution(np.array([4, 5]), np.array([0.5, 0.5])))
    np.testing.assert_array_equal(dense(left), dense(target))


class Scripted:
    """A generator that returns these numbers."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def test_a_token_the_target_excludes_is_not_accepted_even_if_the_number_is_zero() -> None:
    target = Distribution(np.array([1]), np.array([1.0]))
    law = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
    rng: Any = Scripted(0.0, 0.0)
    verdict = decide(target, 0, law, rng)
    assert (verdict.token, verdict.accepted) == (1, False)


@given(target=distributions(), proposed=st.integers(0, SIZE - 1), seed=st.integers(0, 2**32))
def test_a_certain_draft_takes_the_number_plain_decoding_takes(target: Distribution, proposed: int, seed: int) -> None:
    ours, plain = np.random.default_rng(seed), np.random.default_rng(seed)
    verdict = decide(target, proposed, None, ours)
    assert verdict.token == draw(target, plain)
    assert verdict.accepted == (verdict.token == proposed)
    assert ours.bit_generator.state == plain.bit_generator.state


@given(target=distributions(), law=distributions(), seed=st.integers(0, 2**32))
def test_a_drawn_draft_takes_one_number_if_accepted_and_two_if_not(
    target: Distribution, law: Distribution, seed: int
) -> None:
    rng, counted = np.random.default_rng(seed), np.random.default_rng(seed)
    verdict = decide(target, int(law.ids[0]), law, rng)
    counted.random(1 if verdict.accepted else 2)
    assert rng.bit_generator.state == counted.bit_generator.state


class SwitchesAtRandom(ScriptedSelector):
    """Any arm at any round, from a generator of its own."""

    def __init__(self, arms: Any) -> None:
        super().__init__(arms)
        self.rng = np.random.default_rng(123)

    def choose(self, costs: Any, context_length: int) -> Arm:
        return self.arms[self.rng.integers(len(self.arms))]


def real(**given_: Any) -> TableDrafter:
    return TableDrafter(SIZE, draws=draw, **given_)


CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], list[Arm]]] = {
    "sampled": ({}, lambda: {"a": real()}, [Arm("a", 2)]),
    "n-gram and greedy, p-less": (
        {"sampler": "p-less", "temperature": 2.0},
        lambda: {"a": NgramDrafter("a", least=1, most=2), "b": real(certain=True)},
        [Arm("a", 3), Arm("b", 2)],
    ),
    "all of them, switching, top-p, penalties": (
        {"sampler": "top-p", "top_p": 0.9, "presence_penalty": 0.5},
        lambda: {"a": real(), "b": NgramDrafter("b", least=1, most=2), "c": real(seed=5, stop_below=0.4)},
        [Arm("a", 3), Arm("b", 2), Arm("c", 4), Arm(None, 0), Arm("a", 1)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_joint_of_two_tokens_passes_a_chi_square_test(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 000 answers of the real loop with the real generator; the level is 1e-6."""
    asked, make_drafters, arms = CASES[case]
    target, plan = TableTarget(SIZE, seed=1), table_plan(SIZE, **asked)
    drafters, selector = make_drafters(), SwitchesAtRandom(arms)
    rng, draft_rng = np.random.default_rng(2), np.random.default_rng(3)
    answers = 20_000
    seen: Counter[tuple[int, ...]] = Counter()
    cache = target.new_cache()
    for _ in range(answers):
        answer = new_answer(plan, 6)
        events = speculate(
            target, cache, PROMPT, answer, new_sampling(plan, rng),
            means=Means(drafters, selector), draft_rng=draft_rng, counted=Counted(),
            interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        for _ in events:
            if len(answer.ids) >= 3:
                break
        seen[tuple(answer.ids[:3])] += 1
    monkeypatch.setattr("edgeduet_client.llm.generate.draw", enumerated_draw)
    wanted = plain_law(target, plan, 3)
    assert set(seen) <= set(wanted)
    large = {key: probability for key, probability in wanted.items() if answers * probability >= 5}
    expected = [answers * probability for probability in large.values()]
    found = [seen[key] for key in large]
    if answers * (1 - sum(large.values())) >= 5:
        expected.append(answers - sum(expected))
        found.append(answers - sum(found))
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))
    assert len(expected) > 5
    assert chi2.sf(statistic, len(expected) - 1) > 1e-6
