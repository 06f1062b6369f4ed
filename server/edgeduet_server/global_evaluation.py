"""Accuracy of the plain global model on the common test sets, after each stage.

The server of a simulation holds all images. A server of real devices holds none: it leaves this out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.evaluation import evaluate_held_out, evaluate_rows, predictor
from edgeduet_shared.experiment import Experiment


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

    def __call__(self, state: ServerState, stage: int) -> Mapping[str, Any]:
        """Return ``correct`` and ``totals`` per task (all T tasks, trained or not), and for held-out classes.

        -1 stands for what does not exist: all of it where the method has no global model, ``held_out`` where
        the scenario holds no classes out.
        """
        experiment, parts = self._experiment, self._strategy.parts
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
