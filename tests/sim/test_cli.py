"""The command line: quick help, one clear line for what the user can fix, and the right exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.config import Scenario, load_scenario
from edgeduet_shared.errors import ConfigError, DataError
from edgeduet_shared.method_spec import MethodSpec, parse_methods
from edgeduet_sim import cli
from edgeduet_sim.describe import find_settings, settings
from edgeduet_sim.scenario_files import open_scenario, resolve_source, scenario_names, scenario_path

Invoke = Callable[..., tuple[int, str, str]]
COMMANDS = (
    (),
    ("run",),
    ("compare",),
    ("report",),
    ("list",),
    ("describe",),
    ("doctor",),
    ("backbone",),
    ("backbone", "build"),
    ("backbone", "list"),
    ("backbone", "show"),
)


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line in this process; return exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["edgeduet-sim", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return call


def assert_one_line(err: str, *words: str) -> None:
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err, f"{word!r} is not in {err!r}"


# --- help ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(invoke: Invoke, command: tuple[str, ...]):
    code, out, _ = invoke(*command, "--help")
    assert code == 0 and "Usage" in out
    if command not in ((), ("backbone",)):
        assert "edgeduet-sim " + " ".join(command) in out.split("Usage", 1)[1].split("\n", 1)[1], "no example"


@pytest.mark.parametrize("arguments", [("--help",), ("run", "--help"), ("--version",)], ids=" ".join)
def test_help_needs_neither_torch_nor_flower(arguments: tuple[str, ...]):
    script = (
        "import sys; sys.argv = ['edgeduet-sim', *sys.argv[1:]]\n"
        "from edgeduet_sim.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'flwr', 'open_clip', 'matplotlib', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_shell_completion_offers_scenarios():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['edgeduet-sim']; from edgeduet_sim.cli import main; main()"],
        env={
            **_environment(),
            "_EDGEDUET_SIM_COMPLETE": "complete_bash",
            "COMP_WORDS": "edgeduet-sim run pacs",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "pacs-domain-iid" in done.stdout, done.stderr


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    paths = [str(root / part) for part in ("shared", "server", "client", "simulations")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


# --- what the user can fix ------------------------------------------------------------------------------


def test_unknown_scenario_names_the_nearest(invoke: Invoke):
    code, _, err = invoke("run", "pacs-domain-beta5")
    assert code == 2
    assert_one_line(err, "pacs-domain-beta05")


def test_unknown_key_names_the_nearest(invoke: Invoke):
    code, _, err = invoke("run", "demo", "--set", "train.leraning_rate=1")
    assert code == 2
    assert_one_line(err, "train.leraning_rate", "did you mean")


def test_a_value_out_of_bounds_names_key_and_value(invoke: Invoke):
    code, _, err = invoke("run", "demo", "--set", "federation.clients=0")
    assert code == 2
    assert_one_line(err, "federation.clients", "0")


def test_missing_data_path_names_the_path(invoke: Invoke, tmp_path: Path):
    code, _, err = invoke("run", "demo", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out"))
    assert code == 2
    assert_one_line(err, "nowhere", "--data")
    assert not (tmp_path / "out").exists()


def test_missing_scenario_file_is_one_line(invoke: Invoke, tmp_path: Path):
    code, _, err = invoke("run", str(tmp_path / "mine.toml"))
    assert code == 2
    assert_one_line(err, "mine.toml")


def test_a_report_without_runs_is_one_line(invoke: Invoke, tmp_path: Path):
    code, _, err = invoke("report", str(tmp_path))
    assert code == 2
    assert_one_line(err, "no run found")


def test_an_unknown_name_to_describe_names_the_nearest(invoke: Invoke):
    code, _, err = invoke("describe", "train.lrr")
    assert code == 2
    assert_one_line(err, "train.lr")


def test_real_data_scenarios_say_how_to_give_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("EDGEDUET_DATA", raising=False)
    monkeypatch.setattr("edgeduet_sim.scenario_files.real_data_folder", lambda: None)
    with pytest.raises(DataError, match=r"'pacs'.*--data PATH.*EDGEDUET_DATA"):
        open_scenario("pacs-domain-iid")
    (tmp_path / "pacs").mkdir()
    monkeypatch.undo()
    monkeypatch.setenv("EDGEDUET_DATA", str(tmp_path))
    assert open_scenario("pacs-domain-iid").data.source == f"folder:{(tmp_path / 'pacs').resolve()}"


# --- scenarios --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_file_is_valid_named_after_itself_and_has_a_purpose(name: str):
    scenario = load_scenario(scenario_path(name))
    assert scenario.name == name
    assert len(scenario.purpose) > 20 and "\n" not in scenario.purpose


def test_list_shows_every_scenario_with_its_purpose(invoke: Invoke):
    code, out, _ = invoke("list")
    assert code == 0
    for name in scenario_names():
        line = next(line for line in out.splitlines() if line.strip().startswith(name + " "))
        assert load_scenario(scenario_path(name)).purpose in line


def test_other_data_takes_the_backbone_for_real_images(tmp_path: Path):
    other = open_scenario("demo", data=str(tmp_path))
    assert other.data.source == f"folder:{tmp_path.resolve()}" and other.model.backbone == "clip-lite0"
    chosen = open_scenario("demo", ["model.backbone=clip-world"], data=str(tmp_path))
    assert chosen.model.backbone == "clip-world"
    assert open_scenario("demo", data="world") == open_scenario("demo")
    assert open_scenario("demo", data="hub:cifar10").data.source == "hub:cifar10"


def test_other_data_drops_domain_lists_unless_chosen(tmp_path: Path):
    assert open_scenario("pacs-domain-iid", data=str(tmp_path)).data.domains == ()
    chosen = open_scenario("pacs-domain-iid", ['data.domains=["photo"]'], data=str(tmp_path))
    assert chosen.data.domains == ("photo",)


def test_sources_other_than_folders_are_left_alone():
    assert resolve_source("world") == "world"
    assert resolve_source("hub:a/b") == "hub:a/b"


# --- describe -----------------------------------------------------------------------------------------------


def test_describe_knows_every_setting_with_bounds_and_meaning(invoke: Invoke):
    code, out, _ = invoke("describe")
    assert code == 0
    for setting in settings(Scenario):
        if setting.key not in ("name",):
            assert setting.meaning and setting.kind, setting.key
        assert setting.key in out
    lr = find_settings("train.lr")[0]
    assert lr.kind == "number, > 0" and json.loads(lr.default) == 1e-3
    assert "world" in find_settings("data.source")[0].default
    assert find_settings("stream.kind")[0].kind.startswith("class-incremental | domain-incremental")
    assert len(find_settings("privacy")) == 6


def test_describe_a_scenario_shows_its_own_values(invoke: Invoke):
    code, out, _ = invoke("describe", "pacs-domain-beta01")
    assert code == 0
    line = next(line for line in out.splitlines() if line.strip().startswith("partition.beta"))
    assert "0.1" in line


# --- methods ------------------------------------------------------------------------------------------------


def test_method_options_are_read_as_toml_values():
    spec = MethodSpec.parse("fed-duet:fusion=false+dispatch=random+consistency=0.5")
    assert spec.name == "fed-duet"
    assert spec.options == {"fusion": False, "dispatch": "random", "consistency": 0.5}


OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True),
    st.one_of(
        st.booleans(),
        st.integers(-999, 999),
        st.sampled_from([0.5, 0.1, 2.25]),
        st.sampled_from(["random", "cosine", "paper"]),
    ),
    max_size=4,
)


@given(OPTIONS)
def test_a_method_survives_being_written_and_read(options: dict[str, object]):
    spec = MethodSpec("fed-duet", options)
    assert MethodSpec.parse(str(spec)) == spec


@given(OPTIONS, OPTIONS)
def test_different_options_give_different_safe_folder_names(a: dict[str, object], b: dict[str, object]):
    one, two = MethodSpec("fed-duet", a), MethodSpec("fed-duet", b)
    assert (one.slug == two.slug) == (str(one) == str(two))
    assert len(one.slug) <= 70 and "/" not in one.slug


@pytest.mark.parametrize("text", ["fed-duet:fusion", "fed-duet:a=1+a=2", ":a=1"])
def test_malformed_methods_are_refused(text: str):
    with pytest.raises(ConfigError):
        MethodSpec.parse(text)


def test_all_stands_for_every_method_that_suits_the_scenario() -> None:
    from edgeduet_sim.methods import method_names, spell_out

    images = Scenario(name="images")
    texts = Scenario.model_validate({"name": "texts", "drafter": {"target": "m", "domains": ["a=folder:a"]}})
    both = [str(spec) for scenario in (images, texts) for spec in parse_methods(spell_out("all", scenario))]
    assert both == list(method_names())
    assert spell_out("local,fed-duet:fusion=false", images) == "local,fed-duet:fusion=false"


def test_a_method_list_has_no_doubles_and_is_not_empty():
    assert [str(m) for m in parse_methods("fed-duet, zero-shot,")] == ["fed-duet", "zero-shot"]
    with pytest.raises(ConfigError, match="twice"):
        parse_methods("local,local")
    with pytest.raises(ConfigError, match="empty"):
        parse_methods(" ,")


def test_report_command_prints_the_table_and_where_the_page_is(invoke: Invoke, record_run: Callable[..., Path]):
    folder = record_run("fed-duet")
    code, out, err = invoke("report", str(folder))
    assert code == 0, err
    assert "| fed-duet |" in out and str(folder / "report.html") in out


# --- whole commands on images of one's own --------------------------------------------------------------


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder of four classes with eight small pictures each."""
    from PIL import Image

    folder = tmp_path / "images"
    for number, name in enumerate(("red", "green", "blue", "grey")):
        (folder / name).mkdir(parents=True)
        for shade in range(8):
            colour = [40, 40, 40]
            colour[number % 3] += 20 * shade + 60 * (number < 3)
            Image.new("RGB", (32, 32), tuple(colour)).save(folder / name / f"{shade}.png")
    return folder


