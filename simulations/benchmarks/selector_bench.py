"""Which selector loses least: with 2 to 64 drafters, on the table of objectives, and over domains that change.

    python simulations/benchmarks/selector_bench.py              # some minutes; writes selector_bench.md and .png
    python simulations/benchmarks/selector_bench.py --quick --output /tmp/selector_bench

Everything is replayed on made-up traces (``edgeduet_client.llm.speculation.synthetic_trace``): verdicts are drawn,
seconds come from a cost table, in units of a plain step. So what is measured is the choice, not a machine; the
processor time that selectors themselves take is real. Selectors learn late and only what the evaluation budget (4 %
of the time) lets be scored, and that time is charged, unless a table says otherwise.

1. *Many drafters*: one accepts .8 of its tokens, all others .65, independently; all cost the same. Regret is what is
   lost against playing the best one from the start, in plain steps, scoring not charged; what scoring would take is
   a column of its own.
2. *Objectives*: the four drafters of methods/speculative-decoding.md D.5 at four slopes of the verification cost.
3. *Domains*: three drafters, text with easy and hard stretches, noisy clocks; alone, changing, and where nothing helps.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round, Selector
from edgeduet_client.llm.speculation.costs import CostModel
from edgeduet_client.llm.speculation.replay import CostWorld, Replayed, replay, replay_fixed
from edgeduet_client.llm.speculation.selectors import new_selector
from edgeduet_client.llm.speculation.selectors.fixed import FixedSelector
from edgeduet_client.llm.speculation.synthetic_trace import SyntheticDrafter, synthetic_trace
from edgeduet_client.llm.speculation.trace import Trace

FULL = ("ratio", "follow_the_leader", "normalhedge", "adanormalhedge", "hedge")
BANDITS = ("ucbspec", "exp3spec", "metasd")
COUNTS = (2, 4, 8, 16, 32, 64)
COLOURS = {
    "ratio": "#6a1bb1",
    "follow_the_leader": "#8a8a8a",
    "normalhedge": "#2e86ab",
    "adanormalhedge": "#00798c",
    "hedge": "#3a7d44",
    "ucbspec": "#d1495b",
    "exp3spec": "#c98a1b",
    "metasd": "#8d5a3b",
}
LENGTHS = (1, 2, 3, 4, 6, 8)


class Timed:
    """A selector, and the processor time it takes to choose and to learn."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self.seconds = 0.0

    def start_request(self) -> None:
        """Pass on."""
        self._selector.start_request()

    def choose(self, costs: CostModel | None, context_length: int) -> Arm:
        """Pass on."""
        return self._timed(self._selector.choose, costs, context_length)

    def learn(
        self,
        survival: Mapping[str, NDArray[np.float64]],
        proposed: Mapping[str, int] | None = None,
        start: int | None = None,
    ) -> None:
        """Pass on."""
        self._timed(self._selector.learn, survival, proposed, start)

    def played(self, round: Round) -> None:
        """Pass on."""
        self._timed(self._selector.played, round)

    def standing(self) -> Mapping[str, float]:
        """Pass on; nothing where the selector does not compare rates."""
        return getattr(self._selector, "standing", dict)()

    def changes(self) -> int:
        """Pass on; never, where the selector does not look."""
        return getattr(self._selector, "changes", int)()

    def _timed(self, act: Callable[..., Any], *values: Any) -> Any:
        began = time.process_time()
        try:
            return act(*values)
        finally:
            self.seconds += time.process_time() - began


class FreeScoring(CostWorld):
    """Costs in which scoring takes no time, so that only choices differ."""

    def scoring_seconds(self, drafter: str, starts: int) -> float:
        """Return next to nothing."""
        return 1e-12


@dataclass(frozen=True)
class Scaling:
    """One selector with one number of drafters, over seeds.

    Attributes:
        regret: plain steps lost against the best drafter; mean and standard deviation.
        deviation: of the regret.
        microseconds: processor time of the selector per round.
        scoring: share of the time that scoring takes within its budget.
    """

    selector: str
    drafters: int
    regret: float
    deviation: float
    microseconds: float
    scoring: float


def many_drafters(count: int, tokens: int, seed: int) -> Trace:
    """Return a text on which drafter d0 is best."""
    pool = {f"d{number}": SyntheticDrafter({"x": 0.8 if number == 0 else 0.65}, each=0.02) for number in range(count)}
    steps = [1 + 0.06 * row for row in range(6)]
    return synthetic_trace(
        pool, ["x"], steps=steps, tokens=tokens, lengths=(5,), persistence=0.0, shared=0.0, seed=1000 * seed + count
    )


