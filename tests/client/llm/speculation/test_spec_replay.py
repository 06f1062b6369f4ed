"""Traces: written while decoding, read back, replayed under any selector, drawn; and the commands that do it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from edgeduet_client.llm.draw import draw, generator
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_client.llm.speculation.commands import speculate_app
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.evaluation_budget import EvaluationBudget
from edgeduet_client.llm.speculation.plotting import Timeline, plot_trace
from edgeduet_client.llm.speculation.replay import CostWorld, compare, oracle, replay, replay_fixed, request_oracles
from edgeduet_client.llm.speculation.scoring import Scoring
from edgeduet_client.llm.speculation.selectors import new_selector
from edgeduet_client.llm.speculation.selectors.fixed import FixedSelector
from edgeduet_client.llm.speculation.selectors.ratio import RatioSelector
from edgeduet_client.llm.speculation.synthetic_trace import SyntheticDrafter, synthetic_trace
from edgeduet_client.llm.speculation.trace import Trace, TraceWriter, read_trace
from edgeduet_shared.errors import EdgeDuetError
from table_model import (
    PROMPT,
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    never_interrupted,
    new_answer,
    new_sampling,
    run_to_end,
    table_plan,
)

SIZE, DEPTH = 6, 4
LENGTHS = {"drawn": [1, 2, 4], "certain": [2, 4]}
ARMS = [NO_DRAFT, *(Arm(name, length) for name, lengths in LENGTHS.items() for length in lengths)]


def drafters() -> dict[str, Any]:
    return {
        "drawn": TableDrafter(SIZE, name="drawn", seed=3, draws=draw),
        "certain": TableDrafter(SIZE, name="certain", seed=4, certain=True, sharpness=0.3),
    }


def costs() -> CostModel:
    return CostModel(
        {0: [1 + 0.1 * row for row in range(DEPTH + 1)]},
        {"drawn": DraftCost(0.01, 0.05), "certain": DraftCost(0.0, 0.01)},
    )


def record(
    path: Path, arms: Sequence[Arm], *, requests: int = 1, budget: int = 60, sampler: str = "temperature"
) -> list[Counted]:
    """Decode with the real loop on the table target, and trace it."""
    target: Any = TableTarget(SIZE, limit=256)
    # No token ends the text before its budget.
    plan = table_plan(SIZE, sampler=sampler, min_tokens=budget)
    pool, counts = drafters(), []
    ticks = count()
    with TraceWriter(path, pool, LENGTHS, depth=DEPTH, costs=costs()) as writer:
        for request in range(requests):
            counted = Counted()
            events = speculate(
                target,
                target.new_cache(),
                PROMPT,
                new_answer(plan, budget),
                new_sampling(plan, generator(request)),
                means=Means(pool, ScriptedSelector(arms)),
                draft_rng=np.random.default_rng(request),
                counted=counted,
                interruption=never_interrupted(),
                clock=lambda: 1e-3 * next(ticks),
                told=writer.round,
            )
            run_to_end(events)
            writer.end_request()
            counts.append(counted)
    return counts


def test_a_trace_says_what_the_rounds_did(tmp_path: Path) -> None:
    (counted, other) = record(tmp_path / "t.jsonl", ARMS, requests=2)
    trace = read_trace(tmp_path / "t.jsonl")
    assert [dict(trace.lengths), trace.depth] == [LENGTHS, DEPTH]
    assert trace.arms == ARMS
    assert trace.costs.as_json() == costs().as_json()
    for request, counts in zip(trace.requests, (counted, other), strict=True):
        assert len(request.rounds) == counts.rounds.rounds
        assert sum(one.emitted for _, one in request.rounds) == sum(arm.emitted for arm in counts.rounds.arms())
        position = request.first
        assert position == len(PROMPT) + 1
        for before, one in request.rounds:
            assert before == position
            position += one.emitted


def test_a_trace_holds_every_start_whose_horizon_was_committed(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl", ARMS)
    (request,) = read_trace(tmp_path / "t.jsonl").requests
    written = request.rounds[-1][0] + request.rounds[-1][1].emitted
    assert request.starts == written - DEPTH - request.first + 1
    for name in LENGTHS:
        assert request.chances[name].shape == request.survival[name].shape == (request.starts, DEPTH)
        assert (np.diff(request.survival[name], axis=1) <= 1).all()
    assert ((request.target > 0) & (request.target <= 1)).all()


@pytest.mark.parametrize("arm", [Arm("drawn", 4), Arm("certain", 4), Arm("drawn", 2)])
def test_a_replayed_arm_does_on_average_what_it_does_when_really_played(tmp_path: Path, arm: Arm) -> None:
    """The text was written under other arms; tokens per round agree within four standard errors."""
    others = [other for other in ARMS if other != arm]
    record(tmp_path / "others.jsonl", others, requests=8, budget=150)
    record(tmp_path / "own.jsonl", [arm], requests=8, budget=150)
    own = read_trace(tmp_path / "own.jsonl")
    emitted = np.array([one.emitted for request in own.requests for _, one in request.rounds[:-1]], float)
    trace = read_trace(tmp_path / "others.jsonl")
    fixed = FixedSelector(trace.arms, drafter=arm.drafter, length=arm.length)
    rounds, tokens = 0, 0
    for seed in range(4):
        run = replay(trace, fixed, seed=seed, eval_budget=0)
        rounds, tokens = rounds + run.rounds, tokens + run.tokens
    error = emitted.std(ddof=1) / np.sqrt(len(emitted))
    assert abs(tokens / rounds - emitted.mean()) < 4 * np.sqrt(2) * error


def test_with_a_greedy_target_and_certain_drafts_the_replay_of_the_arm_in_use_is_the_run_itself(tmp_path: Path) -> None:
    arm = Arm("certain", 4)
    record(tmp_path / "t.jsonl", [arm], budget=80, sampler="greedy")
    trace = read_trace(tmp_path / "t.jsonl")
    (request,) = trace.requests
    recorded = [one.accepted for position, one in request.rounds if position < request.first + request.starts]
    run = replay(trace, FixedSelector(trace.arms, drafter="certain", length=4), eval_budget=0)
    assert run.rounds == len(recorded)
    assert run.tokens == sum(recorded) + len(recorded)


def small_trace(seed: int = 0) -> Trace:
    pool = {
        "a": SyntheticDrafter({"x": 0.7, "y": 0.2}, 0.01, 0.02),
        "b": SyntheticDrafter({"x": 0.3, "y": 0.6}, 0.01, 0.02, {"x": 0.3, "y": 0.9}),
    }
    return synthetic_trace(
        pool, ["x", "y", "x", "y"], steps=[1 + 0.1 * row for row in range(5)], tokens=120, lengths=(1, 2, 4), seed=seed
    )


def test_all_selectors_write_the_same_text() -> None:
    trace = small_trace()
    for name in ("ratio", "hedge", "exp3spec"):
        run = replay(trace, new_selector(name, trace.arms))
        assert all(
            request.starts <= tokens <= request.starts + trace.depth
            for request, tokens in zip(trace.requests, run.request_tokens, strict=True)
        )
        assert sum(run.request_tokens) == run.tokens
        assert sum(run.request_seconds) == pytest.approx(run.seconds)
        assert sum(run.arms.values()) == run.rounds


def test_a_replay_is_the_same_every_time_and_changes_no_trace() -> None:
    trace = small_trace()
    before = trace.costs.as_json()
    runs = [
        replay(trace, RatioSelector(trace.arms), world=CostWorld(trace.costs, noise=0.2, spikes=0.05, seed=3))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert trace.costs.as_json() == before


def test_no_draft_takes_the_time_of_plain_steps_and_scoring_is_charged() -> None:
    trace = small_trace()
    plain = replay_fixed(trace)[NO_DRAFT]
    assert plain.rate == pytest.approx(1.0)
    assert plain.scoring_seconds == 0
    scored = replay(trace, RatioSelector(trace.arms), eval_budget=0.1)
    assert 0 < scored.scoring_share < 0.1


def test_the_oracle_is_the_fastest_fixed_arm_and_groups_have_their_own() -> None:
    trace = small_trace()
    fixed = replay_fixed(trace)
    assert fixed[oracle(fixed)].rate == max(run.rate for run in fixed.values())
    one, other = request_oracles(fixed, [[0, 2], [1, 3]])
    assert min(one, other) > 1 and max(one, other) > fixed[oracle(fixed)].rate


def test_what_selectors_are_told_is_late_and_complete() -> None:
    class Listening(FixedSelector):
        def __init__(self, arms: Sequence[Arm]) -> None:
            super().__init__(arms, drafter="none")
            self.heard: list[tuple[int, int]] = []
            self.at = 0

        def choose(self, costs: CostModel | None, context_length: int) -> Arm:
            self.at = context_length
            return super().choose(costs, context_length)

        def learn(self, survival: Any, proposed: Any = None, start: int | None = None) -> None:
            assert start is not None
            self.heard.append((start, self.at))

        def standing(self) -> dict[str, float]:
            return {}

    trace = small_trace()
    listening = Listening(trace.arms)
    replay(trace, listening, eval_budget=0.3)
    assert listening.heard
    assert all(start + trace.depth <= at + 1 for start, at in listening.heard)


def test_a_trace_whose_end_was_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path, ARMS)
    whole = path.read_text("utf-8")
    rounds = len(read_trace(path).requests[0].rounds)
    path.write_text(whole + '{"kind":"round","posi', "utf-8")
    assert len(read_trace(path).requests[0].rounds) == rounds


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        ("nonsense\n", "line 1"),
        ('{"kind":"round"}\n', "line 1"),
        ('{"kind":"header","format":99}\n', "header"),
    ],
)
def test_what_is_no_trace_is_refused_with_the_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(ModelError, match=says):
        read_trace(path)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path, ARMS)
    lines = path.read_text("utf-8").splitlines()
    lines[3] = lines[3][:-5]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    with pytest.raises(ModelError, match="line 4"):
        read_trace(path)
    with pytest.raises(ModelError, match="cannot read"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_trace_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(EdgeDuetError, match="cannot write"):
        TraceWriter(tmp_path / "file" / "t.jsonl", drafters(), LENGTHS, depth=DEPTH, costs=costs())


def test_scoring_in_the_loop_finds_what_a_trace_finds(tmp_path: Path) -> None:
    """The selector hears the very curves that the trace holds, late, for some of the starts."""
    target: Any = TableTarget(SIZE, limit=256)
    pool = drafters()
    plan = table_plan(SIZE, min_tokens=90)
    ticks = count()
    heard: dict[int, dict[str, np.ndarray]] = {}

    class Hearing(ScriptedSelector):
        def learn(self, survival: Any, proposed: Any = None, start: int | None = None) -> None:
            assert start is not None and start not in heard
            heard[start] = survival
            assert set(proposed) == set(survival)

    budget = EvaluationBudget(list(pool), depth=DEPTH, share=0.9)
    scoring = Scoring(pool, budget=budget, clock=lambda: 1e-3 * next(ticks))
    with TraceWriter(tmp_path / "t.jsonl", pool, LENGTHS, depth=DEPTH, costs=costs()) as writer:
        run_to_end(
            speculate(
                target,
                target.new_cache(),
                PROMPT,
                new_answer(plan, 90),
                new_sampling(plan, generator(0)),
                means=Means(pool, Hearing(ARMS), costs(), scoring),
                draft_rng=np.random.default_rng(0),
                counted=Counted(),
                interruption=never_interrupted(),
                clock=lambda: 1e-3 * next(ticks),
                told=writer.round,
            )
        )
    (request,) = read_trace(tmp_path / "t.jsonl").requests
    assert len(heard) >= 12
    for start, curves in heard.items():
        for name, curve in curves.items():
            np.testing.assert_allclose(curve, request.survival[name][start - request.first], rtol=1e-5)


def test_compare_lists_selectors_and_every_fixed_arm() -> None:
    trace = small_trace()
    result = compare(trace, ["ratio", "ucbspec"])
    names = [row["name"] for row in result["rows"]]
    assert names[:2] == ["ratio", "ucbspec"]
    assert len(names) == 2 + len(trace.arms)
    by_name = {row["name"]: row for row in result["rows"]}
    assert by_name[result["oracle"]]["of_oracle"] == 1.0
    assert by_name["no draft"]["of_no_draft"] == 1.0
    with pytest.raises(RequestError, match="no selector"):
        compare(trace, ["nobody"])
    with pytest.raises(ModelError, match="no start"):
        compare(Trace(trace.lengths, trace.depth, trace.costs, []), ["ratio"])


def test_the_commands_replay_and_draw(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    record(path, ARMS, requests=2)
    runner = CliRunner()
    told = runner.invoke(speculate_app, ["replay", str(path), "--selector", "ratio", "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["rows"][0]["name"] == "ratio"
    table = runner.invoke(speculate_app, ["replay", str(path), "--selector", "ratio"])
    assert table.exit_code == 0 and "no draft" in table.stdout
    drawn = runner.invoke(speculate_app, ["plot", str(path), "-o", str(tmp_path / "t.png")])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_rounds_and_does_without_times(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing to draw"):
        plot_trace(small_trace(), tmp_path / "t.png")
    record(tmp_path / "t.jsonl", [NO_DRAFT])
    trace = read_trace(tmp_path / "t.jsonl")
    timeline = Timeline.of(trace)
    assert timeline.ends[-1] == sum(one.emitted for one in timeline.rounds)
    for _, one in trace.requests[0].rounds:
        for part in one.seconds:
            one.seconds[part] = 0.0  # type: ignore[index]
    plot_trace(trace, tmp_path / "still.png")
    assert (tmp_path / "still.png").stat().st_size > 10_000
