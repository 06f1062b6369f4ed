"""The round loop over real Flower messages, clients that misbehave included."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from hypothesis import given
from hypothesis import strategies as st

import linear_federation as linear
from edgeduet_server.checkpoint import CheckpointStore
from edgeduet_server.recorder import JsonlRecorder, read_events
from edgeduet_server.reply_checks import ExpectedReply, rejection
from edgeduet_server.round_loop import run_training
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import FederationError, RunStopped
from edgeduet_shared.messages import HelloReply, TrainReply, TrainRequest, encode
from edgeduet_sim.engines.in_process import Clients, InProcessGrid, run_in_process


def run(
    folder: Path, *, trouble: dict[str, str] | None = None, seed: int = 3, grid: type = InProcessGrid, **federation: Any
) -> list[dict[str, Any]]:
    """Run the linear federation to its end; return its events."""
    federation = {"clients": 4, "rounds": 3, **federation}
    config = {
        "run-dir": str(folder),
        "seed": seed,
        "federation": json.dumps(federation),
        "trouble": json.dumps(trouble or {}),
    }
    run_in_process(linear.server_app, grid(Clients(linear.client_app, federation["clients"], config)), config)
    return list(read_events(folder / "metrics.jsonl"))


def rounds(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round"]


def test_every_client_trains_in_every_round_and_is_evaluated_after_every_stage(tmp_path: Path) -> None:
    events = run(tmp_path)
    assert [event["event"] for event in events] == [
        "run-start",
        *["stage-start", "round", "round", "round", "evaluate"] * linear.STAGES,
        "run-end",
    ]
    assert all(event["asked"] == [0, 1, 2, 3] and not event["skipped"] for event in rounds(events))
    assert [len(event["clients"][0]["shared"]) for event in events if event["event"] == "evaluate"] == [1, 2]
    assert events[-1]["bytes_up"] == sum(event["bytes_up"] for event in rounds(events)) > 0


def test_the_result_is_the_mean_computed_by_hand(tmp_path: Path) -> None:
    run(tmp_path, clients=2, rounds=1)
    strategy, state = linear.LinearStrategy(), linear.LinearState()
    offsets = np.zeros(2, np.float32)
    for stage in range(linear.STAGES):
        weights = []
        for client in range(2):
            w = state.shared["w"].copy()
            x, y = linear.examples(3, client, stage)
            for _ in range(3):
                error = x @ w + offsets[client] - y
                w -= np.float32(0.1 / len(y)) * (x.T @ error)
                offsets[client] -= np.float32(0.1) * error.mean(dtype=np.float32)
            weights.append(TrainReply(client, stage, 0, 12, 0.0, 0.0, 3, 0.0, update={"w": w}))
        state = strategy.aggregate(state, weights, stage, 0)
    found = CheckpointStore(tmp_path / "checkpoints", {"seed": 3, "scenario": _digest(clients=2, rounds=1)}).load(
        linear.LinearState()
    )
    assert found is not None
    assert found[0].shared["w"].tobytes() == state.shared["w"].tobytes()


def _digest(**federation: Any) -> str:
    return Scenario.model_validate({"name": "linear", "federation": federation}).digest()


def test_participation_samples_by_seed_stage_and_round_only(tmp_path: Path) -> None:
    first, again, other = (
        [event["asked"] for event in rounds(run(tmp_path / name, clients=10, participation=0.3, seed=seed))]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again != other
    assert {len(asked) for asked in first} == {3}
    assert len({tuple(asked) for asked in first}) > 1


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raises", "client-error"),
        ("nan", "non-finite"),
        ("empty", "zero-examples"),
        ("shape", "wrong-shape"),
        ("name", "unknown-name"),
        ("no-name", "missing-name"),
        ("version", "other-version"),
        ("silent", "no-answer"),
    ],
)
def test_an_unusable_reply_is_counted_by_reason_and_the_others_are_aggregated(
    tmp_path: Path, kind: str, reason: str
) -> None:
    events = run(tmp_path, trouble={"2": f"{kind}@0.1"})
    assert [event["rejected"] for event in rounds(events)][:3] == [{}, {reason: 1}, {}]
    assert [client["client"] for client in rounds(events)[1]["clients"]] == [0, 1, 3]
    assert not any(event["skipped"] for event in rounds(events))
    assert events[-1]["rejected"] == {reason: 1}


def test_the_first_traceback_is_shown_with_client_stage_and_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = run(tmp_path, trouble={"2": "raises@0.1"})
    line = next(record.getMessage() for record in caplog.records if "client 2" in record.getMessage())
    assert "stage 1, round 2" in line
    assert "ValueError: client 2 has a problem" in line
    assert "Traceback" in line
    assert "linear_federation.py" in rounds(events)[1]["failures"][0]["text"]


def test_another_schema_version_is_refused_with_a_clear_line_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    events = run(tmp_path, trouble={"1": "version"})
    lines = [record.getMessage() for record in caplog.records if "client 1 is refused" in record.getMessage()]
    assert len(lines) == 1
    assert "schema version 999" in lines[0]
    assert "install the same edgeduet version" in lines[0]
    assert events[-1]["rejected"] == {"other-version": 6}
    assert events[-1]["skipped_rounds"] == 0


def test_a_round_without_quorum_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    spoiled = {str(client): "nan@1.2" for client in range(3)}
    with_skip = run(tmp_path / "a", trouble=spoiled)
    assert [event["skipped"] for event in rounds(with_skip)] == [False] * 5 + [True]
    shorter = run(tmp_path / "b")
    norm = [event["common"]["norm"] for event in with_skip if event["event"] == "evaluate"]
    full = [event["common"]["norm"] for event in shorter if event["event"] == "evaluate"]
    assert norm[0] == full[0]
    assert norm[1] != full[1]
    assert with_skip[-1]["skipped_rounds"] == 1
    # The state is that of the round before, not a mean of the one usable reply.
    seen = _final(tmp_path / "a", clients=4, rounds=3).extra["seen"]
    assert int(seen) == 5 * 4 * 12


def _final(folder: Path, **federation: Any) -> linear.LinearState:
    found = CheckpointStore(folder / "checkpoints", {"seed": 3, "scenario": _digest(**federation)}).load(
        linear.LinearState()
    )
    assert found is not None
    return found[0]


def test_clients_without_examples_count_for_the_quorum_but_not_for_the_mean(tmp_path: Path) -> None:
    events = run(tmp_path, trouble={str(client): "empty" for client in range(3)}, quorum=1.0)
    assert not any(event["skipped"] for event in rounds(events))
    assert [client["client"] for client in rounds(events)[0]["clients"]] == [3]


def test_a_round_in_which_nobody_has_examples_is_skipped_and_not_bad(tmp_path: Path) -> None:
    events = run(tmp_path, trouble={str(client): "empty@0.1" for client in range(4)}, max_bad_rounds=1)
    assert [event["skipped"] for event in rounds(events)][:3] == [False, True, False]


def test_the_run_stops_after_max_bad_rounds_with_one_line_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="stopped after 2 round") as caught:
        run(tmp_path, trouble={str(client): "raises" for client in range(3)}, max_bad_rounds=2)
    message = str(caught.value)
    assert "\n" not in message
    assert "client 0: client-error: ValueError: client 0 has a problem" in message
    assert "--resume" in message
    assert [event["skipped"] for event in rounds(list(read_events(tmp_path / "metrics.jsonl")))] == [True, True]


def test_one_client_is_enough(tmp_path: Path) -> None:
    assert len(rounds(run(tmp_path, clients=1))) == 6


def test_a_client_that_never_answers_costs_no_wall_time_and_is_left_alone_while_it_owes(tmp_path: Path) -> None:
    events = run(tmp_path, trouble={"0": "silent@0.0"}, round_timeout=100000)
    assert rounds(events)[0]["missing"] == [0]
    assert all(0 not in event["asked"] for event in rounds(events)[1:])
    assert events[-1]["skipped_rounds"] == 0


def test_a_client_is_asked_again_when_the_time_to_live_of_its_old_message_is_over(tmp_path: Path) -> None:
    # Client 1 lets each of its rounds run into the timeout, so that time passes in the simulation.
    silent = {"0": "silent@0.0", "1": "silent@0.0", "2": "silent@0.0"}
    events = run(tmp_path, trouble=silent, rounds=4, quorum=0.75, node_wait=100000)
    asked = [event["asked"] for event in rounds(events)]
    assert asked[0] == [0, 1, 2, 3]
    assert asked[1] == [0, 1, 2, 3]  # waited for enough free clients: the debts ran out
    assert rounds(events)[0]["skipped"]
    assert not rounds(events)[1]["skipped"]


class Tardy(InProcessGrid):
    """Client 0's first training reply is only there when asked for a later time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: list[Message] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        replies = list(super().pull_messages(wanted))
        if self.held and self.clock.now() > 600:
            late, self.held = self.held, []
            return [*replies, *(message for message in late if message.metadata.reply_to_message_id in wanted)]
        for message in replies:
            if message.metadata.group_id == "0.0" and message.metadata.src_node_id == 1000:
                self.held.append(message)
        return [message for message in replies if message not in self.held]


