"""Devices that die, hang or run out of disk in the middle of a round, with real kills on a live deployment.

For each: what an operator sees, that the run ends well, and that the device goes on with its personal state.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, LiveDevice, deployed, tiny_scenario, wait

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DEVICES = 2

# Python runs this in every process of the devices. Once the test makes ARMED, device 0 stops in the middle of writing
# a personal state and says which file in MARK: the test then cuts the power.
POWER_CUT = """
import os, signal
flush = os.fsync
def fsync(descriptor):
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    state = "/client-0/" in name and ".safetensors." in name and name.endswith(".tmp")
    if state and os.path.exists(os.environ["POWER_CUT_ARMED"]):
        with open(os.environ["POWER_CUT_MARK"], "w") as mark:
            mark.write(name)
        os.kill(os.getpid(), signal.SIGSTOP)
    return flush(descriptor)
os.fsync = fsync
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("devices")
    (folder / "sitecustomize.py").write_text(POWER_CUT)
    extra = {name: str(folder / name) for name in ("POWER_CUT_ARMED", "POWER_CUT_MARK")}
    with deployed(folder, devices=DEVICES, extra={"PYTHONPATH": str(folder), **extra}) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def used(system: Deployment, run: str) -> list[list[int]]:
    """Return whose replies were used, round by round."""
    return [[client["client"] for client in event["clients"]] for event in system.events(run, "round")]


def test_a_killed_client_app_costs_its_reply_of_that_round(system: Deployment) -> None:
    system.start_run("app-killed", tiny_scenario(devices=DEVICES))
    system.app_at_work(system.devices[0], "app-killed").kill()

    system.wait_for_event("app-killed", "round")
    status, warnings = system.status()
    assert "client 0: client-crashed: ClientApp stopped responding" in warnings
    assert status["devices_online"] == DEVICES
    assert system.json("clients", "show", "edge-0")["last_failure"].startswith("client-crashed")

    system.wait_for("app-killed", "finished")
    system.assert_complete("app-killed", clients=DEVICES)
    assert used(system, "app-killed") == [[1], [0, 1]]
    system.devices[0].personal_state("app-killed")


def test_a_device_that_is_too_slow_misses_the_round_and_is_asked_again(system: Deployment) -> None:
    # Nobody waits for it longer than this; the other one may be late, too, on a machine with much to do.
    system.start_run("slow", tiny_scenario(devices=DEVICES, round_timeout=40, rounds=4, max_bad_rounds=4))
    stopped = system.app_at_work(system.devices[1], "slow")
    stopped.suspend()
    try:
        system.wait_for_event("slow", "round")
        _, warnings = system.status()
        assert "no answer in time from client" in warnings and "1" in warnings
        assert system.json("clients", "show", "edge-1")["last_failure"] == "no answer in time"
    finally:
        stopped.resume()

    first = system.events("slow", "round")[0]
    assert 1 in first["missing"] and 1 not in [client["client"] for client in first["clients"]]
    system.wait_for("slow", "finished")
    assert len(system.assert_rounds("slow", rounds=4)) == 4
    # What was late is counted, and nobody was shut out for it.
    assert any(1 in event["asked"] for event in system.events("slow", "round")[1:])
    system.devices[1].personal_state("slow")


def test_a_power_cut_while_personal_state_is_written_loses_nothing_that_was_written(system: Deployment) -> None:
    cut, armed, mark = system.devices[0], system.folder / "POWER_CUT_ARMED", system.folder / "POWER_CUT_MARK"
    system.start_run("power", tiny_scenario(devices=DEVICES, rounds=3))
    system.wait_for_event("power", "round")
    armed.touch()
    before = cut.newest_state("power")
    wait(lambda: mark.exists() and mark.read_text(), "a personal state being written")
    cut.kill()
    armed.unlink()
    assert Path(mark.read_text()).exists(), "it was to die before the file had its name"
    kept = cut.newest_state("power")
    assert kept.keys() == before.keys() and all(np.array_equal(kept[name], before[name]) for name in before)

    system.wait_for_event("power", "round", 2)
    status, warnings = system.status()
    assert "offline: edge-0" in warnings and status["devices_online"] == DEVICES - 1
    assert "client 0: unavailable: " in warnings
    assert system.json("clients", "show", "edge-0")["connection"] == "offline"

    cut.start()
    system.wait_for("power", "finished")
    system.assert_complete("power", rounds=3, clients=DEVICES)
    assert 0 not in used(system, "power")[1]
    assert "offline" not in system.status()[1]
    # It went on from what it had, and what was half written is gone.
    cut.personal_state("power")


@pytest.fixture
def small_disk(system: Deployment) -> Iterator[LiveDevice]:
    """Device 1 on a disk of its own that can be filled."""
    device = system.devices[1]
    device.end()
    moved = device.home.with_name(f"{device.home.name}-moved")
    device.home.rename(moved)
    device.home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(device.home)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        device.home.rmdir()
        moved.rename(device.home)
        device.start()
        pytest.skip(f"a disk of its own takes root: {mounted.stderr.strip()}")
    subprocess.run(["cp", "-a", f"{moved}/.", str(device.home)], check=True)
    device.start()
    try:
        yield device
    finally:
        device.end()
        subprocess.run(["umount", str(device.home)], check=True)
        device.home.rmdir()
        moved.rename(device.home)
        device.start()


def fill(folder: Path) -> Path:
    """Take all that is free on a disk."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return ballast


def test_a_full_disk_costs_replies_until_there_is_room_and_no_state(system: Deployment, small_disk: LiveDevice) -> None:
    wait(small_disk.connected, "the device on its small disk")
    system.start_run("full", tiny_scenario(devices=DEVICES, rounds=3))
    system.wait_for_event("full", "round")
    ballast = fill(small_disk.home)
    before = small_disk.newest_state("full")
    system.wait_for_event("full", "round", 2)

    status, warnings = system.status()
    assert "client 1: client-error: " in warnings and "the disk is full; free some space" in warnings
    # It says so itself, too, and has not died of it.
    assert status["devices_online"] == DEVICES
    assert small_disk.state().get("training") == "connected"
    kept = small_disk.newest_state("full")
    assert all(np.array_equal(kept[name], before[name]) for name in before)

    ballast.unlink()
    system.wait_for("full", "finished")
    system.assert_complete("full", rounds=3, clients=DEVICES)
    assert used(system, "full") == [[0, 1], [0], [0, 1]]
    small_disk.personal_state("full")
