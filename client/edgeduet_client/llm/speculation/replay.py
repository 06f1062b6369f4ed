"""Replays a trace under any selector.

The text of a trace stays as it is; only where rounds begin and who drafts changes. At every start it is known, for
every drafter, how likely each drafted token was to be accepted given the text, so verdicts drawn from those chances
have exactly the law a real run would have had (a certain drafter's are 0 or 1). One uniform number belongs to every
position and is the same for all selectors, so that they differ by what they choose, not by luck. Seconds come from
the trace's costs: a replay compares selectors, it does not time a machine.

Selectors learn as they would have: late, and only what :class:`.evaluation_budget.EvaluationBudget` lets be scored,
whose time is charged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round, Selector
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.evaluation_budget import EvaluationBudget
from edgeduet_client.llm.speculation.selectors import new_selector
from edgeduet_client.llm.speculation.selectors.fixed import FixedSelector
from edgeduet_client.llm.speculation.trace import Trace, TracedRequest


class World(Protocol):
    """What things really take while a trace is replayed."""

    def round_seconds(self, arm: Arm, proposed: int, context_length: int, switched: bool) -> dict[str, float]:
        """Return the seconds of a round by part; ``switched``: another drafter was in use before."""

    def scoring_seconds(self, drafter: str, starts: int) -> float:
        """Return the seconds of scoring ``drafter`` at neighbouring starts."""


@dataclass
class CostWorld:
    """Everything takes what a cost model says, times noise.

    Attributes:
        costs: the truth.
        noise: standard deviation of the logarithm of every measurement.
        spikes: chance that a step is interrupted and takes three times as long.
        seed: of the noise.
    """

    costs: CostModel
    noise: float = 0.0
    spikes: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def round_seconds(self, arm: Arm, proposed: int, context_length: int, switched: bool) -> dict[str, float]:
        """Return draft, verify and catch_up."""
        seconds = {"verify": self.costs.step_seconds(proposed + 1, context_length) * self._factor()}
        if arm.drafter is not None:
            seconds["draft"] = self.costs.draft_seconds(arm.drafter, proposed) * self._factor()
            seconds["catch_up"] = self.costs.catch_up(arm.drafter) if switched else 0.0
        return seconds

    def scoring_seconds(self, drafter: str, starts: int) -> float:
        """Return what drafting one token takes, for every start: teacher forcing reads neighbours in one call."""
        return self.costs.draft_seconds(drafter, 1) * starts

    def _factor(self) -> float:
        if self.noise == 0 and self.spikes == 0:
            return 1.0
        return float(np.exp(self.noise * self._rng.standard_normal())) * (
            3.0 if self._rng.random() < self.spikes else 1.0
        )


@dataclass
class Replayed:
    """What a selector would have done.

    Attributes:
        tokens, seconds, scoring_seconds: in all; ``seconds`` includes scoring.
        arms: rounds by arm.
        switches: rounds whose arm is another than the one before.
        request_tokens, request_seconds: by request.
    """

    tokens: int = 0
    seconds: float = 0.0
    scoring_seconds: float = 0.0
    arms: Counter[Arm] = field(default_factory=Counter)
    switches: int = 0
    request_tokens: list[int] = field(default_factory=list)
    request_seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def rounds(self) -> int:
        """Steps of the target."""
        return sum(self.arms.values())

    @property
    def scoring_share(self) -> float:
        """Share of the time that went into scoring."""
        return self.scoring_seconds / self.seconds if self.seconds else 0.0


def replay(
    trace: Trace,
    selector: Selector,
    *,
    seed: int = 0,
    world: World | None = None,
    costs: CostModel | None = None,
    eval_budget: float = 0.04,
) -> Replayed:
    """Replay all requests of ``trace`` under ``selector``, which keeps what it learns.

    Args:
        seed: of the uniform numbers of verdicts.
        world: what things take; default: the trace's costs.
        costs: what is believed at first; corrected by every round; default: the trace's. Not changed.
        eval_budget: share of the time scoring may take.
    """
    believed = CostModel.from_json((costs or trace.costs).as_json())
    budget = EvaluationBudget(
        list(trace.lengths),
        depth=trace.depth,
        share=eval_budget,
        standing=getattr(selector, "standing", dict),
        changes=getattr(selector, "changes", int),
    )
    run = _Run(trace, selector, world or CostWorld(trace.costs), believed, budget, Replayed())
    for number, request in enumerate(trace.requests):
        uniforms = np.random.default_rng([seed, number]).random(request.starts + trace.depth)
        run.request(request, uniforms)
    return run.replayed


def replay_fixed(trace: Trace, *, seed: int = 0, world: World | None = None) -> dict[Arm, Replayed]:
    """Replay every fixed arm, none of which is scored."""
    found = {}
    for arm in trace.arms:
        fixed = FixedSelector(trace.arms, drafter=arm.drafter or "none", length=arm.length or None)
        found[arm] = replay(trace, fixed, seed=seed, world=world, eval_budget=0)
    return found


def oracle(fixed: Mapping[Arm, Replayed]) -> Arm:
    """Return the fixed arm of the highest rate."""
    return max(fixed, key=lambda arm: fixed[arm].rate)


def compare(trace: Trace, selectors: Sequence[str], *, seed: int = 0, eval_budget: float = 0.04) -> dict[str, Any]:
    """Replay selectors by name and every fixed arm.

    Returns:
        ``rows``: selectors, then fixed arms, fastest first; ``oracle``: name of the fastest fixed arm; ``tokens``;
        ``requests``.

    Raises:
        RequestError: no such selector.
        ModelError: the trace has no complete start, so nothing can be replayed.
    """
    if not any(request.starts for request in trace.requests):
        raise ModelError("no start of this trace is complete (answers are shorter than the longest draft?)")
    fixed = replay_fixed(trace, seed=seed)
    best = oracle(fixed)

    def row(name: str, run: Replayed) -> dict[str, Any]:
        return {
            "name": name,
            "tokens_per_second": round(run.rate, 4),
            "of_no_draft": round(run.rate / fixed[NO_DRAFT].rate, 4),
            "of_oracle": round(run.rate / fixed[best].rate, 4),
            "tokens_per_round": round(run.tokens / run.rounds, 4),
            "scoring_share": round(run.scoring_share, 4),
            "switches": run.switches,
        }

    rows = []
    for name in selectors:
        chosen = new_selector(name, trace.arms, common={"seed": seed})
        rows.append(row(name, replay(trace, chosen, seed=seed, eval_budget=eval_budget)))
    arms = sorted(fixed, key=lambda arm: -fixed[arm].rate)
    return {
        "tokens": fixed[best].tokens,
        "requests": len(trace.requests),
        "oracle": arm_name(best),
        "rows": rows + [row(arm_name(arm), fixed[arm]) for arm in arms],
    }


def arm_name(arm: Arm) -> str:
    """Return what tables call an arm."""
    return "no draft" if arm.drafter is None else f"{arm.drafter} {arm.length}"


@dataclass
class _Run:
    trace: Trace
    selector: Selector
    world: World
    costs: CostModel
    budget: EvaluationBudget
    replayed: Replayed
    last: Arm | None = None

    def request(self, request: TracedRequest, uniforms: NDArray[np.float64]) -> None:
        self.selector.start_request()
        self.budget.begin()
        self.last = None
        place, before = 0, self.replayed.seconds
        while place < request.starts:
            emitted = self._round(request, place, uniforms)
            for start in range(place, place + emitted):
                self.budget.push(request.first + start)
            place += emitted
            self._learn(request, request.first + place)
        self.replayed.request_tokens.append(place)
        self.replayed.request_seconds.append(self.replayed.seconds - before)

    def _round(self, request: TracedRequest, place: int, uniforms: NDArray[np.float64]) -> int:
        """Play a round at start ``place``; return how many tokens it emits."""
        context = request.first + place
        arm = self.selector.choose(self.costs, context)
        proposed = accepted = 0
        if arm.drafter is not None:
            proposed = int(min(arm.length, request.proposed[arm.drafter][place]))
            passed = uniforms[place : place + proposed] < request.chances[arm.drafter][place, :proposed]
            accepted = proposed if passed.all() else int(passed.argmin())
        seconds = self.world.round_seconds(arm, proposed, context, _switched(self.last, arm))
        round = Round(arm, proposed, min(accepted + 1, proposed), accepted, accepted + 1, seconds)
        self.selector.played(round)
        self.costs.observe(round, context)
        self._account(round)
        return round.emitted

    def _account(self, round: Round) -> None:
        took = sum(round.seconds.values())
        self.budget.paid(took)
        self.replayed.tokens += round.emitted
        self.replayed.seconds += took
        self.replayed.arms[round.arm] += 1
        self.replayed.switches += self.last is not None and self.last != round.arm
        self.last = round.arm

    def _learn(self, request: TracedRequest, length: int) -> None:
        for block in self.budget.due(length):
            for name in block.drafters:
                took = self.world.scoring_seconds(name, len(block.starts))
                self.budget.took(name, len(block.starts), took)
                self.replayed.scoring_seconds += took
                self.replayed.seconds += took
            for start in block.starts:
                place = start - request.first
                if place < request.starts:
                    self.selector.learn(
                        {name: request.survival[name][place] for name in block.drafters},
                        {name: int(request.proposed[name][place]) for name in block.drafters},
                        start,
                    )


def _switched(last: Arm | None, arm: Arm) -> bool:
    return last is not None and last.drafter != arm.drafter


def request_oracles(fixed: Mapping[Arm, Replayed], groups: Sequence[Sequence[int]]) -> list[float]:
    """Return, for each group of requests, the rate of the arm that is fastest on that group."""
    return [
        max(
            sum(run.request_tokens[one] for one in group) / sum(run.request_seconds[one] for one in group)
            for run in fixed.values()
        )
        for group in groups
    ]