def test_a_late_reply_is_dropped_counted_and_frees_the_client(tmp_path: Path) -> None:
    events = run(tmp_path, grid=Tardy, quorum=1.0)
    assert rounds(events)[0]["missing"] == [0]
    assert rounds(events)[1]["asked"] == [0, 1, 2, 3]
    assert [event["skipped"] for event in rounds(events)][:2] == [True, False]
    assert events[-1]["late_replies"] == 1


class Unsorted(InProcessGrid):
    """Hands out replies in reverse."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return list(super().pull_messages(message_ids))[::-1]


def test_the_order_of_replies_changes_nothing(tmp_path: Path) -> None:
    run(tmp_path / "a", clients=9)
    run(tmp_path / "b", clients=9, grid=Unsorted)
    one, other = (_final(tmp_path / name, clients=9, rounds=3).shared["w"] for name in "ab")
    assert one.tobytes() == other.tobytes()


class FewNodes(InProcessGrid):
    """Only the first node is online at first; the others come 5 s later, one of them never."""

    def get_node_ids(self) -> Iterable[int]:
        nodes = list(super().get_node_ids())
        return nodes[:1] if self.clock.now() < 5 else nodes[:-1]


def test_waiting_for_nodes_has_a_deadline_and_offline_clients_are_passed_over(tmp_path: Path) -> None:
    events = run(tmp_path, grid=FewNodes, node_wait=20)
    assert all(event["asked"] == [0, 1, 2] for event in rounds(events))
    assert [event["absent"] for event in events if event["event"] == "evaluate"] == [[3], [3]]


class NoNodes(InProcessGrid):
    """Nobody is ever online."""

    def get_node_ids(self) -> Iterable[int]:
        return []


def test_without_any_node_the_run_stops_instead_of_waiting_for_ever(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="0 clients were asked"):
        run(tmp_path, grid=NoNodes)


def _with_hello(partition: Any) -> ClientApp:
    """The linear ClientApp with another answer to the greeting."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        record = partition(int(context.node_config["partition-id"]))
        return Message(record, reply_to=message)

    app.train()(linear.train)
    app.evaluate()(linear.evaluate)
    return app


