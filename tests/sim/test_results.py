"""The run folder: claimed before any work, derived from recorded events, nothing half written."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeduet_shared import metrics
from edgeduet_shared.errors import EdgeDuetError, StateError
from edgeduet_shared.method_spec import MethodSpec
from edgeduet_sim.results import FORMAT, RunFolder, find_runs, is_finished, load_run, run_digest, run_folder
from recorded_runs import IMAGES, SLICE, TASKS, accuracies_of, small_scenario

RecordRun = Callable[..., Path]
DIGEST = "0123456789abcdef"


def test_a_recorded_run_gives_back_every_number(record_run: RecordRun):
    run = load_run(record_run("fed-duet", 3))
    expected = accuracies_of("fed-duet", 3)
    matrix = run.evaluations.matrix_TT
    assert matrix == pytest.approx(expected, abs=0.5 / IMAGES)
    summary = run.summary()
    assert summary["avg"] == pytest.approx(metrics.mean(metrics.stage_accuracies(matrix, "domain-incremental")))
    assert summary["forgetting"] == pytest.approx(metrics.forgetting(matrix))
    assert summary["zero_shot_retention"] == pytest.approx(28 / 50 - 30 / 50)
    assert summary["fwt"] == pytest.approx(metrics.forward_transfer(matrix, [0.7, 0.55, 0.45, 0.35]))
    assert 0 < summary["personal"] <= 1
    assert run.evaluations.personal_MTT.shape == (5, len(TASKS), len(TASKS))
    assert run.evaluations.client_totals_MTT.tolist() == [[[SLICE] * len(TASKS)] * len(TASKS)] * 5


def test_bytes_and_seconds_are_sums_over_rounds(record_run: RecordRun):
    run = load_run(record_run("promptfl"))
    rounds = len(TASKS) * 2
    assert run.summary()["bytes_down"] == 40_000 * rounds
    assert run.summary()["bytes_up"] == (20_000 + 8_000) * rounds
    assert run.summary()["seconds"] == pytest.approx(1.5 * rounds + 0.5 * len(TASKS))


def test_summary_file_holds_the_derived_numbers_and_null_for_what_does_not_exist(record_run: RecordRun):
    folder = record_run("fed-duet", changes={"zero_shot": None})
    written = json.loads((folder / "summary.json").read_text())
    derived = load_run(folder).summary()
    assert written["fwt"] is None and math.isnan(derived["fwt"])
    assert written["avg"] == pytest.approx(derived["avg"])
    assert set(written) == set(derived)


def test_an_unfinished_run_is_readable_and_marked(record_run: RecordRun):
    run = load_run(record_run("fed-duet", stages=2, finish=False))
    assert not run.finished and len(run.stages) == 2
    assert math.isnan(run.summary()["last"])
    assert run.summary()["avg"] > 0


def test_failures_and_skipped_rounds_are_counted(record_run: RecordRun):
    run = load_run(record_run("promptfl", skipped=True))
    assert run.failures == {"no-answer": 2} and run.skipped_rounds == 1
    assert run.summary()["failed_answers"] == 2


def test_digest_depends_on_everything_that_changes_a_result_and_on_nothing_else():
    scenario = small_scenario()
    base = run_digest(scenario, MethodSpec.parse("fed-duet"), 0)
    assert base == run_digest(small_scenario(), MethodSpec("fed-duet", {}), 0)
    others = {
        run_digest(small_scenario(rounds=3), MethodSpec("fed-duet"), 0),
        run_digest(scenario, MethodSpec("promptfl"), 0),
        run_digest(scenario, MethodSpec.parse("fed-duet:fusion=false"), 0),
        run_digest(scenario, MethodSpec("fed-duet"), 1),
    }
    assert base not in others and len(others) == 4


def test_another_configuration_gets_another_folder(tmp_path: Path):
    a = run_folder(tmp_path, small_scenario(), MethodSpec("fed-duet"), 0)
    b = run_folder(tmp_path, small_scenario(rounds=9), MethodSpec("fed-duet"), 0)
    assert a != b and a.parent == b.parent == tmp_path


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(EdgeDuetError, match="not a run of edgeduet-sim"):
        RunFolder(tmp_path, DIGEST, resume=False)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_of_another_run_is_refused(tmp_path: Path):
    RunFolder(tmp_path / "run", DIGEST, resume=False).begin({"format": FORMAT, "digest": DIGEST})
    with pytest.raises(StateError, match="another run"):
        RunFolder(tmp_path / "run", "f" * 16, resume=True)


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path: Path):
    folder = RunFolder(tmp_path / "new" / "run", DIGEST, resume=False)
    assert folder.path.is_dir()
    folder.abandon()
    assert list(tmp_path.iterdir()) == []


def test_abandoning_keeps_what_was_there(tmp_path: Path):
    folder = RunFolder(tmp_path, DIGEST, resume=False)
    folder.abandon()
    assert tmp_path.is_dir()


def test_an_interrupted_run_needs_resume_and_a_finished_one_is_kept(record_run: RecordRun):
    unfinished = record_run("fed-duet", stages=1, finish=False)
    digest = json.loads((unfinished / "config.json").read_text())["digest"]
    with pytest.raises(StateError, match="--resume"):
        RunFolder(unfinished, digest, resume=False)
    assert RunFolder(unfinished, digest, resume=True).resumed
    finished = record_run("promptfl")
    assert is_finished(finished)
    with pytest.raises(StateError, match="finished"):
        RunFolder(finished, json.loads((finished / "config.json").read_text())["digest"], resume=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_clear_line(tmp_path: Path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(EdgeDuetError, match="permission denied"):
            RunFolder(tmp_path / "run", DIGEST, resume=False)
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_file_in_the_way_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeDuetError, match="choose another"):
        RunFolder(tmp_path / "file" / "run", DIGEST, resume=False)


def test_a_damaged_config_names_the_file(record_run: RecordRun):
    folder = record_run("fed-duet")
    (folder / "config.json").write_text('{"format": 1,')
    with pytest.raises(StateError, match=r"config\.json: damaged"):
        load_run(folder)


def test_runs_are_found_below_a_folder_each_once(record_run: RecordRun):
    folders = {record_run(method, seed) for method in ("fed-duet", "promptfl") for seed in (0, 1)}
    top = next(iter(folders)).parent
    runs = find_runs([top, *folders])
    assert {run.folder for run in runs} == {folder.resolve() for folder in folders}
    with pytest.raises(StateError, match="no run found"):
        find_runs([top / "nothing"])
