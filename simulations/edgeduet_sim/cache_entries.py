"""What lies in the cache folders, how large it is, and taking away what nothing uses.

An entry is what is made and used as one: a feature file, the list of an image folder's files, the working
folder of a build. Its age is the time since it was last read or written, whichever the file system noted
later; features are stamped at every use. Only entries unused for at least a day can go, and features that a
process has mapped or is encoding stay however old they are
(:func:`edgeduet_shared.data.features.take_away`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edgeduet_shared.data.cache_folder import cache_folder

log = logging.getLogger("edgeduet.sim")

FEATURES = "features"
_MEANING = {
    FEATURES: "image features",
    "files": "checked image folders",
    "backbone-build": "backbones being built",
    "drafter-texts": "texts for drafters",
    "drafters": "drafters being made",
    "gate": "token tables of language models",
    "invariance": "measurements of language models",
}
_DAY = 86_400.0


@dataclass(frozen=True)
class CacheEntry:
    """Something that can be taken away as one.

    Attributes:
        kind: the folder it lies in, which says what it is.
        path: its file or folder.
        size: bytes.
        used: when it was last read or written, seconds since the epoch.
    """

    kind: str
    path: Path
    size: int
    used: float


def cache_roots() -> tuple[Path, ...]:
    """The cache folder, and the user's own where ``$EDGEDUET_CACHE`` names another (language models use that one)."""
    return tuple(dict.fromkeys((cache_folder(), Path(platformdirs.user_cache_dir("edgeduet", appauthor=False)))))


def find_entries(roots: Sequence[Path] | None = None) -> list[CacheEntry]:
    """Return everything in the known folders below ``roots`` (default: :func:`cache_roots`), largest first.

    Folders that edgeduet does not know are left alone. Empty lock files are no entries.
    """
    found = [
        entry
        for root in (cache_roots() if roots is None else roots)
        for kind in _MEANING
        if (root / kind).is_dir()
        for entry in _entries_in(root / kind)
    ]
    return sorted(found, key=lambda entry: (-entry.size, str(entry.path)))


def _entries_in(folder: Path) -> Iterator[CacheEntry]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".lock" or path.is_symlink():
            continue
        try:
            facts = [file.stat() for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        except OSError:  # taken away by its owner meanwhile
            continue
        if facts:
            used = max(max(fact.st_atime, fact.st_mtime) for fact in facts)
            yield CacheEntry(folder.name, path, sum(fact.st_size for fact in facts), used)


def unused_for(entries: Sequence[CacheEntry], days: int, now: float | None = None) -> list[CacheEntry]:
    """Return the entries that nobody used in the last ``days`` days (at least one)."""
    limit = (time.time() if now is None else now) - max(1, days) * _DAY
    return [entry for entry in entries if entry.used < limit]


def remove_entries(entries: Sequence[CacheEntry]) -> list[CacheEntry]:
    """Remove entries; return those that are gone. What is in use, or cannot be removed, stays and is logged."""
    gone = []
    for entry in entries:
        try:
            if _remove(entry):
                gone.append(entry)
            else:
                log.info("%s is in use and stays", entry.path)
        except OSError as error:
            log.warning("%s cannot be removed (%s)", entry.path, error.strerror)
    return gone


def _remove(entry: CacheEntry) -> bool:
    if entry.kind == FEATURES:
        from edgeduet_shared.data.features import take_away  # imports torch

        return take_away(entry.path)
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink(missing_ok=True)
    return True


def summary_rows(entries: Sequence[CacheEntry], now: float | None = None) -> list[tuple[str, str, str, str, str]]:
    """One row per folder: what it holds, where, number of entries, size, last use; and a row of totals."""
    today = time.time() if now is None else now
    rows = []
    for folder in dict.fromkeys(entry.path.parent for entry in entries):
        inside = [entry for entry in entries if entry.path.parent == folder]
        days = int((today - max(entry.used for entry in inside)) // _DAY)
        last = "today" if days <= 0 else f"{days} days ago"
        rows.append((_MEANING[folder.name], str(folder), str(len(inside)), _megabytes(inside), last))
    return [*rows, ("total", "", str(len(entries)), _megabytes(entries), "")]


def _megabytes(entries: Sequence[CacheEntry]) -> str:
    return f"{sum(entry.size for entry in entries) / 1e6:.1f} MB"
