"""Images that stay on their devices: what is found in a folder, and how one client divides it."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.config import Scenario, parse
from edgeduet_shared.data.own_images import (
    client_folder,
    count_images,
    declared_split,
    declared_table,
    folder_stamp,
    own_split,
    own_table,
)
from edgeduet_shared.errors import ConfigError, DataError
from edgeduet_shared.experiment import Experiment, OwnExperiment
from own_image_folders import SHAPES, write_images


def scenario(**changes: Any) -> Scenario:
    values: dict[str, Any] = {
        "name": "own",
        "data": {"source": "device", "classes": list(SHAPES), **changes.pop("data", {})},
        "stream": {"kind": "class-incremental", "classes_per_task": 2},
        "federation": {"clients": 3},
        **changes,
    }
    return parse(Scenario, values, "scenario")


def divided(folder: Path, wanted: Scenario, seed: int = 0) -> tuple[set[str], set[str]]:
    """Return the names of a client's training and test images over all tasks."""
    table = own_table(wanted.data, folder, seed=seed)
    split = own_split(table, wanted, seed, client=1)
    names = [
        {Path(table.image_name(int(row))).relative_to(folder).as_posix() for task in part for row in task[1]}
        for part in (split.train, split.client_test)
    ]
    return names[0], names[1]


def test_tasks_are_those_the_scenario_names_and_the_same_on_both_sides(tmp_path: Path) -> None:
    write_images(tmp_path, {"circle": 5, "star": 4})
    wanted = scenario()
    declared, own = declared_split(wanted, 0), own_split(own_table(wanted.data, tmp_path, seed=0), wanted, 0, client=1)
    assert declared.class_names == own.class_names == SHAPES
    assert declared.tasks == own.tasks
    assert [task.class_ids for task in own.tasks] == [(0, 1), (2, 3)]
    assert not any(len(rows) for task in declared.train for rows in task)
    # The images of other clients are not there.
    assert not any(len(task[client]) for task in (*own.train, *own.client_test) for client in (0, 2))


def test_every_image_is_either_trained_on_or_tested_on(tmp_path: Path) -> None:
    write_images(tmp_path, {"circle": 12, "triangle": 7})
    train, test = divided(tmp_path, scenario())
    assert len(train) + len(test) == 19
    assert not train & test


def test_a_class_that_is_missing_has_no_images_and_nothing_stops(tmp_path: Path) -> None:
    write_images(tmp_path, {"star": 6})
    split = own_split(own_table(scenario().data, tmp_path, seed=0), scenario(), 0, client=0)
    assert len(split.train[0][0]) == 0
    assert sum(len(task[0]) for task in (*split.train, *split.client_test)) == 6


def test_new_images_move_no_old_one(tmp_path: Path) -> None:
    write_images(tmp_path, {"circle": 10, "square": 10})
    before = divided(tmp_path, scenario())
    write_images(tmp_path, {"circle": 15, "star": 9}, first=10)
    after = divided(tmp_path, scenario())
    assert before[0] < after[0] and before[1] < after[1]
    assert len(after[0]) + len(after[1]) == 44


def test_neither_a_copy_nor_another_name_or_label_moves_an_image(tmp_path: Path) -> None:
    write_images(tmp_path, {"circle": 10, "square": 10})
    train, _ = divided(tmp_path, scenario())
    (trained, moved, *_) = sorted(train)
    shutil.copy(tmp_path / trained, tmp_path / "circle" / "copy.png")
    (tmp_path / "star").mkdir()
    (tmp_path / moved).rename(tmp_path / "star" / "corrected.png")
    after, _ = divided(tmp_path, scenario())
    assert {trained, "circle/copy.png", "star/corrected.png"} <= after


