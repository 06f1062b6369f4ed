"""Which drafters are scored where: within the budget, whatever the text says, rarely where it is clear."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.speculation.evaluation_budget import BLOCKS, EvaluationBudget

DEPTH = 4


def run(
    budget: EvaluationBudget,
    emitted: list[int],
    costs: Mapping[str, float],
    *,
    seconds: float = 1.0,
) -> dict[str, list[int]]:
    """One request; returns the starts each drafter was scored at."""
    budget.begin()
    scored: dict[str, list[int]] = {name: [] for name in costs}
    length = known = 1
    for tokens in emitted:
        length += tokens
        budget.paid(seconds)
        for start in range(known, length):
            budget.push(start)
        known = length
        for block in budget.due(length):
            assert block.starts[-1] + DEPTH <= length
            for name in block.drafters:
                scored[name] += block.starts
                budget.took(name, len(block.starts), costs[name] * len(block.starts))
    return scored


@given(
    st.floats(0.005, 0.3),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=50, max_size=300),
)
@settings(max_examples=60, deadline=None)
def test_scoring_stays_within_its_share_but_for_the_first_look(
    share: float, costs: list[float], emitted: list[int]
) -> None:
    names = {f"d{number}": cost for number, cost in enumerate(costs)}
    budget = EvaluationBudget(list(names), depth=DEPTH, share=share)
    run(budget, emitted, names)
    first_look = BLOCKS[0][0] * sum(costs)
    assert budget.spent <= share * budget.elapsed + first_look + 1e-9


@given(st.lists(st.integers(1, 5), min_size=30, max_size=120))
@settings(max_examples=40, deadline=None)
def test_every_start_is_scored_at_most_once_and_never_before_its_horizon(emitted: list[int]) -> None:
    budget = EvaluationBudget(["a", "b"], depth=DEPTH, share=0.5)
    for starts in run(budget, emitted, {"a": 0.001, "b": 0.02}).values():
        assert starts == sorted(set(starts))


def test_a_share_of_nothing_scores_nothing() -> None:
    budget = EvaluationBudget(["a"], depth=DEPTH, share=0.0)
    assert run(budget, [3] * 100, {"a": 0.0}) == {"a": []}
    with pytest.raises(ValueError, match="share"):
        EvaluationBudget(["a"], depth=DEPTH, share=1.0)


def test_the_schedule_is_told_nothing_about_what_scoring_found() -> None:
    """Neither accepted tokens nor curves get in; a standing is read when a block opens, so it is past by then."""
    taken = {
        name: set(inspect.signature(method).parameters) - {"self"}
        for name, method in inspect.getmembers(EvaluationBudget, inspect.isfunction)
        if not name.startswith("_")
    }
    assert taken == {
        "begin": set(),
        "push": {"start"},
        "paid": {"seconds"},
        "due": {"length"},
        "took": {"drafter", "starts", "seconds"},
    }


def test_who_is_scored_is_settled_when_a_block_opens() -> None:
    standing = {"a": 1.0}
    budget = EvaluationBudget(["a"], depth=DEPTH, share=0.5, standing=lambda: standing)
    budget.begin()
    budget.push(1)
    standing["a"] = 0.1
    for start in range(2, 40):
        budget.push(start)
    (block, *_) = budget.due(60)
    assert block.drafters == ("a",) and block.starts[0] == 1


def test_the_first_blocks_of_a_request_are_short_and_one_takes_every_position() -> None:
    budget = EvaluationBudget(["a"], depth=1, share=0.5)
    budget.begin()
    for start in range(1, 200):
        budget.push(start)
        budget.paid(1.0)
    sizes = [(len(block.starts), block.starts[1] - block.starts[0]) for block in budget.due(200)[:1]]
    assert sizes == [BLOCKS[0]]
    assert any(stride == 1 for _, stride in BLOCKS)


def test_within_a_request_scoring_becomes_rare_and_a_change_brings_it_back() -> None:
    changes = [0]
    budget = EvaluationBudget(["a"], depth=DEPTH, share=0.3, changes=lambda: changes[0])
    steady = len(run(budget, [2] * 500, {"a": 0.01})["a"])
    again = EvaluationBudget(["a"], depth=DEPTH, share=0.3, changes=lambda: changes[0])
    again.begin()
    scored, length = 0, 1
    for turn in range(500):
        changes[0] = turn // 50
        for start in range(length, length + 2):
            again.push(start)
        length += 2
        again.paid(1.0)
        for block in again.due(length):
            scored += len(block.starts)
            again.took("a", len(block.starts), 0.01 * len(block.starts))
    assert steady < 0.25 * 1000
    assert scored > 1.2 * steady


def test_a_drafter_that_is_clearly_worse_is_looked_at_ever_more_rarely_until_it_stands_better() -> None:
    standing = {"good": 1.0, "bad": 0.5}
    budget = EvaluationBudget(["good", "bad"], depth=DEPTH, share=0.3, standing=lambda: standing)
    costs = {"good": 0.01, "bad": 0.01}
    run(budget, [2] * 100, costs)
    totals = dict.fromkeys(costs, 0)
    for _ in range(20):
        for name, starts in run(budget, [2] * 100, costs).items():
            totals[name] += len(starts)
    assert 0 < totals["bad"] < 0.2 * totals["good"]
    standing["bad"] = 0.95
    recovered = run(budget, [2] * 100, costs)
    assert len(recovered["bad"]) == len(recovered["good"])


def test_where_no_draft_is_best_little_is_spent() -> None:
    spent = {}
    for label, standing in (("pays", 1.0), ("does not", 0.97)):
        budget = EvaluationBudget(["a"], depth=DEPTH, share=0.04, standing=partial(dict, a=standing))
        for _ in range(20):
            run(budget, [1] * 200, {"a": 0.1})
        spent[label] = budget.spent / budget.elapsed
    assert spent["does not"] < 0.008 < spent["pays"] <= 0.041


def test_a_drafter_that_never_answers_is_not_asked_again_in_that_request() -> None:
    budget = EvaluationBudget(["dead"], depth=DEPTH, share=0.3)
    budget.begin()
    asked, length = 0, 1
    for _ in range(200):
        for start in range(length, length + 2):
            budget.push(start)
        length += 2
        budget.paid(1.0)
        asked += len(budget.due(length))
    assert asked == 1


def test_a_drafter_that_takes_next_to_no_time_is_scored_throughout() -> None:
    standing = {"lookup": 0.3, "model": 1.0}
    budget = EvaluationBudget(list(standing), depth=DEPTH, share=0.04, standing=lambda: standing)
    scored = run(budget, [2] * 600, {"lookup": 1e-5, "model": 0.02})
    assert len(scored["lookup"]) > 1.5 * len(scored["model"])
    # A block takes every third position.
    assert len(scored["lookup"]) > 0.9 * 1200 / 3
