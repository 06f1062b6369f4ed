"""Model folders: what `llm import` writes, and everything else reads.

A folder appears whole or not at all: an import works in a hidden folder beside it and renames that at the
end. The manifest names every file with its size and checksum, so that a damaged or exchanged file is found
before it answers wrongly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgeduet_client.llm.errors import ModelError
from edgeduet_shared.atomic_files import atomic_write_text, write_failure
from edgeduet_shared.errors import EdgeDuetError, nearest

MANIFEST = "manifest.json"
GRAPH = "model.onnx"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_DEFAULTS = "generation.json"
FAMILIES = "families.npy"
HEAD_NORMS = "head_norms.npy"
GATE_FOLDER = "gate"

MODELS_VARIABLE = "EDGEDUET_MODELS"
SCHEMA_VERSION = 1

# The family table is derived, and carries its own key and checksum: newer rules make it anew.
_NOT_LISTED = frozenset({MANIFEST, FAMILIES, "families.json"})
_UNFINISHED = ".unfinished-"
_READ = 1 << 22

Dtype = Literal["fp32", "int8", "w8a8", "int4"]


class FileFacts(BaseModel):
    """Size and checksum of one file."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    sha256: str
    bytes: int


class Manifest(BaseModel):
    """What a model folder holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    name: str
    source: str = Field(description="Where the weights came from")
    source_sha256: str = Field(description="Checksum of the weights' file, or of all weight files in order")
    licence: str = Field(description="As the source states it")
    architecture: Literal["llama", "qwen2", "qwen3", "gemma3"]
    layers: int
    hidden_width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context_length: int = Field(description="Positions this folder can hold, in tokens")
    native_context_length: int = Field(description="Positions the model was trained for, in tokens")
    vocab_width: int = Field(description="Width of the logits")
    vocab_size: int = Field(description="Ids the tokenizer knows")
    tokenizer_sha256: str
    bos_id: int | None
    eos_ids: list[int] = Field(description="Tokens that end an answer")
    pad_id: int | None
    add_bos: bool = Field(description="A prompt begins with bos_id")
    dtype: Dtype
    bits_per_weight: float = Field(description="Mean over all matrices, scales and offsets included")
    memory_weights: int = Field(description="Bytes of weights")
    memory_kv_per_token: int = Field(description="Bytes of keys and values that one position needs")
    files: dict[str, FileFacts]
    versions: dict[str, str] = Field(description="Of the libraries that wrote the folder")
    checks: dict[str, Any] = Field(description="What the import measured; see docs/models.md")


@dataclass(frozen=True)
class ModelFolder:
    """An imported model on disk."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, name_or_path: str | Path, root: Path | None = None) -> ModelFolder:
        """Read the manifest of a model and check that its files are there with their sizes.

        Args:
            name_or_path: the name of an imported model, or a path to a model folder.
            root: where models lie; default :func:`models_root`.

        Raises:
            ModelError: no such model, a folder of another version, or a file that is missing or of another size.
        """
        path = _locate(name_or_path, root or models_root())
        folder = cls(path, _read_manifest(path))
        for name, facts in folder.manifest.files.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != facts.bytes:
                raise ModelError(f"{file} is missing or has another size than imported; {_again(folder.manifest)}")
        return folder

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.manifest.name

    @property
    def graph(self) -> Path:
        """The ONNX graph."""
        return self.path / GRAPH

    def file(self, name: str) -> Path:
        """Return the path of a file of the folder."""
        return self.path / name

    def verify(self, progress: Any = None) -> None:
        """Compare the checksum of every file with the manifest; ``progress(done_bytes, all_bytes)``.

        Raises:
            ModelError: a file was altered; names it.
        """
        total = sum(facts.bytes for facts in self.manifest.files.values())
        done = 0
        for name, facts in self.manifest.files.items():
            if file_sha256(self.path / name) != facts.sha256:
                raise ModelError(f"{self.path / name} was altered since it was imported; {_again(self.manifest)}")
            done += facts.bytes
            if progress is not None:
                progress(done, total)

    def generation_defaults(self) -> dict[str, Any]:
        """Return the settings the source suggests (temperature and the like), as the source names them."""
        file = self.path / GENERATION_DEFAULTS
        defaults: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        return defaults

    def head_row_norms(self) -> np.ndarray:
        """Return the norms of the rows of the output matrix, float32 ``(V,)``."""
        norms: np.ndarray = np.load(self.path / HEAD_NORMS)
        return norms

    def memory_bytes(self, tokens: int) -> int:
        """Bytes that a session with one context of ``tokens`` positions needs."""
        return self.manifest.memory_weights + tokens * self.manifest.memory_kv_per_token

    def remove(self) -> None:
        """Delete the folder: first its name, so that nobody opens half a model.

        Raises:
            EdgeDuetError: the system refused.
        """
        path = self.path.resolve()
        doomed = path.with_name(f"{_UNFINISHED}{path.name}")
        try:
            with _lock(path.parent, path.name):
                shutil.rmtree(doomed, ignore_errors=True)
                path.rename(doomed)
                shutil.rmtree(doomed)
        except Timeout:
            raise ModelError(f"another process is importing '{path.name}' now; wait for it, then remove it") from None
        except OSError as error:
            raise write_failure(path, error) from error


