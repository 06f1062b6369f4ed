"""Where a device keeps its classifier: the version in use, the one before, switched in one step.

    DIR/current.json                 names the version in use; replaced atomically
    DIR/versions/NAME/               classifier.json, model.onnx

A version is complete before ``current.json`` names it. The last good one stays, for a rollback and for a
program that has it open.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgeduet_client.classifier.preprocessing import Preprocessing
from edgeduet_shared.atomic_files import atomic_write_json, write_failure
from edgeduet_shared.errors import StateError

FACTS = "classifier.json"
MODEL = "model.onnx"
CURRENT = "current.json"
ERROR_FILE = "export-error.txt"
"""Why the last export failed; not there after one that worked."""
_VERSIONS = "versions"
KEPT = 2


@dataclass(frozen=True)
class ClassifierFacts:
    """What a version is.

    Attributes:
        class_names: of all classes of the stream, in label order.
        seen: labels that can be answered: the classes of the stages so far.
        largest_difference: of logits between ONNX Runtime and torch, as found by the export.
    """

    run: str
    client: int
    stage: int
    class_names: tuple[str, ...]
    seen: tuple[int, ...]
    preprocessing: Preprocessing
    model_sha256: str
    largest_difference: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ClassifierFacts:
        """Read what :meth:`as_json` wrote."""
        lists = {name: tuple(values[name]) for name in ("class_names", "seen")}
        return cls(**{**values, **lists, "preprocessing": Preprocessing.from_json(values["preprocessing"])})

    def as_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


class ClassifierFolder:
    """Versions of a classifier under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def publish(self, name: str, write: Callable[[Path], ClassifierFacts]) -> ClassifierFacts:
        """Make a new version and put it into use.

        Args:
            name: of the version; one of the same name that is not in use is replaced.
            write: writes ``model.onnx`` into the folder it is given and returns the facts. What it raises leaves
                the version in use as it is.

        Raises:
            EdgeDuetError: the system refused (disk full).
        """
        versions = self.root / _VERSIONS
        folder = versions / name
        try:
            if self._named() == name:
                folder = versions / f"{name}-again"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            facts = write(folder)
            atomic_write_json(folder / FACTS, facts.as_json())
            atomic_write_json(self.root / CURRENT, {"version": folder.name, "previous": self._named()})
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise write_failure(folder, error) from error
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._remove_old()
        return facts

    def current(self) -> tuple[Path, ClassifierFacts] | None:
        """Return folder and facts of the version in use, or ``None`` before the first stage ended.

        Raises:
            StateError: it is damaged, and there is no good one before it.
        """
        named = self._pointer()
        if named is None:
            return None
        problems = []
        for version in (named["version"], named.get("previous")):
            if version is None:
                continue
            folder = self.root / _VERSIONS / version
            try:
                facts = ClassifierFacts.from_json(json.loads((folder / FACTS).read_text("utf-8")))
                if file_sha256(folder / MODEL) == facts.model_sha256:
                    return folder, facts
                problems.append(f"{folder / MODEL} was altered")
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{folder}: {error}")
        raise StateError(f"the classifier is damaged ({'; '.join(problems)}); it is made anew after the next stage")

    def _pointer(self) -> dict[str, Any] | None:
        path = self.root / CURRENT
        try:
            pointer: dict[str, Any] = json.loads(path.read_text("utf-8"))
            return pointer
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StateError(f"{path} is damaged ({error}); remove it: it is made anew after the next stage") from error

    def _named(self) -> str | None:
        pointer = self._pointer()
        return None if pointer is None else str(pointer["version"])

    def _remove_old(self) -> None:
        pointer = self._pointer() or {}
        keep = {pointer.get("version"), pointer.get("previous")}
        for folder in (self.root / _VERSIONS).iterdir():
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """Return the checksum of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
