"""FLy, the lossy rule: hand cases of gate and window, and everything it must never do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.draw import generator
from edgeduet_client.llm.speculation.arms import Arm, Round
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.fly import FlyRule, doubting_plan
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from table_model import (
    EOS,
    PIECES,
    PROMPT,
    ScriptedSelector,
    TableTarget,
    never_interrupted,
    new_answer,
    new_sampling,
    run_to_end,
    table_plan,
)

SIZE = len(PIECES)
BEST, OTHER = 5, 6
UNSURE, SURE = 0.5, 8.0
"""How far the best logit is above all others: three tokens of near equal probability, or one."""


class ByPosition(TableTarget):
    """Says BEST everywhere, here more and there less surely; ``ends`` says where it says EOS."""

    def __init__(self, unsure: Sequence[int], ends: Sequence[int] = ()) -> None:
        super().__init__(SIZE)
        self.unsure, self.ends = set(unsure), set(ends)

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        place = len(tokens) - len(PROMPT)
        row = np.zeros(SIZE, np.float32)
        row[EOS if place in self.ends else BEST] = UNSURE if place in self.unsure else SURE
        return row


class Proposes(NgramDrafter):
    """Proposes BEST, and OTHER (or what else is said) at some answer positions."""

    def __init__(self, others: dict[int, int]) -> None:
        super().__init__("d")
        self.others = others

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        first = len(text) - text.prompt_length
        return Draft.certain(tuple(self.others.get(first + place, BEST) for place in range(length)))


def first_round(
    *, others: dict[int, int], unsure: Sequence[int], length: int = 8, ends: Sequence[int] = (), rule: FlyRule | None,
    **settings_: Any,
) -> tuple[list[int], Round, int]:  # fmt: skip
    """The answer up to the end of the first round; position 0 comes with the prompt, drafts begin at 1."""
    target, plan = ByPosition(unsure, ends), table_plan(SIZE, **({"sampler": "greedy"} | settings_))
    answer, selector, counted = new_answer(plan, 40), ScriptedSelector([Arm("d", length)]), Counted()
    events = speculate(
        target, target.new_cache(), PROMPT, answer, new_sampling(plan, generator(0)),
        means=Means({"d": Proposes(others)}, selector, fly=rule), draft_rng=generator(0), counted=counted,
        interruption=never_interrupted(), clock=lambda: 0.0,
    )  # fmt: skip
    for _ in events:
        if selector.played_rounds:
            break
    return answer.ids[1:], selector.played_rounds[0], counted.relaxed


RULE = FlyRule(window=3, theta=0.3)


def test_an_isolated_mismatch_where_the_target_is_unsure_stands() -> None:
    ids, round, relaxed = first_round(others={2: OTHER}, unsure=[2], rule=RULE)
    assert ids == [BEST, OTHER, *[BEST] * 7]
    assert (round.accepted, round.evaluated, round.emitted, relaxed) == (8, 8, 9, 1)


def test_the_same_mismatch_is_rejected_where_the_target_is_sure() -> None:
    ids, round, relaxed = first_round(others={2: OTHER}, unsure=[], rule=RULE)
    assert ids == [BEST, BEST]
    assert (round.accepted, relaxed) == (1, 0)


def test_two_mismatches_inside_the_window_are_rejected_at_the_first() -> None:
    for second in (3, 4, 5):
        ids, _, relaxed = first_round(others={2: OTHER, second: OTHER}, unsure=range(20), rule=RULE)
        assert ids == [BEST, BEST]
        assert relaxed == 0


def test_two_mismatches_further_apart_than_the_window_both_stand() -> None:
    others = {1: OTHER, 5: OTHER}
    ids, _, relaxed = first_round(others=others, unsure=range(20), rule=RULE)
    assert ids == [OTHER, BEST, BEST, BEST, OTHER, *[BEST] * 4]
    assert relaxed == 2


@pytest.mark.parametrize(("place", "stands"), [(5, True), (6, False), (7, False), (8, False)])
def test_a_mismatch_whose_window_does_not_fit_into_the_draft_is_rejected(place: int, stands: bool) -> None:
    """K = 8, W = 3: the paper's rule j + W <= K lets 5 stand, and no later one."""
    ids, _, relaxed = first_round(others={place: OTHER}, unsure=range(20), rule=RULE)
    assert relaxed == stands
    assert ids[place - 1] == (OTHER if stands else BEST)
    assert len(ids) == (9 if stands else place)


def test_an_end_of_text_is_never_relaxed_on_either_side() -> None:
    proposed_end, *_ = first_round(others={2: EOS}, unsure=range(20), rule=RULE)
    assert proposed_end == [BEST, BEST]
    wanted_end, *_ = first_round(others={}, unsure=range(20), ends=[2], rule=RULE)
    assert wanted_end == [BEST, EOS]


def test_a_text_that_ends_inside_the_window_does_not_confirm_the_mismatch() -> None:
    ids, _, relaxed = first_round(others={2: OTHER, 4: EOS}, unsure=[2], ends=[4], rule=RULE)
    assert ids == [BEST, BEST]
    assert relaxed == 0


