"""Diagonal Fisher information for elastic weight consolidation.

Kirkpatrick et al. 2017, "Overcoming catastrophic forgetting in neural networks": mean over samples of
the squared gradient of log p(y | x), here with the observed label (the empirical Fisher).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.func import grad, vmap
from torch.nn import functional

from edgeduet_client.local_training import Job
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.plan import LocalPlan

_IMAGES = 64


def diagonal_fisher(model: DuetModel, plan: LocalPlan, class_ids: Sequence[int], job: Job) -> Params:
    """Return the Fisher diagonal of the trained parameters, from at most 64 images of the client."""
    classes_C = torch.as_tensor(class_ids)
    trained = {name: value for name, value in job.params.items() if model.group_of(name) in plan.train}
    fixed = {name: value for name, value in job.params.items() if name not in trained}

    def loss(values: Params, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        params = {**fixed, **values}
        z_BD, _ = model.run(params, "encode_image", x.unsqueeze(0))
        t_CD, _ = model.run(params, "encode_text", classes_C)
        logits_BC = model.run(params, "local_logits", z_BD, t_CD)
        return functional.cross_entropy(logits_BC, label.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), chunk_size=16)
    grads = per_sample(trained, job.x[:_IMAGES], job.labels_N[:_IMAGES])
    return {name: value.square().mean(0).detach() for name, value in grads.items()}
