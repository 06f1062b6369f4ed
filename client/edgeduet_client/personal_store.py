"""Personal state of clients: what never leaves them.

One small interface, two homes:

* :class:`MemoryStore` for simulations: the newest state per client; it is part of the run's
  checkpoint (``edgeduet_server.checkpoint.PersonalSnapshot``).
* :class:`DiskStore` for devices, and for engines whose clients share no process: one safetensors file
  per state, written to a temporary name and renamed, so that a kill or a power cut leaves the previous
  one intact. The last ``KEPT`` states stay. A file that does not match its checksum is reported and
  moved aside, and the state before it is used.

States carry the (stage, round) they were made in. A request of (stage, round) starts from the newest
state made *before* it, so that a server that resumes and repeats a round gets the same answer again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as decode_arrays
from safetensors.numpy import save as encode_arrays

from edgeduet_shared.atomic_files import atomic_write_bytes
from edgeduet_shared.errors import StateError

log = logging.getLogger("edgeduet.client")

KEPT = 3
AFTER_STAGE = 1_000_000
"""As a round: after all rounds of the stage."""

Arrays = dict[str, npt.NDArray[Any]]
Position = tuple[int, int]


class PersonalStore(Protocol):
    """Where a client's personal state lives; ``run`` names run and method."""

    def load(self, run: str, client: int, before: Position) -> Arrays | None:
        """Return the newest state made before (stage, round), or None when there is none yet."""
        ...

    def save(self, run: str, client: int, at: Position, state: Arrays) -> None:
        """Keep ``state`` as the result of (stage, round)."""
        ...


class MemoryStore:
    """States in memory, for simulated clients of one process."""

    def __init__(self) -> None:
        self._states: dict[str, dict[int, Arrays]] = {}
        self._run = ""

    def open(self, run: str) -> None:
        """Make ``run`` the one that :meth:`snapshot` and :meth:`restore` speak of."""
        self._run = run

    def load(self, run: str, client: int, before: Position) -> Arrays | None:
        """Return the state of ``client``; positions are the checkpoint's business here."""
        return self._states.get(run, {}).get(client)

    def save(self, run: str, client: int, at: Position, state: Arrays) -> None:
        """Keep ``state``."""
        self._states.setdefault(run, {})[client] = state

    def snapshot(self, clients: Collection[int]) -> dict[int, Arrays]:
        """Return the present states of ``clients`` in the open run."""
        states = self._states.get(self._run, {})
        return {client: states[client] for client in clients if client in states}

    def restore(self, states: Mapping[int, Arrays]) -> None:
        """Replace all states of the open run."""
        self._states[self._run] = {client: dict(state) for client, state in states.items()}


class DiskStore:
    """States as files ``ROOT/RUN/client-C/STAGE-ROUND.safetensors`` with a checksum in front.

    Raises:
        StateError: a state cannot be written, or every state of a client is damaged.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def load(self, run: str, client: int, before: Position) -> Arrays | None:
        """Return the newest intact state made before (stage, round), or None when there is none."""
        folder = self._folder(run, client)
        # Half written when the power was cut; nobody else writes here.
        for path in folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        if before <= (0, 0):
            return None
        files = [path for path in reversed(_sorted(folder)) if _position(path) < before]
        for path in files:
            arrays = _read(path)
            if arrays is not None:
                return arrays
        if files or any(_position(path) < before for path in folder.glob("*.damaged")):
            raise StateError(
                f"{folder}: every personal state of client {client} is damaged; "
                "remove the folder to start this client afresh"
            )
        return None

    def save(self, run: str, client: int, at: Position, state: Arrays) -> None:
        """Write ``state`` atomically and remove states, damaged ones too, older than the last few."""
        folder = self._folder(run, client)
        folder.mkdir(parents=True, exist_ok=True)
        content = encode_arrays({name: np.asarray(value, order="C") for name, value in state.items()})
        atomic_write_bytes(folder / f"{at[0]:04d}-{at[1]:07d}.safetensors", _checksum(content) + content)
        earlier = [path for path in _sorted(folder) if _position(path) <= at]
        for path in earlier[:-KEPT]:
            path.unlink(missing_ok=True)
        # Reported when it was found, and of no use once newer states are there.
        for path in folder.glob("*.damaged"):
            if len(earlier) >= KEPT and _position(path) < _position(earlier[-KEPT]):
                path.unlink(missing_ok=True)
        # Left by a run that went further and was resumed from an earlier point.
        for path in _sorted(folder):
            if _position(path) > at:
                path.unlink(missing_ok=True)

    def _folder(self, run: str, client: int) -> Path:
        return self.root / run_folder_name(run) / f"client-{client}"


def run_folder_name(run: str) -> str:
    """The folder of a run's states: its name, with what a file name cannot hold percent-encoded; no two runs share one.

    Encoded are all but ASCII letters, digits, ``_``, ``.``, ``-`` and ``~``. A name of dots alone would be this
    folder or the one above, so that its dots are encoded too.
    """
    name = quote(run, safe="", errors="surrogatepass")
    if name.strip("."):
        return name
    return name.replace(".", "%2E") or "%"


def _sorted(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) if folder.is_dir() else []


def _position(path: Path) -> Position:
    stage, round = path.stem.split("-")
    return int(stage), int(round)


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _read(path: Path) -> Arrays | None:
    try:
        raw = path.read_bytes()
        if raw[:32] == _checksum(raw[32:]):
            return dict(decode_arrays(raw[32:]))
        why = "checksum does not match"
    except (OSError, SafetensorError) as error:
        why = str(error)
    log.warning("%s: personal state is damaged (%s); using the one before it", path, why)
    path.replace(path.with_suffix(".damaged"))
    return None
