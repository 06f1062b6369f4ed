"""Orders of an operator between rounds: what they do, and that a resumed run does the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from sqlalchemy import select

import linear_federation as linear
from edgeduet_server.app import serve
from edgeduet_server.checkpoint import CheckpointStore
from edgeduet_server.orders import SETTABLE, NoControl, Orders, changed_scenario
from edgeduet_server.recorder import JsonlRecorder, read_events
from edgeduet_server.registry.control import RegistryControl
from edgeduet_server.registry.desired import STOP, wish, wishes
from edgeduet_server.registry.listener import RegistryListener
from edgeduet_server.registry.models import Artefact, ClientSighting, Run
from edgeduet_server.registry.recorded_run import RecordedRun, recorded_run
from edgeduet_server.registry.runs import begin_run, end_run, find_run, interrupted_run
from edgeduet_server.registry.store import Registry
from edgeduet_server.round_loop import run_training
from edgeduet_shared.config import Scenario, known_keys
from edgeduet_shared.errors import ConfigError, FederationError, RunStopped
from edgeduet_shared.run_config import RunConfig
from edgeduet_sim.engines.in_process import Clients, InProcessGrid, edgeduet_clients, run_in_process

NOW = datetime(2026, 12, 1, tzinfo=UTC)
Wishes = Mapping[tuple[int, int], list[tuple[str, Any]]]


class Operator(RegistryControl):
    """The real control; the operator makes each wish just before the loop asks about that round, once."""

    def __init__(self, registry: Registry, run_id: int, plan: Wishes) -> None:
        super().__init__(registry, run_id)
        self.plan = {place: list(orders) for place, orders in plan.items()}
        self.questions: list[tuple[int, int]] = []

    def orders(self, stage: int, round: int) -> Orders:
        self.questions.append((stage, round))
        if made := self.plan.pop((stage, round), []):
            with self._registry.writing() as session:
                for key, value in made:
                    wish(session, self._run_id, key, value, by="test", now=NOW)
        return super().orders(stage, round)

    def wait(self) -> None:
        """Time enough for the operator to change his mind: the pause ends at the second question."""
        with self._registry.writing() as session:
            assert session.get_one(Run, self._run_id).state == "paused"
            wish(session, self._run_id, "paused", False, by="test", now=NOW)


class Linear:
    """The linear federation with a registry; run again, it goes on."""

    def __init__(self, folder: Path, url: str, **federation: Any) -> None:
        self.folder = folder
        self.scenario = Scenario.model_validate(
            {"name": "linear", "federation": {"clients": 4, "rounds": 3, **federation}}
        )
        self.registry = Registry.open(url)
        config = RunConfig(self.scenario, "fed-duet", run_dir=folder, run_name="linear")
        with self.registry.writing() as session:
            self.run_id = begin_run(session, config, "1", NOW).id
        self.grid: Any = InProcessGrid(Clients(linear.client_app, self.scenario.federation.clients, {"seed": 3}))
        self.scenarios: list[Scenario] = []
        self.last: Operator | None = None

    def go(self, plan: Wishes | None = None, *, resume: bool = False, every: int = 1) -> linear.LinearState:
        # A checkpoint brings the personal states back; a new process has none.
        self.grid.restore({})
        self.last = operator = Operator(self.registry, self.run_id, plan or {})
        app = ServerApp()
        result: list[linear.LinearState] = []

        def make_strategy(changed: Scenario) -> linear.LinearStrategy:
            self.scenarios.append(changed)
            return linear.LinearStrategy()

        @app.main()
        def main(grid: Grid, context: Context) -> None:
            recorder = JsonlRecorder(self.folder / "metrics.jsonl", [RegistryListener(self.registry, self.run_id)])
            checkpoints = CheckpointStore(self.folder / "checkpoints", {}, every=every, personal=self.grid)
            result.append(
                run_training(
                    grid,
                    linear.LinearStrategy(),
                    self.scenario,
                    start=linear.LinearState(),
                    stages=linear.STAGES,
                    recorder=recorder,
                    checkpoints=checkpoints,
                    seed=3,
                    resume=resume,
                    control=operator,
                    make_strategy=make_strategy,
                )
            )

        run_in_process(app, self.grid, {})
        return result[0]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Without what differs from run to run."""
        return [{k: v for k, v in e.items() if k != "timing"} for e in read_events(self.folder / "metrics.jsonl")]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "round"]


