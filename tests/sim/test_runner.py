"""Whole runs on the real stack: generated world, shipped backbone, in-process engine, tiny sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeduet_server.strategies.catalogue import STRATEGIES
from edgeduet_shared.config import Scenario
from edgeduet_shared.data.split import load_split
from edgeduet_shared.errors import ConfigError, DataError, StateError
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_sim.progress import JsonEvents, Lines, RunTitle, Silent
from edgeduet_sim.results import Run, load_run
from edgeduet_sim.runner import ABLATIONS, EngineSetup, Job, make_job, run_all, run_one, with_ablations

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "data": {"max_per_class": 6, "domains": ["photo", "sketch"]},
    "model": {"adapter": {"experts": 2, "bottleneck": 4, "shared_bottleneck": 8}, "pool": {"size": 6, "dispatched": 2}},
    "federation": {"clients": 3, "rounds": 2},
}


def tiny_scenario(**changes: Any) -> Scenario:
    """Two styles, three clients, two rounds, the shipped backbone."""
    return Scenario.model_validate({"name": "tiny", "purpose": "for tests", **SIZES, **changes})


class Listening(Silent):
    """Keeps what is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.events: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def event(self, run: RunTitle, event: Any) -> None:
        self.events.append(event["event"])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def told() -> Listening:
    return Listening()


@pytest.fixture(scope="module")
def duet(out: Path, told: Listening) -> Run:
    """One finished run of fed-duet."""
    job = make_job(tiny_scenario(), MethodSpec("fed-duet"), 0, out)
    return run_one(job, EngineSetup(), told, command=["edgeduet-sim", "run", "tiny"])


def test_a_run_writes_a_complete_folder(duet: Run):
    names = {path.name for path in duet.folder.iterdir()}
    assert {"config.json", "split.json", "metrics.jsonl", "summary.json", "done", "checkpoints", "tensorboard"} <= names
    config = duet.config
    assert config["method"] == "fed-duet" and config["seed"] == 0
    assert Scenario.model_validate(config["scenario"]) == tiny_scenario()
    assert config["versions"]["torch"] != "none" and len(config["backbone"]["fingerprint"]) == 16
    assert config["command"] == ["edgeduet-sim", "run", "tiny"]
    split = load_split(duet.folder / "split.json")
    assert split.digest == config["split"]
    assert config["client_images"] == [sum(len(task[c]) for task in split.train) for c in range(3)]
    assert list((duet.folder / "tensorboard").glob("events.*"))


def test_what_a_run_recorded_is_what_it_summarises(duet: Run):
    written = json.loads((duet.folder / "summary.json").read_text())
    assert written["avg"] == pytest.approx(duet.summary()["avg"])
    assert len(duet.rounds) == 4 and len(duet.stages) == 2
    assert all(row.usable == 3 and not row.skipped for row in duet.rounds)
    assert not np.isnan(duet.evaluations.matrix_TT).any()
    # Prompts are dispatched in semantic rounds only.
    assert [bool(row.dispatch) for row in duet.rounds] == [False, True, False, True]


def test_the_budget_told_before_the_run_is_close_to_what_was_measured(duet: Run, told: Listening):
    text = "\n".join(told.messages)
    assert "trained on a client" in text and "bytes to expect" in text
    parameters, summary = duet.config["parameters"], duet.summary()
    assert parameters["expected_bytes_up"] == pytest.approx(summary["bytes_up"], rel=0.05)
    assert parameters["expected_bytes_down"] >= summary["bytes_down"] * 0.95
    assert parameters["trainable"] == sum(parameters["groups"].values())
    assert parameters["personal"] + parameters["uploaded"] >= parameters["trainable"]


def test_events_are_shown_as_they_happen(duet: Run, told: Listening):
    assert told.events.count("round") == 4 and told.events.count("evaluate") == 2
    assert told.events[-1] == "summary"


def test_the_same_run_again_is_refused_not_overwritten(duet: Run, out: Path):
    with pytest.raises(StateError, match="finished"):
        run_one(make_job(tiny_scenario(), MethodSpec("fed-duet"), 0, out), EngineSetup(), Silent(), resume=True)


def test_comparing_keeps_finished_runs_and_uses_one_split(duet: Run, out: Path):
    told = Listening()
    jobs = [make_job(tiny_scenario(), MethodSpec(name), 0, out) for name in ("fed-duet", "zero-shot", "local", "joint")]
    outcome = run_all(jobs, EngineSetup(), told)
    assert not outcome.failed
    assert "1 of 4 runs are finished already and kept" in told.messages
    assert len({run.config["split"] for run in outcome.runs}) == 1
    by_name = {run.method.name: run for run in outcome.runs}
    zero_shot = by_name["zero-shot"]
    reference = zero_shot.config["zero_shot"]
    # b_j is the zero-shot method's own accuracy on task j, scored over the classes of tasks 0..j.
    assert np.diag(zero_shot.evaluations.correct_TT).tolist() == reference["correct"]
    assert zero_shot.summary()["bytes_up"] == 0 and zero_shot.summary()["trainable"] == 0
    assert zero_shot.summary()["fwt"] == pytest.approx(0)
    local = by_name["local"].summary()
    assert np.isnan(local["avg"]) and local["personal"] > 0
    assert np.isnan(by_name["joint"].summary()["bytes_up"])


