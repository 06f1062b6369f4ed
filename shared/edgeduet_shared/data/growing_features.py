"""Cached features of a folder that changes: only new images are encoded, and old entries do not pile up.

The feature cache knows tables as wholes, so that one more image makes another entry. For a folder whose images come
and go, a note ``own/HASH.json`` beside the cache's ``features/`` names the newest entry and the content of each of
its rows. The next entry copies from it what it can (:class:`~edgeduet_shared.data.features.Known`) and takes its
place; one that a process still has open goes with the one after.

An image is encoded in a batch with other new ones, so that its features are those of a fresh encoding up to the
rounding of half precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from edgeduet_shared.atomic_files import atomic_write_json
from edgeduet_shared.data.features import Encode, FeatureCache, Known, Transform, take_away, transform_key
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.errors import DataError, EdgeDuetError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Note:
    """``entry``: name of the newest entry; ``contents``: of its rows; ``left``: older entries still to be removed."""

    entry: str
    contents: list[str]
    left: list[str]


def open_growing(
    cache: FeatureCache,
    table: ImageTable,
    *,
    folder: Path,
    model_key: str,
    transform: Transform,
    encode: Encode,
    progress: bool = True,
) -> np.memmap:
    """Return features as :meth:`FeatureCache.open` does, encoding only images that the entry before did not have.

    Args:
        folder: where the images of the table are; it must have ``contents``.

    Raises:
        DataError: as :meth:`FeatureCache.open`.
    """
    identity = "\x1f".join((str(folder.resolve()), *table.class_names, model_key, transform_key(transform)))
    place = cache.root.parent / "own" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    path = cache.path(table, model_key=model_key, transform=transform)
    note = _read(place)
    known = None if note is None or path.exists() else _known(cache.root / note.entry, note, table)
    features = cache.open(
        table, model_key=model_key, transform=transform, encode=encode, progress=progress, known=known
    )
    del known  # its mapping would keep the entry in use
    if note is None or note.entry != path.name:
        old = [] if note is None else [name for name in (*note.left, note.entry) if name != path.name]
        _write(place, _Note(path.name, list(table.contents), [name for name in old if not _removed(cache.root / name)]))
    return features


def _known(entry: Path, note: _Note, table: ImageTable) -> Known | None:
    """Return what the entry before has of ``table``; None when it is gone or damaged."""
    row_of = {content: row for row, content in enumerate(note.contents)}
    rows = {row: row_of[content] for row, content in enumerate(table.contents) if content in row_of}
    try:
        features = FeatureCache.read(entry, len(note.contents))
    except DataError as error:
        log.warning("all images are encoded again: %s", error)
        return None
    return None if features is None or not rows else Known(rows, features)


def _removed(entry: Path) -> bool:
    try:
        return not entry.exists() or take_away(entry)
    except OSError as error:
        log.warning("%s: an old entry cannot be removed (%s)", entry, error.strerror)
        return False


def _read(place: Path) -> _Note | None:
    try:
        note = _Note(**json.loads(place.read_text("utf-8")))
        # Names of files in one folder, whatever somebody wrote into the note.
        return note if all(Path(name).name == name for name in (note.entry, *note.left)) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s: unreadable (%s); all images are encoded again", place, error)
        return None


def _write(place: Path, note: _Note) -> None:
    try:
        atomic_write_json(place, asdict(note), indent=None)
    except EdgeDuetError as error:
        log.warning("which images are encoded is not noted, so that the next change encodes all again: %s", error)
