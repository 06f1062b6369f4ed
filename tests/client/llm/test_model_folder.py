"""Model folders: whole or not there, altered files found, the old model kept until the new one is whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import family_table
from edgeduet_client.llm.free_memory import available_memory
from edgeduet_client.llm.model_folder import (
    FAMILIES,
    MANIFEST,
    ModelFolder,
    list_models,
    models_root,
    new_folder,
)
from edgeduet_shared.errors import EdgeDuetError
from tiny_llm import write_model


def _hidden(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".") and path.suffix != ".lock")


def _replace(root: Path, name: str, *, seed: int, fail: bool = False) -> None:
    with new_folder(name, root, replace=True) as folder:
        write_model(folder, name=name, seed=seed)
        if fail:
            raise ModelError("the last check failed")


def test_a_folder_gets_its_name_only_when_all_is_done(tmp_path: Path):
    with new_folder("m", tmp_path, replace=False) as folder:
        write_model(folder, name="m")
        assert not (tmp_path / "m").exists()
        assert list_models(tmp_path) == ([], [])
    assert [model.name for model in list_models(tmp_path)[0]] == ["m"]
    assert _hidden(tmp_path) == []


def test_a_failed_import_leaves_nothing(tmp_path: Path):
    with pytest.raises(ModelError, match="the last check failed"):
        _replace(tmp_path, "m", seed=0, fail=True)
    assert list_models(tmp_path) == ([], []) and _hidden(tmp_path) == []


def test_a_failed_replacement_keeps_the_old_model(tmp_path: Path):
    _replace(tmp_path, "m", seed=0)
    before = ModelFolder.open("m", tmp_path).manifest
    with pytest.raises(ModelError):
        _replace(tmp_path, "m", seed=1, fail=True)
    assert ModelFolder.open("m", tmp_path).manifest == before
    _replace(tmp_path, "m", seed=1)
    after = ModelFolder.open("m", tmp_path)
    assert after.manifest.files != before.files
    after.verify()
    assert _hidden(tmp_path) == []


def test_a_name_that_is_taken_needs_replace(tmp_path: Path):
    _replace(tmp_path, "m", seed=0)
    with (
        pytest.raises(ModelError, match=r"a model named 'm' exists .*--replace"),
        new_folder("m", tmp_path, replace=False),
    ):
        pass


def test_two_at_once_cannot_have_one_name(tmp_path: Path):
    with new_folder("first", tmp_path, replace=False) as folder:
        with (
            pytest.raises(ModelError, match="another process is importing 'first'"),
            new_folder("first", tmp_path, replace=True),
        ):
            pass
        write_model(folder)
    with new_folder("m", tmp_path, replace=False) as folder, new_folder("other", tmp_path, replace=False) as beside:
        write_model(folder)
        write_model(beside)


def test_leftovers_of_killed_imports_go_with_the_next_one(tmp_path: Path):
    (tmp_path / ".unfinished-m").mkdir()
    (tmp_path / ".unfinished-m" / "model.onnx.data").write_bytes(bytes(10))
    (tmp_path / ".unfinished-another").mkdir()
    with new_folder("at-work", tmp_path, replace=False) as folder:
        (tmp_path / ".unfinished-stays").mkdir()
        _replace(tmp_path, "m", seed=0)
        assert folder.is_dir()  # that one is not a leftover
        write_model(folder)
    assert [model.name for model in list_models(tmp_path)[0]] == ["tiny", "m"]
    assert _hidden(tmp_path) == []


@pytest.mark.parametrize("asked_by", ["open", "import"])
def test_a_model_that_lost_its_name_to_a_kill_gets_it_back(tmp_path: Path, asked_by: str):
    """Between the two renames of a replacement, neither has the name."""
    _replace(tmp_path, "m", seed=0)
    (tmp_path / "m").rename(tmp_path / ".unfinished-former-m")
    if asked_by == "open":
        assert ModelFolder.open("m", tmp_path).name == "m"
    else:
        with pytest.raises(ModelError, match="exists"), new_folder("m", tmp_path, replace=False):
            pass
    ModelFolder.open("m", tmp_path).verify()


@pytest.mark.parametrize("place", ["start", "middle", "end"])
def test_verify_names_the_file_that_was_altered(tmp_path: Path, place: str):
    folder = write_model(tmp_path / "m")
    for name in folder.manifest.files:
        file = folder.file(name)
        content = bytearray(file.read_bytes())
        at = {"start": 0, "middle": len(content) // 2, "end": len(content) - 1}[place]
        content[at] ^= 1
        file.write_bytes(content)
        with pytest.raises(ModelError, match=f"{name} was altered since it was imported; import it again: edgeduet"):
            folder.verify()
        content[at] ^= 1
        file.write_bytes(content)
    folder.verify()


def test_opening_names_a_file_that_is_missing_or_cut(tmp_path: Path):
    folder = write_model(tmp_path / "m")
    weights = folder.file("model.onnx.data")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.onnx\.data is missing or has another size"):
        ModelFolder.open(folder.path)
    weights.unlink()
    with pytest.raises(ModelError, match=r"model\.onnx\.data is missing"):
        ModelFolder.open(folder.path)
    usable, broken = list_models(tmp_path)
    assert usable == [] and len(broken) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        ("{}", "schema version None"),
        ('{"schema_version": 2}', "schema version 2, this program reads 1"),
        ('{"schema_version": 1}', "wrong entries"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_one_line(tmp_path: Path, content: str, message: str):
    folder = write_model(tmp_path / "m")
    folder.file(MANIFEST).write_text(content)
    with pytest.raises(ModelError, match=message) as refused:
        ModelFolder.open(folder.path)
    assert "\n" not in str(refused.value)


def test_a_manifest_refuses_entries_it_does_not_know(tmp_path: Path):
    folder = write_model(tmp_path / "m")
    stated = json.loads(folder.file(MANIFEST).read_text())
    folder.file(MANIFEST).write_text(json.dumps(stated | {"colour": "blue"}))
    with pytest.raises(ModelError, match="1 wrong entries"):
        ModelFolder.open(folder.path)


def test_a_wrong_name_suggests_the_nearest(tmp_path: Path):
    with pytest.raises(ModelError, match="none is imported"):
        ModelFolder.open("assistant", tmp_path / "nowhere")
    _replace(tmp_path, "assistant", seed=0)
    with pytest.raises(ModelError, match=r"did you mean.*assistant"):
        ModelFolder.open("asistant", tmp_path)
    with pytest.raises(ModelError):
        ModelFolder.open("../assistant", tmp_path / "deeper")


def test_removing_takes_the_name_away(tmp_path: Path):
    _replace(tmp_path, "m", seed=0)
    ModelFolder.open("m", tmp_path).remove()
    assert list_models(tmp_path) == ([], []) and _hidden(tmp_path) == []


def test_removing_waits_for_nobody(tmp_path: Path):
    _replace(tmp_path, "m", seed=0)
    folder = ModelFolder.open("m", tmp_path)
    with (
        pytest.raises(ModelError, match="importing 'm' now"),
        new_folder("m", tmp_path, replace=True),
    ):
        folder.remove()
    assert ModelFolder.open("m", tmp_path).name == "m"


def test_a_new_family_table_is_no_altered_file(tmp_path: Path):
    """It is derived and checked by its own key: newer rules, or damage, make it anew."""
    folder = write_model(tmp_path / "m")
    table = family_table(folder.file("tokenizer.json"), 320, cache=folder.file(FAMILIES))
    folder.file(FAMILIES).write_bytes(b"damaged")
    again = family_table(folder.file("tokenizer.json"), 320, cache=folder.file(FAMILIES))
    np.testing.assert_array_equal(table, again)
    ModelFolder.open(folder.path).verify()


def test_what_the_system_refuses_names_the_right_place(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EdgeDuetError, match="is a file, not a folder"),
        new_folder("m", tmp_path / "file", replace=False),
    ):
        pass
    root = tmp_path / "models"
    with (
        pytest.raises(ModelError, match=r"cannot use .*source.gguf: No such file"),
        new_folder("m", root, replace=False),
    ):
        (tmp_path / "source.gguf").read_bytes()
    with pytest.raises(EdgeDuetError, match=r"cannot write .*models: the disk is full"):  # noqa: SIM117
        with new_folder("m", root, replace=False):
            raise OSError(28, "No space left on device")
    with pytest.raises(ModelError, match="cannot read the source: gone"), new_folder("m", root, replace=False):
        raise FileNotFoundError("gone")


def test_models_lie_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGEDUET_MODELS", str(tmp_path))
    assert models_root() == tmp_path
    monkeypatch.delenv("EDGEDUET_MODELS")
    assert models_root().parts[-2:] == ("edgeduet", "models")


def test_a_container_has_no_more_memory_than_its_limit(tmp_path: Path):
    machine = available_memory(tmp_path)
    assert machine > 1 << 20
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 1 << 20
    (tmp_path / "memory.max").write_text("1000000\n")
    assert available_memory(tmp_path) == 300_000
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert available_memory(tmp_path) == 350_000
