"""What a strategy asks of a client in one round.

The client knows no methods: a strategy (one file under ``edgeduet_server.strategies``) says which
parameter groups are trained, uploaded and kept, and which loss terms apply. The plan travels with
the round's message, so a device never has to be updated for a new method made of known parts.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgeduet_shared.config import PrivacyConfig, Section, TrainConfig

Group = Literal["shared_adapter", "router", "routed_adapters", "prompt", "fusion", "lora", "head", "drafter"]
GROUPS: tuple[Group, ...] = (
    "shared_adapter",
    "router",
    "routed_adapters",
    "prompt",
    "fusion",
    "lora",
    "head",
    "drafter",
)


class Parts(Section):
    """Which trainable parts a method's model is built with."""

    adapters: bool = Field(False, description="shared adapter at each site")
    experts: bool = Field(False, description="routed adapters and routers at each site (needs adapters)")
    prompt: bool = Field(False, description="learnable prompt context; otherwise the hand template is used")
    fusion: bool = Field(False, description="cross-attention over local and dispatched prompts")
    lora: bool = Field(False, description="LoRA through peft instead of adapters")
    head: bool = Field(False, description="FedCLIP's attention head on the image embedding")


class LocalPlan(Section):
    """One round of local work, as told by the strategy."""

    parts: Parts
    train: tuple[Group, ...] = Field((), description="groups trained in this round")
    upload: tuple[Group, ...] = Field((), description="groups whose new values are sent back")
    personal: tuple[Group, ...] = Field((), description="groups that stay on the client between rounds")
    remember: tuple[Group, ...] = Field(
        (), description="groups whose last received values the client keeps, for rounds that do not send them"
    )
    last_round: bool = Field(False, description="last round of the stage: statistics of the stage are closed")
    data: Literal["own", "pooled", "pooled-seen"] = Field(
        "own",
        description="the client's task data; 'pooled': all clients' task data; 'pooled-seen': all clients' data of "
        "all tasks so far (upper references, simulation only)",
    )

    logits: Literal["local", "fused"] = Field("local", description="logits under the cross-entropy")
    mix: float = Field(0.5, ge=0, le=1, description="lambda of the fused logits")
    evaluate_fused: bool = Field(False, description="the personal model predicts with fused logits")
    prior: float = Field(0.0, ge=0, description="logit adjustment by the client's class shares in the cross-entropy")
    generic: float = Field(0.0, ge=0, description="weight of the cross-entropy of the path without routed adapters")
    generic_prior: float = Field(0.0, ge=0, description="logit adjustment of that generic cross-entropy")
    rehearsal: float = Field(
        0.0,
        ge=0,
        description="features drawn from the client's class prototypes of earlier stages, per image of a batch; "
        "with it the losses are over all classes seen so far, else over the classes of the task",
    )
    balance: float = Field(0.0, ge=0, description="alpha: weight of the load-balancing loss")
    consistency: float = Field(0.0, ge=0, description="eta: weight of the routing-consistency loss")
    consistency_temperature: float = Field(0.1, gt=0, description="tau of the routing-consistency loss")
    stability: float = Field(0.0, ge=0, description="gamma: weight of the expert-stability loss")
    stability_ema: float = Field(0.9, ge=0, lt=1, description="decay per step of the routing statistics")
    proximal: float = Field(0.0, ge=0, description="FedProx mu on the trained groups")
    ewc: float = Field(0.0, ge=0, description="EWC weight on the trained groups")
    distill: float = Field(0.0, ge=0, description="LwF weight: distillation from the model before this stage")
    distill_temperature: float = Field(2.0, gt=0, description="LwF temperature")

    digest: bool = Field(False, description="send the mean normalised image feature")
    usage: bool = Field(False, description="send the attention mass each dispatched prompt received")
    noise: bool = Field(True, description="router noise while training")
    optimiser: TrainConfig = Field(TrainConfig(), description="local optimisation of this round")
    privacy: PrivacyConfig = Field(PrivacyConfig(), description="clipping and noise applied before anything is sent")
