"""What speculation brings on this machine: the table of ``llm bench --speculate``.

Plain decoding, every fixed arm and the selector write the same number of tokens after the same prompts, one after
the other within each round, so that a machine that slows down slows all of them. Each is compared with the plain
decoding of its own round and prompt; what is reported is the geometric mean of those ratios, with a 95 % interval from
resampling rounds. The first round is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm
from edgeduet_client.llm.speculation.speculator import Speculator

STEPS = 9
"""Rows of the largest step of the cost table."""
_RESAMPLES = 2000


@dataclass
class Contender:
    """One way to decode, and what it took.

    Attributes:
        name: of the row.
        model: as it decodes.
        seconds_per_token: by round and prompt.
        finished: how each answer ended.
    """

    name: str
    model: LocalModel
    seconds_per_token: list[float] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


def bench_speculation(
    model: LocalModel,
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    settings: Mapping[str, Any],
    *,
    answer_tokens: int,
    rounds: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure ``rounds`` rounds over ``prompts`` after one that is not counted.

    Args:
        model: without speculation.
        speculator: drafters and selector to measure.
        prompts: ids.
        settings: of the generation.
        answer_tokens: of every answer.

    Returns:
        ``rows`` (first plain decoding, then no draft, the arms, the selector), ``oracle`` (name of the fastest fixed
        arm), ``selector_share`` of the oracle's rate, ``step_costs`` (V(m): time of a step of m rows over one row's).
    """
    contenders = contenders_of(model, speculator)
    asked = {**settings, "max_tokens": answer_tokens, "min_tokens": answer_tokens}
    total = (rounds + 1) * len(prompts)
    for number in range(rounds + 1):
        for place, prompt in enumerate(prompts):
            request = GenerationRequest(**{"seed": number, **asked})
            for contender in contenders:
                finished = answer_of(contender.model, prompt, request)
                if number:
                    contender.seconds_per_token.append(finished.seconds_decode / (finished.completion_tokens - 1))
                    contender.finished.append(finished)
            progress(number * len(prompts) + place + 1, total)
    rows = [row_of(contender, contenders[0]) for contender in contenders]
    arms = [row for row in rows if row["fixed"]]
    oracle = max(arms, key=lambda row: float(row["ratio"]))
    return {
        "mode": speculator.options.mode,
        "verify": speculator.options.verify,
        "selector": speculator.options.selector,
        "answer_tokens": answer_tokens,
        "prompts": len(prompts),
        "rounds": rounds,
        "rows": rows,
        "oracle": oracle["name"],
        "selector_share": round(rows[-1]["ratio"] / oracle["ratio"], 4),
        "step_costs": step_costs(model, prompts[0]),
        "drafter_bytes": sum(drafter.memory_bytes() for drafter in speculator.drafters.values()),
    }


def contenders_of(model: LocalModel, speculator: Speculator) -> list[Contender]:
    """Return plain decoding, no draft, every fixed arm, and the selector itself."""
    arms = [Arm(name, length) for name in speculator.drafters for length in speculator.lengths_of(name)]
    fixed = [
        Contender("no draft" if arm == NO_DRAFT else f"{arm.drafter} {arm.length}", _with(model, speculator.fixed(arm)))
        for arm in (NO_DRAFT, *arms)
    ]
    return [
        Contender("plain decoding", model),
        *fixed,
        Contender(f"selector {speculator.options.selector}", _with(model, speculator)),
    ]


def step_costs(model: LocalModel, prompt: Sequence[int], *, repeats: int = 5) -> list[float]:
    """Return V(1) to V(9): the median time of a step of m rows behind ``prompt``, over that of one row."""
    cache = model.new_cache()
    model.session.prefill(prompt, cache, rows=())
    times: dict[int, list[float]] = {rows: [] for rows in range(1, STEPS + 1)}
    for _ in range(repeats + 1):
        for rows, taken in times.items():
            began = time.perf_counter()
            model.session.forward([prompt[-1]] * rows, cache, rows=tuple(range(rows)))
            taken.append(time.perf_counter() - began)
            cache.crop(len(prompt))
    medians = {rows: statistics.median(taken[1:]) for rows, taken in times.items()}
    return [round(medians[rows] / medians[1], 3) for rows in times]


SPECULATION_HEAD = ("decoding", "tokens/s", "x plain", "95 % interval", "MAT", "acceptance", "scoring")


def speculation_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the result as rows under :data:`SPECULATION_HEAD`."""
    return [
        (
            row["name"] + (" (lossy)" if row["lossy"] else "") + (" *" if row["name"] == result["oracle"] else ""),
            f"{row['tokens_per_second']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}",
            _or_dash(row["mean_accepted_tokens"], "{:.2f}"),
            _or_dash(row["acceptance"], "{:.2f}"),
            _or_dash(row["evaluation_share"], "{:.1%}"),
        )
        for row in result["rows"]
    ]


def answer_of(model: LocalModel, prompt: Sequence[int], request: GenerationRequest) -> Finished:
    """Let ``model`` answer; return how the answer ended."""
    for event in model.generate(prompt, request, clock=time.perf_counter):
        if isinstance(event, Finished):
            return event
    raise AssertionError("a generation ends with Finished")


def _with(model: LocalModel, speculator: Speculator) -> LocalModel:
    return replace(model, speculator=speculator)


def row_of(contender: Contender, plain: Contender) -> dict[str, Any]:
    """Return what a contender reached, compared with plain decoding of the same rounds and prompts."""
    ratios = np.array(plain.seconds_per_token) / np.array(contender.seconds_per_token)
    logs = np.log(ratios)
    resampled = np.random.default_rng(0).choice(logs, (_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(resampled, (0.025, 0.975)))
    stats = [finished.speculation for finished in contender.finished if finished.speculation is not None]
    rounds, evaluated = sum(s.rounds for s in stats), sum(s.evaluated for s in stats)
    spent = sum(s.decode_seconds for s in stats)
    return {
        "name": contender.name,
        "fixed": bool(stats) and not contender.name.startswith("selector "),
        "lossy": any(s.lossy for s in stats),
        "tokens_per_second": round(1 / statistics.mean(contender.seconds_per_token), 3),
        "ratio": round(float(np.exp(logs.mean())), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "mean_accepted_tokens": round(sum(s.emitted for s in stats) / rounds, 4) if rounds else None,
        "acceptance": round(sum(s.accepted for s in stats) / evaluated, 4) if evaluated else None,
        "evaluation_share": round(sum(s.seconds()["evaluation"] for s in stats) / spent, 4) if spent else None,
    }


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