def test_runs_in_processes_of_their_own_give_the_same_numbers(
    duet: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = [str(ROOT / part) for part in ("shared", "server", "client", "simulations")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    told = Listening()
    jobs = [make_job(tiny_scenario(), MethodSpec(name), 0, tmp_path) for name in ("fed-duet", "promptfl")]
    outcome = run_all(jobs, EngineSetup(), told, processes=2)
    assert not outcome.failed, outcome.failed
    again = outcome.runs[0]
    assert (again.evaluations.personal_MTT == duet.evaluations.personal_MTT).all()
    assert (again.evaluations.correct_TT == duet.evaluations.correct_TT).all()
    assert told.events.count("summary") == 2


def test_a_failing_run_does_not_stop_the_others(out: Path, tmp_path: Path):
    broken = make_job(tiny_scenario(), MethodSpec("promptfl"), 5, tmp_path)
    broken.folder.mkdir(parents=True)
    (broken.folder / "foreign.txt").write_text("in the way")
    good = make_job(tiny_scenario(), MethodSpec("zero-shot"), 5, tmp_path)
    outcome = run_all([broken, good], EngineSetup(), Silent())
    assert [run.method.name for run in outcome.runs] == ["zero-shot"]
    assert "not a run" in outcome.failed["promptfl, seed 5"]
    with pytest.raises(Exception, match="1 of 2 runs failed"):
        outcome.raise_failures()


def test_unknown_methods_and_options_are_found_before_any_run(tmp_path: Path):
    for text in ("fed-duett", "fed-duet:fusoin=false"):
        jobs = [make_job(tiny_scenario(), MethodSpec.parse(t), 0, tmp_path / "x") for t in ("zero-shot", text)]
        with pytest.raises(ConfigError, match="did you mean"):
            run_all(jobs, EngineSetup(), Silent())
    assert not (tmp_path / "x").exists()


def test_a_run_that_cannot_load_its_data_leaves_nothing_behind(tmp_path: Path):
    scenario = tiny_scenario(data={"source": f"folder:{tmp_path / 'nowhere'}"})
    with pytest.raises(DataError):
        run_one(make_job(scenario, MethodSpec("zero-shot"), 0, tmp_path / "runs"), EngineSetup(), Silent())
    assert not (tmp_path / "runs").exists()


def test_every_ablation_is_a_valid_method(out: Path):
    specs = with_ablations([MethodSpec("fed-duet"), MethodSpec.parse(ABLATIONS[0])])
    assert len(specs) == 1 + len(ABLATIONS) and len({str(spec) for spec in specs}) == len(specs)
    known = STRATEGIES["fed-duet"].options_type
    for spec in specs:
        known.model_validate(spec.options)


def test_unknown_engine_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'ray'"):
        EngineSetup.parse("rai")


def test_lines_and_json_tell_the_same_story(duet: Run, capsys: pytest.CaptureFixture[str]):
    title = RunTitle("fed-duet, seed 0", "domain-incremental", duet.task_names, 2, 3)
    events = [json.loads(line) for line in (duet.folder / "metrics.jsonl").read_text().splitlines()]
    lines, as_json = Lines(), JsonEvents()
    for event in events:
        lines.event(title, event)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6
    assert "stage 1/2, round 1/2, clients 3/3, loss" in printed[0]
    assert "global" in printed[2] and "personal" in printed[2]
    for event in events:
        as_json.event(title, event)
    parsed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{k: v for k, v in p.items() if k != "run"} for p in parsed] == events


@pytest.fixture
def slow_run(tmp_path: Path) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """A command line for a run long enough to interrupt."""
    settings = [
        "data.max_per_class=8",
        'data.domains=["photo","sketch"]',
        "federation.clients=3",
        "federation.rounds=12",
    ]
    command = [sys.executable, "-c", "from edgeduet_sim.cli import main; main()", "run", "demo", "--out", str(tmp_path)]
    command += [part for setting in settings for part in ("--set", setting)]
    paths = [str(ROOT / part) for part in ("shared", "server", "client", "simulations")]
    yield command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, tmp_path


def wait_for_rounds(folder: Path, count: int) -> Path:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for events in folder.glob("*/metrics.jsonl"):
            if events.read_text().count('"event":"round"') >= count:
                return events.parent
        time.sleep(0.05)
    raise AssertionError("the run did not get going")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill-9"])
def test_an_interrupted_run_says_how_to_go_on_and_ends_as_if_never_interrupted(
    slow_run: tuple[list[str], dict[str, str], Path], how: signal.Signals
):
    command, environment, folder = slow_run
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = wait_for_rounds(folder, 3)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    interrupted = load_run(run_dir)
    assert not interrupted.finished
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "--resume" in err and "Traceback" not in err
    job = make_job(interrupted.scenario, interrupted.method, 0, folder)
    assert job.folder == run_dir
    with pytest.raises(StateError, match="--resume"):
        run_one(job, EngineSetup(), Silent())
    resumed = run_one(job, EngineSetup(), Silent(), resume=True)
    straight = run_one(replace(job, folder=folder / "straight" / "run"), EngineSetup(), Silent())
    assert [row.loss for row in resumed.rounds] == [row.loss for row in straight.rounds]
    assert (resumed.evaluations.personal_MTT == straight.evaluations.personal_MTT).all()
    assert resumed.summary()["bytes_up"] == straight.summary()["bytes_up"]


def test_job_names_and_split_file_depend_on_scenario_and_seed_only(tmp_path: Path):
    a, b = (make_job(tiny_scenario(), MethodSpec(name), 0, tmp_path) for name in ("fed-duet", "local"))
    assert a.split_file == b.split_file and a.folder != b.folder
    assert isinstance(a, Job) and a.name == "fed-duet, seed 0"
    assert make_job(tiny_scenario(), MethodSpec("local"), 1, tmp_path).split_file != b.split_file
