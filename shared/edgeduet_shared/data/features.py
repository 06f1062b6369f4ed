"""Encode once what no trained parameter changes, and keep it on disk in half precision.

A cache entry is one ``.npy`` file of shape ``[N, ...]`` float16, row by row as in the table, named by
a hash of the model part that encodes, the transform and the content of the images.

How it is written: under a file lock (a second process waits, then reads the finished entry), to a
``.partial`` file that already has the final header and grows by whole chunks, and is renamed when
complete. After a kill the lock is gone, whole chunks are kept and encoding goes on behind them;
batches start at the same rows, so the result is the same as without the interruption. The
rows are appended by plain writes, not through the memory map: a full disk is then an error to
report and not a bus error.

Legend: ``N`` images, ``B`` batch, ``C, H, W`` channels and size of the transformed image.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: mapped files cannot be removed there anyway
    fcntl = None  # type: ignore[assignment]

import filelock
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared.data.cache_folder import cache_folder, make_folder
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.progress import progress_bar
from edgeduet_shared.errors import DataError

log = logging.getLogger(__name__)

BATCH = 64
CHUNK = 4 * BATCH
"""Rows written and synced together: what a kill can cost."""

Transform = Callable[[Image.Image], torch.Tensor]
Encode = Callable[[torch.Tensor], torch.Tensor]
Half = NDArray[np.float16]


@dataclass(frozen=True, eq=False)
class Known:
    """Features of some rows of a table, encoded before: row ``r`` has ``features[rows[r]]``."""

    rows: Mapping[int, int]
    features: Half


class FeatureCache:
    """Features on disk, shared by all clients, runs and processes of one machine."""

    def __init__(self, root: Path | None = None) -> None:
        """Use ``root``, or the user's cache folder (``$EDGEDUET_CACHE``)."""
        self.root = (root if root is not None else cache_folder()) / "features"

    def path(self, table: ImageTable, *, model_key: str, transform: Transform) -> Path:
        """Where the entry of these images, this model part and this transform lies."""
        identity = "\x1f".join((model_key, transform_key(transform), table.fingerprint, str(len(table))))
        return self.root / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.npy"

    def open(
        self,
        table: ImageTable,
        *,
        model_key: str,
        transform: Transform,
        encode: Encode,
        progress: bool = True,
        known: Known | None = None,
    ) -> np.memmap:
        """Return features ``[N, ...]`` float16, read-only, encoding first what is missing.

        ``encode`` maps ``[B, C, H, W]`` to ``[B, ...]``; ``model_key`` must name everything in it that
        can change a value. ``transform`` must be deterministic and its ``repr`` complete. What ``known`` has, of the
        same model part and transform, is copied.

        Raises:
            DataError: an image cannot be decoded, the disk is full or not writable, an entry is damaged.
        """
        final = self.path(table, model_key=model_key, transform=transform)
        while True:
            if not final.exists():
                make_folder(self.root)
                with _locked(final.with_suffix(".lock"), progress):
                    # Another process may have finished it while this one waited.
                    if not final.exists():
                        _Writer(final, table, transform, encode, progress, known).run()
            entry = _open_entry(final, len(table))
            if entry is not None:
                return entry
            # `edgeduet-sim cache --prune` took it between the look and the opening.

    @staticmethod
    def read(entry: Path, rows: int) -> np.memmap | None:
        """Map a finished entry of ``rows`` images; None when there is none.

        Raises:
            DataError: it is damaged.
        """
        return _open_entry(entry, rows)


def transform_key(transform: Transform) -> str:
    """``repr`` of a transform without memory addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(transform))


@contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """Hold the entry's lock. The system drops it when the process dies, so it never goes stale."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("another process is encoding these images; waiting for it (%s)", path)
        with progress_bar("waiting for another process that encodes these images", None, enabled=progress):
            lock.acquire()
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


