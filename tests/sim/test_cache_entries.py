"""What the cache holds is shown; what goes is old, confirmed, and not in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.features import FeatureCache, take_away
from edgeduet_shared.data.sources import load_table
from edgeduet_sim.cache_entries import find_entries, remove_entries, summary_rows, unused_for
from edgeduet_sim.cli import app

OLD = time.time() - 40 * 86_400

HOLDER = """
import sys
from pathlib import Path
from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.features import _open_entry

entry = _open_entry(Path(sys.argv[1]), 3)
print("held", flush=True)
sys.stdin.readline()
assert entry.sum() == 3 * 4, "still readable"
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with an entry of every kind of shape."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("EDGEDUET_CACHE", str(folder))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *_, **__: str(folder))
    for name, size in (("features/a.npy", 300), ("features/b.partial", 20), ("files/c.json", 10)):
        _write(folder / name, size)
    _write(folder / "features" / "a.lock", 0)
    _write(folder / "backbone-build" / "clip-lite0" / "words.pt", 500)
    _write(folder / "backbone-build" / "clip-lite0" / "deep" / "more.pt", 5)
    _write(folder / "somebody-elses" / "letters.txt", 7)
    return folder


def _write(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def _age(path: Path) -> None:
    for file in [path] if path.is_file() else path.rglob("*"):
        os.utime(file, (OLD, OLD))


def _entry_file(root: Path) -> Path:
    path = root / "features" / "whole.npy"
    np.save(path, np.ones((3, 4), np.float16))
    return path


def _cache(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cache", *arguments])
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_everything_of_ours_is_found_with_its_size_and_nothing_else(root: Path) -> None:
    found = {entry.path.relative_to(root).as_posix(): entry.size for entry in find_entries()}

    assert found == {
        "backbone-build/clip-lite0": 505,
        "features/a.npy": 300,
        "features/b.partial": 20,
        "files/c.json": 10,
    }


def test_the_table_has_a_row_per_folder_and_the_total(root: Path) -> None:
    rows = summary_rows(find_entries())

    assert [(row[0], row[2]) for row in rows] == [
        ("backbones being built", "1"),
        ("image features", "2"),
        ("checked image folders", "1"),
        ("total", "4"),
    ]
    code, output = _cache()
    assert code == 0 and "image features" in output


def test_what_was_used_within_the_days_stays(root: Path) -> None:
    _age(root / "features" / "a.npy")
    old = unused_for(find_entries(), 30)

    assert [entry.path.name for entry in old] == ["a.npy"]
    assert unused_for(find_entries(), 41) == []
    hours_ago = time.time() - 7_200
    os.utime(root / "features" / "a.npy", (hours_ago, hours_ago))
    assert not unused_for(find_entries(), 0), "never what was used within a day"


def test_a_folder_is_as_young_as_its_youngest_file(root: Path) -> None:
    _age(root / "backbone-build")
    os.utime(root / "backbone-build" / "clip-lite0" / "deep" / "more.pt")

    assert not unused_for(find_entries(), 30)


def test_pruning_asks_and_does_nothing_unless_told_yes(root: Path) -> None:
    _age(root / "files" / "c.json")

    code, output = _cache("--prune")

    assert code != 0 and "--yes" in output
    assert (root / "files" / "c.json").exists()


def test_pruning_removes_what_is_old_and_only_that(root: Path) -> None:
    _age(root / "files" / "c.json")
    _age(root / "backbone-build")

    code, output = _cache("--prune", "--yes")

    assert (code, "removed 2 entries" in output) == (0, True)
    assert {entry.path.name for entry in find_entries()} == {"a.npy", "b.partial"}
    assert (root / "somebody-elses" / "letters.txt").exists()
    assert "nothing to remove" in _cache("--prune")[1]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows refuses to remove mapped files by itself")
def test_features_that_another_process_reads_stay_until_it_ends(root: Path) -> None:
    path = _entry_file(root)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        _age(path)
        entries = [entry for entry in find_entries() if entry.path == path]

        assert remove_entries(entries) == [] and path.exists()

        holder.stdin.write("\n")
        holder.stdin.close()
        assert holder.wait(timeout=120) == 0
    assert remove_entries(entries) == entries and not path.exists()


def test_features_that_are_being_encoded_stay(root: Path) -> None:
    import filelock

    partial = root / "features" / "b.partial"
    with filelock.FileLock(partial.with_suffix(".lock")):
        assert not take_away(partial)
    assert partial.exists()
    assert take_away(partial)


def test_a_use_makes_features_young_again_and_pruned_ones_are_encoded_again(root: Path) -> None:
    table = load_table(DataConfig(domains=("photo",), classes=("star",), max_per_class=2))
    cache = FeatureCache(root)
    arguments = {"model_key": "k", "transform": _pixels, "encode": lambda x: x.mean((2, 3)), "progress": False}
    first = np.array(cache.open(table, **arguments))
    path = cache.path(table, model_key="k", transform=_pixels)
    _age(path)

    assert (np.array(cache.open(table, **arguments)) == first).all()
    assert not [entry for entry in unused_for(find_entries(), 30) if entry.path == path]
    assert take_away(path)
    assert (np.array(cache.open(table, **arguments)) == first).all()


def _pixels(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(picture, np.float32)).permute(2, 0, 1) / 255
