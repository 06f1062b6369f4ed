"""A server that is killed in the middle of a round goes on by itself, and ends with the bits of an undisturbed run.

Killed twice in one run: first its supervisor alone, whose programs stay behind, then everything at once. The order
of the tests is the story of that run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, accuracies, deployed, final_state, simulate, tiny_scenario, wait

pytestmark = [pytest.mark.e2e, pytest.mark.long]

DEVICES = 2
RUN = "night"


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return tiny_scenario(tasks=2, devices=DEVICES)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("killed"), devices=DEVICES) as made:
        made.start_run(RUN, scenario)
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def programs(system: Deployment) -> dict[str, int]:
    return {name: facts["pid"] for name, facts in system.server_state()["programs"].items()}


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_killed_supervisor_is_started_again_ends_what_it_left_and_the_run_goes_on(system: Deployment) -> None:
    system.wait_for_event(RUN, "round", 1)
    system.app_at_work(system.devices[0], RUN)
    wait(lambda: set(programs(system)) == {"superlink", "admin", "proxy"}, "the programs to be noted")
    left = programs(system)
    assert system.server is not None
    os.kill(system.server.pid, signal.SIGKILL)
    system.server.wait()
    assert not any(ended(pid) for pid in left.values())

    system.start_server()
    assert all(ended(pid) for pid in left.values())
    wait(lambda: system.json("runs", "show", RUN)["starts"] == 2, "the run to be resumed", every=5)
    status, warnings = system.status()
    assert status["run"]["state"] == "running" and "failed" not in warnings
    assert "start 2" in system.admin("status")


def test_a_server_killed_whole_in_the_second_stage_is_started_again_and_the_run_goes_on(system: Deployment) -> None:
    system.wait_for_event(RUN, "evaluate", 1)
    system.wait_for_event(RUN, "round", 3)
    system.app_at_work(system.devices[1], RUN)
    system.kill_server()
    assert "cannot be reached" in system.admin("status", code=2)

    system.start_server()
    wait(lambda: system.json("runs", "show", RUN)["starts"] == 3, "the run to be resumed", every=5)
    assert "start 3" in system.admin("runs", "show", RUN)


def test_the_run_ends_with_the_bits_of_an_undisturbed_one(
    system: Deployment, scenario: Scenario, tmp_path: Path
) -> None:
    system.wait_for(RUN, "finished")
    rounds = system.assert_complete(RUN, stages=2, clients=DEVICES)
    assert not any(event["skipped"] or event["rejected"] for event in rounds)
    run = system.config.folder("runs") / RUN
    simulate(run, scenario, tmp_path)
    assert accuracies(run) == accuracies(tmp_path)
    assert final_state(run) == final_state(tmp_path)
    for device in system.devices:
        device.personal_state(RUN)
    assert [model["stage"] for model in system.json("models", "list", RUN)["models"]] == [0, 1]
    assert system.status()[1] == ""
