"""A small real federation for tests of engines and round loop: linear regression in numpy.

Each client fits a shared weight vector and a private offset (its personal state, kept in Flower's
``Context.state``) to its own examples. Everything is exact enough to compare bytes, quick enough to
kill and resume often, and needs no torch.

``trouble`` in the run configuration makes clients misbehave: JSON ``{"client": "kind"}`` or
``{"client": "kind@stage.round"}``.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from edgeduet_server.checkpoint import CheckpointStore, PersonalSnapshot
from edgeduet_server.recorder import JsonlRecorder
from edgeduet_server.reply_checks import ExpectedReply
from edgeduet_server.round_loop import run_training
from edgeduet_shared.config import Scenario
from edgeduet_shared.messages import (
    EvaluateReply,
    EvaluateRequest,
    HelloReply,
    TrainReply,
    TrainRequest,
    decode,
    encode,
)
from edgeduet_shared.plan import LocalPlan, Parts
from edgeduet_shared.seeds import derive_seed

SIZE = 6
STAGES = 2
PLAN = LocalPlan(parts=Parts())


def examples(seed: int, client: int, stage: int, count: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (count, SIZE) and targets (count,) of one client and stage."""
    generator = np.random.default_rng(derive_seed(seed, "data", client, stage))
    x = generator.normal(size=(count, SIZE)).astype(np.float32)
    truth = np.random.default_rng(derive_seed(seed, "truth", stage)).normal(size=SIZE).astype(np.float32)
    return x, (x @ truth + client).astype(np.float32)


@dataclass(frozen=True)
class LinearState:
    """Server state of the test federation."""

    shared: dict[str, np.ndarray] = field(default_factory=lambda: {"w": np.zeros(SIZE, np.float32)})
    extra: dict[str, np.ndarray] = field(default_factory=lambda: {"seen": np.zeros((), np.int64)})
    notes: dict[str, Any] = field(default_factory=lambda: {"stages": []})


class LinearStrategy:
    """Weighted mean of the clients' weights."""

    def begin_stage(self, state: LinearState, stage: int) -> LinearState:
        return replace(state, notes={"stages": [*state.notes["stages"], f"begin {stage}"]})

    def configure(self, state: LinearState, clients: Sequence[int], stage: int, round: int) -> dict[int, TrainRequest]:
        return {client: TrainRequest(stage, round, PLAN, shared=state.shared) for client in clients}

    def expect(self, state: LinearState, request: TrainRequest) -> ExpectedReply:
        return ExpectedReply(update={name: value.shape for name, value in state.shared.items()})

    def aggregate(self, state: LinearState, replies: Sequence[TrainReply], stage: int, round: int) -> LinearState:
        total = sum(reply.examples for reply in replies)
        mean = np.zeros(SIZE, np.float32)
        for reply in replies:
            mean += reply.update["w"] * np.float32(reply.examples / total)
        return replace(state, shared={"w": mean}, extra={"seen": state.extra["seen"] + total})

    def end_stage(self, state: LinearState, stage: int) -> LinearState:
        return replace(state, notes={"stages": [*state.notes["stages"], f"end {stage}"]})

    def configure_evaluate(self, state: LinearState, clients: Sequence[int], stage: int) -> dict[int, EvaluateRequest]:
        return {client: EvaluateRequest(stage, PLAN, shared=state.shared) for client in clients}


client_app = ClientApp()


@client_app.query("hello")
def hello(message: Message, context: Context) -> Message:
    return Message(encode(HelloReply(int(context.node_config["partition-id"]))), reply_to=message)


def _trouble(context: Context, stage: int, round: int) -> str:
    kinds = json.loads(str(context.run_config.get("trouble", "{}")))
    kind, _, when = kinds.get(str(context.node_config["partition-id"]), "").partition("@")
    return kind if not when or when == f"{stage}.{round}" else ""


@client_app.train()
def train(message: Message, context: Context) -> Message:
    request = decode(message.content, TrainRequest)
    client, seed = int(context.node_config["partition-id"]), int(context.run_config.get("seed", 0))
    trouble = _trouble(context, request.stage, request.round)
    if trouble == "raises":
        raise ValueError(f"client {client} has a problem")
    if trouble == "silent":
        return None  # type: ignore[return-value]
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "interrupt":
        raise KeyboardInterrupt
    if trouble == "slow":
        time.sleep(0.2)
    w = request.shared["w"].copy()
    personal = context.state.array_records.get("personal")
    offset = personal["offset"].numpy() if personal is not None else np.zeros((), np.float32)
    x, y = examples(seed, client, request.stage)
    for _ in range(3):
        error = x @ w + offset - y
        w -= np.float32(0.1 / len(y)) * (x.T @ error)
        offset = offset - np.float32(0.1) * error.mean(dtype=np.float32)
    context.state["personal"] = ArrayRecord({"offset": _array(offset)})
    reply = TrainReply(
        client=client,
        stage=request.stage,
        round=request.round,
        examples=0 if trouble == "empty" else len(y),
        loss=float((error**2).mean()),
        accuracy=float((abs(error) < 1).mean()),
        steps=3,
        seconds=0.001,
        update={"w": {"nan": w * np.nan, "shape": w[:2]}.get(trouble, w)},
    )
    if trouble == "name":
        reply = replace(reply, update={**reply.update, "other": w})
    if trouble == "no-name":
        reply = replace(reply, update={})
    record = encode(reply)
    if trouble == "version":
        record["meta"] = ConfigRecord({**record.config_records["meta"], "schema": 999})
    return Message(record, reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    request = decode(message.content, EvaluateRequest)
    client, seed = int(context.node_config["partition-id"]), int(context.run_config.get("seed", 0))
    if _trouble(context, request.stage, -1) == "silent":
        return None  # type: ignore[return-value]
    right = []
    for stage in range(request.stage + 1):
        x, y = examples(seed, client, stage)
        right.append(int((abs(x @ request.shared["w"] + client - y) < 1).sum()))
    none = (-1,) * len(right)
    reply = EvaluateReply(
        client, request.stage, tuple(right), tuple(right), (12,) * len(right), none, (0,) * len(right), seconds=0.001
    )
    return Message(encode(reply), reply_to=message)


def _array(value: Any) -> Any:
    from flwr.app import Array

    return Array(np.asarray(value, np.float32))


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    folder = Path(str(config["run-dir"]))
    scenario = Scenario.model_validate(
        {"name": "linear", "federation": json.loads(str(config.get("federation", "{}")))}
    )
    seed = int(config.get("seed", 0))
    run_training(
        grid,
        LinearStrategy(),
        scenario,
        start=LinearState(),
        stages=STAGES,
        recorder=JsonlRecorder(folder / "metrics.jsonl"),
        checkpoints=CheckpointStore(
            folder / "checkpoints",
            {"seed": seed, "scenario": scenario.digest()},
            every=int(config.get("checkpoint-every", 1)),
            personal=grid if isinstance(grid, PersonalSnapshot) else None,
        ),
        seed=seed,
        resume=bool(config.get("resume", False)),
        evaluate_global=lambda state, stage, replies: {"norm": float(np.linalg.norm(state.shared["w"]))},
    )
