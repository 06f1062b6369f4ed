"""A trace as a picture: which arm was played, what was accepted, how fast it went, over the tokens of all answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round
from edgeduet_client.llm.speculation.replay import arm_name
from edgeduet_client.llm.speculation.trace import Trace
from edgeduet_shared.atomic_files import atomic_output

_SMOOTHED = 16
"""Rounds a line averages over."""
_PLAIN = "#8a8a8a"
_COLOURS = ("#2e86ab", "#d1495b", "#3a7d44", "#c98a1b", "#6a1bb1", "#00798c", "#8d5a3b", "#5c6b73")


@dataclass(frozen=True)
class Timeline:
    """Rounds of a trace in order.

    Attributes:
        rounds: all of them.
        ends: tokens written by the end of each.
        begins: tokens written when each request began.
    """

    rounds: Sequence[Round]
    ends: NDArray[np.int64]
    begins: Sequence[int]

    @classmethod
    def of(cls, trace: Trace) -> Timeline:
        """Return the recorded rounds of all requests, one after the other."""
        rounds: list[Round] = []
        begins, written = [], 0
        for request in trace.requests:
            begins.append(written)
            for _, one in request.rounds:
                rounds.append(one)
                written += one.emitted
        return cls(rounds, np.cumsum([one.emitted for one in rounds]), begins)


def plot_trace(trace: Trace, output: Path) -> None:
    """Draw ``trace`` into ``output`` (PNG).

    Raises:
        ModelError: there is no round in it, or matplotlib is not installed.
        EdgeDuetError: the file cannot be written.
    """
    timeline = Timeline.of(trace)
    if not timeline.rounds:
        raise ModelError("the trace has no rounds, so there is nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ModelError("drawing needs matplotlib; install it: pip install matplotlib") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    arms, accepted, rate = figure.subplots(3, 1, sharex=True, height_ratios=(2.2, 1, 1))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(trace.lengths)}
    _draw_arms(arms, trace, timeline, colours)
    _draw_accepted(accepted, timeline, colours)
    _draw_rate(rate, trace, timeline)
    rate.set_xlabel("tokens written")
    for axes in (arms, accepted, rate):
        for begin in timeline.begins[1:]:
            axes.axvline(begin, color="#d0d0d0", linewidth=0.8, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    requests = len(timeline.begins)
    figure.suptitle(
        f"{timeline.ends[-1]} tokens in {len(timeline.rounds)} rounds"
        + (f", {requests} answers (grey lines)" if requests > 1 else "")
    )
    with atomic_output(output) as path:
        figure.savefig(path, format="png", dpi=130)


def _draw_arms(axes, trace: Trace, timeline: Timeline, colours: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    played = [one.arm for one in timeline.rounds]
    shown = [arm for arm in (NO_DRAFT, *sorted(set(trace.arms) - {NO_DRAFT}, key=_order)) if arm in set(played)]
    begins = np.concatenate([[0], timeline.ends[:-1]])
    for place, arm in enumerate(shown):
        of = [number for number, one in enumerate(played) if one == arm]
        colour = _PLAIN if arm.drafter is None else colours[arm.drafter]
        # As long as the round's tokens, but for a gap that keeps neighbours apart.
        axes.hlines([place] * len(of), begins[of], timeline.ends[of] - 0.25, color=colour, linewidth=9)
    shares = [sum(one == arm for one in played) / len(played) for arm in shown]
    axes.set_yticks(
        range(len(shown)), [f"{arm_name(arm)}   {share:.0%}" for arm, share in zip(shown, shares, strict=True)]
    )
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_title("arm of every round, and its share of the rounds", loc="left", fontsize=10)


def _draw_accepted(axes, timeline: Timeline, colours: dict[str, str]) -> None:  # type: ignore[no-untyped-def]
    for name, colour in colours.items():
        of = [place for place, one in enumerate(timeline.rounds) if one.arm.drafter == name and one.evaluated]
        if not of:
            continue
        accepted = np.array([timeline.rounds[place].accepted for place in of], float)
        evaluated = np.array([timeline.rounds[place].evaluated for place in of], float)
        axes.plot(
            timeline.ends[of],
            _running(accepted) / _running(evaluated),
            color=colour,
            label=name,
            marker=".",
            markersize=3,
            linewidth=1.2,
        )
    axes.set_ylim(-0.02, 1.05)
    axes.set_title(f"accepted / evaluated, mean of {_SMOOTHED} rounds of a drafter", loc="left", fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_rate(axes, trace: Trace, timeline: Timeline) -> None:  # type: ignore[no-untyped-def]
    seconds = np.array([sum(one.seconds.values()) for one in timeline.rounds])
    emitted = np.array([one.emitted for one in timeline.rounds], float)
    if seconds.sum() <= 0:
        axes.set_title("no times in this trace", loc="left", fontsize=10)
        return
    axes.plot(timeline.ends, _running(emitted) / np.maximum(_running(seconds), 1e-12), color="#1f1f1f", linewidth=1.2)
    mean = emitted.sum() / seconds.sum()
    axes.axhline(mean, color="#1f1f1f", linestyle="--", linewidth=0.8)
    plain = 1 / trace.costs.step_seconds(1, int(timeline.ends[-1]))
    axes.axhline(plain, color=_PLAIN, linestyle=":", linewidth=1.2)
    axes.set_ylim(bottom=0)
    axes.set_title(
        f"tokens per second, mean of {_SMOOTHED} rounds; dashed: all rounds ({mean:.1f}); "
        f"dotted: plain steps as calibrated ({plain:.1f})",
        loc="left",
        fontsize=10,
    )


def _running(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each value and the ones before it, at most ``_SMOOTHED`` of them."""
    sums = np.cumsum(values)
    before = np.concatenate([np.zeros(min(_SMOOTHED, len(sums))), sums[:-_SMOOTHED]])[: len(sums)]
    return sums - before


def _order(arm: Arm) -> tuple[str, int]:
    return arm.drafter or "", arm.length
