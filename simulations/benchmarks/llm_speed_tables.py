"""Tables of the speed benchmark from its numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Mapping[str, Any]

OURS_INT8 = "edgeduet int8, greedy"
OURS_OWN = "edgeduet own 4-bit blocks, greedy"


@dataclass(frozen=True)
class Target:
    """What is claimed: a peer's time over ours is at least ``least``."""

    ours: str
    peer: str
    least: float


TARGETS = (
    Target(OURS_INT8, "genai int8", 0.95),
    Target("edgeduet int8, p-less", "genai int8", 0.95),
    Target(OURS_INT8, "genai int8, blocks of 128", 0.95),
    Target("edgeduet int8, p-less", "genai int8, blocks of 128", 0.95),
    Target(OURS_INT8, "llama.cpp Q8_0", 0.9),
    Target("edgeduet int8, p-less", "llama.cpp Q8_0", 0.9),
    Target(OURS_INT8, "transformers float32", 3.0),
    Target(OURS_OWN, "genai int4", 0.95),
    Target(OURS_OWN, "llama.cpp, the GGUF file", 0.9),
    Target(OURS_OWN, "transformers float32", 3.0),
)
STEP_SHARE = 0.05


def tables(report: Report) -> str:
    """Return the page."""
    parts = [
        "# The local language model's speed, measured",
        "`python simulations/benchmarks/llm_speed_bench.py --gguf ... --llama-python ... --genai-int8 ... --genai-int4 "
        "... --hf ...` (see its head for what is measured and how). SmolLM2-135M-Instruct from one GGUF file (Q4_1 "
        "body, Q8_0 embedding) for all. This file is generated.",
    ]
    for name in sorted(report):
        if name.startswith("speed"):
            parts += _speed(name, report[name])
    if "steps" in report:
        parts += ["## What the sampling pipeline costs", _steps(report["steps"]["seconds"])]
    if "perplexity" in report:
        parts += [
            "## The same model?",
            f"Perplexity on a fixed text of {report['perplexity']['tokens']} tokens, and its ratio to float32.",
            _perplexity(report["perplexity"]["nll"]),
        ]
    if "cold" in report:
        parts += [
            "## From nothing to the first token, and memory",
            "Fresh process, nothing else of ours running, files in the page cache, 1 thread: from starting Python to "
            "the first token after a prompt of 64; memory after 512 + 32 tokens more. Medians. Private memory is what "
            "would come back if the process ended; the rest of the peak are file pages and pages freed since.",
            _cold(report["cold"]["processes"]),
        ]
    if "import" in report:
        parts += [
            "## Imports",
            "Fresh process, medians; memory is the highest resident size.",
            _imports(report["import"]["processes"]),
        ]
    return "\n\n".join(parts) + "\n"


def _speed(name: str, part: Report) -> list[str]:
    facts, seconds = part["machine"], part["seconds"]
    clock = {"cpu": "processor time", "wall": "wall time"}[part["clock"]]
    versions = ", ".join(f"{library} {version}" for library, version in sorted(facts["versions"].items()))
    return [
        f"## {name.capitalize()}: {clock}",
        f"{part['date']}, {facts['processor']}, {facts['cores']} cores shared with other work (load "
        f"{' '.join(map(str, facts['load']))}), {part['rounds']} rounds in turn; {versions}. Medians.",
        _rates(seconds),
        "Peer's time over ours within a round, median [quartiles]; above 1 ours is faster.",
        _ratios(seconds),
    ]


def _rates(seconds: Report) -> str:
    rows = []
    for peer, by_length in seconds.items():
        cells = []
        for length in by_length:
            middle = _median(by_length[length]["decode"])
            cells.append(f"{1 / middle:.1f} ({1000 * middle:.2f} ms)")
        cells += [f"{1 / _median(times['prefill']):.0f}" for times in by_length.values()]
        rows.append([peer, *cells])
    lengths = list(next(iter(seconds.values())))
    head = [f"writing after {length}, tokens/s" for length in lengths]
    return _table(["runtime", *head, *(f"reading {length}, tokens/s" for length in lengths)], rows)


def _ratios(seconds: Report) -> str:
    rows = []
    for target in TARGETS:
        if target.ours in seconds and target.peer in seconds:
            ours, peer = seconds[target.ours], seconds[target.peer]
            lengths = list(ours)
            cells = [_ratio(peer[length]["decode"], ours[length]["decode"]) for length in lengths]
            reading = _ratio(peer[lengths[-1]]["prefill"], ours[lengths[-1]]["prefill"])
            middles = [_middle_ratio(peer[length]["decode"], ours[length]["decode"]) for length in lengths]
            met = "yes" if min(middles) >= target.least else "**no**"
            rows.append([f"{target.peer} / {target.ours}", *cells, reading, f"{target.least:g}", met])
    lengths = list(next(iter(seconds.values())))
    head = [*(f"writing after {length}" for length in lengths), f"reading {lengths[-1]}", "target", "met (writing)"]
    return _table(["", *head], rows)


def _ratio(peer: Sequence[float | None], ours: Sequence[float | None]) -> str:
    ratios = _ratios_by_round(peer, ours)
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def _middle_ratio(peer: Sequence[float | None], ours: Sequence[float | None]) -> float:
    return statistics.median(_ratios_by_round(peer, ours))


def _ratios_by_round(peer: Sequence[float | None], ours: Sequence[float | None]) -> list[float]:
    """Return theirs over ours in the rounds both took part in."""
    return [left / right for left, right in zip(peer, ours, strict=True) if left is not None and right is not None]


def _median(values: Sequence[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


def _steps(seconds: Report) -> str:
    rows = []
    for name, times in seconds.items():
        share = times["draw"] / (times["draw"] + times["forward"])
        met = "yes" if share < STEP_SHARE else "**no**"
        rows.append([name, *(f"{1000 * times[part]:.2f}" for part in ("forward", "draw")), f"{share:.1%}", met])
    head = ["", "model, ms a token", "logits to token, ms", "share of a step", f"below {STEP_SHARE:.0%}"]
    return _table(head, rows)


def _perplexity(losses: Report) -> str:
    reference = losses.get("transformers float32")
    rows = []
    for name, loss in losses.items():
        ratio = f"{math.exp(loss - reference):.4f}" if reference is not None else ""
        rows.append([name.removesuffix(", greedy"), f"{math.exp(loss):.2f}", ratio])
    return _table(["", "perplexity", "ratio"], rows)


def _cold(processes: Report) -> str:
    rows = []
    for name, values in processes.items():
        middle = {key: statistics.median(found) for key, found in values.items()}
        spread = f"{middle['wall']:.2f} [{min(values['wall']):.2f}, {max(values['wall']):.2f}]"
        sizes = (f"{middle[key] / 1e6:.0f}" for key in ("peak", "pss", "private"))
        rows.append([name, spread, f"{middle['cpu']:.2f}", *sizes])
    return _table(["", "wall s [range]", "CPU s", "peak RSS, MB", "PSS, MB", "private, MB"], rows)


def _imports(processes: Report) -> str:
    rows = []
    for name, values in processes.items():
        spread = f"{statistics.median(values['wall']):.2f} [{min(values['wall']):.2f}, {max(values['wall']):.2f}]"
        cpu, peak = statistics.median(values["cpu"]), statistics.median(values["peak"])
        rows.append([name, spread, f"{cpu:.2f}", f"{peak / 1e6:.0f}", "yes" if any(values["torch"]) else "no"])
    return _table(["", "wall s [range]", "CPU s", "peak RSS, MB", "torch loaded"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)
