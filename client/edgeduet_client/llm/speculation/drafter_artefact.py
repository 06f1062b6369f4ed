"""Drafters on disk: ``MODEL/drafters/NAME/`` with ``drafter.json``, the graph, and what it was trained to.

A drafter belongs to one target: its graph names the target's weights, and it continues that model's hidden states.
So the description holds the checksums of the target's graph, weights and tokenizer, and every opening compares.
A folder appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import Manifest, ModelFolder, file_sha256
from edgeduet_shared.atomic_files import atomic_write_text, write_failure
from edgeduet_shared.errors import nearest

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel

DRAFTERS_FOLDER = "drafters"
DESCRIPTION = "drafter.json"
DRAFTER_GRAPH = "drafter.onnx"
PARAMETERS = "parameters.safetensors"
_UNFINISHED = ".unfinished-drafter-"

Kind = Literal["recurrent", "truncated"]


class TargetBinding(BaseModel):
    """The target a drafter belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="its name when the drafter was made")
    graph_sha256: str
    weights_sha256: str
    tokenizer_sha256: str

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return the binding of a model."""
        files = manifest.files
        return cls(
            model=manifest.name,
            graph_sha256=files["model.onnx"].sha256,
            weights_sha256=files["model.onnx.data"].sha256,
            tokenizer_sha256=manifest.tokenizer_sha256,
        )

    def same_target(self, other: TargetBinding) -> bool:
        """Whether both are the same model, whatever its name."""
        return self.model_dump(exclude={"model"}) == other.model_dump(exclude={"model"})


class DrafterCard(BaseModel):
    """What is known about a drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    name: str
    kind: Kind
    target: TargetBinding
    vocabulary: int = Field(description="ids it may propose")
    graph_sha256: str = Field(description="of drafter.onnx")
    bytes: int = Field(description="of drafter.onnx")
    layers: int | None = Field(None, description="of a truncated drafter")
    training: dict[str, Any] = Field(default_factory=dict, description="settings and what was measured while training")
    parity: dict[str, float] = Field(default_factory=dict, description="of the graph with the float32 network")
    acceptance: dict[str, list[float | None]] = Field(
        default_factory=dict,
        description="by domain, on held-out answers: share of tokens 1, 2, 3 that are the target's greedy ones",
    )


@dataclass(frozen=True)
class DrafterFolder:
    """A drafter on disk."""

    path: Path
    card: DrafterCard

    @classmethod
    def open(cls, path: Path, manifest: Manifest) -> DrafterFolder:
        """Read a drafter for the model of ``manifest``.

        Raises:
            ModelError: it is missing or damaged, or belongs to another model.
        """
        card = read_card(path)
        if not card.target.same_target(TargetBinding.of(manifest)):
            raise ModelError(
                f"the drafter {path} was made for '{card.target.model}' as imported then, not for '{manifest.name}' "
                "as it is; train one with: edgeduet-client llm drafter train"
            )
        graph = path / DRAFTER_GRAPH
        if not graph.is_file() or file_sha256(graph) != card.graph_sha256:
            raise ModelError(f"{graph} is missing or was altered; train the drafter again")
        return cls(path, card)

    @property
    def graph(self) -> Path:
        """The ONNX graph."""
        return self.path / DRAFTER_GRAPH


