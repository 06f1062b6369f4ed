"""Images that never leave the client that has them, under classes that the scenario names for all.

With ``data.source = "device"`` nobody holds all images. Server and clients agree on what the scenario says: classes,
domains and tasks (:func:`declared_split`). Each client reads its own folder, finds those classes in it, and divides
its images into training and test images itself (:func:`own_split`).

The division looks at the bytes of each image alone: a hash of (seed, content) below ``data.test_fraction`` makes it a
test image. So an image that was trained on never becomes a test image because others came, nor under another name or
label, nor as a copy; and the shares of the classes among a client's test images are those among all its images, up to
chance. A client may lack any class, domain or task; it then says so by counts of zero.

A folder is ``ROOT/[domain/]class/*.jpg``, or any folder with a labels file: CSV with the columns ``file``, ``class``
and, where the scenario has domains, ``domain``.
"""

from __future__ import annotations

import csv
import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared.config import DataConfig, Scenario
from edgeduet_shared.data.image_folder import (
    ONLY_DOMAIN,
    FileIndex,
    FileReader,
    find_images,
    list_files,
    list_folder,
)
from edgeduet_shared.data.image_table import ImageTable, Listing, build_table
from edgeduet_shared.data.split import Split
from edgeduet_shared.data.stream import build_stream
from edgeduet_shared.errors import DataError

log = logging.getLogger(__name__)

_COLUMNS = ("file", "class", "domain")


# -- what everybody knows ------------------------------------------------------------------------------


def declared_table(config: DataConfig) -> ImageTable:
    """Return the table without images: the classes and domains of the scenario, in its order."""
    nothing = np.empty(0, np.int64)
    return ImageTable(
        labels=nothing,
        domains=nothing,
        class_names=config.classes,
        domain_names=config.domains or (ONLY_DOMAIN,),
        fingerprint="0" * 16,
        skipped=0,
        source=config.source,
        reader=_NoImages(),
        positions=nothing,
    )


def declared_split(scenario: Scenario, seed: int) -> Split:
    """Return the tasks that all share; nobody's images are in it.

    Raises:
        ConfigError: classes or domains make no stream.
        DataError: two classes have the same name in words.
    """
    return own_split(declared_table(scenario.data), scenario, seed, client=0)


class _NoImages:
    """The reader of a table without rows."""

    def read(self, index: int) -> Image.Image:
        raise DataError("these images lie on the devices; nobody else can read them")

    def name(self, index: int) -> str:
        return f"image {index} of a device"


# -- what one client has -------------------------------------------------------------------------------


def client_folder(source: str, client: int) -> Path:
    """Return the folder of a simulated client: the ``client``-th by name below ROOT of ``device:ROOT``.

    Raises:
        DataError: no ROOT is named, it does not exist, or it has too few folders.
    """
    root = source.partition(":")[2]
    if not root:
        raise DataError(
            "data.source=device: these images lie on devices, and this process is none; in a simulation write "
            "--set data.source=device:ROOT, where ROOT holds one folder per client"
        )
    path = Path(root).expanduser()
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; data.source=device:ROOT needs one that holds a folder per client")
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if client >= len(folders):
        raise DataError(f"{path}: {len(folders)} folders are too few for client {client}; lower federation.clients")
    return folders[client]


def own_table(config: DataConfig, folder: Path, *, seed: int, labels: Path | None = None) -> ImageTable:
    """Read a client's own images of the scenario's classes; others are counted and said, in one line of the log.

    Args:
        config: names classes and domains; every one is in the table, with or without images.
        folder: the client's.
        seed: decides which images ``max_per_class`` keeps.
        labels: CSV file that says what each image shows; ``None``: the names of folders say it.

    Raises:
        DataError: the folder or the labels file cannot be used, no image of a named class is there, or an image is
            corrupt (unless ``skip_corrupt``).
    """
    listing = (
        list_folder(folder, full_decode=config.skip_corrupt) if labels is None else _labelled(config, folder, labels)
    )
    if not config.domains:
        # A scenario without domains does not care for a device's.
        listing = replace(listing, domains=np.zeros_like(listing.domains), domain_names=(ONLY_DOMAIN,))
    domains = config.domains or (ONLY_DOMAIN,)
    _tell_unknown(listing, config.classes, domains, folder)
    widened = replace(
        listing,
        class_names=_with(listing.class_names, config.classes),
        domain_names=_with(listing.domain_names, domains),
    )
    table = build_table(widened, config.model_copy(update={"domains": domains}), seed)
    if not len(table):
        raise DataError(
            f"{folder}: no image of the run's classes ({', '.join(config.classes)}); name the folders as the classes, "
            "or give a labels file"
        )
    return table


def count_images(folder: Path, labels: Path | None = None) -> dict[str, int]:
    """Return the number of images of each class in a client's folder, by name; the images are not looked into.

    Raises:
        DataError: as :func:`own_table`.
    """
    if labels is not None:
        return dict(sorted(Counter(name for _, name, _ in _checked_labels(folder, labels)).items()))
    found: Counter[str] = Counter()
    for (_, name), files in find_images(folder).items():
        found[name] += len(files)
    return dict(sorted(found.items()))


