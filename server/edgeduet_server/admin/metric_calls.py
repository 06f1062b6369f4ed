"""Calls about numbers: accuracy matrices, and which prompts went where."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.admin.tokens import Caller
from edgeduet_server.registry.models import ClientMetric, ClientSighting, Round, Run, Stage
from edgeduet_server.registry.runs import find_run
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.metrics import (
    Kind,
    Values,
    accuracies,
    average_incremental_accuracy,
    backward_transfer,
    forgetting,
    mean,
    stage_accuracies,
)


class MetricCalls:
    """Numbers of runs.

    Args:
        registry: the registry.
        now: the clock.
    """

    def __init__(self, registry: Registry, now: Callable[[], datetime]) -> None:
        self._registry = registry
        self._now = now

    def get_metrics(self, request: pb.RunRequest, caller: Caller) -> pb.Metrics:
        """Return the matrices of the evaluated stages and what derives from them."""
        with self._registry.reading() as session:
            run = find_run(session, request.run or "latest")
            return _metrics(session, run)

    def get_prompts(self, request: pb.RunRequest, caller: Caller) -> pb.Prompts:
        """Return how often each prompt was dispatched, and to whom which last."""
        with self._registry.reading() as session:
            run = find_run(session, request.run or "latest")
            model = run.scenario.get("model", {}).get("pool", {})
            message = pb.Prompts(
                run=run.name, pool=model.get("size", 0), dispatched_per_client=model.get("dispatched", 0)
            )
            uses: Counter[int] = Counter()
            distinct: defaultdict[int, set[int]] = defaultdict(set)
            last: dict[int, tuple[int, int, list[int]]] = {}
            rounds = select(Round).where(Round.run_id == run.id).order_by(Round.stage, Round.round)
            for row in session.scalars(rounds):
                for client, prompts in row.dispatch.items():
                    uses.update(prompts)
                    distinct[int(client)].update(prompts)
                    last[int(client)] = (row.stage, row.round, prompts)
            message.uses.update(uses)
            names = _names(session, run.id)
            for client, (stage, round, prompts) in sorted(last.items()):
                message.clients.add(
                    client=client,
                    name=names.get(client, ""),
                    prompts=prompts,
                    stage=stage,
                    round=round,
                    distinct=len(distinct[client]),
                )
            return message


def _names(session: Session, run_id: int) -> dict[int, str]:
    rows = select(ClientSighting.client, ClientSighting.name).where(ClientSighting.run_id == run_id)
    return dict(session.execute(rows).all())


def _metrics(session: Session, run: Run) -> pb.Metrics:
    rows = select(Stage).where(Stage.run_id == run.id, Stage.evaluated).order_by(Stage.stage)
    stages = list(session.scalars(rows))
    message = pb.Metrics(run=run.name, tasks=run.tasks)
    if not stages:
        return message
    kind: Kind = run.scenario.get("stream", {}).get("kind", "domain-incremental")
    counts = _client_counts(session, run.id)
    matrix, totals = _global_matrix(stages, run.stages or len(stages))
    if not np.isnan(matrix).all():
        _add_rows(message.global_matrix, stages, matrix)
        done = _square_part(matrix, len(stages))
        after = stage_accuracies(done, kind, totals[: len(stages)])
        _put(message, "avg", average_incremental_accuracy(after))
        _put(message, "last", float(after[-1]))
        _put(message, "forgetting", forgetting(done))
        _put(message, "bwt", backward_transfer(done))
    personal = _personal_matrices(counts, "personal", len(stages), run.stages or len(stages))
    if personal:
        over = np.array(
            [
                [mean([m[i, j] for m in personal.values()]) for j in range(i + 1)]
                + [math.nan] * (matrix.shape[1] - i - 1)
                for i in range(len(stages))
            ]
        )
        _add_rows(message.personal_matrix, stages, over)
        shared = _personal_matrices(counts, "shared", len(stages), run.stages or len(stages))
        names = _names(session, run.id)
        finals = []
        for client in sorted(personal):
            own = _last_stage(personal[client], kind, counts, client, len(stages))
            finals.append(own)
            entry = message.clients.add(client=client, name=names.get(client, ""))
            if not math.isnan(own):
                entry.personal = own
            general = _last_stage(shared[client], kind, counts, client, len(stages))
            if not math.isnan(general):
                entry.general = general
        _put(message, "personal", mean(finals))
        if not all(math.isnan(value) for value in finals):
            _put(message, "personal_worst", float(np.nanmin(finals)))
    return message


_Counts = dict[tuple[int, int], dict[str, float]]


def _client_counts(session: Session, run_id: int) -> _Counts:
    """(client, stage) -> metric -> value."""
    counts: _Counts = defaultdict(dict)
    for row in session.scalars(select(ClientMetric).where(ClientMetric.run_id == run_id)):
        counts[row.client, row.stage][row.metric] = row.value
    return counts


def _global_matrix(stages: list[Stage], tasks: int) -> tuple[Values, Values]:
    matrix, totals = np.full((len(stages), tasks), math.nan), np.zeros(tasks)
    for index, stage in enumerate(stages):
        common: dict[str, Any] = stage.common or {}
        if common.get("correct"):
            values = accuracies(common["correct"], common["totals"])
            matrix[index, : len(values)] = values[:tasks]
            totals[: len(values)] = common["totals"][:tasks]
    return matrix, totals


def _personal_matrices(counts: _Counts, metric: str, stages: int, tasks: int) -> dict[int, Values]:
    """Client -> accuracies (stages, tasks) on its own test images."""
    matrices: dict[int, Values] = {}
    for (client, stage), values in counts.items():
        matrix = matrices.setdefault(client, np.full((stages, tasks), math.nan))
        for task in range(tasks):
            if f"{metric}/{task}" in values and stage < stages:
                matrix[stage, task] = accuracies(values[f"{metric}/{task}"], values[f"total/{task}"])
    return matrices


def _last_stage(matrix: Values, kind: Kind, counts: _Counts, client: int, stages: int) -> float:
    last = counts.get((client, stages - 1), {})
    totals = np.array([last.get(f"total/{task}", 0.0) for task in range(stages)])
    return float(stage_accuracies(_square_part(matrix, stages), kind, totals)[-1])


def _square_part(matrix: Values, stages: int) -> Values:
    return matrix[:stages, :stages]


def _add_rows(target: Any, stages: list[Stage], matrix: npt.NDArray[np.float64]) -> None:
    for stage, values in zip(stages, matrix, strict=True):
        row = target.add(stage=stage.stage)
        for value in values:
            row.tasks.add(**({} if math.isnan(value) else {"value": float(value)}))


def _put(message: pb.Metrics, name: str, value: float) -> None:
    if not math.isnan(value):
        message.numbers[name] = value
