"""Bring runs together that may be compared: same scenario, same split per seed; several methods and seeds.

S seeds, T tasks (= stages), M clients. Accuracies in [0, 1]; NaN where a value does not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeduet_shared.config import Scenario
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_shared.metrics import (
    METRICS,
    MeanStd,
    Values,
    forgetting_over_stages,
    intransigence,
    over_seeds,
    stage_accuracies,
)
from edgeduet_sim.results import Run

MAIN_METHOD = "fed-duet"
REFERENCES = ("zero-shot", "local", "joint")
"""Without these three beside it, a federated number cannot be read (fed-duet.md 4.5)."""

NOT_FEDERATED = ("zero-shot", "local", "joint", "centralised")
"""References: no federation to compete with."""


@dataclass(frozen=True)
class MethodResult:
    """One method over its finished seeds.

    Attributes:
        spec: method and options.
        runs: one finished run per seed, sorted by seed.
        numbers: every metric over seeds.
        stages_ST: accuracy of the global model on all tasks seen so far, after each stage.
        personal_ST: mean personal accuracy over clients, after each stage.
        forgetting_ST: forgetting measured after each stage.
        matrix_TT: accuracy matrix of the global model, mean over seeds.
        clients_SM: personal accuracy of each client after the final stage.
        bytes_ST: bytes moved (both ways, all clients) up to the end of each stage.
    """

    spec: MethodSpec
    runs: tuple[Run, ...]
    numbers: dict[str, MeanStd]
    stages_ST: Values
    personal_ST: Values
    forgetting_ST: Values
    matrix_TT: Values
    clients_SM: Values
    bytes_ST: Values

    @property
    def name(self) -> str:
        """How the method is called in tables and figures."""
        return str(self.spec)

    @property
    def federated(self) -> bool:
        """Whether clients learn together (references do not)."""
        return self.spec.name not in NOT_FEDERATED


@dataclass(frozen=True)
class Comparison:
    """All methods run on one scenario.

    Attributes:
        scenario: the common scenario.
        methods: finished methods, the main method first, then federated ones, then references.
        ablations: variants of a method that is itself among ``methods``.
        unfinished: runs left out because they did not come to their end.
        warnings: what a reader must know before trusting the numbers.
    """

    scenario: Scenario
    methods: tuple[MethodResult, ...]
    ablations: tuple[MethodResult, ...]
    unfinished: tuple[Run, ...]
    warnings: tuple[str, ...]

    @property
    def all(self) -> tuple[MethodResult, ...]:
        """Methods and ablations."""
        return self.methods + self.ablations

    def find(self, name: str) -> MethodResult | None:
        """Return the result of the method called ``name``, if it is there."""
        return next((result for result in self.all if result.name == name), None)

    def best_federated(self, metric: str) -> MethodResult | None:
        """Return the best federated method by mean of ``metric``, other than the main one and sharing seeds with it."""
        better = METRICS[metric].better
        main = self.find(MAIN_METHOD)
        seeds = {run.seed for run in main.runs} if main else set()
        rivals = [
            r
            for r in self.methods
            if r.federated
            and r.spec.name != MAIN_METHOD
            and not math.isnan(r.numbers[metric].mean)
            and seeds & {run.seed for run in r.runs}
        ]
        return max(rivals, key=lambda r: better * r.numbers[metric].mean, default=None)


def compare(runs: Sequence[Run]) -> tuple[Comparison, ...]:
    """Group runs by scenario and bring each group together; groups in order of their names."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.scenario.digest(), []).append(run)
    ordered = sorted(groups.values(), key=lambda group: (group[0].scenario.name, group[0].scenario.digest()))
    return tuple(_compare_group(group) for group in ordered)


def _compare_group(runs: Sequence[Run]) -> Comparison:
    finished = [run for run in runs if run.finished]
    joint = {run.seed: run for run in finished if str(run.method) == "joint"}
    by_method: dict[str, list[Run]] = {}
    for run in sorted(finished, key=lambda run: run.seed):
        by_method.setdefault(str(run.method), []).append(run)
    results = [_method_result(method_runs, joint) for method_runs in by_method.values()]
    plain = {result.spec.name for result in results if not result.spec.options}
    ablations = [result for result in results if result.spec.options and result.spec.name in plain]
    methods = [result for result in results if result not in ablations]
    return Comparison(
        scenario=runs[0].scenario,
        methods=tuple(sorted(methods, key=_reading_order)),
        ablations=tuple(sorted(ablations, key=lambda result: result.name)),
        unfinished=tuple(run for run in runs if not run.finished),
        warnings=tuple(_warnings(runs, results)),
    )