def models_root() -> Path:
    """Return where models lie: ``$EDGEDUET_MODELS``, or a folder of the user's."""
    stated = os.environ.get(MODELS_VARIABLE)
    return Path(stated) if stated else Path(platformdirs.user_data_dir("edgeduet")) / "models"


def list_models(root: Path | None = None) -> tuple[list[ModelFolder], list[str]]:
    """Return the usable models, by name, and one line for every folder that is not usable."""
    root = root or models_root()
    usable, broken = [], []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            usable.append(ModelFolder.open(path))
        except ModelError as error:
            broken.append(str(error))
    return usable, broken


@contextmanager
def new_folder(name: str, root: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a hidden folder to write a model into; on leaving without an error it becomes ``root / name``.

    What earlier imports of that name left behind when they were killed is removed first.

    Raises:
        ModelError: the name is taken (and ``replace`` is not set), or another process imports it now.
        EdgeDuetError: the system refused (disk full, no permission).
    """
    target = root / name
    staging = root / f"{_UNFINISHED}{name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root, name):
            _recover(target)
            if target.exists() and not replace:
                raise ModelError(f"a model named '{name}' exists in {root}; give --replace, or another --name")
            _sweep(root, name)
            staging.mkdir()
            try:
                yield staging
                _publish(staging, target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except Timeout:
        raise ModelError(f"another process is importing '{name}' into {root}; wait for it, or choose --name") from None
    except OSError as error:
        raise _system_failure(root, error) from error


def _lock(root: Path, name: str) -> FileLock:
    return FileLock(root / f".{name}.lock", timeout=0)


def _former(target: Path) -> Path:
    """Where a model lies for the moment in which another takes its name."""
    return target.with_name(f"{_UNFINISHED}former-{target.name}")


def _sweep(root: Path, own: str) -> None:
    """Remove what killed imports and removals left; the caller holds the lock of the model ``own``."""
    for left in root.glob(f"{_UNFINISHED}*"):
        name = left.name.removeprefix(_UNFINISHED)
        if name.startswith("former-"):
            continue  # whoever opens that model next puts it back
        if name == own:
            shutil.rmtree(left, ignore_errors=True)
            continue
        with suppress(Timeout), _lock(root, name):  # taken: an import at work
            shutil.rmtree(left, ignore_errors=True)


def _recover(target: Path) -> None:
    """Give a model its name back that lost it to a process killed in that very moment; the caller holds the lock."""
    if not target.exists() and (_former(target) / MANIFEST).is_file():
        _former(target).rename(target)


def _system_failure(root: Path, error: OSError) -> EdgeDuetError:
    """Return the line for what the system refused while a folder was made under ``root``."""
    if error.errno is None:  # raised by a library in words of its own; ours and Python's have a number
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return ModelError(f"cannot read the source: {said}")
    named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    # What has no name was a write to an open file; what lies elsewhere belongs to the source.
    if named is None or named.absolute().is_relative_to(root.absolute()) or named in root.absolute().parents:
        return write_failure(root, error)
    return ModelError(f"cannot use {named}: {error.strerror or error}")


def write_manifest(folder: Path, facts: dict[str, Any]) -> Manifest:
    """Add the facts of every file present to ``facts`` and write the manifest, which makes the folder a model."""
    files = {
        path.name: FileFacts(sha256=file_sha256(path), bytes=path.stat().st_size)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in _NOT_LISTED
    }
    manifest = Manifest(**facts, files=files)
    atomic_write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")
    return manifest


def file_sha256(path: Path) -> str:
    """Return the checksum of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ):
            digest.update(chunk)
    return digest.hexdigest()


def _locate(name_or_path: str | Path, root: Path) -> Path:
    as_path = Path(name_or_path)
    if as_path.is_dir() and (as_path / MANIFEST).is_file():
        return as_path
    named = root / str(name_or_path)
    if as_path.name == str(name_or_path):
        if not named.exists() and _former(named).is_dir():
            with suppress(Timeout, OSError), _lock(root, named.name):
                _recover(named)
        if (named / MANIFEST).is_file():
            return named
    known = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}")) if root.is_dir() else []
    if not known:
        raise ModelError(
            f"no model named '{name_or_path}': none is imported in {root}; "
            "try `edgeduet-client llm import smollm2-135m`"
        )
    raise ModelError(f"no model named '{name_or_path}' in {root}{nearest(str(name_or_path), known)}")


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        stated = json.loads(file.read_text("utf-8"))
        version = stated.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ModelError(f"{file} has schema version {version}, this program reads {SCHEMA_VERSION}; import again")
        return Manifest.model_validate(stated)
    except (OSError, ValueError, AttributeError) as error:
        reason = f"{error.error_count()} wrong entries" if isinstance(error, ValidationError) else str(error)
        raise ModelError(f"{file} cannot be read ({reason}); import the model again") from error


def _publish(staging: Path, target: Path) -> None:
    """Give a finished folder its name; a former model of that name goes only when the new one is there."""
    if not (staging / MANIFEST).is_file():
        raise RuntimeError(f"{staging} has no manifest")
    for path in (*staging.rglob("*"), staging):
        _to_disk(path)
    former = _former(target)
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    staging.rename(target)
    _to_disk(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _again(manifest: Manifest) -> str:
    quantisation = "none" if manifest.dtype == "fp32" else manifest.dtype
    return (
        f"import it again: edgeduet-client llm import {shlex.quote(manifest.source)} --name {manifest.name} "
        f"--quantize {quantisation} --replace"
    )