def read_card(path: Path) -> DrafterCard:
    """Return the description of the drafter in the folder ``path``.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    file = path / DESCRIPTION
    try:
        return DrafterCard.model_validate(json.loads(file.read_text("utf-8")))
    except FileNotFoundError:
        raise ModelError(f"no drafter in {path}; train one with: edgeduet-client llm drafter train") from None
    except (OSError, ValueError) as error:
        reason = f"{error.error_count()} wrong entries" if isinstance(error, ValidationError) else str(error)
        raise ModelError(f"{file} cannot be read ({reason}); train the drafter again") from error


def find_drafter(name_or_path: str, model: LocalModel | ModelFolder) -> Path:
    """Return the folder of a drafter of ``model``, by its name or its path.

    Raises:
        ModelError: there is none.
    """
    as_path = Path(name_or_path)
    if (as_path / DESCRIPTION).is_file():
        return as_path
    root = drafters_root(model)
    if as_path.name == name_or_path and (root / name_or_path / DESCRIPTION).is_file():
        return root / name_or_path
    known = [path.parent.name for path in root.glob(f"*/{DESCRIPTION}")]
    if not known:
        raise ModelError(
            f"no drafter named '{name_or_path}': {model.manifest.name} has none; train one with: "
            f"edgeduet-client llm drafter train {model.manifest.name}"
        )
    raise ModelError(f"no drafter named '{name_or_path}' of {model.manifest.name}{nearest(name_or_path, known)}")


def drafters_root(model: LocalModel | ModelFolder) -> Path:
    """Return where the drafters of a model lie."""
    folder = model.path if isinstance(model, ModelFolder) else model.session.path.parent
    return folder / DRAFTERS_FOLDER


def list_drafters(model: LocalModel | ModelFolder) -> tuple[list[DrafterFolder], list[str]]:
    """Return the usable drafters of a model, by name, and one line for each that is not usable."""
    usable, broken = [], []
    for file in sorted(drafters_root(model).glob(f"[!.]*/{DESCRIPTION}")):
        try:
            usable.append(DrafterFolder.open(file.parent, model.manifest))
        except ModelError as error:
            broken.append(str(error))
    return usable, broken


@contextmanager
def new_drafter(model: ModelFolder, name: str, *, replace: bool) -> Iterator[Path]:
    """Yield a hidden folder to write a drafter into; on leaving without an error it becomes ``drafters/NAME``.

    Raises:
        ModelError: no possible name, or it is taken (and ``replace`` is not set) or being made now.
        EdgeDuetError: the system refused (disk full, no permission).
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name):
        raise ModelError(f"'{name}' is no name for a drafter; use small letters, digits, '.', '_' and '-'")
    root = drafters_root(model)
    target, staging = root / name, model.path / f"{_UNFINISHED}{name}"
    try:
        root.mkdir(exist_ok=True)
        with FileLock(root / f".{name}.lock", timeout=0):
            refuse_taken(model, name, replace=replace)
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            try:
                yield staging
                if target.exists():
                    shutil.rmtree(target)
                staging.rename(target)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except Timeout:
        raise ModelError(f"another process is making the drafter '{name}'; wait for it, or choose --name") from None
    except OSError as error:
        raise write_failure(target, error) from error


def refuse_taken(model: ModelFolder, name: str, *, replace: bool) -> None:
    """Raise ModelError where a drafter of that name exists and may not be replaced."""
    if (drafters_root(model) / name).exists() and not replace:
        raise ModelError(f"{model.name} has a drafter named '{name}'; give --replace, or another --name")


def write_card(folder: Path, model: ModelFolder, **facts: Any) -> DrafterCard:
    """Describe the drafter whose graph lies in ``folder``."""
    graph = folder / DRAFTER_GRAPH
    card = DrafterCard(
        target=TargetBinding.of(model.manifest), graph_sha256=file_sha256(graph), bytes=graph.stat().st_size, **facts
    )
    atomic_write_text(folder / DESCRIPTION, card.model_dump_json(indent=2) + "\n")
    return card


def remove_drafter(model: ModelFolder, name: str) -> None:
    """Delete a drafter, usable or not.

    Raises:
        ModelError: there is none of that name.
        EdgeDuetError: the system refused.
    """
    path = drafters_root(model) / Path(name).name
    if not path.is_dir():
        find_drafter(name, model)  # says what there is
        raise ModelError(f"'{name}' is a path; give the name of a drafter of {model.name}")
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise write_failure(path, error) from error
