"""Find images in a ``root/[domain/]class/`` folder, check and fingerprint them.

Reading 10 000 small files takes seconds, so the result per file is remembered in the cache folder
under (path, size, modification time) once a scan has been slow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from edgeduet_shared.atomic_files import atomic_write_json
from edgeduet_shared.data.cache_folder import cache_folder
from edgeduet_shared.data.image_check import decode, problem
from edgeduet_shared.data.image_table import Inspection, Listing
from edgeduet_shared.errors import DataError, EdgeDuetError

log = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png")
ONLY_DOMAIN = "images"
"""Name of the single domain of a ``root/class/`` folder."""

SLOW_S = 2.0
"""Scans slower than this are remembered."""

_LAYOUT = "expected ROOT/class/*.jpg or ROOT/domain/class/*.jpg"


def find_images(root: Path) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return ``(domain, class) -> sorted paths relative to root`` (with ``/``). Hidden files are ignored.

    Raises :class:`DataError` when the folder is missing, holds no image, or mixes layouts.
    """
    if not root.is_dir():
        raise DataError(
            f"{root}: no such folder; check the path in data.source, "
            "or use --set data.source=world for generated images"
        )
    paths = _walk(root)
    if not paths:
        raise DataError(f"{root}: no image in it; {_LAYOUT} (or .jpeg, .png)")
    depths = Counter(path.count("/") for path in paths)
    usual = max(depths, key=lambda depth: (depths[depth], depth))
    for path in paths:
        depth = path.count("/")
        if depth not in (1, 2) or depth != usual:
            other = "" if depth not in (1, 2) or usual not in (1, 2) else f" while most images are as {_example(usual)}"
            raise DataError(f"{root / path}: image in an unexpected place{other}; {_LAYOUT}, one of them throughout")
    found: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        *folders, _ = path.split("/")
        domain = folders[0] if len(folders) == 2 else ONLY_DOMAIN
        found.setdefault((domain, folders[-1]), []).append(path)
    return {cell: tuple(sorted(files)) for cell, files in found.items()}


def _example(depth: int) -> str:
    return "ROOT/class/image" if depth == 1 else "ROOT/domain/class/image"


def _walk(root: Path) -> list[str]:
    """Sorted relative paths of all images down to one level deeper than any valid layout."""

    def unreadable(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check its permissions") from error

    paths = []
    for folder, subfolders, files in os.walk(root, followlinks=True, onerror=unreadable):
        relative = Path(folder).relative_to(root).as_posix()
        # Bounds the walk also where a link leads back to a parent.
        deep = relative != "." and relative.count("/") >= 2
        subfolders[:] = [] if deep else sorted(name for name in subfolders if not name.startswith("."))
        prefix = "" if relative == "." else relative + "/"
        paths += [prefix + name for name in files if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    return sorted(paths)


@dataclass(frozen=True, eq=False)
class FileReader:
    """Reads images from files; ``paths`` are relative to ``root``."""

    root: Path
    paths: tuple[str, ...]

    def read(self, index: int) -> Image.Image:
        """Decode one file (RGB)."""
        path = self.root / self.paths[index]
        return decode(path, str(path))

    def name(self, index: int) -> str:
        """Its path."""
        return str(self.root / self.paths[index])


def list_folder(root: Path, *, full_decode: bool) -> Listing:
    """List the images of ``root/[domain/]class/``; ``full_decode`` as in :class:`FileIndex`."""
    found = find_images(root)
    domain_names = tuple(sorted({domain for domain, _ in found}))
    class_names = tuple(sorted({name for _, name in found}))
    paths: list[str] = []
    labels: list[int] = []
    domains: list[int] = []
    for (domain, name), files in sorted(found.items()):
        paths += files
        labels += [class_names.index(name)] * len(files)
        domains += [domain_names.index(domain)] * len(files)
    index = FileIndex(root, full_decode)
    return list_files(FileReader(root, tuple(paths)), labels, domains, class_names, domain_names, index)


def list_files(
    reader: FileReader,
    labels: Sequence[int],
    domains: Sequence[int],
    class_names: tuple[str, ...],
    domain_names: tuple[str, ...],
    index: FileIndex,
) -> Listing:
    """A listing whose images are files, checked and hashed by ``index``."""

    def inspect(position: int) -> Inspection:
        path = reader.paths[position]
        record = index.check(path)
        return Inspection(f"{path}\0{record.size}\0{record.sha256}", record.problem, record.sha256)

    return Listing(
        reader=reader,
        labels=np.array(labels, np.int64),
        domains=np.array(domains, np.int64),
        class_names=class_names,
        domain_names=domain_names,
        inspect=inspect,
        finish=index.save,
    )


@dataclass(frozen=True)
class FileRecord:
    """What is known of one file. ``decoded``: it was fully decoded, not only its header looked at."""

    size: int
    mtime_ns: int
    sha256: str
    problem: str
    decoded: bool


@dataclass(eq=False)
class FileIndex:
    """Checks and hashes files below ``root``, remembering results of earlier runs.

    ``full_decode`` decodes every image instead of looking at its header only: needed when corrupt
    images are to be left out, because a JPEG cut short has a perfect header.
    """

    root: Path
    full_decode: bool = False
    seconds: float = 0.0
    _known: dict[str, FileRecord] = field(init=False)
    _store: Path = field(init=False)
    _changed: bool = False

    def __post_init__(self) -> None:
        identity = hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:16]
        self._store = cache_folder() / "files" / f"{identity}.json"
        self._known = _read_records(self._store)

    def check(self, relative: str) -> FileRecord:
        """Return the record of a file, reading it only when it is new or has changed."""
        start = time.perf_counter()
        path = self.root / relative
        try:
            status = path.stat()
            record = self._known.get(relative)
            if (
                record is None
                or (record.size, record.mtime_ns) != (status.st_size, status.st_mtime_ns)
                or (self.full_decode and not record.decoded)
            ):
                data = path.read_bytes()
                found = problem(data, full=self.full_decode)
                digest = hashlib.sha256(data).hexdigest()
                record = FileRecord(status.st_size, status.st_mtime_ns, digest, found, self.full_decode)
                self._known[relative] = record
                self._changed = True
        except OSError as error:
            # Not remembered: permissions change without a new modification time.
            record = FileRecord(0, 0, "", error.strerror or str(error), self.full_decode)
        self.seconds += time.perf_counter() - start
        return record

    def save(self) -> None:
        """Remember the records when gathering them was slow. A cache that cannot be written costs only time."""
        if not self._changed or self.seconds < SLOW_S:
            return
        try:
            atomic_write_json(self._store, {path: astuple(r) for path, r in self._known.items()}, indent=None)
        except EdgeDuetError as error:
            log.warning("file hashes are not remembered, so the next run reads the files again: %s", error)


def _read_records(store: Path) -> dict[str, FileRecord]:
    try:
        return {path: FileRecord(*values) for path, values in json.loads(store.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s: remembered file hashes are unreadable (%s); the files are read again", store, error)
        return {}
