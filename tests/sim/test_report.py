"""Reports from recorded runs: complete, self-contained, honest about what is missing."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgeduet_sim import plots
from edgeduet_sim.comparison import compare, dispatch_counts, paired_difference
from edgeduet_sim.report import best_of, configuration_text, markdown, verdict, write_report
from edgeduet_sim.results import find_runs

RecordRun = Callable[..., Path]
VOID = {"meta", "br", "hr", "img", "input", "link", "use", "path", "rect", "image", "circle", "line", "col"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects what a page refers to and says."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(html: str) -> Outline:
    outline = Outline()
    outline.feed(html)
    outline.close()
    assert not outline.open, f"left open: {outline.open}"
    return outline


@pytest.fixture
def all_methods(record_run: RecordRun) -> Path:
    """Three seeds of five methods and one ablation; returns the folder above the runs."""
    folder = Path()
    for method in ("fed-duet", "fedavg-adapter", "zero-shot", "local", "joint", "fed-duet:fusion=false"):
        for seed in range(3):
            folder = record_run(method, seed, skipped=(method, seed) == ("fedavg-adapter", 1))
    return folder.parent


def test_report_is_one_file_that_loads_nothing_from_elsewhere(all_methods: Path):
    files = write_report(find_runs([all_methods]), all_methods)
    html = files.html.read_text(encoding="utf-8")
    page = parse(html)
    outside = [r for r in page.references if not r.startswith(("#", "data:image/png;base64,"))]
    assert outside == []
    assert "<script" not in html and "@import" not in html and "<link" not in html
    assert not re.search(r"url\((?!#)", html)
    # Namespace names are the only addresses on the page.
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_report_shows_every_figure_and_every_method(all_methods: Path):
    files = write_report(find_runs([all_methods]), all_methods)
    html = files.html.read_text(encoding="utf-8")
    for name in ("accuracy-over-stages", "personal-over-stages", "clients", "forgetting", "bytes-accuracy"):
        assert f'id="{name}"' in html and (all_methods / "figures" / f"{name}.png").is_file()
    for method in ("fed-duet", "fedavg-adapter", "zero-shot", "local", "joint"):
        assert f'id="matrix-{method}"' in html
        assert f'<th scope="row">{method}</th>' in html
    assert 'id="dispatch-fed-duet"' in html and 'id="ablation"' in html
    text = " ".join(parse(html).text)
    assert "edgeduet-sim run small --method fed-duet" in text
    assert "federation.clients = 5" in text
    assert "split-of-seed-2" in text
    assert "2 no-answer" in text and "1 of 8" in text
    for path in files.figures:
        with Image.open(path) as picture:
            assert picture.width > 250


def test_report_follows_the_readers_theme(all_methods: Path):
    html = write_report(find_runs([all_methods]), all_methods).html.read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in html
    assert "#010a0" not in html and "#010b0" not in html
    for variable in ("--ink", "--grid", "--s0", "--s1"):
        assert f"var({variable})" in html


def test_missing_references_are_named(record_run: RecordRun):
    record_run("fed-duet")
    folder = record_run("zero-shot")
    (comparison,) = compare(find_runs([folder.parent]))
    assert any("Not in this report: local, joint" in warning for warning in comparison.warnings)
    files = write_report(find_runs([folder.parent]), folder.parent)
    assert "Not in this report: local, joint" in files.html.read_text(encoding="utf-8")
    assert "Not in this report: local, joint" in files.markdown.read_text(encoding="utf-8")


def test_different_splits_of_one_seed_are_a_warning(record_run: RecordRun):
    record_run("fed-duet")
    folder = record_run("zero-shot", changes={"split": "another"})
    (comparison,) = compare(find_runs([folder.parent]))
    assert any("different splits" in warning for warning in comparison.warnings)


def test_unfinished_runs_are_left_out_and_named(record_run: RecordRun):
    record_run("fed-duet", 0)
    folder = record_run("fed-duet", 1, stages=2, finish=False)
    (comparison,) = compare(find_runs([folder.parent]))
    assert [run.seed for run in comparison.methods[0].runs] == [0]
    assert any("fed-duet (seed 1)" in warning for warning in comparison.warnings)
    write_report(find_runs([folder.parent]), folder.parent)


def test_a_report_on_one_unfinished_run_only_says_so(record_run: RecordRun):
    folder = record_run("fed-duet", stages=0, finish=False)
    html = write_report(find_runs([folder]), folder).html.read_text(encoding="utf-8")
    parse(html)
    assert "No run has finished yet" in html


def test_verdict_names_the_best_other_federated_method(record_run: RecordRun):
    record_run("fed-duet:dispatch=cosine")
    record_run("fed-duet")
    folder = record_run("fedavg-adapter")
    (comparison,) = compare(find_runs([folder.parent]))
    assert "above the best other federated method (fedavg-adapter)" in verdict(comparison)[0]


def test_verdict_says_below_when_the_main_method_loses(record_run: RecordRun, monkeypatch: pytest.MonkeyPatch):
    import recorded_runs

    usual = recorded_runs.accuracies_of
    monkeypatch.setattr(
        recorded_runs, "accuracies_of", lambda method, seed: usual(method, seed) - 0.4 * (method == "fed-duet")
    )
    record_run("fed-duet")
    folder = record_run("fedavg-adapter")
    (comparison,) = compare(find_runs([folder.parent]))
    assert "points BELOW the best other federated method (fedavg-adapter)" in verdict(comparison)[0]


def test_verdict_compares_common_seeds_only(record_run: RecordRun):
    record_run("fed-duet", 0)
    record_run("fedavg-adapter", 0)
    folder = record_run("promptfl", 7)
    (comparison,) = compare(find_runs([folder.parent]))
    rival = comparison.best_federated("avg")
    assert rival is not None and rival.name == "fedavg-adapter"


def test_ablation_is_paired_by_seed(all_methods: Path):
    (comparison,) = compare(find_runs([all_methods]))
    assert [r.name for r in comparison.ablations] == ["fed-duet:fusion=false"]
    full = comparison.find("fed-duet")
    assert full is not None
    difference = paired_difference(comparison.ablations[0], full, "avg")
    assert difference.mean == pytest.approx(-0.02, abs=0.01) and difference.count == 3


def test_intransigence_is_measured_against_joint_of_the_same_seed(all_methods: Path):
    (comparison,) = compare(find_runs([all_methods]))
    duet, joint = comparison.find("fed-duet"), comparison.find("joint")
    assert duet is not None and joint is not None
    assert math.isnan(joint.numbers["intransigence"].mean)
    expected = [
        np.mean(np.diag(j.evaluations.matrix_TT) - np.diag(d.evaluations.matrix_TT))
        for d, j in zip(duet.runs, joint.runs, strict=True)
    ]
    assert duet.numbers["intransigence"].mean == pytest.approx(np.mean(expected))


def test_csv_holds_unrounded_numbers_of_every_run(all_methods: Path):
    runs = find_runs([all_methods])
    files = write_report(runs, all_methods)
    rows = list(csv.DictReader(io.StringIO(files.csv.read_text(encoding="utf-8"))))
    assert len(rows) == 18
    by_key = {(row["method"], row["seed"]): row for row in rows}
    for run in runs:
        assert float(by_key[str(run.method), str(run.seed)]["avg"]) == run.summary()["avg"]


def test_markdown_marks_the_best_federated_method_only(all_methods: Path):
    (comparison,) = compare(find_runs([all_methods]))
    assert best_of(comparison.methods, "avg") == {"fed-duet"}
    table = markdown(comparison)
    assert re.search(r"\| fed-duet \| 3 \| \*\*[\d.]+ ± [\d.]+\*\*", table)
    joint_row = next(line for line in table.splitlines() if line.startswith("| joint"))
    assert "**" not in joint_row


def test_dispatch_counts_add_up(record_run: RecordRun):
    (run,) = find_runs([record_run("fed-duet")])
    counts = dispatch_counts(run)
    assert counts.shape == (5, 64)
    assert (counts.sum(axis=1) == 8 * 2 * 4).all()


def test_scenarios_are_kept_apart(record_run: RecordRun):
    from recorded_runs import small_scenario

    record_run("fed-duet")
    folder = record_run("fed-duet", scenario=small_scenario(rounds=3))
    assert len(compare(find_runs([folder.parent]))) == 2


def test_configuration_lines_are_valid_overrides():
    from edgeduet_shared.config import Scenario, apply_overrides
    from recorded_runs import small_scenario

    scenario = small_scenario(clients=7)
    lines = [line for line in configuration_text(scenario).splitlines() if not line.endswith("= null")]
    values = apply_overrides({}, [line.replace(" = ", "=", 1) for line in lines], Scenario)
    assert Scenario.model_validate(values) == scenario


@given(st.lists(st.floats(0, 100), max_size=14).map(sorted), st.floats(0.1, 5))
def test_labels_are_spread_apart_in_order(positions: list[float], gap: float):
    moved = plots.spread_out(positions, gap)
    assert len(moved) == len(positions)
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(moved))
    if positions:
        assert sum(moved) == pytest.approx(sum(positions), abs=1e-6 * len(moved) * 100)


def test_methods_differ_without_colour(all_methods: Path):
    (comparison,) = compare(find_runs([all_methods]))
    styles = [plots.style_of(r, comparison.methods, plots.LIGHT) for r in comparison.methods]
    assert len({(s.marker, str(s.dash)) for s in styles}) == len(styles)
    known = [(plots._MARKERS[i % len(plots._MARKERS)], str(plots._DASHES[i % len(plots._DASHES)])) for i in range(10)]
    assert len(set(known)) == 10
