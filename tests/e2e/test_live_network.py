"""A network that is cut, for seconds and for minutes, between one device and the server of a live deployment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, accuracies, deployed, final_state, simulate, tiny_scenario, wait

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DEVICES = 2
CUT = 1


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("network"), devices=DEVICES, wired=[CUT]) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def test_a_cut_while_a_device_trains_that_is_mended_when_it_is_done_costs_nothing(
    system: Deployment, tmp_path: Path
) -> None:
    device, wire = system.devices[CUT], system.wires[CUT]
    scenario = tiny_scenario(devices=DEVICES)
    run = system.start_run("blink", scenario)
    app = system.app_at_work(device, "blink")
    wire.cut()
    # It trains to its end and cannot say so.
    wait(lambda: not app.is_running() or app.status() == "zombie", "the training to end")
    wire.mend()

    system.wait_for("blink", "finished")
    rounds = system.assert_complete("blink", clients=DEVICES)
    assert [[client["client"] for client in event["clients"]] for event in rounds] == [[0, 1], [0, 1]]
    simulate(run, scenario, tmp_path)
    assert accuracies(run) == accuracies(tmp_path)
    assert final_state(run) == final_state(tmp_path)
    device.personal_state("blink")


def test_a_cut_of_minutes_costs_rounds_of_that_device_and_not_the_run(system: Deployment) -> None:
    device, wire = system.devices[CUT], system.wires[CUT]
    system.start_run("outage", tiny_scenario(devices=DEVICES, rounds=3))
    system.app_at_work(device, "outage")
    wire.cut()

    system.wait_for_event("outage", "round")
    status, warnings = system.status()
    assert "offline: edge-1" in warnings and "client 1: unavailable: " in warnings
    assert (status["devices_online"], status["devices"]) == (DEVICES - 1, DEVICES)
    assert system.json("clients", "show", "edge-1")["connection"] == "offline"
    # The device keeps what it runs for its own programs, and itself says what is wrong.
    wait(lambda: device.cause() == "unreachable" or not device.connected(), "the device to notice")

    wire.mend()
    wait(device.connected, "the device to be back")
    system.wait_for("outage", "finished")
    rounds = system.assert_complete("outage", rounds=3, clients=DEVICES)
    assert not any(event["skipped"] for event in rounds)
    assert [client["client"] for client in rounds[0]["clients"]] == [0]
    assert "offline" not in system.status()[1]
    device.personal_state("outage")
