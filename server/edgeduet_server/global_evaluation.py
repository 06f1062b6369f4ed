"""Accuracy of the plain global model after each stage.

Where the server has the scenario's images, on the common test sets. Where they lie on the devices, every client counts
on its own test images, and the counts are added up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.evaluation import evaluate_held_out, evaluate_rows, predictor
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.messages import EvaluateReply


class GlobalEvaluation:
    """Counts what the global model gets right; called by the round loop after each stage."""

    def __init__(self, experiment: Experiment, strategy: Strategy) -> None:
        self._experiment = experiment
        self._strategy = strategy

    def describe(self, stage: int) -> Mapping[str, str]:
        """Return what somebody who has only the global model's arrays needs to classify with them, as JSON texts.

        ``edgeduet_client.classifier.adopting`` reads it.
        """
        split = self._experiment.split
        return {
            "parts": self._strategy.parts.model_dump_json(),
            "model": self._experiment.scenario.model.model_dump_json(),
            "class_names": json.dumps(list(split.class_names)),
            "seen": json.dumps([int(label) for label in split.seen_classes(stage)]),
        }

    def __call__(self, state: ServerState, stage: int, replies: Sequence[EvaluateReply]) -> Mapping[str, Any]:
        """Return ``correct`` and ``totals`` per task (all T tasks, trained or not), and for held-out classes.

        -1 stands for what does not exist: all of it where the method has no global model, ``held_out`` where
        the scenario holds no classes out.
        """
        experiment, parts = self._experiment, self._strategy.parts
        if experiment.scenario.data.on_devices:
            return self._added_up(replies)
        split, model = experiment.split, experiment.model(parts)
        totals = [len(rows) for rows in split.test]
        if not self._strategy.has_global_model:
            return {"correct": [-1] * len(totals), "totals": totals, "held_out": -1, "held_out_total": 0}
        predict = predictor(model, self._strategy.global_params(state), len(split.class_names))
        held_out, held_out_total = evaluate_held_out(predict, experiment, parts)
        return {
            "correct": list(evaluate_rows(predict, experiment, parts, stage, split.test)),
            "totals": totals,
            "held_out": held_out,
            "held_out_total": held_out_total,
        }

    def _added_up(self, replies: Sequence[EvaluateReply]) -> Mapping[str, Any]:
        """As :meth:`__call__`, over the own test images of the clients that answered.

        Classes held out are scored by clients for their personal models only.
        """
        tasks = len(self._experiment.split.tasks)
        totals = [sum(reply.totals[task] for reply in replies) for task in range(tasks)]
        correct = [-1] * tasks
        if self._strategy.has_global_model:
            correct = [sum(reply.shared[task] for reply in replies) for task in range(tasks)]
        return {"correct": correct, "totals": totals, "held_out": -1, "held_out_total": 0}