def _old_version(client: int) -> Any:
    record = encode(HelloReply(client))
    if client == 1:
        record["meta"] = ConfigRecord({**record.config_records["meta"], "schema": 0})
    return record


def _out_of_range(client: int) -> Any:
    return encode(HelloReply(77 if client == 1 else client))


def _twice(client: int) -> Any:
    return encode(HelloReply(0 if client == 1 else client))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (_old_version, "schema version 0"),
        (_out_of_range, "says it is client 77"),
        (_twice, "two online nodes say they are client 0"),
    ],
)
def test_a_node_that_greets_wrongly_takes_no_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Any, says: str
) -> None:
    federation = {"clients": 3, "rounds": 1}
    config = {"run-dir": str(tmp_path), "seed": 3, "federation": json.dumps(federation)}
    run_in_process(linear.server_app, InProcessGrid(Clients(_with_hello(answer), 3, config)), config)
    events = list(read_events(tmp_path / "metrics.jsonl"))
    assert all(event["asked"] == [0, 2] for event in rounds(events))
    assert sum(says in record.getMessage() for record in caplog.records) == 1


class BrokenEngine(InProcessGrid):
    """What Flower's engine reports when a Ray actor has died: code 0, for client 2, from stage 0 round 1 on."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        from flwr.app import Error

        for message in super().pull_messages(message_ids):
            if message.metadata.src_node_id == 1002 and message.metadata.group_id in ("0.1", "0.2"):
                dead = Message.__new__(Message)
                dead.__dict__.update(message.__dict__)
                dead.__dict__["_content"] = None
                dead.__dict__["_error"] = Error(0, "<class 'ray.exceptions.ActorDiedError'>:<'The actor died.'>")
                yield dead
            else:
                yield message


def test_the_same_engine_fault_in_two_rounds_running_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="ActorDiedError in two rounds running") as caught:
        run(tmp_path, grid=BrokenEngine)
    assert "round 3" in str(caught.value)
    assert "client 2" in str(caught.value)


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="up to stage 1, round 2 of 3: the same command with --resume"):
        run(tmp_path, trouble={"1": "interrupt@0.2"})


def test_a_stop_request_ends_the_run_between_rounds(tmp_path: Path) -> None:
    stop = threading.Event()

    class Stopper(linear.LinearStrategy):
        def aggregate(self, *args: Any) -> linear.LinearState:
            stop.set()
            return super().aggregate(*args)

    config = {"run-dir": str(tmp_path), "seed": 3}
    grid = InProcessGrid(Clients(linear.client_app, 2, config))
    scenario = Scenario.model_validate({"name": "linear", "federation": {"clients": 2, "rounds": 5}})
    with pytest.raises(RunStopped, match="up to stage 1, round 1 of 5"):
        run_training(
            grid,
            Stopper(),
            scenario,
            start=linear.LinearState(),
            stages=1,
            recorder=JsonlRecorder(tmp_path / "m.jsonl"),
            checkpoints=CheckpointStore(tmp_path / "c", {}, every=4),
            seed=0,
            stop=stop,
        )


def test_a_method_that_asks_nothing_of_clients_has_no_bad_rounds(tmp_path: Path) -> None:
    class ZeroShot(linear.LinearStrategy):
        def configure(self, *args: Any) -> dict[int, TrainRequest]:
            return {}

    config = {"run-dir": str(tmp_path), "seed": 3}
    grid = InProcessGrid(Clients(linear.client_app, 2, config))
    scenario = Scenario.model_validate({"name": "linear", "federation": {"clients": 2, "max_bad_rounds": 1}})
    state = run_training(
        grid,
        ZeroShot(),
        scenario,
        start=linear.LinearState(),
        stages=2,
        recorder=JsonlRecorder(tmp_path / "m.jsonl"),
        checkpoints=CheckpointStore(tmp_path / "c", {}),
        seed=0,
    )
    assert not state.shared["w"].any()
    assert not any(event["skipped"] for event in rounds(list(read_events(tmp_path / "m.jsonl"))))


def test_a_method_that_asks_one_of_the_clients_needs_one_answer(tmp_path: Path) -> None:
    class Pooled(linear.LinearStrategy):
        def configure(self, state: linear.LinearState, clients: Any, *where: int) -> dict[int, TrainRequest]:
            return super().configure(state, clients[:1], *where)

    config = {"run-dir": str(tmp_path), "seed": 3}
    grid = InProcessGrid(Clients(linear.client_app, 5, config))
    scenario = Scenario.model_validate({"name": "linear", "federation": {"clients": 5, "rounds": 2, "quorum": 1.0}})
    run_training(
        grid,
        Pooled(),
        scenario,
        start=linear.LinearState(),
        stages=1,
        recorder=JsonlRecorder(tmp_path / "m.jsonl"),
        checkpoints=CheckpointStore(tmp_path / "c", {}),
        seed=0,
    )
    events = rounds(list(read_events(tmp_path / "m.jsonl")))
    assert [(event["asked"], event["skipped"]) for event in events] == [([0], False)] * 2


REQUEST = TrainRequest(1, 2, linear.PLAN, contexts={"4": np.zeros((1, 2), np.float32)})


@given(
    client=st.integers(0, 3),
    stage=st.integers(0, 2),
    round=st.integers(0, 3),
    examples=st.integers(-1, 2),
    value=st.floats(width=32),
    shape=st.sampled_from([(2,), (3,), (1, 2)]),
    name=st.sampled_from(["w", "v"]),
    loss=st.floats(width=32),
    prompt=st.sampled_from(["4", "5"]),
)
def test_a_reply_is_used_exactly_when_everything_about_it_is_right(
    client: int,
    stage: int,
    round: int,
    examples: int,
    value: float,
    shape: tuple[int, ...],
    name: str,
    loss: float,
    prompt: str,
) -> None:
    reply = TrainReply(
        client,
        stage,
        round,
        examples,
        loss,
        0.5,
        1,
        0.0,
        usage={prompt: 0.5},
        update={name: np.full(shape, value, np.float32)},
        digest={"digest": np.full(4, value, np.float32)},
    )
    right = (
        (client, stage, round) == (0, 1, 2)
        and examples > 0
        and bool(np.isfinite([value, loss]).all())
        and shape == (2,)
        and name == "w"
        and prompt == "4"
    )
    found = rejection(reply, 0, REQUEST, ExpectedReply({"w": (2,)}, digest=(4,)))
    assert (found is None) == right
