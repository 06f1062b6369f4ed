"""How much attention each dispatched prompt received: the orchestrator's credit (U11)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgeduet_client.local_training import Job, encode_images
from edgeduet_shared.duet import DuetModel, Params

_IMAGES = 256


@torch.no_grad()
def prompt_usage(
    model: DuetModel, params: Params, job: Job, class_ids: Sequence[int], indices: Sequence[str]
) -> dict[str, float]:
    """Return the mean attention mass per dispatched prompt, for the true class of each image.

    ``indices`` are the pool indices of ``job.contexts_MLW`` in sorted order; masses and that of the
    local prompt sum to 1. Evaluation mode, after training, on at most 256 images.
    """
    if not indices:
        return {}
    classes_C = torch.as_tensor(class_ids)
    z_BD = encode_images(model, params, job.x[:_IMAGES])
    t_CD = model.run(params, "encode_text", classes_C)[0]
    u_MCD = model.run(params, "encode_text_under", job.contexts_MLW, classes_C)
    _, attention_BCP = model.run(params, "fused_logits", z_BD, t_CD, u_MCD, 0.5)
    own_BP = attention_BCP[torch.arange(len(z_BD)), job.labels_N[:_IMAGES]]
    masses = own_BP.mean(0)[1:].tolist()
    return dict(zip(sorted(indices, key=int), masses, strict=True))
