"""Real, tiny rounds of local training: models on tiny towers, plans of the real strategies, jobs of any size."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from edgeduet_client.local_training import Job
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.plan import LocalPlan, Parts
from tiny_towers import CLASS_NAMES, pictures, tiny_backbone

CLASSES = tuple(range(len(CLASS_NAMES)))
FULL = Parts(adapters=True, experts=True, prompt=True, fusion=True)
SCENARIO = Scenario.model_validate(
    {
        "name": "tiny",
        "model": {
            "adapter": {"bottleneck": 4, "shared_bottleneck": 8, "experts": 3, "top_k": 2},
            "fusion": {"stride": 2, "heads": 4},
        },
        "train": {"batch_size": 4},
        "federation": {"rounds": 2},
    }
)


def plan_of(method: str, round: int = 0, **options: Any) -> LocalPlan:
    """The plan that the strategy of ``method`` makes for ``round`` of the first stage."""
    return make_strategy(method, options, SCENARIO, Experiment(SCENARIO, 0)).plan(0, round)


@lru_cache(maxsize=16)
def model_of(parts: Parts) -> DuetModel:
    """The model with ``parts`` on the tiny ViT."""
    return DuetModel(tiny_backbone("vit"), CLASS_NAMES, SCENARIO.model, parts)


@lru_cache(maxsize=16)
def features(parts: Parts, count: int, seed: int) -> Tensor:
    """Cached features of ``count`` random pictures."""
    return model_of(parts).front(pictures(tiny_backbone("vit"), count, seed))


def moved(params: Params, seed: int = 0, by: float = 0.1) -> Params:
    """Parameters away from their initial zeros."""
    source = torch.Generator().manual_seed(seed)
    return {name: value + by * torch.randn(value.shape, generator=source) for name, value in params.items()}


def job(plan: LocalPlan, client: int, count: int, *, fresh: bool = False, **changes: Any) -> Job:
    """A client with ``count`` images; two prompts are dispatched to it where the plan fuses."""
    model = model_of(plan.parts)
    source = torch.Generator().manual_seed(client)
    contexts = 0.05 * torch.randn(2, 4, 32, generator=source) if plan.logits == "fused" else torch.zeros(0, 4, 1)
    params = model.initial(0) if fresh else moved(model.initial(0), seed=client)
    return Job(
        client=client,
        stage=0,
        round=0,
        seed=0,
        x=features(plan.parts, count, client),
        labels_N=torch.randint(0, len(CLASSES), (count,), generator=source),
        params=params,
        contexts_MLW=contexts,
        **changes,
    )
