"""Whether the model folder on disk still is the one that was loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from edgeduet_client.llm.model_folder import GRAPH, MANIFEST, TOKENIZER, ModelFolder
from edgeduet_client.llm.serving.folder_watch import FolderWatch
from edgeduet_client.llm.serving.refusals import ModelChanged
from tiny_llm import write_model


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return write_model(tmp_path / "tiny")


def test_a_folder_left_alone_is_the_same(folder: ModelFolder) -> None:
    watch = FolderWatch(folder)
    watch.check()
    watch.check()


def test_the_same_bytes_written_again_are_the_same(folder: ModelFolder) -> None:
    watch = FolderWatch(folder)
    shutil.copytree(folder.path, folder.path.with_name("copy"))
    shutil.rmtree(folder.path)
    folder.path.with_name("copy").rename(folder.path)
    watch.check()


def test_another_model_in_its_place_is_noticed(folder: ModelFolder, tmp_path: Path) -> None:
    watch = FolderWatch(folder)
    shutil.rmtree(folder.path)
    write_model(folder.path, seed=1)
    with pytest.raises(ModelChanged, match="restart this server"):
        watch.check()


def test_a_removed_folder_is_noticed_and_welcome_back(folder: ModelFolder) -> None:
    watch = FolderWatch(folder)
    away = folder.path.with_name("away")
    folder.path.rename(away)
    for _ in range(2):
        with pytest.raises(ModelChanged, match="gone"):
            watch.check()
    away.rename(folder.path)
    watch.check()


@pytest.mark.parametrize("name", [GRAPH, TOKENIZER])
def test_a_file_that_is_missing_or_of_another_size_is_noticed(folder: ModelFolder, name: str) -> None:
    watch = FolderWatch(folder)
    with folder.file(name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(ModelChanged):
        watch.check()
    folder.file(name).unlink()
    with pytest.raises(ModelChanged):
        watch.check()


def test_a_touched_manifest_is_read_again_and_found_the_same(folder: ModelFolder) -> None:
    watch = FolderWatch(folder)
    os.utime(folder.file(MANIFEST), (1, 1))
    watch.check()
