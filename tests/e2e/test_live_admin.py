"""``edgeduet-admin`` against a run of real devices: what is ordered happens, at the place it was ordered for.

One run of two stages with two rounds each; the order of the tests is the story of that run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, deployed, tiny_scenario, wait

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DEVICES = 2
RUN = "watched"


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("admin"), devices=DEVICES) as made:
        made.start_run(RUN, tiny_scenario(tasks=2, devices=DEVICES))
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def setting(system: Deployment, key: str) -> dict[str, Any]:
    (found,) = [entry for entry in system.json("config", "get", key)["settings"] if entry["key"] == key]
    return dict(found)


def test_a_pause_waits_for_the_round_and_keeps_the_training_process(system: Deployment) -> None:
    system.app_at_work(system.devices[0], RUN)
    assert system.json("runs", "pause", RUN)["pause_ordered"]
    assert "pauses after this round" in system.admin("status")
    system.wait_for(RUN, "paused")
    assert len(system.events(RUN, "round")) == 1
    status, warnings = system.status()
    assert (status["run"]["state"], status["run"]["rounds_done"], warnings) == ("paused", 1, "")
    assert status["devices_online"] == DEVICES


def test_settings_and_exclusions_hold_from_the_next_round_on(system: Deployment) -> None:
    before = setting(system, "train.lr")
    system.json("config", "set", "train.lr=0.0005")
    system.json("clients", "exclude", "edge-1")
    after = setting(system, "train.lr")
    assert (after["value"], after["scenario_value"], after["by"]) == (0.0005, before["value"], "first")
    assert "can be changed from the next round" in system.admin("config", "set", "federation.clients=5", code=2)
    system.json("runs", "unpause", RUN)

    rounds = system.wait_for_event(RUN, "round", 2)
    assert "orders" not in rounds[0]
    assert rounds[1]["orders"] == {"excluded": [1], "overrides": {"train.lr": 0.0005}}
    assert [rounds[1]["asked"], [client["client"] for client in rounds[1]["clients"]]] == [[0], [0]]
    listed = system.json("rounds", RUN)["rounds"][1]
    assert (listed["excluded"], listed["overrides"]) == ([1], {"train.lr": 0.0005})
    assert not setting(system, "train.lr")["pending"]


def test_a_client_that_is_let_back_in_takes_part_again_and_a_stop_waits_for_the_round(system: Deployment) -> None:
    # The evaluation of the stage is without the client that is left out.
    (evaluated,) = system.wait_for_event(RUN, "evaluate")
    assert [client["client"] for client in evaluated["clients"]] == [0]
    system.json("clients", "include", "edge-1")
    system.json("config", "set", "train.lr=")
    system.app_at_work(system.devices[0], RUN)
    system.json("runs", "stop", RUN, "--yes")
    system.wait_for(RUN, "stopped")
    done = len(system.events(RUN, "round"))
    assert done >= 3

    system.json("runs", "resume", RUN)
    system.wait_for(RUN, "finished")
    rounds = system.assert_rounds(RUN, stages=2)
    assert [client["client"] for client in rounds[-1]["clients"]] == [0, 1]
    assert "orders" not in rounds[-1]
    assert [client["client"] for client in system.events(RUN, "evaluate")[1]["clients"]] == [0, 1]
    assert system.json("runs", "show", RUN)["starts"] == 2


def test_metrics_prompts_and_clients_are_those_of_the_run(system: Deployment) -> None:
    metrics = system.json("metrics", RUN)
    assert [row["stage"] for row in metrics["global_matrix"]] == [0, 1]
    common = [event["common"] for event in system.events(RUN, "evaluate")]
    for row, counted in zip(metrics["global_matrix"], common, strict=True):
        for cell, correct, total in zip(row["tasks"], counted["correct"], counted["totals"], strict=True):
            if cell["value"] is not None:
                assert cell["value"] == pytest.approx(correct / total)
    assert [(c["client"], c["name"]) for c in metrics["clients"]] == [(0, "edge-0"), (1, "edge-1")]
    prompts = system.json("prompts", RUN)
    assert {c["client"] for c in prompts["clients"]} == {0, 1}
    assert sum(int(count) for count in prompts["uses"].values()) == sum(
        len(indices) for event in system.events(RUN, "round") for indices in event["dispatch"].values()
    )
    shown = {c["name"]: c for c in system.json("clients", "list")["clients"]}
    assert shown["edge-0"]["rounds_used"] == shown["edge-0"]["rounds_asked"] == 4
    assert shown["edge-1"]["rounds_asked"] == sum(1 in event["asked"] for event in system.events(RUN, "round"))
    assert not shown["edge-1"]["excluded"] and shown["edge-1"]["connection"] == "online"


def test_models_are_exported_promoted_and_rolled_back(system: Deployment, tmp_path: Path) -> None:
    models = system.json("models", "list", RUN)["models"]
    assert [(model["stage"], model["promoted"]) for model in models] == [(0, False), (1, False)]
    assert "no model is promoted" in system.admin(
        "models", "export", "--promoted", "--out", str(tmp_path / "x"), code=2
    )
    for stage in (1, 2):
        system.admin("models", "export", RUN, "--stage", str(stage), "--out", str(tmp_path / f"{stage}"))
        system.json("models", "promote", RUN, "--stage", str(stage))
    first, second = load_file(tmp_path / "1"), load_file(tmp_path / "2")
    assert first.keys() == second.keys() and any(not np.array_equal(first[n], second[n]) for n in first)

    assert system.json("status")["promoted"]["stage"] == 1
    promoted = system.config.home / "models/current.safetensors"
    assert promoted.read_bytes() == (tmp_path / "2").read_bytes()
    system.json("models", "rollback", "--yes")
    system.admin("models", "export", "--promoted", "--out", str(tmp_path / "now"))
    assert (tmp_path / "now").read_bytes() == (tmp_path / "1").read_bytes() == promoted.read_bytes()


def test_a_revoked_device_is_gone_from_the_next_run_which_goes_on_without_it(system: Deployment) -> None:
    system.json("clients", "revoke", "edge-1", "--yes")
    wait(lambda: not system.devices[1].connected(), "the device to be thrown out")
    system.start_run("without", tiny_scenario(devices=DEVICES, node_wait=1, rounds=1))
    system.wait_for("without", "finished")
    (event,) = system.assert_rounds("without", rounds=1)
    assert event["asked"] == [0]
    assert "device edge-1 at 127.0.0.1 is refused: it was revoked" in system.status()[1]
    actions = [entry["action"] for entry in system.json("audit")["entries"]]
    assert {"PauseRun", "UnpauseRun", "SetConfig", "ExcludeClient", "IncludeClient", "StopRun", "ResumeRun"} < set(
        actions
    )
    assert {"PromoteModel", "RollbackModel", "RevokeClient"} < set(actions)
