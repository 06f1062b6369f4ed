"""What can be said about speculation, in a configuration and on a command line, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.speculation.ngram import FACTORY
from edgeduet_client.llm.speculation.options import SpeculationOptions, options_from_command_line
from edgeduet_client.llm.speculation.registry import BUILT_IN, GROUP, drafter_factory, drafter_kinds


def test_nothing_said_is_the_default() -> None:
    options = SpeculationOptions()
    assert (options.mode, options.verify, options.selector, options.lengths) == ("fast", "exact", "ratio", (1, 2, 4, 8))
    assert options.drafters is None
    assert options.longest == 8


def test_lengths_are_a_set_in_order() -> None:
    assert SpeculationOptions(lengths=(4, 1, 4)).lengths == (1, 4)


def test_a_command_line_says_everything() -> None:
    options = options_from_command_line(
        "exact",
        ["ngram", "notes=ngram:corpus=notes.txt,longest=6"],
        "fixed",
        ["lengths=[2,4]", "eval_budget=0.1", "verify=fly", "fly.window=4", "trace=t.jsonl"],
    )
    assert options is not None and options.drafters is not None
    assert [(d.name, d.kind, d.options) for d in options.drafters] == [
        ("ngram", "ngram", {}),
        ("notes", "ngram", {"corpus": "notes.txt", "longest": 6}),
    ]
    assert (options.mode, options.selector, options.lengths, options.eval_budget) == ("exact", "fixed", (2, 4), 0.1)
    assert (options.verify, options.fly.window, options.fly.theta, options.trace) == ("fly", 4, 0.3, Path("t.jsonl"))


def test_no_drafter_at_all_can_be_asked_for() -> None:
    options = options_from_command_line("exact", ["none"])
    assert options is not None
    assert options.drafters == ()


@pytest.mark.parametrize("mode", [None, "off"])
def test_speculation_is_off_unless_asked_for(mode: str | None) -> None:
    assert options_from_command_line(mode) is None
    with pytest.raises(RequestError, match="do nothing without --speculate"):
        options_from_command_line(mode, ["ngram"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"selektor": "ratio"}, "no such setting: selektor; did you mean 'selector'"),
        ({"verify": "fly", "fly": {"windw": 3}}, "no such setting: fly.windw; did you mean 'window'"),
        ({"drafters": [{"name": "a", "knd": "ngram"}]}, "drafters.0"),
        ({"drafters": [{"name": "a", "kind": "ngram"}, {"name": "a", "kind": "model"}]}, "two drafters are called a"),
        ({"fly": {"window": 3}}, "settings of fly have no effect with verify=exact"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [0]}, "lengths.0"),
        ({"eval_budget": 1.0}, "eval_budget"),
        ({"hysteresis": 0.9}, "hysteresis"),
        ({"mode": "sloppy"}, "mode"),
        ({"verify": "typical"}, "verify"),
        ({"fly": {"theta": float("nan")}, "verify": "fly"}, "fly.theta"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as refused:
        SpeculationOptions.from_mapping(values)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["a=ngram:longest", "a=ngram:=3"])
def test_a_drafter_that_is_written_wrong_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="write NAME=KIND:KEY=VALUE"):
        options_from_command_line("fast", [text])


def test_a_pair_needs_a_value() -> None:
    with pytest.raises(RequestError, match="write KEY=VALUE"):
        options_from_command_line("fast", pairs=["lengths"])


def test_the_built_in_kinds_need_no_installed_distribution() -> None:
    assert set(BUILT_IN) <= set(drafter_kinds())
    assert drafter_factory("ngram") is FACTORY


def test_an_unknown_kind_is_refused_with_what_there_is() -> None:
    with pytest.raises(RequestError, match="no drafter of kind 'ngrm'; did you mean 'ngram'"):
        drafter_factory("ngrm")


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, entry: str, code: str) -> None:
    """Put a distribution that registers a drafter kind on the path, as pip would."""
    info = folder / "others_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others-drafter\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n", "utf-8")
    (folder / "others_drafter.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_another_package_can_register_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "class F:\n    kind = 'theirs'\n    def open(self, *given):\n        return given\nFACTORY = F()\n"
    installed(tmp_path, monkeypatch, "theirs = others_drafter:FACTORY", code)
    assert "theirs" in drafter_kinds()
    assert drafter_factory("theirs").open("x", {}, "model") == ("x", {}, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["others_drafter_missing:FACTORY", "others_drafter:NOTHING", "others_drafter:WRONG"])
def test_a_kind_that_cannot_be_loaded_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    installed(tmp_path, monkeypatch, f"theirs = {value}", "WRONG = 3\n")
    with pytest.raises(ModelError, match="the drafter kind 'theirs'"):
        drafter_factory("theirs")