@pytest.fixture
def federation(tmp_path: Path) -> Linear:
    return Linear(tmp_path / "run", f"sqlite:///{tmp_path / 'registry.db'}")


def test_without_orders_a_run_is_the_same_with_and_without_a_registry(federation: Linear, tmp_path: Path) -> None:
    federation.go()
    config = {"run-dir": str(tmp_path / "plain"), "seed": 3, "federation": json.dumps({"clients": 4, "rounds": 3})}
    run_in_process(linear.server_app, InProcessGrid(Clients(linear.client_app, 4, config)), config)
    plain = [
        {k: v for k, v in event.items() if k not in ("timing", "common")}
        for event in read_events(tmp_path / "plain" / "metrics.jsonl")
    ]
    assert [{k: v for k, v in event.items() if k != "common"} for event in federation.events] == plain
    assert not any("orders" in event for event in federation.events)


def test_the_loop_asks_before_every_round_and_every_evaluation(federation: Linear) -> None:
    federation.go()
    assert federation.last is not None
    assert federation.last.questions == [(stage, round) for stage in range(2) for round in range(4)]


def test_an_excluded_client_is_not_asked_until_it_is_included_again(tmp_path: Path, registry_url: str) -> None:
    federation = Linear(tmp_path / "run", registry_url)
    federation.go({(0, 1): [("excluded/2", True)], (1, 1): [("excluded/2", False)]})
    assert [event["asked"] for event in federation.rounds] == [
        [0, 1, 2, 3],
        [0, 1, 3],
        [0, 1, 3],
        [0, 1, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    assert [event.get("orders") for event in federation.rounds][:2] == [None, {"excluded": [2]}]
    evaluations = [event for event in federation.events if event["event"] == "evaluate"]
    assert [[client["client"] for client in event["clients"]] for event in evaluations] == [[0, 1, 3], [0, 1, 2, 3]]
    assert [event["absent"] for event in evaluations] == [[], []]


def test_quorum_and_participation_count_the_clients_that_are_not_excluded(tmp_path: Path) -> None:
    two_of_four = Linear(tmp_path / "run", f"sqlite:///{tmp_path / 'registry.db'}", quorum=1.0)
    two_of_four.go({(0, 0): [("excluded/0", True), ("excluded/1", True)]})
    assert all(event["asked"] == [2, 3] and not event["skipped"] for event in two_of_four.rounds)


def test_with_everybody_excluded_the_run_stops_like_after_any_bad_rounds(tmp_path: Path) -> None:
    nobody = Linear(tmp_path / "run", f"sqlite:///{tmp_path / 'registry.db'}", max_bad_rounds=2, node_wait=0)
    with pytest.raises(FederationError, match="0 clients were asked"):
        nobody.go({(0, 0): [(f"excluded/{client}", True) for client in range(4)]})


def test_a_changed_setting_holds_from_the_next_round_until_it_is_taken_back(federation: Linear) -> None:
    federation.go(
        {
            (0, 1): [("set/federation.participation", 0.5), ("set/train.lr", 0.5)],
            (1, 0): [("set/federation.participation", None)],
            (1, 1): [("set/train.lr", None)],
        }
    )
    assert [len(event["asked"]) for event in federation.rounds] == [4, 2, 2, 4, 4, 4]
    assert [event.get("orders", {}).get("overrides") for event in federation.rounds] == [
        None,
        *[{"federation.participation": 0.5, "train.lr": 0.5}] * 2,
        {"train.lr": 0.5},
        None,
        None,
    ]
    assert [scenario.train.lr for scenario in federation.scenarios] == [0.5, 0.5]


def test_where_each_wish_was_applied_is_written_down(federation: Linear) -> None:
    federation.go({(0, 2): [("excluded/1", True)], (1, 0): [("set/train.lr", 0.1)]})
    with federation.registry.reading() as session:
        rows = wishes(session, federation.run_id)
    assert [(row.key, row.by, row.applied_stage, row.applied_round) for row in rows] == [
        ("excluded/1", "test", 0, 2),
        ("set/train.lr", "test", 1, 0),
    ]


def test_a_paused_run_waits_says_so_and_loses_nothing(federation: Linear, tmp_path: Path) -> None:
    state = federation.go({(0, 1): [("paused", True)], (0, 3): [("paused", True)], (1, 2): [("paused", True)]})
    other = Linear(tmp_path / "other", f"sqlite:///{tmp_path / 'other.db'}")
    assert other.go().shared["w"].tobytes() == state.shared["w"].tobytes()
    assert federation.events == other.events
    assert federation.last is not None
    assert federation.last.questions.count((0, 1)) == 2


ORDERS: Wishes = {
    (0, 1): [("excluded/2", True), ("set/federation.participation", 0.5)],
    (0, 3): [("excluded/3", True)],
    (1, 0): [("excluded/2", False)],
    (1, 2): [("set/federation.participation", None)],
}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("place", [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 3)])
def test_a_run_stopped_by_order_and_resumed_ends_as_if_it_had_not_been(
    tmp_path: Path, place: tuple[int, int], every: int
) -> None:
    whole = Linear(tmp_path / "whole", f"sqlite:///{tmp_path / 'whole.db'}")
    expected = whole.go(ORDERS, every=every)
    broken = Linear(tmp_path / "broken", f"sqlite:///{tmp_path / 'broken.db'}")
    plan = {where: list(orders) for where, orders in ORDERS.items()}
    plan[place] = [*plan.get(place, []), ("stop", True)]
    with pytest.raises(RunStopped):
        broken.go(plan, every=every)
    rest = {where: orders for where, orders in ORDERS.items() if where > place}
    rest[place] = [("stop", False)]
    if every == 2 or place == (0, 0):
        # Whatever checkpoint is taken up, the first question undoes the order to stop.
        with broken.registry.writing() as session:
            wish(session, broken.run_id, "stop", False, by="test", now=NOW)
    state = broken.go(rest, resume=True, every=every)
    assert broken.events == whole.events
    assert state.shared["w"].tobytes() == expected.shared["w"].tobytes()
    assert state.notes == expected.notes


@pytest.mark.parametrize("events", range(1, 10))
def test_a_run_killed_anywhere_applies_its_orders_at_the_same_rounds_again(tmp_path: Path, events: int) -> None:
    whole = Linear(tmp_path / "whole", f"sqlite:///{tmp_path / 'whole.db'}")
    expected = whole.go(ORDERS, every=2)
    broken = Linear(tmp_path / "broken", f"sqlite:///{tmp_path / 'broken.db'}")

    class Killed(Exception):
        pass

    seen = []

    def kill(event: Any) -> None:
        seen.append(event)
        if len(seen) == events:
            raise Killed

    original = RegistryListener.__call__

    def call(self: RegistryListener, event: Any) -> None:
        original(self, event)
        kill(event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegistryListener, "__call__", call)
        with pytest.raises(Killed):
            broken.go(ORDERS, every=2)
    assert broken.last is not None
    state = broken.go(broken.last.plan, resume=True, every=2)
    assert broken.events == whole.events
    assert state.shared["w"].tobytes() == expected.shared["w"].tobytes()


def test_who_was_seen_is_written_down(federation: Linear) -> None:
    federation.go()
    with federation.registry.reading() as session:
        rows = session.scalars(select(ClientSighting).order_by(ClientSighting.client)).all()
    assert [row.client for row in rows] == [0, 1, 2, 3]
    assert all(row.node_id.isdigit() and row.last_seen >= row.first_seen for row in rows)


def test_an_outage_of_the_database_leaves_the_last_orders_in_force(
    federation: Linear, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeduet_server.registry import control as control_module
    from edgeduet_server.registry.errors import RegistryError

    control = RegistryControl(federation.registry, federation.run_id)
    with federation.registry.writing() as session:
        wish(session, federation.run_id, "excluded/1", True, by="test", now=NOW)
    assert control.orders(0, 0).excluded == {1}

    def away(*args: Any) -> None:
        raise RegistryError("gone")

    monkeypatch.setattr(control_module, "wishes", away)
    assert control.orders(0, 1).excluded == {1}
    assert "stay in force" in caplog.text
    with pytest.raises(RegistryError):
        RegistryControl(federation.registry, federation.run_id).orders(0, 0)


# -- settings -------------------------------------------------------------------------------------------


def test_every_settable_key_is_a_setting_of_the_scenario() -> None:
    assert set(SETTABLE) <= set(known_keys(Scenario))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("federation.clients", 9, "is fixed when a run starts.*train.lr"),
        ("privacy.digest_noise", 0.0, "is fixed when a run starts"),
        ("train.learning_rate", 1, "is no setting"),
        ("train.lr", -1, "train.lr: Input should be greater than 0"),
        ("train.lr", "fast", "train.lr"),
        ("federation.quorum", 1.5, "federation.quorum"),
        ("train.batch_size", 0, "train.batch_size"),
    ],
)
def test_what_cannot_be_set_is_refused_with_what_can(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        changed_scenario(Scenario(name="x"), {key: value})
    assert "\n" not in str(caught.value)


def test_no_control_never_orders_anything() -> None:
    assert NoControl().orders(0, 0) == Orders()
    assert Orders().as_record() == {}


# -- edgeduet's own server ------------------------------------------------------------------------------


def tiny() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "tiny",
            "data": {"max_per_class": 12, "classes": ["circle", "square"], "domains": ["photo", "sketch"]},
            "train": {"batch_size": 4},
            "federation": {"clients": 2, "rounds": 2},
        }
    )


