"""How good the drafters of a client are, measured on what the target writes by itself.

The target's greedy text does not depend on drafters, so that every drafter is judged at every place of it without
running the target again. S(k) is the share of places at which the first k drafted tokens are those of the target; a
draft of g tokens then yields 1 + S(1) + ... + S(g) tokens per pass of the target in the mean.

A client that holds several drafters has a selector choose at every place, from what was known there: the evidence of a
place comes to it only when the tokens that decide are written (:mod:`.llm.speculation.delay_queue`). ``used`` is what
the chosen drafters reach. Places are the same for all methods, so that numbers can be compared.

A second pass plays whole rounds: the selector also chooses how long to draft, or not to; what was accepted is emitted,
and the next round begins behind it. Its rate against plain decoding is computed from costs that the scenario states
(``draft_cost``, ``verify_cost``), not measured: it says what the acceptance is worth, the same on every machine.

Axes: P places of an answer, D depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeduet_client.drafters.selection import pool_selector, stated_costs
from edgeduet_client.drafters.target_data import Answer
from edgeduet_client.llm.speculation.arms import Arm, Round, Selector
from edgeduet_client.llm.speculation.delay_queue import DelayQueue
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.estimators import survival
from edgeduet_shared.config import DrafterConfig

Curves = npt.NDArray[np.float64]
USED, MIXED = "used", "mixed"

Judgement = Mapping[str, Curves]
"""Of one answer: drafter -> (P, D) survival at every place, each 0 or 1."""


@dataclass(frozen=True)
class Judged:
    """All answers of a domain, judged."""

    answers: tuple[Judgement, ...]

    @property
    def starts(self) -> int:
        """Places over all answers."""
        return sum(len(next(iter(answer.values()))) for answer in self.answers)

    def first_tokens(self, drafter: str) -> int:
        """Return at how many places the first token ``drafter`` proposes is right."""
        return int(sum(answer[drafter][:, 0].sum() for answer in self.answers))

    def mean(self, drafter: str) -> Curves:
        """Return S(1..D) of ``drafter`` over all places; zeros where there is none."""
        curves = np.concatenate([answer[drafter] for answer in self.answers])
        return curves.mean(axis=0) if len(curves) else np.zeros(curves.shape[1])


def judge(drafters: Mapping[str, Drafter], answers: Sequence[Answer], depth: int) -> Judged:
    """Judge every drafter at every place of every answer behind which ``depth`` more tokens are written."""
    return Judged(tuple(_judge_answer(drafters, answer, depth) for answer in answers))


def _judge_answer(drafters: Mapping[str, Drafter], answer: Answer, depth: int) -> Judgement:
    text = answer.committed()
    # Behind the prompt itself nothing was predicted yet that a drafter could go on from.
    starts = list(range(text.prompt_length + 1, len(text) - depth + 1))
    found: dict[str, Curves] = {}
    for name, drafter in drafters.items():
        drafter.start(text)
        redrafts = drafter.redraft(text, starts, depth) if starts else []
        curves = [survival(redraft, text, depth, "ratio") for redraft in redrafts]
        found[name] = np.array(curves).reshape(len(starts), depth)
    return found


def figures_of(judged: Mapping[str, Judged], config: DrafterConfig) -> dict[str, float]:
    """Return what a client reports, named ``DOMAIN/WHAT/MEASURE``.

    WHAT is a drafter, with MEASURE ``1`` to ``depth`` for S(k); ``used``, with the same for whatever the selector
    chose, ``pass`` (tokens per round when lengths are chosen too) and ``speed`` (against plain decoding, at stated
    costs); or ``choice``, with a drafter for the share of places it was chosen at. DOMAIN ``mixed`` takes the answers
    of all domains by turns, so that the domain changes with every request.
    """
    figures: dict[str, float] = {}
    streams: dict[str, tuple[Judgement, ...]] = {domain: found.answers for domain, found in judged.items()}
    for domain, found in judged.items():
        for name in found.answers[0] if found.answers else ():
            figures |= {f"{domain}/{name}/{k}": value for k, value in _depths(found.mean(name))}
    if len(judged) > 1:
        streams[MIXED] = tuple(_by_turns([found.answers for found in judged.values()]))
    for domain, answers in streams.items():
        figures |= {f"{domain}/{name}": value for name, value in _used(answers, config).items()}
    return figures


def _depths(curve: Curves) -> list[tuple[int, float]]:
    return [(depth, float(value)) for depth, value in enumerate(curve, start=1)]


def _by_turns(streams: Sequence[Sequence[Judgement]]) -> Iterator[Judgement]:
    for turn in range(max(map(len, streams))):
        yield from (stream[turn] for stream in streams if turn < len(stream))


def _used(answers: Sequence[Judgement], config: DrafterConfig) -> dict[str, float]:
    places = sum(len(next(iter(answer.values()))) for answer in answers)
    if not places:
        return {}
    names = list(answers[0])
    chosen = choose_at_every_place(answers, pool_selector(names, config), config.depth)
    curve = np.concatenate([_rows(answer, picks) for answer, picks in zip(answers, chosen, strict=True)]).mean(axis=0)
    figures = {f"{USED}/{k}": value for k, value in _depths(curve)}
    picks = [name for picked in chosen for name in picked]
    figures |= {f"choice/{name}": picks.count(name) / len(picks) for name in names}
    rounds, emitted, cost = play_rounds(answers, pool_selector(names, config), config)
    return figures | {f"{USED}/pass": emitted / rounds, f"{USED}/speed": emitted / cost}


def _rows(answer: Judgement, picks: Sequence[str]) -> Curves:
    return np.array([answer[name][place] for place, name in enumerate(picks)]).reshape(len(picks), -1)


def choose_at_every_place(answers: Sequence[Judgement], selector: Selector, depth: int) -> list[list[str]]:
    """Return which drafter ``selector`` would use at each place of each answer, at no cost but the target's pass.

    It learns of a place when ``depth`` more tokens are written, and of the last ones at the answer's end.
    """
    free = stated_costs(list(answers[0]), depth, draft=0.0, verify=0.0)
    chosen: list[list[str]] = []
    for answer in answers:
        selector.start_request()
        queue = DelayQueue(depth)
        picks: list[str] = []
        places = len(next(iter(answer.values())))
        for place in range(places):
            _learn(selector, answer, queue.release(place))
            arm = selector.choose(free, place)
            picks.append(arm.drafter or next(iter(answer)))
            queue.push(place)
        _learn(selector, answer, queue.release(places + depth))
        chosen.append(picks)
    return chosen


def play_rounds(answers: Sequence[Judgement], selector: Selector, config: DrafterConfig) -> tuple[int, int, float]:
    """Play every answer in rounds; return rounds, tokens emitted and their cost in plain steps of the target."""
    costs = stated_costs(list(answers[0]), config.depth, draft=config.draft_cost, verify=config.verify_cost)
    rounds, emitted, cost = 0, 0, 0.0
    for answer in answers:
        selector.start_request()
        queue = DelayQueue(config.depth)
        place, places, known = 0, len(next(iter(answer.values()))), 0
        while place < places:
            for start in range(known, place + 1):
                queue.push(start)
            known = place + 1
            _learn(selector, answer, queue.release(place))
            arm = selector.choose(costs, place)
            accepted = 0 if arm.drafter is None else int(math.fsum(answer[arm.drafter][place, : arm.length]))
            taken = costs.seconds(arm, place)
            selector.played(_round(arm, accepted, taken))
            rounds, emitted, cost, place = rounds + 1, emitted + accepted + 1, cost + taken, place + accepted + 1
        _learn(selector, answer, [start for start in queue.release(places + config.depth) if start < places])
    return rounds, emitted, cost


def _round(arm: Arm, accepted: int, seconds: float) -> Round:
    evaluated = min(arm.length, accepted + 1)
    return Round(arm, arm.length, evaluated, accepted, accepted + 1, {"verify": seconds})


def _learn(selector: Selector, answer: Judgement, places: Sequence[int]) -> None:
    for place in places:
        selector.learn({name: curves[place] for name, curves in answer.items()})
