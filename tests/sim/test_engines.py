"""Engines carry the same messages and give the same numbers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

import linear_federation as linear
from edgeduet_server.checkpoint import Arrays, CheckpointStore
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import FederationError
from edgeduet_shared.messages import TrainRequest, encode
from edgeduet_sim.engines.in_process import Clients, InProcessGrid, run_in_process


def linear_run(folder: Path, clients: int = 5, **options: Any) -> bytes:
    """Run the linear federation in process; return the final weights as bytes."""
    config = {"run-dir": str(folder), "seed": 3, "federation": json.dumps({"clients": clients, "rounds": 2})}
    workers = options.pop("workers", 0)
    start_method = options.pop("start_method", "fork")
    app = options.pop("app", linear.client_app)
    with InProcessGrid(Clients(app, clients, config, **options), workers=workers, start_method=start_method) as grid:
        run_in_process(linear.server_app, grid, config)
    return final_weights(folder, clients)


def final_weights(folder: Path, clients: int) -> bytes:
    scenario = Scenario.model_validate({"name": "linear", "federation": {"clients": clients, "rounds": 2}})
    store = CheckpointStore(folder / "checkpoints", {"seed": 3, "scenario": scenario.digest()})
    found = store.load(linear.LinearState())
    assert found is not None
    return found[0].shared["w"].tobytes()


def events(folder: Path) -> list[str]:
    lines = list(read_events(folder / "metrics.jsonl"))
    for event in lines:
        event.pop("timing", None)
    return [json.dumps(event) for event in lines]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_worker_processes_change_nothing(tmp_path: Path, workers: int) -> None:
    assert linear_run(tmp_path / "none") == linear_run(tmp_path / "some", workers=workers)
    assert events(tmp_path / "none") == events(tmp_path / "some")


def test_spawned_workers_load_the_app_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(linear.__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    alone = linear_run(tmp_path / "none")
    assert alone == linear_run(tmp_path / "spawn", workers=2, start_method="spawn", app="linear_federation:client_app")


def test_a_worker_that_is_killed_ends_the_run_with_a_clear_line(tmp_path: Path) -> None:
    config = {
        "run-dir": str(tmp_path),
        "seed": 3,
        "federation": json.dumps({"clients": 4, "rounds": 2}),
        "trouble": json.dumps({"3": "kill@0.1"}),
    }
    with (
        InProcessGrid(Clients(linear.client_app, 4, config), workers=2) as grid,
        pytest.raises(FederationError, match=rf"edgeduet-worker-1 .* died with exit code -{signal.SIGKILL}") as caught,
    ):
        run_in_process(linear.server_app, grid, config)
    assert "--resume" in str(caught.value)


def test_a_run_with_workers_resumes_with_another_number_of_them(tmp_path: Path) -> None:
    whole = linear_run(tmp_path / "whole")
    config = {
        "run-dir": str(tmp_path / "broken"),
        "seed": 3,
        "federation": json.dumps({"clients": 5, "rounds": 2}),
    }
    killed = {**config, "trouble": json.dumps({"3": "kill@1.0"})}
    with InProcessGrid(Clients(linear.client_app, 5, killed), workers=2) as grid, pytest.raises(FederationError):
        run_in_process(linear.server_app, grid, killed)
    again = {**config, "resume": True}
    with InProcessGrid(Clients(linear.client_app, 5, again), workers=3) as grid:
        run_in_process(linear.server_app, grid, again)
    assert final_weights(tmp_path / "broken", 5) == whole
    assert events(tmp_path / "broken") == events(tmp_path / "whole")


def _one_by_one(messages: list[Message], contexts: list[Context]) -> list[Message | None]:
    return [linear.client_app(message, context) for message, context in zip(messages, contexts, strict=True)]


def test_blocks_hand_several_messages_to_the_handler_in_order(tmp_path: Path) -> None:
    sizes: list[list[int]] = []

    def handle(messages: list[Message], contexts: list[Context]) -> list[Message | None]:
        sizes.append([int(context.node_config["partition-id"]) for context in contexts])
        return _one_by_one(messages, contexts)

    assert linear_run(tmp_path / "a") == linear_run(tmp_path / "b", handle_block=handle, block_size=2)
    # The last block of an odd number of clients holds one, which the ClientApp itself handles.
    assert sizes == [[0, 1], [2, 3]] * 2 * linear.STAGES


def test_a_block_that_fails_is_done_one_at_a_time_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(messages: list[Message], contexts: list[Context]) -> list[Message | None]:
        raise RuntimeError("no block today")

    assert linear_run(tmp_path / "a") == linear_run(tmp_path / "b", handle_block=handle, block_size=3)
    text = caplog.records[0].getMessage()
    assert "clients [0, 1, 2] as one block failed" in text
    assert "no block today" in text


def _messages(grid: InProcessGrid, count: int, kind: str = "train") -> list[Message]:
    request = encode(TrainRequest(0, 0, linear.PLAN, shared={"w": np.zeros(linear.SIZE, np.float32)}))
    return [Message(request, node, kind, ttl=10.0) for node in list(grid.get_node_ids())[:count]]


def test_clients_cannot_change_each_others_messages() -> None:
    app = ClientApp()
    seen = []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append(sorted(message.content))
        message.content.array_records["arrays.shared"].clear()
        message.content["extra"] = ArrayRecord()
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(Clients(app, 3, {}))
    messages = _messages(grid, 3)
    assert len(list(grid.send_and_receive(messages))) == 3
    assert seen == [sorted(messages[0].content)] * 3
    assert list(messages[0].content.array_records["arrays.shared"]) == ["w"]


def test_a_client_that_raises_keeps_the_context_it_had() -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "personal" in context.state:
            context.state["personal"] = ArrayRecord()
            context.state["half-written"] = ArrayRecord()
            raise ValueError("no")
        context.state["personal"] = ArrayRecord([np.ones(2)])
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(Clients(app, 1, {}))
    assert next(iter(grid.send_and_receive(_messages(grid, 1)))).has_content()
    before = grid.snapshot([0])
    failed = next(iter(grid.send_and_receive(_messages(grid, 1))))
    assert failed.error.code == 2
    assert "ValueError" in failed.error.reason
    assert failed.metadata.src_node_id == 1000
    assert grid.snapshot([0])[0]["context"].tobytes() == before[0]["context"].tobytes()


def test_replies_name_the_message_they_answer_and_only_asked_ones_are_given() -> None:
    config = {"seed": 0}
    grid = InProcessGrid(Clients(linear.client_app, 3, config))
    ids = list(grid.push_messages(_messages(grid, 3)))
    assert [m.metadata.reply_to_message_id for m in grid.pull_messages([ids[1]])] == [ids[1]]
    assert [m.metadata.reply_to_message_id for m in grid.pull_messages([ids[2], ids[0]])] == [ids[0], ids[2]]
    assert list(grid.pull_messages(ids)) == []


class Store:
    """A personal store as a ClientApp keeps it: outside of Flower's context."""

    def __init__(self) -> None:
        self.states: dict[int, Arrays] = {}

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        return {client: self.states[client] for client in clients if client in self.states}

    def restore(self, states: Mapping[int, Arrays]) -> None:
        self.states = dict(states)