def scaling(tokens: int, seeds: int) -> list[Scaling]:
    """Return regret and overhead of every selector by number of drafters."""
    found = []
    for count in COUNTS:
        regrets: dict[str, list[float]] = {}
        overhead: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        for seed in range(seeds):
            trace = many_drafters(count, tokens, seed)
            best = replay(trace, FixedSelector(trace.arms, drafter="d0", length=5), eval_budget=0)
            for name in (*FULL, *BANDITS):
                timed = Timed(new_selector(name, trace.arms, common={"seed": seed}))
                run = replay(trace, timed, world=FreeScoring(trace.costs), eval_budget=0.5)
                regrets.setdefault(name, []).append(run.seconds - run.tokens / best.rate)
                overhead.setdefault(name, []).append(1e6 * timed.seconds / run.rounds)
                share = 0.0
                if name not in ("ucbspec", "exp3spec"):
                    share = replay(trace, new_selector(name, trace.arms, common={"seed": seed})).scoring_share
                shares.setdefault(name, []).append(share)
        for name, values in regrets.items():
            spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            found.append(
                Scaling(
                    name,
                    count,
                    float(np.mean(values)),
                    spread,
                    float(np.median(overhead[name])),
                    float(np.mean(shares[name])),
                )
            )
        print(f"{count} drafters done", flush=True)
    return found


TABLE = {"n-gram": (0.45, 0.005), "tiny": (0.65, 0.12), "mid": (0.85, 0.45)}
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "ratio (ours)": ("ratio", {}),
    "NormalHedge on rate": ("normalhedge", {}),
    "NormalHedge, leader": ("normalhedge", {"play": "leader"}),
    "AdaNormalHedge on rate": ("adanormalhedge", {}),
    "Hedge on rate": ("hedge", {}),
    "NormalHedge on length": ("normalhedge", {"objective": "length"}),
    "accept length only": ("accept_length", {}),
}


def objectives(tokens: int, seeds: int) -> list[tuple[float, str, float, list[float]]]:
    """Return, by slope: the best arm, its speed-up, and the share of its rate that each objective gets."""
    rows = []
    for beta in (0.03, 0.1, 0.3, 0.6):
        rates = {
            Arm(name, g): sum(a**k for k in range(g + 1)) / (1 + (beta + c) * g)
            for name, (a, c) in TABLE.items()
            for g in LENGTHS
        } | {NO_DRAFT: 1.0}
        best = max(rates, key=lambda arm: rates[arm])
        shares = {label: [] for label in OBJECTIVES}  # type: dict[str, list[float]]
        for seed in range(seeds):
            trace = table_trace(beta, tokens, seed)
            for label, (name, options) in OBJECTIVES.items():
                selector = new_selector(name, trace.arms, options, common={"seed": seed})
                run = replay(trace, selector, world=FreeScoring(trace.costs), eval_budget=0.5)
                shares[label].append(expected_rate(run, beta) / rates[best])
        named = "none" if best == NO_DRAFT else f"{best.drafter}, g{best.length}"
        rows.append((beta, named, rates[best], [float(np.mean(values)) for values in shares.values()]))
        print(f"slope {beta} done", flush=True)
    return rows


def table_trace(beta: float, tokens: int, seed: int) -> Trace:
    """Return a text on which the table's drafters accept independently."""
    pool = {name: SyntheticDrafter({"x": a}, each=c) for name, (a, c) in TABLE.items()}
    steps = [1 + beta * row for row in range(max(LENGTHS) + 1)]
    return synthetic_trace(pool, ["x"], steps=steps, tokens=tokens, persistence=0.0, shared=0.0, seed=seed)


def expected_rate(run: Replayed, beta: float) -> float:
    """Return what the arms that were played bring on average: the luck of one text would hide the choice's worth."""
    tokens = seconds = 0.0
    for arm, rounds in run.arms.items():
        acceptance, cost = TABLE.get(arm.drafter or "", (0.0, 0.0))
        tokens += rounds * sum(acceptance**k for k in range(arm.length + 1))
        seconds += rounds * (1 + (beta + cost) * arm.length)
    return tokens / seconds


