"""`make demo` fits the scenario to the data it is given, and refuses what it cannot use before installing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from demo import data_arguments, default_out

ROOT = Path(__file__).resolve().parents[2]


def images(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "1.jpg").write_bytes(b"")
    return root


def test_the_built_in_world_needs_no_settings() -> None:
    assert data_arguments("") == []


@pytest.mark.parametrize(
    ("data", "folder"),
    [("", "runs/demo"), ("/images/My Cats/", "runs/demo-my-cats"), ("hub:uoft-cs/cifar10", "runs/demo-cifar10")],
)
def test_each_choice_of_data_has_its_own_results(data: str, folder: str) -> None:
    assert default_out(data) == folder


def test_a_folder_with_domains_becomes_a_domain_stream(tmp_path: Path) -> None:
    root = images(tmp_path, "photo/cat", "photo/dog", "sketch/cat")
    assert data_arguments(str(root))[2:] == [
        "--set",
        "model.backbone=clip-lite0",
        "--set",
        "stream.kind=domain-incremental",
    ]


@pytest.mark.parametrize(("classes", "per_task"), [(3, 1), (5, 1), (6, 2), (100, 20)])
def test_a_folder_of_classes_becomes_five_class_incremental_tasks(tmp_path: Path, classes: int, per_task: int) -> None:
    root = images(tmp_path, *(f"class{number}" for number in range(classes)))
    arguments = data_arguments(str(root))
    assert "stream.kind=class-incremental" in arguments
    assert f"stream.classes_per_task={per_task}" in arguments


@pytest.mark.parametrize("data", ["nowhere", "empty"])
def test_data_that_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path, data: str) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--data", str(tmp_path / data)]
    result = subprocess.run([*command, "--venv", str(tmp_path / "venv")], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: DATA=")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()