def run_on(images: Path, *more: str) -> tuple[str, ...]:
    settings = (
        "model.backbone=clip-world",
        "stream.kind=class-incremental",
        "federation.clients=2",
        "federation.rounds=1",
    )
    chosen = [part for setting in settings for part in ("--set", setting)]
    return ("run", "demo", "--data", str(images), *chosen, "--method", "promptfl", *more)


def test_run_on_a_folder_prints_data_first_and_the_numbers_last(invoke: Invoke, images: Path, tmp_path: Path):
    code, out, err = invoke(*run_on(images, "--out", str(tmp_path / "runs")))
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith(f"data: folder:{images}; backbone: clip-world") and "--data world" in lines[0]
    assert "Avg" in out and "report: edgeduet-sim report" in lines[-1]


def test_json_mode_prints_nothing_but_json(invoke: Invoke, images: Path, tmp_path: Path):
    code, out, err = invoke(*run_on(images, "--out", str(tmp_path / "runs"), "--json"))
    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    assert events[0]["event"] == "run" and events[-1]["event"] == "end"
    summary = next(event for event in events if event["event"] == "summary")
    assert 0 <= summary["numbers"]["avg"] <= 1


def test_a_corrupt_image_is_named_and_skipped_only_when_asked(invoke: Invoke, images: Path, tmp_path: Path):
    (images / "red" / "3.png").write_bytes(b"not a picture")
    out = tmp_path / "runs"
    code, _, err = invoke(*run_on(images, "--out", str(out), "--quiet"))
    assert code == 2
    assert_one_line(err, "3.png", "skip")
    assert not out.exists()
    code, shown, err = invoke(*run_on(images, "--out", str(out), "--skip-corrupt"))
    assert code == 0, err
    assert "left out 1 images" in shown
    (config,) = out.glob("*/config.json")
    assert json.loads(config.read_text())["data"]["skipped"] == 1