def serve_tiny(config: RunConfig, url: str, before: Any = None) -> None:
    with (
        InProcessGrid(edgeduet_clients(config)) as grid,
        recorded_run(url, config, "7") as record,
    ):
        if before is not None:
            before(record)
        serve(grid, config, record=record)


def test_a_real_run_with_orders_is_recorded_with_its_models(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    plain = RunConfig(tiny(), "fedavg-adapter", seed=1, run_dir=tmp_path / "plain", run_name="plain")
    serve_tiny(plain, url)
    fast = RunConfig(tiny(), "fedavg-adapter", seed=1, run_dir=tmp_path / "fast", run_name="fast")

    def order(record: RecordedRun) -> None:
        registry = Registry.open(url)
        with registry.writing() as session:
            wish(session, find_run(session, "fast").id, "set/train.max_steps", 1, by="test", now=NOW)
        registry.close()

    serve_tiny(fast, url, order)
    steps = {folder: _steps(tmp_path / folder) for folder in ("plain", "fast")}
    assert set(steps["fast"]) == {1}
    assert min(steps["plain"]) > 1
    registry = Registry.open(url)
    with registry.reading() as session:
        run = find_run(session, "fast")
        assert (run.state, run.starts, run.flower_run_id, run.stages) == ("finished", 1, "7", 2)
        assert run.tasks == ["photo", "sketch"]
        artefacts = session.scalars(select(Artefact).where(Artefact.run_id == run.id)).all()
        assert [(a.stage, a.path) for a in artefacts] == [
            (0, "models/stage-001.safetensors"),
            (1, "models/stage-002.safetensors"),
        ]
    from safetensors import safe_open

    with safe_open(tmp_path / "fast" / "models" / "stage-002.safetensors", "numpy") as file:
        assert file.metadata()["method"] == "fedavg-adapter"
        assert len(list(file.keys())) > 0
    registry.close()


def _steps(folder: Path) -> list[int]:
    events = [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "round"]
    return [client["steps"] for event in events for client in event["clients"]]


def test_how_a_run_ends_is_written_down(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    config = RunConfig(tiny(), "local", run_dir=tmp_path / "run", run_name="run")

    def state() -> tuple[str, str]:
        registry = Registry.open(url)
        with registry.reading() as session:
            run = find_run(session, "run")
            return run.state, run.error

    registry = Registry.open(url)
    for error in (RunStopped("saved"), KeyboardInterrupt(), SystemExit(1), httpx.ConnectError("refused")):
        # The server was stopped, or its SuperLink is gone: nobody ordered that this run ends.
        with pytest.raises(type(error)), recorded_run(url, config, "1"):
            assert state() == ("running", "")
            raise error
        assert state()[0] == "failed" and "its server process ended, told to from outside" in state()[1]
        with registry.reading() as session:
            assert interrupted_run(session) is not None
    with pytest.raises(RunStopped), recorded_run(url, config, "1"):
        with registry.writing() as session:
            wish(session, find_run(session, "run").id, STOP, True, by="ana", now=NOW)
        raise RunStopped("saved")
    assert state() == ("stopped", "")
    with pytest.raises(FederationError), recorded_run(url, config, "2"):
        raise FederationError("nobody answers")
    assert state() == ("failed", "nobody answers")
    with pytest.raises(ZeroDivisionError), recorded_run(url, config, "3"):
        raise ZeroDivisionError("division by zero")
    assert state() == ("failed", "ZeroDivisionError: division by zero")
    with recorded_run(url, config, "4"):
        pass
    assert state() == ("finished", "")
    with pytest.raises(ConnectionError), recorded_run(url, config, "5"):
        # `runs stop --now`: the operator's word stands, whatever the server process dies of.
        with registry.writing() as session:
            end_run(session, find_run(session, "run").id, "stopped", NOW)
        raise ConnectionError("SuperLink went away")
    assert state() == ("stopped", "")
    registry.close()