def folder_stamp(folder: Path, labels: Path | None = None) -> tuple[tuple[str, int], ...]:
    """Return a value that changes when an image comes or goes, or the labels file is written; images are not listed."""
    folders = [folder, *sorted(path for depth in ("*", "*/*") for path in folder.glob(depth) if path.is_dir())]
    stamped = folders if labels is None else [*folders, labels]
    return tuple((str(path), path.stat().st_mtime_ns if path.exists() else 0) for path in stamped)


def own_split(table: ImageTable, scenario: Scenario, seed: int, *, client: int) -> Split:
    """Return the scenario's tasks with the images of one client in them; all other clients have none.

    ``test`` and ``client_test`` of that client are the same images: there is no common test set.
    """
    stream = build_stream(table, scenario.stream, seed)
    is_test = _test_images(table.contents, scenario.data.test_fraction, seed)
    clients, nothing = scenario.federation.clients, np.empty(0, np.int64)
    train, test = [], []
    for task, domains in zip(stream.tasks, stream.domains_of, strict=True):
        members = np.isin(stream.labels, task.class_ids) & np.isin(table.domains, domains)
        train.append(np.flatnonzero(members & ~is_test))
        test.append(np.flatnonzero(members & is_test))

    def of_client(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return tuple(rows if other == client else nothing for other in range(clients))

    return Split(
        class_names=stream.class_names,
        labels=stream.labels,
        tasks=stream.tasks,
        train=tuple(map(of_client, train)),
        test=tuple(test),
        client_test=tuple(map(of_client, test)),
        held_out_classes=stream.held_out_classes,
        held_out_test=np.flatnonzero(np.isin(stream.labels, stream.held_out_classes) & is_test),
        table_fingerprint=table.fingerprint,
    )


def _test_images(contents: Sequence[str], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return (N,): which images are test images, each decided by its content alone."""
    drawn = [hashlib.sha256(f"{seed}\0{content}".encode()).digest()[:8] for content in contents]
    return np.array([int.from_bytes(value) < fraction * 2**64 for value in drawn], np.bool_)


def _with(names: tuple[str, ...], wanted: Sequence[str]) -> tuple[str, ...]:
    return (*names, *(name for name in wanted if name not in names))


def _tell_unknown(listing: Listing, classes: Sequence[str], domains: Sequence[str], folder: Path) -> None:
    """Say how many images belong to no class or domain of the run; they are not used."""
    unknown: Counter[str] = Counter()
    for label, domain in zip(listing.labels.tolist(), listing.domains.tolist(), strict=True):
        if listing.class_names[label] not in classes:
            unknown[listing.class_names[label]] += 1
        elif listing.domain_names[domain] not in domains:
            unknown[listing.domain_names[domain]] += 1
    if unknown:
        named = ", ".join(f"{name!a} ({count})" for name, count in unknown.most_common(5))
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        log.warning("%s: %d images are of no class of this run: %s%s", folder, unknown.total(), named, more)


def _labelled(config: DataConfig, folder: Path, labels: Path) -> Listing:
    """List the images that a labels file names."""
    rows = _checked_labels(folder, labels)
    class_names = tuple(sorted({name for _, name, _ in rows}))
    domain_names = tuple(sorted({domain for _, _, domain in rows}))
    return list_files(
        FileReader(folder, tuple(path for path, _, _ in rows)),
        [class_names.index(name) for _, name, _ in rows],
        [domain_names.index(domain) for _, _, domain in rows],
        class_names,
        domain_names,
        FileIndex(folder, config.skip_corrupt),
    )


def _checked_labels(folder: Path, labels: Path) -> list[tuple[str, str, str]]:
    """Return what :func:`_read_labels` does, of files that exist."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; correct [data] images in device.toml")
    rows = _read_labels(labels)
    for path, _, _ in rows:
        if not (folder / path).is_file():
            raise DataError(f"{labels}: names {path!a}, which is not in {folder}; correct the line or bring the image")
    return rows


def _read_labels(labels: Path) -> list[tuple[str, str, str]]:
    """Return (file, class, domain) of every line, sorted by file.

    Raises:
        DataError: the file cannot be read, lacks a column, names a file twice or one outside the folder.
    """
    try:
        with labels.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            lines = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{labels}: cannot be read as CSV ({error}); correct [data] labels in device.toml") from error
    if not {"file", "class"} <= columns:
        raise DataError(f"{labels}: the first line must name the columns file and class (and domain, if there are any)")
    rows = []
    for number, line in enumerate(lines, 2):
        path, name, domain = ((line.get(column) or "").strip() for column in _COLUMNS)
        if not path or not name:
            raise DataError(f"{labels}, line {number}: file or class is empty; complete or remove the line")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise DataError(f"{labels}, line {number}: {path!a} lies outside the image folder; write it relative to it")
        rows.append((Path(path).as_posix(), name, domain or ONLY_DOMAIN))
    twice = [path for path, count in Counter(path for path, _, _ in rows).items() if count > 1]
    if twice:
        raise DataError(f"{labels}: {twice[0]!a} is named twice; keep one line")
    if not rows:
        raise DataError(f"{labels}: no image is named in it")
    return sorted(rows)
