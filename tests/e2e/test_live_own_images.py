"""Devices that train on images of their own: real processes, nothing of an image on the server.

The weights are those of the simulation over the same folders; images that come between two stages take part in the
second; a device without images says so and the others go on.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edgeduet_client.classifier.classifier_folder import ClassifierFolder
from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_server.recorder import read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import DEVICES, PATIENCE, Deployment, accuracies, deployed, final_state, simulate
from own_image_folders import SHAPES, write_images

pytestmark = [pytest.mark.e2e, pytest.mark.long]

HELD = ({"circle": 9, "square": 8, "triangle": 7, "star": 6}, {"circle": 10, "square": 8}, {"square": 5, "star": 9})


def scenario(source: str) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "own",
            "data": {"source": source, "classes": list(SHAPES)},
            "stream": {"kind": "class-incremental", "classes_per_task": 2},
            "train": {"batch_size": 4},
            "federation": {
                "clients": DEVICES,
                "rounds": 2,
                "quorum": 0.3,
                "round_timeout": PATIENCE,
                "node_wait": PATIENCE,
            },
        }
    )


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("deployed")) as made:
        for device, counts in zip(made.devices, HELD, strict=True):
            write_images(device.home / "own", counts, seed=device.index)
            device.set("data", images="own")
        yield made


def examples(run: Path) -> list[dict[int, int]]:
    """Return how many images each client trained on, round by round."""
    rounds = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "round"]
    return [{client["client"]: client["examples"] for client in event["clients"]} for event in rounds]


def test_devices_train_on_their_own_images_as_the_simulation_does(system: Deployment, tmp_path: Path) -> None:
    run = system.start_run("own", scenario("device"))
    system.wait_for("own", "finished")
    system.assert_complete("own", stages=2)

    for device in system.devices:
        shutil.copytree(device.home / "own", tmp_path / "folders" / device.name)
    simulate(run, scenario(f"device:{tmp_path / 'folders'}"), tmp_path / "run")
    assert accuracies(run) == accuracies(tmp_path / "run")
    assert final_state(run) == final_state(tmp_path / "run")

    evaluated: list[dict[str, Any]] = [e for e in read_events(run / "metrics.jsonl") if e["event"] == "evaluate"]
    for event in evaluated:
        for part, whole in (("totals", "totals"), ("shared", "correct")):
            assert event["common"][whole] == [sum(client[part][task] for client in event["clients"]) for task in (0, 1)]
    found = ClassifierFolder(system.devices[1].home / "classifier").current()
    assert found is not None and found[1].run == "own"
    Image.new("RGB", (40, 40), "red").save(tmp_path / "dot.png")
    assert system.devices[1].command("classify", str(tmp_path / "dot.png"))


def test_images_that_come_between_two_stages_take_part_in_the_second(system: Deployment) -> None:
    before, device = examples(system.config.home / "runs" / "own"), system.devices[1]
    write_images(device.home / "new", {"star": 12}, first=50)
    run = system.start_run("more", scenario("device"))
    system.wait_for_event("more", "evaluate")
    (device.home / "new" / "star").rename(device.home / "own" / "star")
    system.wait_for("more", "finished")
    after = examples(run)
    # Client 1 had nothing of the second stage, so its replies were not used. The round that began meanwhile may have
    # looked before the images came; the next one saw them.
    assert 1 not in before[3] and after[3].pop(1) > 0
    assert (after[:2], after[3]) == (before[:2], before[3])
    first, last = (event["clients"][1]["totals"][1] for event in system.events("more", "evaluate"))
    assert first == 0
    assert examples(run)[3][1] + last == 12


def test_a_device_without_images_says_so_and_the_others_go_on(system: Deployment) -> None:
    system.devices[2].set("data", images="")
    run = system.start_run("without", scenario("device"), method="fedavg-adapter")
    system.wait_for("without", "finished")
    rounds = [event for event in read_events(run / "metrics.jsonl") if event["event"] == "round"]
    assert all({client["client"] for client in event["clients"]} == {0, 1} for event in rounds)
    assert "set [data] images in its device.toml" in str(rounds[0]["failures"])