@given(
    held=st.lists(st.integers(0, 2**32), min_size=1, max_size=40, unique=True),
    more=st.lists(st.integers(0, 2**32), max_size=40, unique=True),
    seed=st.integers(0, 100),
)
def test_whatever_comes_no_image_changes_sides(held: list[int], more: list[int], seed: int) -> None:
    def sides(images: list[int]) -> dict[int, bool]:
        table = replace(
            declared_table(scenario().data),
            labels=np.array([image % 4 for image in images]),
            domains=np.zeros(len(images), np.int64),
            positions=np.arange(len(images)),
            contents=tuple(map(str, images)),
        )
        split = own_split(table, scenario(), seed, client=2)
        tested = {int(row) for task in split.client_test for row in task[2]}
        assert len(tested) + sum(len(task[2]) for task in split.train) == len(images)
        return {image: row in tested for row, image in enumerate(images)}

    before = sides(held)
    after = sides([*(image for image in more if image not in before), *held])
    assert {image: after[image] for image in held} == before


def test_the_stamp_of_a_folder_changes_when_an_image_comes_or_goes(tmp_path: Path) -> None:
    write_images(tmp_path / "street", {"circle": 2})
    labels = tmp_path / "labels.csv"
    stamps = [folder_stamp(tmp_path, labels), folder_stamp(tmp_path, labels)]
    assert stamps[0] == stamps[1]
    write_images(tmp_path / "street", {"circle": 1}, first=2)
    stamps.append(folder_stamp(tmp_path, labels))
    write_images(tmp_path / "garden", {"star": 1})
    stamps.append(folder_stamp(tmp_path, labels))
    (tmp_path / "street" / "circle" / "0000.png").unlink()
    stamps.append(folder_stamp(tmp_path, labels))
    labels.write_text("file,class\n")
    stamps.append(folder_stamp(tmp_path, labels))
    assert len(set(stamps)) == 5
    assert folder_stamp(tmp_path / "gone") == ((str(tmp_path / "gone"), 0),)


@given(fraction=st.floats(0.1, 0.9), seed=st.integers(0, 1000))
def test_the_share_of_test_images_is_the_fraction_asked_for(fraction: float, seed: int) -> None:
    many = 600
    zeros = np.zeros(many, np.int64)
    table = replace(
        declared_table(scenario().data),
        labels=zeros,
        domains=zeros,
        positions=np.arange(many),
        contents=tuple(str(number) for number in range(many)),
    )
    wanted = scenario(data={"test_fraction": fraction})
    share = len(own_split(table, wanted, seed, client=0).test[0]) / many
    # Six standard deviations.
    assert abs(share - fraction) < 6 * np.sqrt(fraction * (1 - fraction) / many)


def test_images_of_other_classes_are_counted_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_images(tmp_path, {"circle": 3, "heart": 2, "cross": 1})
    with caplog.at_level(logging.WARNING):
        table = own_table(scenario().data, tmp_path, seed=0)
    assert len(table) == 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "3 images are of no class of this run: 'heart' (2), 'cross' (1)" in line


def test_domains_make_the_tasks_where_the_scenario_says_so(tmp_path: Path) -> None:
    write_images(tmp_path / "sketch", {"circle": 8}, style="sketch")
    wanted = scenario(data={"domains": ["photo", "sketch"]}, stream={"kind": "domain-incremental"})
    split = own_split(own_table(wanted.data, tmp_path, seed=0), wanted, 0, client=0)
    assert [task.name for task in split.tasks] == ["photo", "sketch"]
    assert [len(train[0]) + len(test[0]) for train, test in zip(split.train, split.client_test, strict=True)] == [0, 8]


def test_a_scenario_without_domains_does_not_care_for_a_devices(tmp_path: Path) -> None:
    write_images(tmp_path / "garden", {"circle": 4})
    write_images(tmp_path / "street", {"star": 5}, style="sketch")
    assert len(own_table(scenario().data, tmp_path, seed=0)) == 9


