"""What a pool is worth: choices made from what was known at the time, rounds that add up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.drafters.judging import Judged, choose_at_every_place, figures_of, play_rounds
from edgeduet_client.drafters.selection import pool_selector, stated_costs
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_shared.config import DrafterConfig

CONFIG = DrafterConfig(target="m", domains=("a=folder:a", "b=folder:b"), depth=3, draft_cost=0.02, verify_cost=0.05)


def curves(places: int, level: int) -> np.ndarray:
    """(P, 3): the first ``level`` tokens accepted everywhere."""
    return np.tile((np.arange(3) < level).astype(float), (places, 1))


class Recording:
    """Always the same arm; notes what it was told, and when."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.now, self.learnt = arm, -1, []  # type: ignore[var-annotated]

    def start_request(self) -> None:
        self.now = -1

    def choose(self, costs: Any, context_length: int) -> Arm:
        self.now = context_length
        return self.arm

    def learn(self, survival: Any, *_: Any, **__: Any) -> None:
        self.learnt.append((self.now, survival["d"][0]))

    def played(self, round: Any) -> None:
        pass


def test_evidence_of_a_place_comes_when_the_tokens_behind_it_are_written():
    answer = {"d": np.arange(30.0).reshape(10, 3)}
    selector = Recording(Arm("d", 3))
    assert choose_at_every_place([answer, answer], selector, 3) == [["d"] * 10] * 2
    assert [place for _, place in selector.learnt] == [3.0 * place for place in range(10)] * 2, "each place once"
    # What is learnt between two choices was asked for after the earlier of them: place <= now + 1 - depth.
    for now, first in selector.learnt[:7]:
        assert first / 3 <= now + 1 - 3


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=4), st.integers(1, 3))
def test_rounds_of_a_fixed_arm_cover_every_place_and_cost_what_is_stated(levels: list[list[int]], length: int):
    answers = [{"d": np.array([(np.arange(3) < level).astype(float) for level in levels_of])} for levels_of in levels]
    rounds, emitted, cost = play_rounds(answers, Recording(Arm("d", length)), CONFIG)
    expected = 0
    for levels_of in levels:
        place = 0
        while place < len(levels_of):
            place, expected = place + min(levels_of[place], length) + 1, expected + 1
    assert rounds == expected
    assert rounds <= emitted <= rounds * (length + 1)
    assert cost == pytest.approx(rounds * (1 + length * (0.02 + 0.05)))


def test_plain_steps_cost_one_and_emit_one():
    assert play_rounds([{"d": curves(7, 3)}], Recording(NO_DRAFT), CONFIG) == (7, 7, 7.0)


def test_the_selector_follows_the_domain_from_request_to_request():
    expert, stranger = curves(60, 3), curves(60, 0)
    domains = {
        "a": Judged(({"own": expert, "expert-1": stranger},) * 6),
        "b": Judged(({"own": stranger, "expert-1": expert},) * 6),
    }
    figures = figures_of(domains, CONFIG)
    assert figures["a/own/1"] == 1 and figures["b/own/1"] == 0
    assert figures["a/choice/own"] > 0.95 and figures["b/choice/expert-1"] > 0.9
    assert figures["mixed/used/3"] > 0.8, "either drafter alone would have 0.5"
    assert figures["mixed/used/speed"] > 2
    assert sum(figures[f"mixed/choice/{name}"] for name in ("own", "expert-1")) == pytest.approx(1)


def test_where_no_drafter_helps_none_is_used():
    figures = figures_of({"a": Judged(({"own": curves(200, 0)},))}, CONFIG)
    assert figures["a/used/1"] == 0 and figures["a/used/pass"] == 1
    assert 0.95 < figures["a/used/speed"] <= 1


def test_a_domain_without_an_answer_reports_nothing():
    assert figures_of({"a": Judged(())}, CONFIG) == {}
    empty = Judged(({"own": np.zeros((0, 3))},))
    assert figures_of({"a": empty}, CONFIG) == {"a/own/1": 0.0, "a/own/2": 0.0, "a/own/3": 0.0}


def test_stated_costs_are_in_plain_steps():
    costs = stated_costs(["d"], 3, draft=0.02, verify=0.05)
    assert costs.seconds(NO_DRAFT, 10) == pytest.approx(1)
    assert costs.seconds(Arm("d", 2), 10) == pytest.approx(1 + 2 * 0.05 + 2 * 0.02)
    assert pool_selector(["d"], CONFIG).choose(costs, 1).length in range(4)