class _Writer:
    """Encodes one entry."""

    def __init__(
        self,
        final: Path,
        table: ImageTable,
        transform: Transform,
        encode: Encode,
        progress: bool,
        known: Known | None = None,
    ) -> None:
        self._final = final
        self._partial = final.with_suffix(".partial")
        self._table = table
        self._transform = transform
        self._encode = encode
        self._progress = progress
        self._known = known
        self._shape: tuple[int, ...] | None = None

    def run(self) -> None:
        try:
            self._write()
            os.replace(self._partial, self._final)
        except (DataError, OSError) as error:
            # What a kill leaves is worth going on with; what an error leaves is only in the way.
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)
            if isinstance(error, DataError):
                raise
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full() from error
            raise _unwritable(self._final.parent, error) from error

    def _write(self) -> None:
        total = len(self._table)
        self._shape, done = _resumable(self._partial, total)
        if done:
            log.info("going on with an interrupted encoding at image %d of %d", done + 1, total)
        with (
            self._partial.open("r+b" if done else "w+b") as file,
            progress_bar("encoding images", total, enabled=self._progress) as advance,
        ):
            file.seek(0, os.SEEK_END)
            advance(done)
            while done < total:
                chunk = self._encode_rows(done, min(done + CHUNK, total), advance)
                if self._shape is None:
                    self._shape = chunk.shape[1:]
                    self._check_space()
                    _write_header(file, (total, *self._shape))
                if chunk.shape[1:] != self._shape:
                    raise DataError(
                        f"{self._final.name}: features changed shape from {self._shape} to {chunk.shape[1:]} while "
                        "encoding; the same model_key must not name two model parts"
                    )
                file.write(np.ascontiguousarray(chunk).tobytes())
                file.flush()
                os.fsync(file.fileno())
                done += len(chunk)

    def _encode_rows(self, start: int, stop: int, advance: Callable[[int], None]) -> Half:
        parts = []
        for first in range(start, stop, BATCH):
            rows = range(first, min(first + BATCH, stop))
            parts.append(self._encode_batch(rows) if self._known is None else self._fill_batch(rows, self._known))
            advance(len(rows))
        return np.concatenate(parts)

    def _fill_batch(self, rows: Sequence[int], known: Known) -> Half:
        """Copy what is known and encode the rest."""
        new = [row for row in rows if row not in known.rows]
        encoded = self._encode_batch(new) if new else known.features[:0]
        batch = np.empty((len(rows), *encoded.shape[1:]), np.float16)
        for place, row in enumerate(rows):
            if row in known.rows:
                batch[place] = known.features[known.rows[row]]
        batch[[place for place, row in enumerate(rows) if row not in known.rows]] = encoded
        return batch

    def _encode_batch(self, rows: Sequence[int]) -> Half:
        with torch.inference_mode():
            pixels = torch.stack([self._transform(self._table.image(row)) for row in rows])
            encoded: Half = self._encode(pixels).to("cpu", torch.float16).numpy()
        if len(encoded) != len(rows):
            raise ValueError(f"encode returned {len(encoded)} rows for {len(rows)} images")
        finite = np.isfinite(encoded.reshape(len(rows), -1)).all(axis=1)
        if not finite.all():
            name = self._table.image_name(rows[int(np.argmin(finite))])
            raise DataError(f"{name}: its features are not finite in half precision; the backbone does not suit it")
        return encoded

    def _check_space(self) -> None:
        if shutil.disk_usage(self._final.parent).free < self._needed():
            raise self._full()

    def _needed(self) -> int:
        return _bytes(len(self._table), self._shape or ())

    def _full(self) -> DataError:
        free = shutil.disk_usage(self._final.parent).free
        return DataError(
            f"{self._final.parent}: disk full: caching the features of {len(self._table)} images needs "
            f"{_megabytes(self._needed())}, {_megabytes(free)} are free; make room or set EDGEDUET_CACHE to a folder "
            "on a larger disk"
        )


def _resumable(partial: Path, total: int) -> tuple[tuple[int, ...] | None, int]:
    """Row shape and number of whole-chunk rows of an interrupted entry, cut to them; ``(None, 0)`` if none."""
    try:
        with partial.open("r+b") as file:
            shape, offset = _read_header(file)
            if not shape or shape[0] != total:
                return None, 0
            row = _bytes(1, shape[1:])
            size = file.seek(0, os.SEEK_END)
            done = (size - offset) // row // CHUNK * CHUNK
            if done <= 0:
                return None, 0
            file.truncate(offset + done * row)
            return shape[1:], done
    except (FileNotFoundError, ValueError):
        return None, 0


def _write_header(file: BufferedRandom, shape: tuple[int, ...]) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _read_header(file: BufferedRandom) -> tuple[tuple[int, ...], int]:
    """Shape and offset of the data; ``ValueError`` when this is no such file."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("not a version 1.0 npy file")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order or dtype != np.float16:
        raise ValueError("not a float16 array in row order")
    return tuple(shape), file.tell()


def _open_entry(path: Path, rows: int) -> np.memmap | None:
    """Map an entry and hold it; None when it is no longer there."""
    try:
        held = _hold(path)
        features: np.memmap = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged feature cache ({error}); delete it to encode the images again") from error
    if features.dtype != np.float16 or features.shape[:1] != (rows,):
        raise DataError(
            f"{path}: damaged feature cache ({features.dtype} {features.shape}); delete it to encode the images again"
        )
    with suppress(OSError):  # a cache on a read-only disk is fine
        os.utime(path)  # the time of the last use, by which entries are pruned
    features.held = held  # type: ignore[attr-defined]  # lives and dies with the mapping
    return features


def _hold(path: Path) -> BufferedReader:
    """Open an entry with a shared lock, which says to :func:`take_away` that it is in use.

    Raises:
        FileNotFoundError: it is not there, or was taken away while it was opened.
    """
    file = path.open("rb")
    if fcntl is not None:
        with suppress(OSError):  # file systems without locks
            fcntl.flock(file, fcntl.LOCK_SH)
    if os.fstat(file.fileno()).st_nlink == 0:
        file.close()
        raise FileNotFoundError(path)
    return file


def take_away(path: Path) -> bool:
    """Remove a finished or interrupted entry unless a process maps or writes it; whether it was removed.

    The lock file stays: it is empty, and taking it from under a waiting process would let two of them write.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with filelock.FileLock(path.with_suffix(".lock"), timeout=0), path.open("rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (filelock.Timeout, BlockingIOError, FileNotFoundError):
        return False
    return True


def _bytes(rows: int, shape: tuple[int, ...]) -> int:
    return rows * math.prod(shape) * np.dtype(np.float16).itemsize


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"{folder}: the feature cache cannot be written ({error.strerror}); "
        "set EDGEDUET_CACHE to a folder you may write to"
    )
