"""Clients of three text domains train drafters of one language model: whole runs on a tiny target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import drafter_bigram
from edgeduet_client.drafters import kinds
from edgeduet_client.drafters.kind import Training
from edgeduet_client.drafters.target_data import open_target, training_data
from edgeduet_server.strategies.strategy import ServerState
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError, RunStopped
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_shared.seeds import derive_seed
from edgeduet_sim.progress import Silent
from edgeduet_sim.report import write_report
from edgeduet_sim.results import Run, find_runs
from edgeduet_sim.runner import EngineSetup, make_job, run_all, run_one
from tiny_llm import TEXT, write_model

DOMAINS = ("animals", "numbers", "trains")
METHODS = ("drafter-local", "drafter-fedavg", "drafter-fedprox:mu=0.5", "drafter-pool:share=false", "drafter-pool")
EPOCHS = 20


@pytest.fixture(scope="module", autouse=True)
def bigram() -> Any:
    patch = pytest.MonkeyPatch()
    patch.setitem(kinds.KINDS, "bigram", "drafter_bigram:KIND")
    yield
    patch.undo()


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Three clients, a domain each, two rounds; experts may travel."""
    folder = tmp_path_factory.mktemp("drafters")
    write_model(folder / "tiny")
    words = {"animals": TEXT[0] + TEXT[1], "numbers": TEXT[5], "trains": TEXT[2]}
    for name, text in words.items():
        (folder / name).mkdir()
        for number in range(12):
            (folder / name / f"{number}.txt").write_text(f"{text} {number}\n" * 30, "utf-8")
    return Scenario.model_validate(
        {
            "name": "tiny-drafters",
            "purpose": "for tests",
            "federation": {"clients": 3, "rounds": 2},
            "train": {"lr": 0.2, "local_epochs": EPOCHS},
            "drafter": {
                "target": str(folder / "tiny"),
                "kind": "bigram",
                "domains": [f"{name}=folder:{folder / name}" for name in DOMAINS],
                "share_experts": True,
                "train_tokens": 400,
                "test_prompts": 2,
                "prompt_tokens": 6,
                "answer_tokens": 24,
            },
        }
    )


