"""The numbers of runs that train drafters, derived from what clients measured after the last round.

A client judges every drafter it holds at every place of the target's own greedy text of every domain. Figures are named
``DOMAIN/WHAT/MEASURE`` (:mod:`edgeduet_client.drafters.judging`): WHAT is a drafter, or ``used`` for whichever the
selector would have used there. S(k) is the share of places at which the first k drafted tokens are all accepted, and
1 + S(1) + ... + S(depth) the tokens that one pass of the target yields in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgeduet_shared.metrics import format_value, mean

if TYPE_CHECKING:
    from edgeduet_sim.results import Run

USED, MIXED = "used", "mixed"

DRAFTER_COLUMNS = (
    "drafted_own",
    "drafted_others",
    "drafted_mixed",
    "accepted_own",
    "accepted_mixed",
    "pass_mixed",
    "speed_own",
    "speed_mixed",
)
"""Numbers of a run that trains drafters, in the order of tables."""


def figures_of(event: Mapping[str, Any]) -> dict[int, dict[str, float]]:
    """Return the figures of an ``evaluate`` event by client."""
    return {reply["client"]: dict(reply.get("figures", {})) for reply in event["clients"]}


def value(figures: Mapping[str, float], domain: str, measure: str, what: str = USED) -> float:
    """Return a figure; NaN where the client has none (a device has texts of its own domain only)."""
    return figures.get(f"{domain}/{what}/{measure}", math.nan)


def tokens_per_pass(figures: Mapping[str, float], domain: str, depth: int, what: str = USED) -> float:
    """Return 1 + S(1) + ... + S(depth)."""
    return 1.0 + math.fsum(value(figures, domain, str(k), what) for k in range(1, depth + 1))


def summary(run: Run) -> dict[str, float]:
    """Return every number of a run by name (``edgeduet_shared.metrics.METRICS``); NaN where there is none yet."""
    config = run.scenario.drafter
    figures = run.stages[-1].figures if run.stages else {}
    own = {client: config.domain(client) for client in figures}
    others = {client: [d for d in config.domain_names if d != own[client]] for client in figures}
    return {
        "drafted_own": mean([tokens_per_pass(f, own[c], config.depth) for c, f in figures.items()]),
        "drafted_others": mean(
            [tokens_per_pass(f, domain, config.depth) for c, f in figures.items() for domain in others[c]]
        ),
        "drafted_mixed": mean([tokens_per_pass(f, MIXED, config.depth) for f in figures.values()]),
        "accepted_own": mean([value(f, own[c], "1") for c, f in figures.items()]),
        "accepted_mixed": mean([value(f, MIXED, "1") for f in figures.values()]),
        "pass_mixed": mean([value(f, MIXED, "pass") for f in figures.values()]),
        "speed_own": mean([value(f, own[c], "speed") for c, f in figures.items()]),
        "speed_mixed": mean([value(f, MIXED, "speed") for f in figures.values()]),
    }


def domain_number(run: Run, domain: str, measure: str, *, holders: bool) -> float:
    """Return a measure of a domain, mean over the clients that hold texts of it, or over all the others.

    Args:
        run: a finished run.
        domain: name of a domain, or ``mixed`` (all clients, whatever ``holders``).
        measure: ``1`` to ``depth``, ``tokens`` (per pass), ``pass`` or ``speed``.
        holders: whose drafters.
    """
    config = run.scenario.drafter
    figures = run.stages[-1].figures if run.stages else {}
    chosen = [f for c, f in figures.items() if domain == MIXED or (config.domain(c) == domain) == holders]
    if measure == "tokens":
        return mean([tokens_per_pass(f, domain, config.depth) for f in chosen])
    return mean([value(f, domain, measure) for f in chosen])


def choices(run: Run, client: int, domain: str) -> dict[str, float]:
    """Return how often ``client``'s selector chose each drafter on ``domain``, by drafter; shares add up to 1."""
    prefix = f"{domain}/choice/"
    figures = run.stages[-1].figures.get(client, {}) if run.stages else {}
    return {name.removeprefix(prefix): share for name, share in figures.items() if name.startswith(prefix)}


def evaluation_line(event: Mapping[str, Any]) -> str:
    """Say in one line how an evaluation came out; it names no domains, so that it needs nothing but the event."""
    first = [reply["personal"][0] / reply["totals"][0] for reply in event["clients"] if reply["totals"][0]]
    text = f"first drafted token right on the client's own domain {100 * mean(first):.1f} %"
    speed = mean([value(f, MIXED, "speed") for f in figures_of(event).values()])
    return text if math.isnan(speed) else f"{text}; mixed domains {speed:.2f} x plain decoding"


def outcome(numbers: Mapping[str, float]) -> str:
    """Say in one line how a run came out."""
    shown = {name: format_value(name, numbers[name]) for name in (*DRAFTER_COLUMNS, "bytes_up", "bytes_down")}
    return (
        f"tokens per pass: own domain {shown['drafted_own']}, others {shown['drafted_others']}, mixed "
        f"{shown['drafted_mixed']}; speed {shown['speed_own']} x, mixed {shown['speed_mixed']} x; up "
        f"{shown['bytes_up']}, down {shown['bytes_down']}, {numbers['seconds']:.0f} s"
    )