def test_an_unusable_output_folder_is_one_line_before_any_work(invoke: Invoke, images: Path, tmp_path: Path):
    (tmp_path / "runs").write_text("a file")
    code, _, err = invoke(*run_on(images, "--out", str(tmp_path / "runs"), "--quiet"))
    assert code == 2
    assert_one_line(err, "choose another")


def test_a_backbone_that_does_not_exist_is_one_line(invoke: Invoke, images: Path, tmp_path: Path):
    code, _, err = invoke(
        *run_on(images, "--out", str(tmp_path / "runs"), "--quiet", "--set", "model.backbone=clip-wrold")
    )
    assert code == 2
    assert_one_line(err, "clip-world")
    assert not (tmp_path / "runs").exists()


def test_an_install_without_the_extra_says_which_one():
    # None in sys.modules makes an import fail as it does where the package is absent.
    code = "import sys; sys.modules['flwr'] = None; sys.argv[1:] = ['list']; import edgeduet_sim.cli as c; c.main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert_one_line(result.stderr, "pip install 'edgeduet[sim]'")


def test_a_bug_is_one_line_too_and_a_traceback_when_asked(invoke: Invoke, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError("oh no")

    monkeypatch.setattr("edgeduet_sim.results.find_runs", broken)
    code, _, err = invoke("report", "x")
    assert code == 1 and err.count("\n") == 1 and "EDGEDUET_DEBUG=1" in err
    monkeypatch.setenv("EDGEDUET_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["edgeduet-sim", "report", "x"])
    with pytest.raises(RuntimeError, match="oh no"):
        cli.main()
