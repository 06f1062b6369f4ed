"""Count correct predictions of a model on cached features.

A prediction is the most likely of the *allowed* classes: for task j after stage i these are the
classes of tasks ``0..max(i, j)``; the task itself is never told (fed-duet.md 7, U17).

Shape suffixes: B images, C classes, D joint width, M dispatched prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.plan import Parts

_CHUNK = 256


@dataclass(frozen=True)
class Predictor:
    """A model with parameters in place, its text features computed once for all classes.

    ``dispatched_MCD`` switches fused logits on.
    """

    model: DuetModel
    params: Params
    text_CD: Tensor
    dispatched_MCD: Tensor | None
    mix: float

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Return logits (B, C) over all classes of the stream."""
        parts = []
        for start in range(0, len(x), _CHUNK):
            z_BD, _ = self.model.run(self.params, "encode_image", x[start : start + _CHUNK])
            if self.dispatched_MCD is None:
                parts.append(self.model.run(self.params, "local_logits", z_BD, self.text_CD))
            else:
                fused = self.model.run(self.params, "fused_logits", z_BD, self.text_CD, self.dispatched_MCD, self.mix)
                parts.append(fused[0])
        return torch.cat(parts) if parts else torch.zeros(0, len(self.text_CD))

    def correct(self, x: Tensor, labels: Tensor, allowed: Sequence[int]) -> int:
        """Count images whose most likely allowed class is the right one."""
        if len(x) == 0:
            return 0
        columns = torch.as_tensor(allowed)
        return int((columns[self.logits(x)[:, columns].argmax(1)] == labels).sum())


@torch.no_grad()
def predictor(
    model: DuetModel, params: Params, classes: int, *, contexts_MLW: Tensor | None = None, mix: float = 0.5
) -> Predictor:
    """Build a :class:`Predictor`; with ``contexts_MLW`` (M may be 0) it predicts with fused logits."""
    every = torch.arange(classes)
    text_CD, _ = model.run(params, "encode_text", every)
    dispatched = None if contexts_MLW is None else model.run(params, "encode_text_under", contexts_MLW, every)
    return Predictor(model, params, text_CD, dispatched, mix)


def evaluate_rows(
    predict: Predictor, experiment: Experiment, parts: Parts, stage: int, per_task: Sequence[NDArray[np.int64]]
) -> tuple[int, ...]:
    """Count correct predictions per task; ``per_task[j]`` are rows of the table that belong to task j."""
    counts = []
    for task, rows in enumerate(per_task):
        x, labels = experiment.rows(parts, rows)
        counts.append(predict.correct(x, labels, experiment.split.seen_classes(max(stage, task))))
    return tuple(counts)


def evaluate_held_out(predict: Predictor, experiment: Experiment, parts: Parts) -> tuple[int, int]:
    """Return (correct, total) on classes kept out of the stream, scored among those classes only."""
    split = experiment.split
    if not len(split.held_out_test):
        return -1, 0
    x, labels = experiment.rows(parts, split.held_out_test)
    return predict.correct(x, labels, split.held_out_classes), len(labels)


# The same for every client of a run; values are never changed in place.
@lru_cache(maxsize=8)
def _fresh(model: DuetModel, seed: int) -> Params:
    return model.initial(seed)


def merged_params(model: DuetModel, seed: int, *sources: Mapping[str, NDArray[np.float32]]) -> Params:
    """Fresh parameters, overridden by each of ``sources`` in turn (names the model lacks are ignored)."""
    params = dict(_fresh(model, seed))
    for source in sources:
        for name, value in source.items():
            if name in params:
                params[name] = torch.from_numpy(np.array(value, dtype=np.float32))
    return params