def _reading_order(result: MethodResult) -> tuple[int, float, str]:
    group = 0 if result.spec.name == MAIN_METHOD else 1 if result.federated else 2
    avg = result.numbers["avg"].mean
    return group, -(avg if not math.isnan(avg) else -1.0), result.name


def _method_result(runs: Sequence[Run], joint: dict[int, Run]) -> MethodResult:
    summaries = [run.summary() for run in runs]
    for run, summary in zip(runs, summaries, strict=True):
        reference = joint.get(run.seed)
        known = reference is not None and str(run.method) != "joint"
        summary["intransigence"] = (
            intransigence(run.evaluations.matrix_TT, reference.evaluations.matrix_TT)
            if known and reference
            else math.nan
        )
    evaluations = [run.evaluations for run in runs]
    moved = [np.cumsum(np.sum(run.stage_bytes(), axis=0)) for run in runs]
    return MethodResult(
        spec=runs[0].method,
        runs=tuple(runs),
        numbers={name: over_seeds([summary[name] for summary in summaries]) for name in summaries[0]},
        stages_ST=np.array([stage_accuracies(e.matrix_TT, e.kind, e.totals_TT) for e in evaluations]),
        personal_ST=np.array([_mean_columns(e.personal_stages_MT()) for e in evaluations]),
        forgetting_ST=np.array([forgetting_over_stages(e.matrix_TT) for e in evaluations]),
        matrix_TT=np.array([e.matrix_TT for e in evaluations]).mean(axis=0),
        clients_SM=np.array([e.personal_stages_MT()[:, -1] for e in evaluations]),
        bytes_ST=np.array(moved, dtype=np.float64),
    )


def _mean_columns(values_MT: Values) -> Values:
    return np.array([over_seeds(column).mean for column in values_MT.T])


def _warnings(runs: Sequence[Run], results: Sequence[MethodResult]) -> list[str]:
    found: list[str] = []
    names = {result.spec.name for result in results}
    missing = [name for name in (MAIN_METHOD, *REFERENCES) if name not in names]
    if missing:
        found.append(
            f"Not in this report: {', '.join(missing)}. Without zero-shot, local and joint beside it, "
            "the number of a federated method says little about whether federation was worth it."
        )
    splits: dict[int, set[str]] = {}
    for run in runs:
        splits.setdefault(run.seed, set()).add(str(run.config.get("split")))
    for seed, digests in sorted(splits.items()):
        if len(digests) > 1:
            found.append(
                f"Seed {seed}: the runs used different splits ({', '.join(sorted(digests))}); do not compare them."
            )
    seeds = {result.name: tuple(run.seed for run in result.runs) for result in results}
    if len(set(seeds.values())) > 1:
        found.append("The methods were run with different sets of seeds; see the column Seeds.")
    if results and max(len(result.runs) for result in results) < 3:
        found.append("Fewer than 3 seeds: the spread between seeds is not known well enough to rank close methods.")
    unfinished = [run for run in runs if not run.finished]
    if unfinished:
        listed = ", ".join(f"{run.method} (seed {run.seed})" for run in unfinished)
        found.append(f"Left out because they did not finish: {listed}. The same command with --resume goes on.")
    skipped = {str(run.method): run.skipped_rounds for run in runs if run.skipped_rounds}
    if skipped:
        listed = ", ".join(f"{name}: {count}" for name, count in skipped.items())
        found.append(f"Rounds were skipped for lack of usable answers ({listed}); see Failures.")
    return found


def band(values_ST: Values) -> tuple[Values, Values]:
    """Return (mean, standard deviation) over seeds at each stage, NaN where nothing exists; std 0 for one seed."""
    spread = [over_seeds(column) for column in values_ST.T]
    mean = np.array([s.mean for s in spread])
    return mean, np.array([0.0 if math.isnan(s.std) else s.std for s in spread])


def dispatch_counts(run: Run) -> npt.NDArray[np.int64]:
    """Return how often each pool prompt went to each client, shape (M, K); K is the size of the pool."""
    counts = np.zeros((run.scenario.federation.clients, run.scenario.model.pool.size), np.int64)
    for row in run.rounds:
        for client, indices in row.dispatch.items():
            for index in indices:
                counts[client, index] += 1
    return counts


def paired_difference(result: MethodResult, full: MethodResult, metric: str) -> MeanStd:
    """Return mean and spread over the common seeds of (variant minus whole method)."""
    whole = {run.seed: run.summary()[metric] for run in full.runs}
    return over_seeds([run.summary()[metric] - whole[run.seed] for run in result.runs if run.seed in whole])