@pytest.fixture(scope="module")
def runs(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Every method, run once."""
    out = tmp_path_factory.mktemp("runs")
    jobs = [make_job(scenario, MethodSpec.parse(name), 0, out) for name in METHODS]
    outcome = run_all(jobs, EngineSetup(), Silent())
    assert not outcome.failed
    return {str(run.method): run for run in outcome.runs}


def final_state(run: Run) -> ServerState:
    """Read the arrays of the last checkpoint."""
    newest = sorted((run.folder / "checkpoints").glob("state-*.safetensors"))[-1]
    arrays = load_file(newest)

    def part(name: str) -> dict[str, np.ndarray]:
        return {key.removeprefix(name): value for key, value in arrays.items() if key.startswith(name)}

    return ServerState(shared=part("shared/"), extra=part("extra/"))


def trained(scenario: Scenario, client: int, round: int, start: dict[str, np.ndarray]) -> Any:
    """What ``client`` makes of ``start`` in a round, computed without any server."""
    how = Training(scenario.train, 0.0, derive_seed(0, "batches", client, 0, round))
    kind = drafter_bigram.KIND
    return kind.train(start, training_data(scenario, client, 0, kind), scenario.drafter, how)


def fresh(scenario: Scenario) -> dict[str, np.ndarray]:
    """What every client begins with."""
    target = open_target(scenario.drafter.target)
    return drafter_bigram.KIND.initial_parameters(target, scenario.drafter, derive_seed(0, "drafter"))


def test_fedavg_is_the_mean_weighted_by_tokens_of_what_clients_train(scenario: Scenario, runs: dict[str, Run]):
    average = fresh(scenario)
    for round in range(2):
        results = [trained(scenario, client, round, average) for client in range(3)]
        weights = np.array([result.examples for result in results], np.float64)
        stacked = np.stack([result.parameters["logits"].astype(np.float64) for result in results])
        average = {"logits": np.tensordot(weights / weights.sum(), stacked, 1).astype(np.float32)}
    found = final_state(runs["drafter-fedavg"]).shared
    assert found.keys() == {"logits"}
    np.testing.assert_allclose(found["logits"], average["logits"], rtol=0, atol=1e-6)


def test_local_drafters_never_leave_and_nothing_comes_down(runs: dict[str, Run]):
    run = runs["drafter-local"]
    assert not final_state(run).shared and not final_state(run).extra
    one_drafter = 4 * run.config["parameters"]["groups"]["drafter"]
    assert run.summary()["bytes_up"] + run.summary()["bytes_down"] < 0.2 * one_drafter
    assert all(set(f) == {key for key in f if "/average/" not in key} for f in run.stages[-1].figures.values())


def test_the_proximal_term_keeps_drafters_near_where_they_began(scenario: Scenario, runs: dict[str, Run]):
    start = fresh(scenario)["logits"]
    moved = {
        name: float(np.abs(final_state(runs[name]).shared["logits"] - start).sum())
        for name in ("drafter-fedavg", "drafter-fedprox:mu=0.5")
    }
    assert moved["drafter-fedprox:mu=0.5"] < moved["drafter-fedavg"]


def test_experts_are_trained_from_the_average_and_handed_to_all_others(scenario: Scenario, runs: dict[str, Run]):
    start = fresh(scenario)
    results = [trained(scenario, client, 0, start) for client in range(3)]
    weights = np.array([result.examples for result in results], np.float64) / sum(r.examples for r in results)
    average = sum(w * r.parameters["logits"].astype(np.float64) for w, r in zip(weights, results, strict=True))
    state = final_state(runs["drafter-pool"])
    np.testing.assert_allclose(state.shared["logits"], average, rtol=0, atol=1e-6)
    for client in range(3):
        expert = trained(scenario, client, 1, state.shared).parameters["logits"]
        np.testing.assert_allclose(state.extra[f"experts/{client}/logits"], expert, rtol=0, atol=1e-6)
    for client, figures in runs["drafter-pool"].stages[-1].figures.items():
        held = {key.split("/")[2] for key in figures if "/choice/" in key}
        assert held == {"own", "average", *(f"expert-{other}" for other in range(3) if other != client)}


def test_without_sharing_experts_stay_where_they_are(runs: dict[str, Run]):
    run = runs["drafter-pool:share=false"]
    assert not final_state(run).extra
    for figures in run.stages[-1].figures.values():
        assert {key.split("/")[2] for key in figures if "/choice/" in key} == {"own", "average"}
    one_drafter = 4 * run.config["parameters"]["groups"]["drafter"]
    # The average goes up once in two rounds; with sharing the expert goes up as well.
    assert run.summary()["bytes_up"] == pytest.approx(3 * one_drafter, rel=0.05)
    assert runs["drafter-pool"].summary()["bytes_up"] == pytest.approx(6 * one_drafter, rel=0.05)


def test_a_client_refuses_to_send_its_own_drafter_where_the_scenario_does_not_allow_it(scenario: Scenario):
    from edgeduet_client.drafters.handlers import check_sharing
    from edgeduet_server.strategies.catalogue import make_strategy
    from edgeduet_shared.experiment import Experiment

    plan = make_strategy("drafter-pool", {}, scenario, Experiment(scenario, 0)).plan(0, 1)
    assert plan is not None and plan.upload and plan.personal
    check_sharing(scenario, plan)
    closed = scenario.model_copy(update={"drafter": scenario.drafter.model_copy(update={"share_experts": False})})
    with pytest.raises(ConfigError, match="may not leave"):
        check_sharing(closed, plan)
    private = make_strategy("drafter-pool", {}, closed, Experiment(closed, 0)).plan(0, 1)
    assert private is not None and not private.upload


def test_the_pool_is_no_worse_than_its_members_where_the_domain_changes(runs: dict[str, Run]):
    summaries = {name: run.summary() for name, run in runs.items()}
    assert summaries["drafter-local"]["drafted_own"] > summaries["drafter-local"]["drafted_others"]
    assert summaries["drafter-pool"]["drafted_others"] > summaries["drafter-local"]["drafted_others"]
    for summary in summaries.values():
        assert 1 <= summary["drafted_own"] <= 4 and 0 <= summary["accepted_own"] <= 1


def test_bytes_told_before_a_run_are_those_measured(runs: dict[str, Run]):
    for run in runs.values():
        parameters, summary = run.config["parameters"], run.summary()
        assert parameters["expected_bytes_up"] == pytest.approx(summary["bytes_up"], rel=0.02, abs=300)
        assert parameters["expected_bytes_down"] == pytest.approx(summary["bytes_down"], rel=0.02, abs=300)


def test_the_report_shows_domains_by_methods(runs: dict[str, Run], tmp_path: Path):
    files = write_report(list(runs.values()), tmp_path)
    text = files.markdown.read_text("utf-8")
    for name in DOMAINS:
        assert f"| {name}, by its clients |" in text and f"| {name}, by the others |" in text
    assert "Whom the selector chose" in text and all(f"| {name} |" in text for name in METHODS)
    assert [path.name for path in files.figures] == ["domains.png"]
    assert files.figures[0].stat().st_size > 1000
    assert "Tokens per pass of the target" in files.html.read_text("utf-8")
    assert files.csv.read_text("utf-8").splitlines()[0].count("drafted_own") == 1


def test_an_interrupted_run_goes_on_to_the_same_numbers(scenario: Scenario, runs: dict[str, Run], tmp_path: Path):
    class Interrupting(Silent):
        def event(self, run: Any, event: Any) -> None:
            if event["event"] == "round" and event["round"] == 1:
                raise KeyboardInterrupt

    class Counting(Silent):
        rounds: list[int] = []  # noqa: RUF012 - of this test alone

        def event(self, run: Any, event: Any) -> None:
            if event["event"] == "round":
                self.rounds.append(event["round"])

    job = make_job(scenario, MethodSpec("drafter-pool"), 0, tmp_path)
    with pytest.raises((KeyboardInterrupt, RunStopped)):
        run_one(job, EngineSetup(), Interrupting())
    again = run_one(job, EngineSetup(), Counting(), resume=True)
    assert Counting.rounds == [1], "the first round is not trained again"
    whole = runs["drafter-pool"]
    assert {c: dict(f) for c, f in again.stages[-1].figures.items()} == {
        c: dict(f) for c, f in whole.stages[-1].figures.items()
    }
    np.testing.assert_array_equal(final_state(again).shared["logits"], final_state(whole).shared["logits"])


def test_methods_and_scenarios_must_be_about_the_same_thing(scenario: Scenario, tmp_path: Path):
    with pytest.raises(ConfigError, match="trains a classifier, scenario 'tiny-drafters' a drafter; use one of"):
        run_all([make_job(scenario, MethodSpec("fed-duet"), 0, tmp_path)], EngineSetup(), Silent())
    images = Scenario(name="images")
    with pytest.raises(ConfigError, match="trains a drafter"):
        run_all([make_job(images, MethodSpec("drafter-local"), 0, tmp_path)], EngineSetup(), Silent())


def test_a_scenario_without_drafters_is_written_as_before():
    assert "drafter" not in json.loads(Scenario(name="images").model_dump_json())


_WITH_WORKERS = """
import sys
from pathlib import Path
from edgeduet_client.drafters import kinds
from edgeduet_shared.config import Scenario
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_sim.progress import Silent
from edgeduet_sim.runner import EngineSetup, make_job, run_one
kinds.KINDS["bigram"] = "drafter_bigram:KIND"
scenario = Scenario.model_validate_json(sys.argv[1])
run_one(make_job(scenario, MethodSpec("drafter-pool"), 0, Path(sys.argv[2])), EngineSetup(workers=2), Silent())
"""


def test_worker_processes_change_nothing(scenario: Scenario, runs: dict[str, Run], tmp_path: Path):
    # In a process of its own: workers are forked there, and know the kind; spawned ones would not.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _WITH_WORKERS, scenario.model_dump_json(), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    (run,) = find_runs([tmp_path])
    whole = runs["drafter-pool"]
    assert {c: dict(f) for c, f in run.stages[-1].figures.items()} == {
        c: dict(f) for c, f in whole.stages[-1].figures.items()
    }
    np.testing.assert_array_equal(final_state(run).shared["logits"], final_state(whole).shared["logits"])