@pytest.mark.parametrize("workers", [0, 2])
def test_snapshot_and_restore_cover_store_and_context(workers: int) -> None:
    def make() -> InProcessGrid:
        store = Store()
        app = ClientApp()

        @app.train()
        def train(message: Message, context: Context) -> Message:
            client = int(context.node_config["partition-id"])
            count = np.asarray(store.states.get(client, {"n": np.zeros(())})["n"] + 1)
            store.states[client] = {"n": count}
            context.state["n"] = ArrayRecord([np.asarray(count * 10)])
            return Message(RecordDict({"n": ArrayRecord([count])}), reply_to=message)

        return InProcessGrid(Clients(app, 3, {}, personal=lambda: store), workers=workers)

    with make() as grid, make() as other:
        for count in (3, 1):
            list(grid.send_and_receive(_messages(grid, count)))
        saved = grid.snapshot([0, 1, 2])
        assert {client: float(arrays["app/n"]) for client, arrays in saved.items()} == {0: 2.0, 1: 1.0, 2: 1.0}
        other.restore(saved)
        replies = list(other.send_and_receive(_messages(other, 3)))
        counts = sorted(float(reply.content.array_records["n"].to_numpy_ndarrays()[0]) for reply in replies)
        assert counts == [2.0, 2.0, 3.0]
        other.restore({})
        assert other.snapshot([0, 1, 2]) == {}


def test_memory_does_not_grow_with_clients_by_more_than_their_own_state(tmp_path: Path) -> None:
    import tracemalloc

    size = 50_000  # 200 kB per copy of the model
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"w": ArrayRecord([np.ones(size, np.float32)])}), reply_to=message)

    wire: dict[int, Any] = {}
    model = {"w": np.zeros(size, np.float32)}
    grid = InProcessGrid(Clients(app, 300, {}))
    tracemalloc.start()
    nodes = list(grid.get_node_ids())
    messages = [Message(encode(TrainRequest(0, 0, linear.PLAN, shared=model), wire), n, "train") for n in nodes]
    pending = list(grid.push_messages(messages))
    for _ in range(len(pending)):
        list(grid.pull_messages(pending))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One copy of the model and one portion of replies, not 300 of each (60 MB).
    assert peak < 12e6
