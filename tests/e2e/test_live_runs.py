"""Runs that do not go as planned, on a live deployment: a client that raises, no quorum, an operator who stops.

What an operator sees is asked of ``edgeduet-admin`` each time, and nothing may be lost: the run goes on, or ends
with its reason and can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, accuracies, deployed, final_state, simulate, tiny_scenario

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("runs")) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


def test_without_quorum_because_a_client_raises_the_run_ends_with_the_reason_and_goes_on_when_it_is_mended(
    system: Deployment,
) -> None:
    refuser = system.devices[1]
    refuser.set("data", sources=["folder:/srv/photos"])
    system.start_run("refused", tiny_scenario(quorum=1.0, max_bad_rounds=1))
    system.wait_for("refused", "failed")

    _, warnings = system.status()
    assert "run refused failed: stopped after 1 round(s) in a row without enough usable replies" in warnings
    assert "stage 1, round 1 was skipped: 2 of 3 replies could be used, fewer than the quorum" in warnings
    assert "client 1: client-error: " in warnings and "data source 'world' is not allowed here" in warnings
    assert "Traceback" not in warnings
    shown = system.json("clients", "show", refuser.name)
    assert (shown["rounds_asked"], shown["rounds_used"]) == (1, 0)
    assert "[data] sources in its device.toml" in shown["last_failure"]

    refuser.set("data", sources=["world"])
    system.json("runs", "resume", "refused")
    system.wait_for("refused", "finished")
    rounds = system.assert_complete("refused", rounds=2)
    assert [event["skipped"] for event in rounds] == [True, False]
    assert [client["client"] for client in rounds[1]["clients"]] == [0, 1, 2]
    # Nothing is wrong any more, and nothing says so.
    assert system.status()[1] == ""
    for device in system.devices:
        device.personal_state("refused")


def test_a_run_stopped_at_once_in_the_middle_of_a_round_is_resumed_and_ends_with_the_same_bits(
    system: Deployment, tmp_path: Path
) -> None:
    scenario = tiny_scenario()
    run = system.start_run("stopped", scenario)
    system.wait_for_event("stopped", "round")
    system.app_at_work(system.devices[2], "stopped")
    stopped = system.json("runs", "stop", "stopped", "--now", "--yes")
    assert stopped["state"] == "stopped"

    status, warnings = system.status()
    assert (status["run"]["state"], status["run"]["rounds_done"]) == ("stopped", 1)
    assert "failed" not in warnings
    assert len(system.events("stopped", "round")) == 1

    system.json("runs", "resume", "stopped")
    system.wait_for("stopped", "finished")
    rounds = system.assert_complete("stopped")
    assert not any(event["skipped"] or event["rejected"] for event in rounds)
    assert system.json("runs", "show", "stopped")["starts"] == 2
    simulate(run, scenario, tmp_path)
    assert accuracies(run) == accuracies(tmp_path)
    assert final_state(run) == final_state(tmp_path)
    for device in system.devices:
        device.personal_state("stopped")