@pytest.mark.parametrize(
    "settings_",
    [{"logit_bias": {OTHER: -100}}, {"sampler": "top-k", "top_k": 1, "temperature": 1.0}, {"bad_words": ("本",)}],
)
def test_a_token_without_probability_never_stands(settings_: dict[str, Any]) -> None:
    ids, _, relaxed = first_round(others={2: OTHER}, unsure=range(20), rule=FlyRule(window=3, theta=0), **settings_)
    assert OTHER not in ids
    assert relaxed == 0


def answers(rule: FlyRule | None, seed: int, length: int, **asked: Any) -> tuple[list[int], Any]:
    target, plan = TableTarget(SIZE, seed=seed % 5), table_plan(SIZE, **asked)
    answer, sampling = new_answer(plan, 30), new_sampling(plan, generator(seed))
    drafter = NgramDrafter("n", least=1, most=2)
    events = speculate(
        target, target.new_cache(), PROMPT, answer, sampling,
        means=Means({"n": drafter}, ScriptedSelector([Arm("n", length)]), fly=rule),
        draft_rng=generator(0), counted=Counted(), interruption=never_interrupted(), clock=lambda: 0.0,
    )  # fmt: skip
    run_to_end(events)
    return answer.ids, sampling.rng.bit_generator.state


ASKED = st.sampled_from([{"sampler": "greedy"}, {}, {"sampler": "p-less", "temperature": 2.0}])


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 500), length=st.integers(1, 6), extra=st.integers(0, 3), asked=ASKED)
def test_a_window_as_long_as_the_draft_is_exact_verification(
    seed: int, length: int, extra: int, asked: dict[str, Any]
) -> None:
    """Random generator included."""
    loose = answers(FlyRule(window=length + extra, theta=0.0), seed, length, **asked)
    assert loose == answers(None, seed, length, **asked)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 500), length=st.integers(2, 8), asked=ASKED)
def test_a_threshold_nobody_reaches_is_exact_verification(seed: int, length: int, asked: dict[str, Any]) -> None:
    assert answers(FlyRule(window=1, theta=math.inf), seed, length, **asked) == answers(None, seed, length, **asked)


@pytest.mark.parametrize("seed", range(10))
def test_a_mismatch_that_is_rejected_after_all_leaves_the_random_numbers_alone(seed: int) -> None:
    """Drafts that are never right: every mismatch is followed by another, so nothing stands."""
    sides = []
    for rule in (FlyRule(window=2, theta=0.0), None):
        target, plan = TableTarget(SIZE, seed=1), table_plan(SIZE, logit_bias={OTHER: -15, EOS: -100})
        answer, sampling = new_answer(plan, 25), new_sampling(plan, generator(seed))
        drafter = Proposes(dict.fromkeys(range(60), OTHER))
        events = speculate(
            target, target.new_cache(), PROMPT, answer, sampling,
            means=Means({"d": drafter}, ScriptedSelector([Arm("d", 8)]), fly=rule),
            draft_rng=generator(0), counted=Counted(), interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        run_to_end(events)
        sides.append((answer.ids, sampling.rng.bit_generator.state))
    assert sides[0] == sides[1]


def test_it_is_lossy() -> None:
    """The rule does change answers, or there would be nothing to warn of."""
    changed = sum(
        answers(FlyRule(window=1, theta=0.0), seed, 8, sampler="greedy") != answers(None, seed, 8, sampler="greedy")
        for seed in range(5)
    )
    assert changed > 0


@given(weights=st.lists(st.floats(1e-6, 1), min_size=1, max_size=30))
def test_both_entropies_are_what_they_are_called(weights: list[float]) -> None:
    probabilities = np.array(weights) / sum(weights)
    best = sorted(probabilities, reverse=True)[:3]
    topk = FlyRule(entropy="topk", top_k=3).uncertainty(probabilities, 100)
    assert topk == pytest.approx(-sum(p * math.log(p) for p in best))
    assert topk <= math.log(3) + 1e-12
    full = FlyRule(entropy="full-normalised").uncertainty(probabilities, 100)
    assert full == pytest.approx(-sum(p * math.log(p) for p in probabilities) / math.log(100))


def test_the_two_entropies_disagree_where_it_matters() -> None:
    """Three equal tokens of 50 000: very unsure to one, nearly certain to the other."""
    probabilities = np.full(3, 1 / 3)
    assert FlyRule(entropy="topk").uncertainty(probabilities, 50_000) > 0.3
    assert FlyRule(entropy="full-normalised").uncertainty(probabilities, 50_000) < 0.3


def test_at_temperature_zero_doubt_is_measured_at_temperature_one() -> None:
    plan = table_plan(SIZE, sampler="greedy", logit_bias={1: -100})
    doubts = doubting_plan(plan)
    assert not doubts.greedy
    assert doubts.request.temperature == 1.0
    assert doubts.bias_ids is plan.bias_ids
    sampled = table_plan(SIZE, sampler="p-less")
    assert doubting_plan(sampled) is sampled
