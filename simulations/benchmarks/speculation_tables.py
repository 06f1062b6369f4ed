"""The tables of speculation_bench.py, from its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 4000
OURS = "edgeduet int8, speculating"


def tables(result: Mapping[str, Any]) -> str:
    """Return everything that was measured as Markdown."""
    about = result.get("about", {})
    lines = [
        "# Speculative decoding, measured",
        "",
        "`python simulations/benchmarks/speculation_bench.py` (its head says what is measured and how). "
        f"Model {about.get('model')}, greedy, {about.get('tokens')} tokens an answer, {about.get('threads')} threads, "
        f"wall time, mode {about.get('mode')}. This file is generated.",
        "",
    ]
    for part, written in (("arms", _arms), ("mix", _mix), ("fly", _fly), ("peers", _peers)):
        if part in result:
            lines += [*written(result[part]), ""]
    return "\n".join(lines)


def _arms(arms: Mapping[str, Any]) -> list[str]:
    domains: Mapping[str, list[dict[str, Any]]] = arms["domains"]
    names = [row["name"] for row in next(iter(domains.values()))]
    by_name = {domain: {row["name"]: row for row in rows} for domain, rows in domains.items()}
    costs = ", ".join(f"{cost:.2f}" for cost in arms["step_costs"])
    lines = [
        "## Every arm and every selector: times plain decoding",
        "",
        f"Load {arms['machine']['load']}. A step of 1, 2, ... rows takes {costs} times one of 1 row. Geometric means "
        "over prompts; the last column over all prompts, with a 95 % interval from resampling them.",
        "",
        _row(["decoding", *domains, "all"]),
        _rule(len(domains) + 2),
    ]
    lines += [
        _row([name, *(f"{by_name[domain][name]['ratio']:.2f}" for domain in domains), _overall(name, by_name)])
        for name in names
    ]
    fixed = [name for name in names if name != "plain decoding" and not name.startswith("selector ")]
    best = {domain: max(fixed, key=lambda name: by_name[domain][name]["ratio"]) for domain in domains}
    lines += [
        "",
        "Share of the best fixed arm's rate (chosen in hindsight, per domain):",
        "",
        _row(["", *(f"{domain} ({best[domain]})" for domain in domains)]),
        _rule(len(domains) + 1),
    ]
    for name in (name for name in names if name.startswith("selector ")):
        shares = [by_name[d][name]["ratio"] / by_name[d][best[d]]["ratio"] for d in domains]
        lines.append(_row([name, *(f"{share:.3f}" for share in shares)]))
    lines += ["", "What the default selector did:", "", _row(["", *domains]), _rule(len(domains) + 1)]
    for title, key, form in (
        ("tokens a step (MAT)", "mean_accepted_tokens", "{:.2f}"),
        ("accepted / evaluated", "acceptance", "{:.2f}"),
        ("share of time for scoring", "evaluation_share", "{:.1%}"),
    ):
        values = [by_name[domain]["selector ratio"][key] for domain in domains]
        lines.append(_row([title, *("-" if value is None else form.format(value) for value in values)]))
    return lines


def _overall(name: str, by_name: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    ratios = np.concatenate(
        [np.array(rows["plain decoding"]["seconds"]) / np.array(rows[name]["seconds"]) for rows in by_name.values()]
    )
    return _mean_with_interval(ratios)


def _mean_with_interval(ratios: np.ndarray) -> str:
    logs = np.log(ratios)
    means = np.random.default_rng(0).choice(logs, (_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    return f"{np.exp(logs.mean()):.2f} [{low:.2f}, {high:.2f}]"


def _mix(mix: Mapping[str, Any]) -> list[str]:
    rows = mix["rows"]
    fixed = [row for row in rows if row["fixed"]]
    totals = {row["name"]: sum(row["seconds"]) for row in rows}
    best = min(fixed, key=lambda row: totals[row["name"]])["name"]
    lines = [
        "## A stream that changes domain every three prompts",
        "",
        f"Load {mix['machine']['load']}. By the whole stream's time; the fixed arm best in hindsight is {best}.",
        "",
        _row(["decoding", "times plain decoding", "share of the best fixed arm", "tokens a step"]),
        _rule(4),
    ]
    for row in rows:
        steps = row["mean_accepted_tokens"]
        lines.append(
            _row(
                [
                    row["name"],
                    f"{totals['plain decoding'] / totals[row['name']]:.3f}",
                    f"{totals[best] / totals[row['name']]:.3f}",
                    "-" if steps is None else f"{steps:.2f}",
                ]
            )
        )
    return lines


def _fly(fly: Mapping[str, Any]) -> list[str]:
    domains: Mapping[str, Mapping[str, list[dict[str, Any]]]] = fly["domains"]
    lines = [
        "## Lossy verification (fly) beside exact",
        "",
        f"Load {fly['machine']['load']}. Exact mode, lookup drafts of {fly['length']} tokens. Times no draft: "
        "geometric mean over prompts; unchanged: answers that equal those of no draft; shared: tokens before the first "
        "that differs; nats: what the model itself thinks of a token of the answer, beside one of its own greedy one.",
        "",
        _row(
            [
                "text",
                "verified",
                "times no draft",
                "tokens a step",
                "relaxed",
                "unchanged",
                "shared",
                "nats, difference",
            ]
        ),
        _rule(8),
    ]
    for domain, ways in domains.items():
        plain = ways["no draft"]
        for name in (name for name in ways if name != "no draft"):
            answers = ways[name]
            pairs = list(zip(plain, answers, strict=True))
            shared = [_common(one["ids"], other["ids"]) for one, other in pairs]
            ratio = np.exp(np.mean([np.log(one["seconds"] / other["seconds"]) for one, other in pairs]))
            lines.append(
                _row(
                    [
                        domain,
                        name,
                        f"{ratio:.2f}",
                        f"{np.mean([answer['tokens_a_step'] for answer in answers]):.2f}",
                        f"{sum(answer['relaxed'] for answer in answers) / sum(len(a['ids']) for a in answers):.1%}",
                        f"{sum(one['ids'] == other['ids'] for one, other in pairs)} of {len(pairs)}",
                        f"{np.mean(shared):.0f}",
                        f"{np.mean([other['nll'] - one['nll'] for one, other in pairs]):+.3f}",
                    ]
                )
            )
    return lines


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def _peers(peers: Mapping[str, Any]) -> list[str]:
    seconds: Mapping[str, Mapping[str, list[float]]] = peers["seconds"]
    domains = list(next(iter(seconds.values())))
    lines = [
        "## Beside the peers: tokens per second",
        "",
        f"Load {peers['machine']['load']}. Medians over prompts; the last column is the runtime's time over that of "
        "ours speculating, geometric mean over prompts with a 95 % interval (above 1: ours is faster).",
        "",
        _row(["runtime", *domains, "time over ours", "memory, MB"]),
        _rule(len(domains) + 3),
    ]
    for name, by_domain in seconds.items():
        rates = [f"{1 / float(np.median(by_domain[domain])):.0f}" for domain in domains]
        ratios = np.concatenate(
            [np.array(by_domain[domain]) / np.array(seconds[OURS][domain]) for domain in domains if OURS in seconds]
        )
        lines.append(_row([name, *rates, _mean_with_interval(ratios), f"{peers['memory'][name] / 1e6:.0f}"]))
    return lines


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return _row(["---"] * columns)
