"""Streams and splits: one permutation for names and labels, disjoint clients, honest test sets, a stable hash."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgeduet_shared.config import DataConfig, Scenario
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.sources import load_table
from edgeduet_shared.data.split import CLIENT_TEST_LIMIT, Split, build_split, load_split, save_split, slice_counts
from edgeduet_shared.data.stream import prompt_name
from edgeduet_shared.errors import ConfigError, DataError, EdgeDuetError

DATA = Path(os.environ.get("EDGEDUET_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


class Blank:
    """An image reader for tables of which only the rows matter here."""

    def read(self, index: int) -> Image.Image:
        return Image.new("RGB", (4, 4))

    def name(self, index: int) -> str:
        return f"image {index}"


def table_of(counts: np.ndarray) -> ImageTable:
    """``counts[domain][class]`` images."""
    domains, classes = counts.shape
    cells = np.repeat(np.arange(domains * classes), counts.ravel())
    return ImageTable(
        labels=cells % classes,
        domains=cells // classes,
        class_names=tuple(f"class_{k}" for k in range(classes)),
        domain_names=tuple(f"domain_{d}" for d in range(domains)),
        fingerprint="0123456789abcdef",
        skipped=0,
        source="folder:/images",
        reader=Blank(),
        positions=np.arange(len(cells)),
    )


def scenario(**sections: dict[str, Any]) -> Scenario:
    partition = {"min_size": 0, **sections.pop("partition", {})}
    return Scenario(name="test", partition=partition, **sections)


def class_incremental(per_task: int, **more: Any) -> dict[str, Any]:
    return {"kind": "class-incremental", "classes_per_task": per_task, **more}


@st.composite
def tables(draw: st.DrawFn) -> ImageTable:
    shape = draw(st.tuples(st.integers(2, 3), st.integers(2, 7)))
    values = draw(st.lists(st.integers(2, 15), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    return table_of(np.array(values).reshape(shape))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    stream = {
        "kind": draw(st.sampled_from(("class-incremental", "domain-incremental"))),
        "classes_per_task": draw(st.integers(1, 4)),
        "order": draw(st.sampled_from(("given", "seeded"))),
        "held_out_classes": draw(st.integers(0, 1)),
    }
    kinds = ["iid", "dirichlet"] + (["domain"] if stream["kind"] == "class-incremental" else [])
    return scenario(
        data={"test_fraction": draw(st.sampled_from((0.1, 0.3, 0.7)))},
        stream=stream,
        partition={"kind": draw(st.sampled_from(kinds)), "beta": draw(st.sampled_from((0.1, 1.0)))},
        federation={"clients": draw(st.integers(3, 12))},
    )


# --- the properties every split has ---------------------------------------------------------------


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
def test_names_and_labels_are_permuted_together(table: ImageTable, scenario: Scenario, seed: int) -> None:
    split = build_split(table, scenario, seed)
    for row in range(len(table)):
        assert split.class_names[split.labels[row]] == prompt_name(table.class_names[table.labels[row]])


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
def test_every_row_has_exactly_one_place(table: ImageTable, scenario: Scenario, seed: int) -> None:
    split = build_split(table, scenario, seed)
    trained = np.concatenate([rows for task in split.train for rows in task])
    tested = np.concatenate(split.test)
    assert len(set(trained)) == len(trained)
    assert len(set(tested)) == len(tested)
    assert not set(trained) & set(tested)
    held_out = np.flatnonzero(np.isin(split.labels, split.held_out_classes))
    assert set(trained) | set(tested) == set(range(len(table))) - set(held_out)
    assert set(split.held_out_test) <= set(held_out)
    assert len(split.train) == len(split.test) == len(split.client_test) == len(split.tasks)
    assert {len(task) for task in (*split.train, *split.client_test)} == {scenario.federation.clients}


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
def test_rows_of_a_task_belong_to_its_classes_and_domain(table: ImageTable, scenario: Scenario, seed: int) -> None:
    split = build_split(table, scenario, seed)
    for task, train, test in zip(split.tasks, split.train, split.test, strict=True):
        for rows in (*train, test):
            assert set(split.labels[rows]) <= set(task.class_ids)
            if scenario.stream.kind == "domain-incremental":
                assert {prompt_name(table.domain_names[d]) for d in table.domains[rows]} <= {task.name}


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
def test_tasks_partition_the_classes_or_the_domains(table: ImageTable, scenario: Scenario, seed: int) -> None:
    split = build_split(table, scenario, seed)
    streamed = [k for k in range(len(split.class_names)) if k not in split.held_out_classes]
    if scenario.stream.kind == "class-incremental":
        assert [k for task in split.tasks for k in task.class_ids] == streamed
    else:
        assert [list(task.class_ids) for task in split.tasks] == [streamed] * len(table.domain_names)
        assert {task.name for task in split.tasks} == {prompt_name(name) for name in table.domain_names}
    for stage in range(len(split.tasks)):
        seen = {k for task in split.tasks[: stage + 1] for k in task.class_ids}
        assert split.seen_classes(stage) == tuple(sorted(seen))


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
def test_a_clients_test_slice_follows_its_training_classes(table: ImageTable, scenario: Scenario, seed: int) -> None:
    split = build_split(table, scenario, seed)
    for task, train, test, slices in zip(split.tasks, split.train, split.test, split.client_test, strict=True):
        for rows, own in zip(train, slices, strict=True):
            assert len(set(own)) == len(own)
            assert set(own) <= set(test)
            assert (len(own) == 0) == (len(rows) == 0)
            for class_id in task.class_ids:
                if len(rows):
                    share = np.mean(split.labels[rows] == class_id)
                    assert abs(np.sum(split.labels[own] == class_id) - share * len(own)) < 1


@given(
    held=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    available=st.lists(st.integers(0, 400), min_size=8, max_size=8),
)
@settings(max_examples=200)
def test_slice_counts_are_the_largest_proportional_ones(held: list[int], available: list[int]) -> None:
    have, pool = np.array(held), np.array(available[: len(held)])
    counts = slice_counts(have, pool)
    usable = np.where(pool > 0, have, 0)
    assert (counts <= pool).all()
    assert (counts[usable == 0] == 0).all()
    if usable.sum() == 0:
        assert counts.sum() == 0
        return
    share = usable / usable.sum()
    assert np.abs(counts - share * counts.sum()).max() < 1
    if counts.sum() < CLIENT_TEST_LIMIT:
        # One image more would ask some class for more than it has.
        assert (share * (counts.sum() + 1) > pool - 1e-9)[usable > 0].any()


def test_clients_alike_are_not_tested_on_the_same_images() -> None:
    split = build_split(table_of(np.full((2, 2), 2000)), scenario(partition={"kind": "iid"}), 0)
    assert len(split.client_test[0][0]) == CLIENT_TEST_LIMIT
    assert not np.array_equal(split.client_test[0][0], split.client_test[0][1])


# --- the division into training and test images ---------------------------------------------------


@given(table=tables(), fraction=st.sampled_from((0.05, 0.3, 0.95)), seed=st.integers(0, 2**40))
def test_each_domain_and_class_is_divided_by_the_fraction(table: ImageTable, fraction: float, seed: int) -> None:
    split = build_split(table, scenario(data={"test_fraction": fraction}), seed)
    tested = np.zeros(len(table), bool)
    tested[np.concatenate(split.test)] = True
    cell = table.domains * len(table.class_names) + table.labels
    for count, test in zip(np.bincount(cell), np.bincount(cell[tested]), strict=True):
        assert 1 <= test < count
        assert abs(test - fraction * count) <= 1


def test_the_division_does_not_depend_on_stream_order_or_clients() -> None:
    table = table_of(np.full((3, 5), 20))

    def tested(seed: int, **sections: Any) -> set[int]:
        return set(np.concatenate(build_split(table, scenario(**sections), seed).test))

    assert tested(0) == tested(0, stream=class_incremental(2, order="seeded")) == tested(0, federation={"clients": 9})
    assert tested(0) != tested(1)


def test_the_division_does_not_depend_on_what_else_is_used() -> None:
    def tested(**data: Any) -> set[str]:
        asked = scenario(data={"max_per_class": 10, **data}, stream=class_incremental(2))
        table = load_table(asked.data)
        names = {table.image_name(row) for row in np.concatenate(build_split(table, asked, 0).test)}
        return {name for name in names if name.startswith("world sketch/star/")}

    every = tested(domains=["photo", "sketch"], classes=["moon", "star"])
    assert len(every) == 3
    assert tested(domains=["sketch", "cartoon"], classes=["star", "cup", "moon"]) == every


def test_a_single_image_is_trained_on() -> None:
    counts = np.array([[1, 10], [10, 10]])
    split = build_split(table_of(counts), scenario(federation={"clients": 1}), 0)
    assert 0 in split.train[0][0]
    assert 0 not in np.concatenate(split.test)
    assert set(split.labels[split.client_test[0][0]]) == {1}


def test_a_class_without_training_image_is_named_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"class 'class 1' has no training image in task 'domain 1' .*data.classes="):
        build_split(table_of(np.array([[5, 5], [5, 0]])), scenario(), 0)


def test_a_task_without_test_image_is_an_error() -> None:
    with pytest.raises(DataError, match=r"task 'domain 1' .* has no test image"):
        build_split(table_of(np.array([[5, 5], [1, 1]])), scenario(), 0)


def test_max_per_class_applies_before_the_division() -> None:
    config = {"source": "world", "max_per_class": 10, "classes": ["star", "moon"], "domains": ["photo", "sketch"]}
    asked = scenario(data=config)
    split = build_split(load_table(asked.data), asked, 0)
    assert [len(rows) for rows in split.test] == [6, 6]
    assert [sum(map(len, clients)) for clients in split.train] == [14, 14]


# --- streams --------------------------------------------------------------------------------------


def test_classes_come_as_given_or_shuffled_by_the_seed() -> None:
    table = table_of(np.full((2, 6), 4))
    given_order = build_split(table, scenario(stream=class_incremental(2)), 0)
    assert given_order.class_names == tuple(f"class {k}" for k in range(6))
    assert [task.class_ids for task in given_order.tasks] == [(0, 1), (2, 3), (4, 5)]
    assert given_order.tasks[0].name == "class 0, class 1"
    shuffled = [build_split(table, scenario(stream=class_incremental(2, order="seeded")), s) for s in range(6)]
    assert len({split.class_names for split in shuffled}) > 3
    assert {tuple(sorted(split.class_names)) for split in shuffled} == {given_order.class_names}


def test_domains_come_as_listed_or_shuffled_by_the_seed() -> None:
    data = {"domains": ["sketch", "cartoon", "photo"], "classes": ["star", "moon"], "max_per_class": 4}

    def names(order: str, seed: int) -> tuple[str, ...]:
        asked = scenario(data=data, stream={"order": order})
        return tuple(task.name for task in build_split(load_table(asked.data), asked, seed).tasks)

    assert names("given", 3) == ("sketch", "cartoon", "photo")
    assert len({names("seeded", seed) for seed in range(6)}) > 1


@pytest.mark.parametrize(
    ("classes", "per_task", "sizes"),
    [(6, 2, [2, 2, 2]), (8, 3, [3, 3, 2]), (7, 2, [2, 2, 3]), (7, 3, [3, 4]), (3, 1, [1, 1, 1]), (2, 5, [2])],
)
def test_left_over_classes_never_make_a_task_of_one(classes: int, per_task: int, sizes: list[int]) -> None:
    split = build_split(table_of(np.full((1, classes), 4)), scenario(stream=class_incremental(per_task)), 0)
    assert [len(task.class_ids) for task in split.tasks] == sizes


@pytest.mark.parametrize("kind", ["class-incremental", "domain-incremental"])
def test_held_out_classes_come_last_and_are_never_trained(kind: str) -> None:
    table = table_of(np.full((2, 6), 10))
    asked = scenario(stream={"kind": kind, "held_out_classes": 2, "classes_per_task": 2})
    splits = [build_split(table, asked, seed) for seed in range(5)]
    for split in splits:
        assert split.held_out_classes == (4, 5)
        assert set(split.labels[split.held_out_test]) == {4, 5}
        assert len(split.held_out_test) == 2 * 2 * 3
        assert split.seen_classes(len(split.tasks) - 1) == (0, 1, 2, 3)
    assert len({split.class_names[4:] for split in splits}) > 1


def test_streams_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs at least two domains, .*stream.kind=class-incremental"):
        build_split(table_of(np.full((1, 4), 5)), scenario(), 0)
    with pytest.raises(ConfigError, match="held_out_classes=4 leaves no class to learn"):
        build_split(table_of(np.full((2, 4), 5)), scenario(stream={"held_out_classes": 4}), 0)


def test_class_names_become_words_and_must_stay_distinct() -> None:
    assert prompt_name("car_side") == "car side"
    assert prompt_name("_ceiling__fan ") == "ceiling fan"
    table = dataclasses.replace(table_of(np.full((2, 2), 5)), class_names=("car_side", "car side"))
    with pytest.raises(DataError, match="two classes are both called 'car side'"):
        build_split(table, scenario(), 0)


# --- the hash, and the file -----------------------------------------------------------------------


def small_split(seed: int = 0) -> Split:
    asked = scenario(partition={"kind": "dirichlet"}, stream={"order": "seeded", "held_out_classes": 1})
    return build_split(table_of(np.full((2, 4), 12)), asked, seed)


@given(table=tables(), scenario=scenarios(), seed=st.integers(0, 2**40))
@settings(max_examples=20)
def test_a_saved_split_comes_back_the_same(
    table: ImageTable, scenario: Scenario, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    split = build_split(table, scenario, seed)
    path = tmp_path_factory.mktemp("split") / "split.json"
    save_split(split, path)
    loaded = load_split(path)
    assert loaded.digest == split.digest
    for name in (f.name for f in dataclasses.fields(Split)):
        mine, theirs = getattr(split, name), getattr(loaded, name)
        assert repr(mine) == repr(theirs), name
    loaded.check_table(table)


def test_the_digest_changes_with_every_part() -> None:
    split = small_split()
    more = np.array([0])
    changes: dict[str, Any] = {
        "class_names": ("other", *split.class_names[1:]),
        "labels": np.roll(split.labels, 1),
        "tasks": split.tasks[::-1],
        "train": (split.train[0][::-1], *split.train[1:]),
        "test": (more, *split.test[1:]),
        "client_test": split.client_test[::-1],
        "held_out_classes": (),
        "held_out_test": more,
    }
    digests = {name: dataclasses.replace(split, **{name: value}).digest for name, value in changes.items()}
    assert len({split.digest, *digests.values()}) == len(changes) + 1
    assert dataclasses.replace(split, labels=split.labels.astype(np.int32)).digest == split.digest
    assert small_split(0).digest == split.digest
    assert small_split(1).digest != split.digest


def test_the_digest_is_the_same_in_every_process() -> None:
    code = (
        "from edgeduet_shared.config import *\n"
        "from edgeduet_shared.data.sources import load_table\n"
        "from edgeduet_shared.data.split import build_split\n"
        "s = Scenario(name='x', data={'max_per_class': 8}, stream={'order': 'seeded'},\n"
        "             partition={'kind': 'dirichlet'})\n"
        "print(build_split(load_table(s.data), s, 4).digest)\n"
    )
    asked = Scenario(
        name="x", data=DataConfig(max_per_class=8), stream={"order": "seeded"}, partition={"kind": "dirichlet"}
    )
    here = build_split(load_table(asked.data), asked, 4).digest
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        there = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        assert there.strip() == here


def _alter(path: Path, change: Any) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["train"][0][0].pop(), "was altered"),
        (lambda d: d["labels"].reverse(), "was altered"),
        (lambda d: d.pop("tasks"), "damaged split"),
        (lambda d: d.update(labels=["x"]), "damaged split"),
        (lambda d: d.update(format=2), "format 2 is not supported"),
    ],
)
def test_an_altered_or_damaged_split_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "split.json"
    save_split(small_split(), path)
    _alter(path, change)
    with pytest.raises(DataError, match=message):
        load_split(path)


def test_a_split_that_is_cut_short_or_missing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    with pytest.raises(DataError, match="cannot be read"):
        load_split(path)
    save_split(small_split(), path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(DataError, match="damaged split"):
        load_split(path)


def test_a_split_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeDuetError, match="cannot write"):
        save_split(small_split(), tmp_path / "file" / "split.json")
    (tmp_path / "split.json").mkdir()
    with pytest.raises(EdgeDuetError):
        save_split(small_split(), tmp_path / "split.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "split.json"]


def test_a_split_of_other_images_is_refused() -> None:
    table = dataclasses.replace(table_of(np.full((2, 4), 12)), fingerprint="f" * 16)
    with pytest.raises(DataError, match="the images differ from those this split was made for"):
        small_split().check_table(table)


# --- scale, and real images -----------------------------------------------------------------------


def test_a_thousand_clients_are_split_quickly_and_small(tmp_path: Path) -> None:
    table = table_of(np.full((4, 7), 350))
    asked = scenario(partition={"kind": "dirichlet", "beta": 0.1}, federation={"clients": 1000})
    start = time.process_time()
    split = build_split(table, asked, 0)
    save_split(split, tmp_path / "split.json")
    # About half a second on a free core.
    assert time.process_time() - start < 5
    arrays = [rows for part in (split.train, split.client_test) for task in part for rows in task]
    assert sum(rows.nbytes for rows in arrays) < 10e6
    assert (tmp_path / "split.json").stat().st_size < 10e6


@pytest.mark.skipif(not (DATA / "pacs").is_dir(), reason=f"no real images at {DATA} (set EDGEDUET_DATA)")
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_pacs_splits_as_the_paper_describes(beta: float) -> None:
    asked = scenario(
        data={"source": f"folder:{DATA / 'pacs'}", "domains": ["photo", "art_painting", "cartoon", "sketch"]},
        partition={"kind": "dirichlet", "beta": beta, "min_size": 10},
    )
    split = build_split(load_table(asked.data), asked, 0)
    assert [task.name for task in split.tasks] == ["photo", "art painting", "cartoon", "sketch"]
    assert min(len(rows) for task in split.train for rows in task) >= 10
    assert sum(map(len, split.test)) == pytest.approx(0.3 * 9991, abs=14)