def test_a_labels_file_says_what_images_show(tmp_path: Path) -> None:
    write_images(tmp_path / "all", {"circle": 3, "star": 2})
    files = sorted(path.relative_to(tmp_path / "all").as_posix() for path in (tmp_path / "all").rglob("*.png"))
    labels = tmp_path / "labels.csv"
    labels.write_text("file,class\n" + "".join(f"{path},square\n" for path in files), "utf-8")
    table = own_table(scenario().data, tmp_path / "all", seed=0, labels=labels)
    assert len(table) == 5
    assert {table.class_names[label] for label in table.labels} == {"square"}
    assert count_images(tmp_path / "all", labels) == {"square": 5}
    assert count_images(tmp_path / "all") == {"circle": 3, "star": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,kind\na.png,circle\n", "must name the columns file and class"),
        ("file,class\ncircle/9999.png,circle\n", "names 'circle/9999.png', which is not in"),
        ("file,class\n../secret.png,circle\n", "line 2: '../secret.png' lies outside the image folder"),
        ("file,class\ncircle/0000.png,circle\ncircle/0000.png,star\n", "'circle/0000.png' is named twice"),
        ("file,class\ncircle/0000.png,\n", "line 2: file or class is empty"),
        ("file,class\n", "no image is named in it"),
    ],
)
def test_a_labels_file_that_cannot_be_used_is_named_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    write_images(tmp_path / "all", {"circle": 1})
    labels = tmp_path / "labels.csv"
    labels.write_text(text, "utf-8")
    with pytest.raises(DataError) as refused:
        own_table(scenario().data, tmp_path / "all", seed=0, labels=labels)
    assert said in str(refused.value)
    assert "labels.csv" in str(refused.value)


def test_a_folder_without_an_image_of_the_classes_is_refused(tmp_path: Path) -> None:
    write_images(tmp_path, {"heart": 2})
    with pytest.raises(DataError, match="no image of the run's classes"):
        own_table(scenario().data, tmp_path, seed=0)


def test_a_corrupt_image_is_named_and_skipped_only_when_asked_to(tmp_path: Path) -> None:
    write_images(tmp_path, {"circle": 2})
    (tmp_path / "circle" / "bad.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"bad\.png: corrupt image"):
        own_table(scenario().data, tmp_path, seed=0)
    table = own_table(scenario(data={"skip_corrupt": True}).data, tmp_path, seed=0)
    assert (len(table), table.skipped) == (2, 1)


@pytest.mark.parametrize(
    ("data", "stream", "said"),
    [
        ({"classes": []}, {}, "needs classes"),
        ({}, {"kind": "domain-incremental"}, "needs two or more data.domains"),
        ({"source": "device:/somewhere"}, {"kind": "domain-incremental"}, "needs two or more data.domains"),
    ],
)
def test_a_scenario_must_name_what_nobody_sees(data: dict[str, Any], stream: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        scenario(data=data, **({"stream": stream} if stream else {}))


def test_nothing_is_dealt_out() -> None:
    with pytest.raises(ConfigError, match=r"leave \[partition\] out"):
        scenario(partition={"kind": "dirichlet"})


def test_a_process_that_is_no_device_says_how_to_simulate_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="device:ROOT"):
        client_folder("device", 0)
    with pytest.raises(DataError, match="no such folder"):
        client_folder(f"device:{tmp_path / 'none'}", 0)
    (tmp_path / "a").mkdir()
    assert client_folder(f"device:{tmp_path}", 0) == tmp_path / "a"
    with pytest.raises(DataError, match="too few for client 1"):
        client_folder(f"device:{tmp_path}", 1)


def test_clients_of_a_process_share_the_backbone_and_nothing_else(tmp_path: Path) -> None:
    write_images(tmp_path / "a", {"circle": 3})
    write_images(tmp_path / "b", {"star": 4})
    shared = Experiment(scenario(), 0)
    first, second = (OwnExperiment(shared, client, tmp_path / name) for client, name in enumerate("ab"))
    assert first.backbone is second.backbone is shared.backbone
    assert (len(first.table), len(second.table), len(shared.table)) == (3, 4, 0)
    assert first.split_digest != second.split_digest
