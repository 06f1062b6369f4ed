"""Runs whose clients have images of their own, in one process: the same code as on devices."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeduet_server.app import serve
from edgeduet_server.recorder import Listener, read_events
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError, DataError
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_shared.run_config import RunConfig
from edgeduet_sim.engines.in_process import InProcessGrid, edgeduet_clients
from edgeduet_sim.progress import Silent
from edgeduet_sim.report import write_report
from edgeduet_sim.results import Run
from edgeduet_sim.runner import EngineSetup, make_job, run_one
from own_image_folders import SHAPES, write_images


def scenario(root: Path, **data: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "own",
            "data": {"source": f"device:{root}", "classes": list(SHAPES), **data},
            "stream": {"kind": "class-incremental", "classes_per_task": 2},
            "model": {"adapter": {"experts": 2, "bottleneck": 4, "shared_bottleneck": 8}},
            "train": {"batch_size": 4},
            "federation": {"clients": 3, "rounds": 2},
        }
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three devices: one has everything, one lacks the second task, one has two classes and one unknown."""
    folder = tmp_path_factory.mktemp("devices")
    write_images(folder / "attic", dict.fromkeys(SHAPES, 9))
    write_images(folder / "barn", {"circle": 10, "square": 7}, seed=1)
    write_images(folder / "cellar", {"square": 6, "star": 8, "heart": 3}, seed=2)
    return folder


def run(root: Path, out: Path, method: str, **data: Any) -> Run:
    return run_one(
        make_job(scenario(root, **data), MethodSpec(method), 0, out), EngineSetup(), Silent(), command=["own"]
    )


@pytest.mark.parametrize("method", ["fed-duet", "fedavg-adapter", "zero-shot"])
def test_a_run_over_own_images_adds_up_what_clients_counted(root: Path, tmp_path: Path, method: str) -> None:
    found = run(root, tmp_path, method)
    assert found.finished
    assert sum(found.config["client_images"]) + sum(found.config["zero_shot"]["totals"]) == 36 + 17 + 14
    for row in found.stages:
        for task in range(2):
            assert row.totals[task] == sum(counts.totals[task] for counts in row.clients.values())
            assert row.correct[task] == sum(counts.shared[task] for counts in row.clients.values())
        # The barn has nothing of the second task; nothing is common to all.
        assert row.clients[1].totals[1] == 0
        assert all(counts.common == (-1, -1) for counts in row.clients.values())
    assert 0 <= found.summary()["avg"] <= 100


def test_zero_shot_after_the_first_stage_is_the_reference_that_was_counted_before(root: Path, tmp_path: Path) -> None:
    found = run(root, tmp_path, "zero-shot")
    assert list(np.diag(found.evaluations.correct_TT)) == found.config["zero_shot"]["correct"]


def test_a_report_is_made_of_it(root: Path, tmp_path: Path) -> None:
    found = [run(root, tmp_path, method) for method in ("fed-duet", "local")]
    assert write_report(found, tmp_path / "report").html.exists()


def serve_with(scenario: Scenario, folder: Path, listener: Listener) -> list[dict[str, Any]]:
    """Run fed-duet in this process; return the events."""
    config = RunConfig(scenario, "fed-duet", run_dir=folder, run_name=str(folder))
    with InProcessGrid(edgeduet_clients(config)) as grid:
        grid.restore({})
        serve(grid, config, listeners=[listener])
        grid.restore({})
    return list(read_events(folder / "metrics.jsonl"))


def test_images_that_come_between_stages_take_part_in_the_next(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "devices")

    def bring(event: Mapping[str, Any]) -> None:
        if event["event"] == "evaluate" and event["stage"] == 0:
            write_images(tmp_path / "devices" / "barn", {"star": 14, "circle": 5}, seed=1, first=20)

    events = serve_with(scenario(tmp_path / "devices"), tmp_path / "run", bring)
    trained = [{c["client"]: c["examples"] for c in e["clients"]} for e in events if e["event"] == "round"]
    assert all(1 not in clients for clients in without_news(root, tmp_path)[2:])
    assert all(clients[1] > 0 for clients in trained[2:])
    before, after = ({c["client"]: c for c in e["clients"]}[1] for e in events if e["event"] == "evaluate")
    # What came is divided, so that the old task may have got test images too; none was lost.
    assert after["totals"][0] >= before["totals"][0] and before["totals"][1] == 0
    assert trained[2][1] + after["totals"][1] == 14


def without_news(root: Path, folder: Path) -> list[dict[int, int]]:
    """Return who trained on how many images in each round, when nothing comes."""
    events = serve_with(scenario(root), folder / "quiet", lambda event: None)
    return [{c["client"]: c["examples"] for c in e["clients"]} for e in events if e["event"] == "round"]


def test_a_task_of_which_nobody_has_images_is_passed_over(tmp_path: Path) -> None:
    for client in range(3):
        write_images(tmp_path / "devices" / str(client), {"triangle": 6, "star": 6}, seed=client)
    wanted = scenario(tmp_path / "devices")
    patient = wanted.model_copy(update={"federation": wanted.federation.model_copy(update={"max_bad_rounds": 1})})
    events = serve_with(patient, tmp_path / "run", lambda event: None)
    assert [e["skipped"] for e in events if e["event"] == "round"] == [True, True, False, False]
    first, last = (e["common"] for e in events if e["event"] == "evaluate")
    assert first["totals"][0] == last["totals"][0] == 0 and last["totals"][1] > 0


def test_all_images_in_one_place_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="never leave"):
        run(root, tmp_path, "joint")


def test_too_few_folders_are_said_before_anything_runs(root: Path, tmp_path: Path) -> None:
    job = scenario(root).model_dump() | {"federation": {"clients": 4, "rounds": 1}}
    with pytest.raises(DataError, match="3 folders are too few for client 3"):
        run_one(make_job(Scenario.model_validate(job), MethodSpec("local"), 0, tmp_path), EngineSetup(), Silent())
