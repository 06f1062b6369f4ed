"""The resolved split: tasks, clients' training images, test sets. One value, saved and hashed.

Every method of a comparison reads the same saved split, so that no method can have another
partition. For one ``(table, scenario, seed)`` the split is the same on every machine.

Division into training and test images is made once per (domain, class), seeded by their names:
it does not change with the stream, its order, or the choice of other classes. A task's test set is
the test part of its images and common to all clients. With one image only, it is trained on.

A client's own test slice (fed-duet.md U15) is a subset of the task's common test set in which each
class has the share it has among the client's training images, up to rounding to whole images. It
is the largest such subset, but at most :data:`CLIENT_TEST_LIMIT` images per task. Classes
without any test image are left out of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_shared.atomic_files import atomic_write_json
from edgeduet_shared.config import Scenario
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.partition import TaskRows, partition_tasks
from edgeduet_shared.data.stream import Stream, Task, build_stream
from edgeduet_shared.errors import DataError
from edgeduet_shared.seeds import derive_seed

__all__ = ["CLIENT_TEST_LIMIT", "Split", "Task", "build_split", "load_split", "save_split"]

Ints = NDArray[np.int64]

CLIENT_TEST_LIMIT = 256
"""Largest own test slice of a client per task: bounds evaluation cost when clients are many."""

_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Split:
    """Who learns what when. Rows are rows of the table (``N`` of them); arrays are int64.

    ``class_names`` in stream order, as words; ``labels`` ``[N]`` index it. ``train[task][client]``,
    ``test[task]``, ``client_test[task][client]`` and ``held_out_test`` hold sorted rows.
    ``table_fingerprint`` names the images the rows belong to. ``digest``: 16 hex digits over
    everything except the fingerprint.
    """

    class_names: tuple[str, ...]
    labels: Ints
    tasks: tuple[Task, ...]
    train: tuple[tuple[Ints, ...], ...]
    test: tuple[Ints, ...]
    client_test: tuple[tuple[Ints, ...], ...]
    held_out_classes: tuple[int, ...]
    held_out_test: Ints
    table_fingerprint: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self))

    def seen_classes(self, stage: int) -> tuple[int, ...]:
        """Class ids of tasks ``0..stage``, sorted."""
        return tuple(sorted({class_id for task in self.tasks[: stage + 1] for class_id in task.class_ids}))

    def check_table(self, table: ImageTable) -> None:
        """Raise :class:`DataError` unless ``table`` holds the images this split was made for."""
        if table.fingerprint != self.table_fingerprint:
            raise DataError(
                f"{table.source}: the images differ from those this split was made for (fingerprint "
                f"{table.fingerprint}, expected {self.table_fingerprint}); restore them or start a new run"
            )


def build_split(table: ImageTable, scenario: Scenario, seed: int) -> Split:
    """Resolve stream, partition and test sets of ``scenario`` over ``table``.

    Raises :class:`ConfigError` or :class:`DataError` with the setting to change.
    """
    stream = build_stream(table, scenario.stream, seed)
    is_test = _division(table, scenario.data.test_fraction, seed)
    train_rows, test = [], []
    for task, domains in zip(stream.tasks, stream.domains_of, strict=True):
        members = np.isin(stream.labels, task.class_ids) & np.isin(table.domains, domains)
        rows = np.flatnonzero(members & ~is_test)
        _check_classes(task, stream, rows, table)
        train_rows.append(TaskRows(task.name, task.class_ids, rows, stream.labels[rows], table.domains[rows]))
        test.append(np.flatnonzero(members & is_test))
        if not len(test[-1]):
            raise DataError(
                f"task '{task.name}' of {table.source} has no test image: each of its classes has a single image; "
                "add images"
            )
    clients = scenario.federation.clients
    train = partition_tasks(
        train_rows,
        scenario.partition,
        clients=clients,
        domain_names=table.domain_names,
        persistent=scenario.stream.kind == "domain-incremental",
        seed=seed,
    )
    return Split(
        class_names=stream.class_names,
        labels=stream.labels,
        tasks=stream.tasks,
        train=train,
        test=tuple(test),
        client_test=tuple(
            _client_tests(stream.labels, task.class_ids, train[index], test[index], derive_seed(seed, "slice", index))
            for index, task in enumerate(stream.tasks)
        ),
        held_out_classes=stream.held_out_classes,
        held_out_test=np.flatnonzero(np.isin(stream.labels, stream.held_out_classes) & is_test),
        table_fingerprint=table.fingerprint,
    )


def _division(table: ImageTable, fraction: float, seed: int) -> NDArray[np.bool_]:
    """``[N]``: which rows are test images. Of two or more images per (domain, class) both parts get one."""
    is_test = np.zeros(len(table), np.bool_)
    cell = table.domains * len(table.class_names) + table.labels
    order = np.argsort(cell, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(cell[order])) + 1):
        if len(rows) < 2:
            continue
        domain, name = table.domain_names[table.domains[rows[0]]], table.class_names[table.labels[rows[0]]]
        count = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
        rng = np.random.default_rng(derive_seed(seed, "test", domain, name))
        is_test[rng.permutation(rows)[:count]] = True
    return is_test


def _check_classes(task: Task, stream: Stream, rows: Ints, table: ImageTable) -> None:
    present = np.bincount(stream.labels[rows], minlength=len(stream.class_names)) > 0
    for class_id in task.class_ids:
        if not present[class_id]:
            raise DataError(
                f"class '{stream.class_names[class_id]}' has no training image in task '{task.name}' "
                f"of {table.source}; add images, or leave the class or domain out by listing the others with "
                "--set data.classes=[...] or data.domains=[...]"
            )


def _client_tests(
    labels: Ints, class_ids: tuple[int, ...], train: tuple[Ints, ...], test: Ints, seed: int
) -> tuple[Ints, ...]:
    """Per client the rows of its own test slice of one task."""
    rng = np.random.default_rng(seed)
    ids = np.array(class_ids)
    pools = [rng.permutation(test[labels[test] == class_id]) for class_id in ids]
    available = np.array([len(pool) for pool in pools])
    column = np.full(int(ids.max()) + 1, -1)
    column[ids] = np.arange(len(ids))
    slices = []
    for rows in train:
        held = np.bincount(column[labels[rows]], minlength=len(ids))
        # A random start in each pool, so that clients with equal proportions see different images.
        starts = rng.integers(0, np.maximum(available, 1))
        counts = slice_counts(held, available)
        parts = [pools[k][(starts[k] + np.arange(counts[k])) % available[k]] for k in np.flatnonzero(counts)]
        slices.append(np.sort(np.concatenate(parts)) if parts else np.empty(0, np.int64))
    return tuple(slices)


def slice_counts(held: Ints, available: Ints, limit: int = CLIENT_TEST_LIMIT) -> Ints:
    """Test images per class ``[K]`` for a client with ``held`` ``[K]`` training images of each.

    With shares ``p_k = held_k / sum held`` over classes that have test images, the size is
    ``S = min(limit, floor(min_k available_k / p_k))`` and each class gets ``p_k S`` rounded down or up
    (largest remainders), so never more than is available.
    """
    usable = np.where(available > 0, held, 0)
    total = int(usable.sum())
    if total == 0:
        return np.zeros(len(held), np.int64)
    positive = usable > 0
    size = min(limit, int((available[positive] * total // usable[positive]).min()))
    # Exact integer arithmetic: p_k * size = usable_k * size / total.
    counts, remainder = np.divmod(usable * size, total)
    missing = size - int(counts.sum())
    counts[np.argsort(-remainder, kind="stable")[:missing]] += 1
    return counts


# --- hash, save, load -----------------------------------------------------------------------------


def _digest(split: Split) -> str:
    text = json.dumps(_content(split), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _content(split: Split) -> dict[str, Any]:
    return {
        "class_names": list(split.class_names),
        "labels": split.labels.tolist(),
        "tasks": [{"name": task.name, "class_ids": list(task.class_ids)} for task in split.tasks],
        "train": [[rows.tolist() for rows in task] for task in split.train],
        "test": [rows.tolist() for rows in split.test],
        "client_test": [[rows.tolist() for rows in task] for task in split.client_test],
        "held_out_classes": list(split.held_out_classes),
        "held_out_test": split.held_out_test.tolist(),
    }


def save_split(split: Split, path: Path) -> None:
    """Write ``split`` as JSON, whole or not at all.

    Raises :class:`~edgeduet_shared.errors.EdgeDuetError` naming the path when that is not possible.
    """
    document = {
        "format": _FORMAT,
        "digest": split.digest,
        "table_fingerprint": split.table_fingerprint,
        **_content(split),
    }
    atomic_write_json(path, document, indent=None)


def load_split(path: Path) -> Split:
    """Read a saved split; :class:`DataError` when it is missing, damaged or altered."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: the split cannot be read ({error.strerror}); check the run folder") from error
    except ValueError as error:
        raise DataError(f"{path}: damaged split ({error}); delete it to build it again") from error
    version = document.get("format") if isinstance(document, dict) else None
    if version != _FORMAT:
        raise DataError(f"{path}: split format {version} is not supported (expected {_FORMAT}); delete it")
    try:
        split = _from_document(document)
        expected = document["digest"]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: damaged split ({type(error).__name__}: {error}); delete it") from error
    if split.digest != expected:
        raise DataError(f"{path}: the split was altered (hash {split.digest}, recorded {expected}); delete it")
    return split


def _from_document(document: dict[str, Any]) -> Split:
    def rows(values: list[int]) -> Ints:
        return np.array(values, dtype=np.int64)

    return Split(
        class_names=tuple(document["class_names"]),
        labels=rows(document["labels"]),
        tasks=tuple(Task(task["name"], tuple(task["class_ids"])) for task in document["tasks"]),
        train=tuple(tuple(rows(client) for client in task) for task in document["train"]),
        test=tuple(rows(task) for task in document["test"]),
        client_test=tuple(tuple(rows(client) for client in task) for task in document["client_test"]),
        held_out_classes=tuple(document["held_out_classes"]),
        held_out_test=rows(document["held_out_test"]),
        table_fingerprint=document["table_fingerprint"],
    )
