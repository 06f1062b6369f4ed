"""The deployed system as real processes on loopback: server with its proxy, three devices, TLS and node keys.

Shown: two stages of Fed-Duet give the very weights of the simulation; a killed SuperNode and a device that was
killed whole are back by themselves; the devices answer with their personal models afterwards.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from edgeduet_client.classifier.classifier_folder import ClassifierFolder
from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import DEVICES, Deployment, accuracies, deployed, final_state, simulate, tiny_scenario, wait

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("deployed"), commands=True) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def test_the_deployed_system_computes_what_the_simulation_computes(system: Deployment, tmp_path: Path) -> None:
    scenario = tiny_scenario(tasks=2)
    run = system.start_run("two-stages", scenario)
    system.wait_for("two-stages", "finished")
    system.assert_complete("two-stages", stages=2)

    simulate(run, scenario, tmp_path)
    assert accuracies(run) == accuracies(tmp_path)
    assert len(accuracies(tmp_path)) == 2
    assert final_state(run) == final_state(tmp_path)

    for device in system.devices:
        found = ClassifierFolder(device.home / "classifier").current()
        assert found is not None and (found[1].run, found[1].stage) == ("two-stages", 1)
    Image.new("RGB", (40, 40), "red").save(tmp_path / "dot.png")
    shown = system.devices[0].command("classify", str(tmp_path / "dot.png"), "--json")
    assert len(json.loads(shown)["answers"]) == 4
    assert DEVICES == 3


def test_a_killed_supernode_is_back_by_itself_under_the_same_identity(system: Deployment) -> None:
    device = system.devices[1]
    before = device.state()["programs"]["supernode"]["pid"]
    node = system.json("clients", "show", device.name)["node_id"]
    os.kill(before, signal.SIGKILL)
    wait(lambda: device.state()["programs"]["supernode"]["pid"] not in (None, before), "another SuperNode")
    wait(device.connected, "the device to be back")
    assert device.state()["programs"]["supernode"]["restarts"] >= 1
    shown = system.json("clients", "show", device.name)
    assert (shown["node_id"], shown["connection"]) == (node, "online")


def test_a_device_whose_supervisor_was_killed_is_started_again_and_ends_what_it_left(system: Deployment) -> None:
    device = system.devices[2]
    left = psutil.Process(device.state()["programs"]["supernode"]["pid"])
    os.kill(device.state()["pid"], signal.SIGKILL)
    assert device.process is not None
    device.process.wait()
    assert left.is_running()

    wait(lambda: not device.state(), "the lock of the killed one")
    device.start()

    wait(device.connected, "the device to be back")
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert device.command("status").startswith("edge-2: training connected")