DOMAINS = {"code": (0.7, 0.2, 0.4), "copy": (0.4, 0.3, 0.9), "prose": (0.35, 0.55, 0.1), "nothing helps": (0.02,) * 3}
FOUND = {"code": 0.3, "copy": 0.85, "prose": 0.1, "nothing helps": 0.05}
STREAMS: dict[str, tuple[list[str], float]] = {
    **{name: ([name] * 10, 0.06) for name in ("code", "copy", "prose")},
    "changing every 3": ([d for _ in range(3) for d in ("code", "copy", "prose") for _ in range(3)], 0.06),
    "nothing helps": (["nothing helps"] * 10, 0.3),
}
COMPARED: dict[str, tuple[str, dict[str, Any]]] = {
    "ratio": ("ratio", {}),
    "normalhedge": ("normalhedge", {}),
    "hedge": ("hedge", {}),
    "accept_length": ("accept_length", {}),
    "ucbspec": ("ucbspec", {}),
    "ucbspec, rate": ("ucbspec", {"reward": "rate"}),
    "exp3spec": ("exp3spec", {}),
    "exp3spec, rate": ("exp3spec", {"reward": "rate"}),
    "metasd": ("metasd", {}),
}
WARM_UP = 2


def domain_shares(tokens: int, seeds: int) -> tuple[list[str], list[tuple[str, float, list[float], float, float]]]:
    """Return selectors, and by stream: best fixed arm over no draft, shares of it, ours over no draft, scoring."""
    rows = []
    for label, (domains, beta) in STREAMS.items():
        gains, scoring, kept = [], [], []
        shares: dict[str, list[float]] = {label: [] for label in COMPARED}
        for seed in range(seeds):
            trace = domain_trace(domains, beta, tokens, seed)
            fixed = replay_fixed(trace, seed=seed, world=noisy(trace, 1))
            best = max(rate_after(run) for run in fixed.values())
            gains.append(best / rate_after(fixed[NO_DRAFT]))
            for compared, (name, options) in COMPARED.items():
                selector = new_selector(name, trace.arms, options, common={"seed": seed})
                run = replay(trace, selector, seed=seed, world=noisy(trace, 2))
                shares[compared].append(rate_after(run) / best)
                if name == "ratio":
                    scoring.append(run.scoring_share)
                    plain = FixedSelector(trace.arms, drafter="none")
                    same_noise = replay(trace, plain, seed=seed, world=noisy(trace, 2), eval_budget=0)
                    kept.append(rate_after(run) / rate_after(same_noise))
        means = [float(np.mean(values)) for values in shares.values()]
        rows.append((label, float(np.mean(gains)), means, float(np.mean(kept)), float(np.mean(scoring))))
        print(f"stream {label} done", flush=True)
    return list(COMPARED), rows


def domain_trace(domains: Sequence[str], beta: float, tokens: int, seed: int) -> Trace:
    """Return a stream: two small drafters and a lookup, of which each domain likes another."""
    pool = {
        "one": SyntheticDrafter({d: a[0] for d, a in DOMAINS.items()}, 0.01, 0.02),
        "two": SyntheticDrafter({d: a[1] for d, a in DOMAINS.items()}, 0.01, 0.02),
        "look": SyntheticDrafter({d: a[2] for d, a in DOMAINS.items()}, 0.003, 0.0, FOUND),
    }
    steps = [1 + beta * row for row in range(max(LENGTHS) + 1)]
    return synthetic_trace(pool, domains, steps=steps, tokens=tokens, seed=seed)


def noisy(trace: Trace, seed: int) -> CostWorld:
    """Return costs with 10 % of noise, and one step in a hundred interrupted."""
    return CostWorld(trace.costs, noise=0.1, spikes=0.01, seed=seed)


def rate_after(run: Replayed) -> float:
    """Return the rate without the first requests."""
    return sum(run.request_tokens[WARM_UP:]) / sum(run.request_seconds[WARM_UP:])


def logarithm_fit(rows: Sequence[Scaling], name: str) -> tuple[float, float]:
    """Return b and R^2 of regret = a + b ln N."""
    of = [row for row in rows if row.selector == name]
    logs, values = np.log([row.drafters for row in of]), np.array([row.regret for row in of])
    fitted = np.polyval(slope := np.polyfit(logs, values, 1), logs)
    return float(slope[0]), float(1 - np.sum((values - fitted) ** 2) / np.sum((values - values.mean()) ** 2))


