"""What a method trains, sends and keeps, and the bytes to expect: counted before a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgeduet_server.strategies.strategy import Strategy
from edgeduet_shared.messages import TrainReply, encode, serialised_bytes
from edgeduet_shared.metrics import format_bytes
from edgeduet_shared.plan import GROUPS, Group, LocalPlan


@dataclass(frozen=True)
class Budget:
    """Numbers of parameters and bytes of one method on one scenario.

    Attributes:
        groups: parameters per group of the method's model; only groups it has.
        trainable: parameters trained on a client in any round.
        uploaded: distinct parameters a client ever sends.
        personal: parameters that stay on the client.
        bytes_down: bytes to expect over the whole run, all clients, server to clients.
        bytes_up: the same, clients to server.
    """

    groups: Mapping[Group, int]
    trainable: int
    uploaded: int
    personal: int
    bytes_down: int
    bytes_up: int

    def as_record(self) -> dict[str, object]:
        """Return the numbers for ``config.json``."""
        return {
            "groups": dict(self.groups),
            "trainable": self.trainable,
            "uploaded": self.uploaded,
            "personal": self.personal,
            "expected_bytes_down": self.bytes_down,
            "expected_bytes_up": self.bytes_up,
        }

    def text(self) -> str:
        """Return the numbers for people."""
        parts = ", ".join(f"{name} {count:,}" for name, count in self.groups.items()) or "none"
        return (
            f"parameters: {parts}\n"
            f"  trained on a client {self.trainable:,}; ever uploaded {self.uploaded:,}; private {self.personal:,}\n"
            f"  bytes to expect, whole run, all clients: up {format_bytes(self.bytes_up)}, "
            f"down {format_bytes(self.bytes_down)}"
        )


def count_budget(strategy: Strategy, stages: int) -> Budget:
    """Count what ``strategy`` trains and sends.

    Bytes are those of the messages of the first stage's rounds as they would be made now, times the
    number of stages: what is sent can change with the run (a client that already holds the newest
    adapters is not sent them again), so the measured number may be lower.
    """
    federation = strategy.scenario.federation
    counts = strategy.model.count()
    plans = [plan for r in range(federation.rounds) if (plan := strategy.plan(0, r)) is not None]
    trained = {group for plan in plans for group in plan.train}
    uploaded = {group for plan in plans for group in plan.upload}
    personal = {group for plan in plans for group in plan.personal}
    down, up = _round_bytes(strategy, plans) if plans else (0, 0)
    factor = stages * federation.participation
    return Budget(
        groups={group: counts[group] for group in GROUPS if counts[group]},
        trainable=sum(counts[group] for group in trained),
        uploaded=sum(counts[group] for group in uploaded),
        personal=sum(counts[group] for group in personal),
        bytes_down=round(down * factor),
        bytes_up=round(up * factor),
    )


def _round_bytes(strategy: Strategy, plans: list[LocalPlan]) -> tuple[int, int]:
    """Return bytes (down, up) of all rounds of one stage with every client taking part."""
    state = strategy.begin_stage(strategy.initial_state(strategy.experiment.seed), 0)
    shapes = dict(strategy.model.named_parameters())
    down = up = 0
    for number, plan in enumerate(plans):
        requests = strategy.configure(state, [0], 0, number)
        for request in requests.values():
            update = {n: p.numpy() for n, p in shapes.items() if strategy.model.group_of(n) in plan.upload}
            width = strategy.experiment.backbone.embed_dim
            digest = {"digest": np.zeros(width, np.float32)} if plan.digest else {}
            usage = dict.fromkeys(request.contexts, 0.123456789) if plan.usage else {}
            reply = TrainReply(0, 0, number, 100, 0.123456789, 0.5, 10, 0.1, usage, update, digest)
            down += serialised_bytes(encode(request))
            up += serialised_bytes(encode(reply))
    # A method that gives all work to one client (centralised, joint) does not multiply.
    everybody = len(strategy.configure(state, range(strategy.scenario.federation.clients), 0, 0))
    return down * everybody, up * everybody
