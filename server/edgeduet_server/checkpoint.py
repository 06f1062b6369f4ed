"""Checkpoints of a run: complete or absent, checked when read, two kept.

A checkpoint ``NNNNNN`` in the folder consists of

* ``state-NNNNNN.safetensors``: the arrays of the server state (``shared/NAME``, ``extra/NAME``),
* ``personal-NNNNNN.bin`` (only in a simulation): personal states of clients, one safetensors document
  after the other,
* ``checkpoint-NNNNNN.json``: everything else, with the SHA-256 of the other files and of itself. It is
  written last and makes the checkpoint exist.

Each file is flushed to the disk and takes its name in one step. Reading verifies the sums; a damaged
checkpoint is reported and the one before is used.

Personal states dominate the size with many clients, so that a checkpoint writes only those of clients
that were given work since the one before, and refers to older files for the rest. Once more than half
of the bytes in the personal files is out of date, all states are written anew and old files go.
Measured for 1 000 clients in ``simulations/benchmarks/engine_bench.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from edgeduet_shared.atomic_files import atomic_output, atomic_write_bytes
from edgeduet_shared.errors import StateError

log = logging.getLogger("edgeduet.server")

FORMAT = 1
KEPT = 2

Arrays = dict[str, npt.NDArray[Any]]


class StateLike(Protocol):
    """What a checkpoint keeps of a server state (``edgeduet_server.strategies.strategy.ServerState``)."""

    shared: Arrays
    extra: Arrays
    notes: dict[str, Any]


StateT = TypeVar("StateT", bound=Any)


@runtime_checkable
class PersonalSnapshot(Protocol):
    """Reads and replaces the personal states of simulated clients."""

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        """Return the present personal state of each of ``clients`` (no entry where there is none yet)."""
        ...

    def restore(self, states: Mapping[int, Arrays]) -> None:
        """Replace all personal states by ``states``; clients without an entry have none."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a run is and what it counted: work goes on with ``round`` of ``stage`` (0-based).

    ``round`` equal to the number of rounds means that the stage's evaluation comes next.
    """

    stage: int = 0
    round: int = 0
    skipped_rounds: int = 0
    bad_rounds_in_a_row: int = 0
    late_replies: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    engine_errors: tuple[str, ...] = ()

    def next_round(self, **changes: Any) -> Progress:
        """The same after one more round."""
        return replace(self, round=self.round + 1, **changes)

    def next_stage(self, **changes: Any) -> Progress:
        """The same at the beginning of the next stage."""
        return replace(self, stage=self.stage + 1, round=0, **changes)


@dataclass(frozen=True)
class _Blob:
    """Where the personal state of one client lies."""

    file: str
    offset: int
    length: int
    sha256: str


class CheckpointStore:
    """Writes and reads the checkpoints of one run.

    Args:
        folder: the run's checkpoint folder.
        identity: what the run is (scenario digest, method, options, seed); a checkpoint of another run
            is refused.
        every: rounds between checkpoints; the end of a stage is always kept.
        personal: where the personal states of simulated clients are; None where clients keep their own.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        *,
        every: int = 1,
        personal: PersonalSnapshot | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.every = every
        self._identity = json.loads(json.dumps(dict(identity)))
        self._personal = personal
        self._blobs: dict[int, _Blob] = {}
        self._number = 0

    def save(self, state: StateLike, progress: Progress, events: int, changed: Collection[int]) -> None:
        """Write a checkpoint; ``changed`` are the clients that were given work since the last one.

        Raises:
            EdgeDuetError: the folder cannot be written; the last checkpoint is intact.
        """
        number = self._number + 1
        state_name = f"state-{number:06d}.safetensors"
        arrays = {f"shared/{name}": value for name, value in state.shared.items()}
        arrays |= {f"extra/{name}": value for name, value in state.extra.items()}
        content = _encode(arrays)
        atomic_write_bytes(self.folder / state_name, content)
        blobs = self._save_personal(number, changed)
        body = {
            "format": FORMAT,
            "identity": self._identity,
            "progress": asdict(progress),
            "events": events,
            "notes": state.notes,
            "state": {"file": state_name, "sha256": _sha256(content)},
            "personal": {str(client): asdict(blob) for client, blob in sorted(blobs.items())},
        }
        text = json.dumps(body, allow_nan=False, separators=(",", ":"))
        envelope = json.dumps({"sha256": _sha256(text.encode()), "checkpoint": text})
        atomic_write_bytes(self._manifest(number), envelope.encode())
        self._number, self._blobs = number, blobs
        self._remove_old()

    def load(self, state: StateT) -> tuple[StateT, Progress, int] | None:
        """Return (state, progress, events) of the newest intact checkpoint, or None where there is none.

        ``state`` gives the type; its values are replaced. Personal states are put back.

        Raises:
            StateError: the checkpoint is of another run, or every checkpoint is damaged.
        """
        numbers = sorted((int(path.stem.split("-")[1]) for path in self.folder.glob("checkpoint-*.json")), reverse=True)
        damaged: list[str] = []
        for number in numbers:
            try:
                body, arrays, personal = self._read(number)
            except _DamagedError as damage:
                damaged.append(str(damage))
                continue
            for line in damaged:
                log.warning("%s; going on from the checkpoint before it (%06d)", line, number)
            return self._apply(number, body, arrays, personal, state)
        if damaged:
            raise StateError(f"{damaged[0]}, and no intact checkpoint is left; start again without --resume")
        return None

    def _apply(
        self, number: int, body: dict[str, Any], arrays: Arrays, personal: dict[int, Arrays], state: StateT
    ) -> tuple[StateT, Progress, int]:
        self._check_identity(number, body["identity"])
        # A damaged newer checkpoint must not be found again, nor share its number with a new one.
        for path in self.folder.glob("checkpoint-*.json"):
            if int(path.stem.split("-")[1]) > number:
                path.rename(path.with_suffix(".json.damaged"))
        self._number = number
        self._blobs = {int(client): _Blob(**blob) for client, blob in body["personal"].items()}
        if self._personal is not None:
            self._personal.restore(personal)
        restored = replace(
            state,
            shared={name[7:]: value for name, value in arrays.items() if name.startswith("shared/")},
            extra={name[6:]: value for name, value in arrays.items() if name.startswith("extra/")},
            notes=body["notes"],
        )
        values = body["progress"]
        progress = Progress(**{**values, "engine_errors": tuple(values["engine_errors"])})
        return restored, progress, int(body["events"])

    def clear(self) -> None:
        """Remove all checkpoints, for a run that starts from the beginning."""
        for pattern in ("checkpoint-*", "state-*.safetensors", "personal-*.bin"):
            for path in self.folder.glob(pattern):
                path.unlink()
        self._number, self._blobs = 0, {}

    def _check_identity(self, number: int, found: Mapping[str, Any]) -> None:
        for key in sorted({*found, *self._identity}):
            if found.get(key) != self._identity.get(key):
                raise StateError(
                    f"{self._manifest(number)}: is of another run ({key} is {found.get(key)!r}, "
                    f"this run has {self._identity.get(key)!r}); use another run folder"
                )

    def _save_personal(self, number: int, changed: Collection[int]) -> dict[int, _Blob]:
        if self._personal is None:
            return {}
        live = {c: blob for c, blob in self._blobs.items() if c not in changed}
        used = {blob.file for blob in live.values()}
        on_disk = sum((self.folder / name).stat().st_size for name in used)
        if on_disk > 2 * sum(blob.length for blob in live.values()):
            changed, live = {*changed, *live}, {}
        if not changed:
            return live
        name = f"personal-{number:06d}.bin"
        offset = 0
        with atomic_output(self.folder / name) as temporary, temporary.open("wb") as file:
            # In portions, so that the encoded states of a thousand clients are never in memory together.
            ordered = sorted(changed)
            for start in range(0, len(ordered), 32):
                for client, arrays in sorted(self._personal.snapshot(ordered[start : start + 32]).items()):
                    content = _encode(arrays)
                    file.write(content)
                    live[client] = _Blob(name, offset, len(content), _sha256(content))
                    offset += len(content)
        return live

    def _read(self, number: int) -> tuple[dict[str, Any], Arrays, dict[int, Arrays]]:
        path = self._manifest(number)
        try:
            envelope = json.loads(path.read_bytes())
            text = envelope["checkpoint"]
            if _sha256(text.encode()) != envelope["sha256"]:
                raise _DamagedError(f"{path}: is damaged (checksum does not match)")
            body = json.loads(text)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _DamagedError(f"{path}: is damaged ({error})") from error
        if body["format"] != FORMAT:
            raise StateError(
                f"{path}: has format {body['format']}, this version reads {FORMAT}; use the version it is of"
            )
        arrays = self._decode(self._bytes(body["state"]["file"]), body["state"]["sha256"], body["state"]["file"])
        if self._personal is None:
            return body, arrays, {}
        personal: dict[int, Arrays] = {}
        for client, values in body["personal"].items():
            blob = _Blob(**values)
            personal[int(client)] = self._decode(
                self._bytes(blob.file, blob.offset, blob.length), blob.sha256, blob.file
            )
        return body, arrays, personal

    def _bytes(self, name: str, offset: int = 0, length: int = -1) -> bytes:
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise _DamagedError(f"{self.folder / name}: cannot be read ({error.strerror})") from error

    def _decode(self, content: bytes, sha256: str, name: str) -> Arrays:
        if _sha256(content) != sha256:
            raise _DamagedError(f"{self.folder / name}: is damaged (checksum does not match)")
        try:
            return dict(load_arrays(content))
        except SafetensorError as error:
            raise _DamagedError(f"{self.folder / name}: is damaged ({error})") from error

    def _manifest(self, number: int) -> Path:
        return self.folder / f"checkpoint-{number:06d}.json"

    def _remove_old(self) -> None:
        """Keep the newest checkpoints and the files they refer to."""
        kept = sorted(self.folder.glob("checkpoint-*.json"))[-KEPT:]
        needed = {path.name for path in kept}
        for path in kept:
            try:
                body = json.loads(json.loads(path.read_bytes())["checkpoint"])
                needed |= {body["state"]["file"], *(blob["file"] for blob in body["personal"].values())}
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("%s: is damaged (%s); it is of no use any more", path, error)
        for pattern in ("checkpoint-*.json", "state-*.safetensors", "personal-*.bin"):
            for path in self.folder.glob(pattern):
                if path.name not in needed:
                    path.unlink()
        # Damaged ones were reported when they were set aside; they stay until the run is well past them.
        for path in self.folder.glob("checkpoint-*.damaged"):
            if len(kept) == KEPT and path.name < kept[0].name:
                path.unlink()


class _DamagedError(Exception):
    """A file of a checkpoint that is missing or altered."""


def _encode(arrays: Arrays) -> bytes:
    return save_arrays({name: np.asarray(value, order="C") for name, value in arrays.items()})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