def draw(rows: Sequence[Scaling], path: Path) -> None:
    """Draw regret and overhead over the number of drafters."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    regret, overhead = figure.subplots(1, 2, width_ratios=(1.4, 1))
    for name in (*FULL, *BANDITS):
        of = [row for row in rows if row.selector == name]
        counts = [row.drafters for row in of]
        style = {"color": COLOURS[name], "marker": "o", "markersize": 4, "linestyle": "--" if name in BANDITS else "-"}
        regret.plot(counts, [max(row.regret, 1) for row in of], label=name, **style)
        overhead.plot(counts, [row.microseconds for row in of], **style)
    for axes in (regret, overhead):
        axes.set_xscale("log", base=2)
        axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
        axes.minorticks_off()
        axes.set_yscale("log")
        axes.set_xlabel("drafters")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    regret.set_ylim(bottom=1)
    regret.set_title("plain steps lost against the best drafter", loc="left", fontsize=10)
    overhead.set_title("processor time of the selector, microseconds per round", loc="left", fontsize=10)
    figure.legend(frameon=False, fontsize=9, ncols=8, loc="outside lower center")
    figure.suptitle("Full information (solid) and bandits (dashed)")
    figure.savefig(path, dpi=130)


def report(
    scaled: Sequence[Scaling],
    table: Sequence[tuple[float, str, float, list[float]]],
    names: Sequence[str],
    streams: Sequence[tuple[str, float, list[float], float, float]],
    arguments: argparse.Namespace,
    picture: str,
) -> str:
    """Return the page."""
    lines = [
        "# Selectors measured",
        "",
        "`python simulations/benchmarks/selector_bench.py` (its head says what is measured and how); made-up traces, "
        f"{arguments.seeds} seeds, {datetime.now(UTC):%Y-%m-%d}, numpy {np.__version__}, Python "
        f"{platform.python_version()}. Only the microseconds depend on the machine (shared and busy when measured).",
        "",
        f"![regret and overhead over the number of drafters]({picture})",
        "",
        f"## Many drafters: plain steps lost in {arguments.tokens} tokens, mean (standard deviation)",
        "",
        "| selector | " + " | ".join(str(count) for count in COUNTS) + " | per ln N | R^2 |",
        "| --- |" + " --- |" * (len(COUNTS) + 2),
    ]
    for name in (*FULL, *BANDITS):
        slope, explained = logarithm_fit(scaled, name)
        cells = [f"{row.regret:.1f} ({row.deviation:.1f})" for row in scaled if row.selector == name]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {slope:.1f} | {explained:.2f} |")
    lines += [
        "",
        "Microseconds of processor time per round, and share of the time scoring takes (budget 4 %):",
        "",
        "| selector | " + " | ".join(str(count) for count in COUNTS) + " |",
        "| --- |" + " --- |" * len(COUNTS),
    ]
    for name in (*FULL, *BANDITS):
        cells = [f"{row.microseconds:.0f}, {row.scoring:.1%}" for row in scaled if row.selector == name]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Objectives: share of the best fixed arm's rate, one text of "
        f"{arguments.tokens} tokens from a cold start, scoring free",
        "",
        "| slope | best arm | " + " | ".join(OBJECTIVES) + " |",
        "| --- | --- |" + " --- |" * len(OBJECTIVES),
    ]
    for beta, best, gain, shares in table:
        lines.append(f"| {beta} | {best} ({gain:.2f}x) | " + " | ".join(f"{share:.3f}" for share in shares) + " |")
    lines += [
        "",
        "## Domains: share of the rate of the fixed arm that is best in hindsight, scoring charged, first "
        f"{WARM_UP} requests left out",
        "",
        "Requests have 300 tokens. Selectors with full information carry means over to the next request; bandits begin "
        "anew, as their papers say, on 19 arms. A share above 1 is possible where domains change.",
        "",
        "| stream | best arm over no draft | " + " | ".join(names) + " | ratio over no draft | scoring of ratio |",
        "| --- | --- |" + " --- |" * (len(names) + 2),
    ]
    for label, gain, shares, kept, scoring in streams:
        of_best = " | ".join(f"{share:.3f}" for share in shares)
        lines.append(f"| {label} | {gain:.2f}x | {of_best} | {kept:.3f} | {scoring:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all parts and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and seeds")
    parser.add_argument("--tokens", type=int, help="of every text [default: 2000]")
    parser.add_argument("--seeds", type=int, help="[default: 8]")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="without suffix")
    arguments = parser.parse_args()
    arguments.tokens = arguments.tokens or (400 if arguments.quick else 2000)
    arguments.seeds = arguments.seeds or (2 if arguments.quick else 8)
    scaled = scaling(arguments.tokens, arguments.seeds)
    table = objectives(arguments.tokens, arguments.seeds)
    names, streams = domain_shares(min(arguments.tokens, 300), arguments.seeds)
    picture = arguments.output.with_suffix(".png")
    draw(scaled, picture)
    page = report(scaled, table, names, streams, arguments, picture.name)
    arguments.output.with_suffix(".md").write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
