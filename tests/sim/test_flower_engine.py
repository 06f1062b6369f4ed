"""The same run under Flower's own engine (Ray) and in this process: the same bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import linear_federation as linear
from edgeduet_server.app import serve
from edgeduet_server.deployment.flower_programs import FlowerApp
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import FederationError
from edgeduet_shared.run_config import DEFAULTS, RunConfig
from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients
from edgeduet_sim.engines.ray_engine import run_app_folder, run_edgeduet, run_ray

SCENARIO = Scenario.model_validate(
    {
        "name": "tiny",
        "data": {"max_per_class": 8, "classes": ["circle", "square"], "domains": ["photo", "sketch"]},
        "federation": {"clients": 3, "rounds": 2, "node_wait": 300},
    }
)


def outcome(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    events = list(read_events(folder / "metrics.jsonl"))
    for event in events:
        event.pop("timing", None)
    return events, max((folder / "checkpoints").glob("state-*")).read_bytes()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.e2e
def test_ray_and_in_process_give_the_same_bytes(tmp_path: Path) -> None:
    """Weights, prompt pool, every metric and every measured byte, for the method with personal state."""
    config = RunConfig(SCENARIO, "fed-duet", seed=1, run_dir=tmp_path / "in-process", run_name="contract")
    with InProcessGrid(edgeduet_clients(config)) as grid:
        serve(grid, config)
    before = children()
    seen: list[Any] = []
    run_edgeduet(replace(config, run_dir=tmp_path / "ray"), listeners=[seen.append])
    ours, theirs = outcome(tmp_path / "in-process"), outcome(tmp_path / "ray")
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1]
    assert [event["event"] for event in seen] == [event["event"] for event in ours[0]]
    assert children() <= before, "processes of Flower or Ray are left over"


@pytest.mark.slow
@pytest.mark.e2e
def test_flwr_run_in_the_checkout_works_offline(repo_root: Path, tmp_path: Path) -> None:
    run_app_folder(
        repo_root,
        clients=SCENARIO.federation.clients,
        events=tmp_path / "metrics.jsonl",
        overrides={
            "scenario-json": json.dumps(SCENARIO.model_dump(mode="json")),
            "method": "promptfl",
            "run-dir": str(tmp_path),
        },
        limit=400,
    )
    events, _ = outcome(tmp_path)
    assert events[-1]["event"] == "run-end"
    assert events[-1]["skipped_rounds"] == 0


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_that_fails_under_flower_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", _with_tests())
    config = {
        "run-dir": str(tmp_path),
        "federation": json.dumps({"clients": 2, "rounds": 2, "max_bad_rounds": 1, "node_wait": 300}),
        "seed": 3,
        "trouble": json.dumps({"0": "raises", "1": "raises"}),
    }
    app = FlowerApp("linear_federation:server_app", "linear_federation:client_app")
    with pytest.raises(FederationError, match=r"client [01] has a problem"):
        run_ray(app, config, clients=2, events=tmp_path / "metrics.jsonl", limit=400)
    assert [event["rejected"] for event in outcome(tmp_path)[0] if event["event"] == "round"] == [{"client-error": 2}]


def _with_tests() -> str:
    import os

    return os.pathsep.join([str(Path(linear.__file__).parent), os.environ.get("PYTHONPATH", "")])


def test_the_app_configuration_in_pyproject_is_what_both_sides_read(repo_root: Path) -> None:
    import tomllib

    app = tomllib.loads((repo_root / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == DEFAULTS
    assert app["components"] == {"serverapp": FlowerApp().server, "clientapp": FlowerApp().client}


@pytest.mark.parametrize("options", [{}, {"fusion": False, "dispatch": "random"}])
def test_a_run_configuration_survives_its_way_through_flower(tmp_path: Path, options: dict[str, Any]) -> None:
    config = RunConfig(
        SCENARIO,
        "fed-duet",
        options=options,
        seed=4,
        run_dir=tmp_path,
        run_name="name",
        split_file="split.json",
        personal_dir="there",
        resume=True,
        checkpoint_every=3,
    )
    assert RunConfig.from_flower(config.to_flower()) == config
    assert all(isinstance(value, bool | int | float | str) for value in config.to_flower().values())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sead": 1}, "unknown key 'sead'; did you mean 'seed'"),
        ({"scenario": "dmeo"}, "unknown scenario 'dmeo'; did you mean 'demo'"),
        ({"scenario-json": "{"}, "'scenario-json': not valid JSON"),
        ({"options-json": "[]"}, "'options-json': must be a JSON object"),
        ({"seed": "one"}, "'seed': must be a whole number, got 'one'"),
        ({"checkpoint-every": 0}, "'checkpoint-every': must be 1 or more, got 0"),
    ],
)
def test_a_wrong_run_configuration_is_one_clear_line(values: dict[str, Any], says: str) -> None:
    from edgeduet_shared.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        RunConfig.from_flower(values)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_by_default_flower_runs_the_demo_with_personal_state_on_disk() -> None:
    config = RunConfig.from_flower({})
    assert config.scenario.name == "demo"
    assert Path(config.personal_dir).parent == config.run_dir
    assert config.run_dir.is_absolute()


def test_event_lines_are_shown_once_and_only_when_complete(tmp_path: Path) -> None:
    from edgeduet_sim.engines.ray_engine import _Tail

    seen: list[Any] = []
    path = tmp_path / "m.jsonl"
    tail = _Tail(path, [seen.append])
    parts: Sequence[tuple[str, bool]] = [
        ("", False),
        ('{"event":"a"}\n{"eve', False),
        ('nt":"b"}\n', False),
        ('{"event":"run-end"}\n', True),
    ]
    assert not tail.read()
    for text, ended in parts:
        with path.open("a") as file:
            file.write(text)
        assert tail.read() == ended
    assert [event["event"] for event in seen] == ["a", "b", "run-end"]
