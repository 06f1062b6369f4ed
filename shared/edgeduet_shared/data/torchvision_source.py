"""torchvision data sets that are already on disk. Nothing is ever downloaded.

Listed here are the classification sets whose labels can be read without decoding an image. Their
official parts are joined; a part that is not on disk is an error, since half a data set would
give other numbers without saying so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torchvision.datasets
from PIL import Image

from edgeduet_shared.data.image_folder import ONLY_DOMAIN, FileIndex, FileReader, list_files
from edgeduet_shared.data.image_table import Inspection, Listing
from edgeduet_shared.errors import ConfigError, DataError, nearest


@dataclass(frozen=True)
class _Recipe:
    """How to read one data set: keyword arguments of its parts and the attributes that hold what we need.

    Pixels are in the array ``data`` or in the files ``files``: a list of paths or of (path, class) pairs.
    """

    parts: tuple[Mapping[str, Any], ...]
    labels: str
    classes: str | tuple[str, ...] = "classes"
    data: str = ""
    files: str = ""


def _splits(*names: str) -> tuple[Mapping[str, str], ...]:
    return tuple({"split": name} for name in names)


_TRAIN_TEST: tuple[Mapping[str, bool], ...] = ({"train": True}, {"train": False})
_DIGITS = tuple("0123456789")
RECIPES: Mapping[str, _Recipe] = {
    "MNIST": _Recipe(_TRAIN_TEST, "targets", classes=_DIGITS, data="data"),
    "FashionMNIST": _Recipe(_TRAIN_TEST, "targets", data="data"),
    "KMNIST": _Recipe(_TRAIN_TEST, "targets", data="data"),
    "CIFAR10": _Recipe(_TRAIN_TEST, "targets", data="data"),
    "CIFAR100": _Recipe(_TRAIN_TEST, "targets", data="data"),
    "SVHN": _Recipe(_splits("train", "test"), "labels", classes=_DIGITS, data="data"),
    "STL10": _Recipe(_splits("train", "test"), "labels", data="data"),
    "DTD": _Recipe(_splits("train", "val", "test"), "_labels", files="_image_files"),
    "Food101": _Recipe(_splits("train", "test"), "_labels", files="_image_files"),
    "FGVCAircraft": _Recipe(_splits("trainval", "test"), "_labels", files="_image_files"),
    "Flowers102": _Recipe(_splits("train", "val", "test"), "_labels", files="_image_files"),
    "OxfordIIITPet": _Recipe(_splits("trainval", "test"), "_labels", files="_images"),
    "EuroSAT": _Recipe(({},), "targets", files="samples"),
}


def list_torchvision(argument: str, *, full_decode: bool) -> Listing:
    """List ``NAME:ROOT``; ``ROOT`` is what torchvision calls ``root``.

    Raises:
        ConfigError: no ROOT, or a data set this module does not know.
        DataError: the data set, or a part of it, is not on disk there.
    """
    name, _, folder = argument.partition(":")
    if name not in RECIPES:
        raise ConfigError(f"data.source: torchvision data set '{name}' is not supported{nearest(name, RECIPES)}")
    if not folder:
        raise ConfigError(f"data.source: 'torchvision:{name}' lacks the folder, as in torchvision:{name}:/data")
    root, recipe = Path(folder).expanduser(), RECIPES[name]
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; check the path in data.source (nothing is downloaded)")
    parts = [_open_part(name, root, arguments) for arguments in recipe.parts]
    labels = [int(label) for part in parts for label in getattr(part, recipe.labels)]
    class_names = recipe.classes if isinstance(recipe.classes, tuple) else tuple(getattr(parts[0], recipe.classes))
    if recipe.files:
        entries = [entry for part in parts for entry in getattr(part, recipe.files)]
        paths = tuple(str(Path(e[0] if isinstance(e, tuple) else e).relative_to(root)) for e in entries)
        reader, index = FileReader(root, paths), FileIndex(root, full_decode)
        return list_files(reader, labels, [0] * len(labels), class_names, (ONLY_DOMAIN,), index)
    arrays = _ArrayReader(name, parts, recipe.data)
    return Listing(
        reader=arrays,
        labels=np.array(labels, np.int64),
        domains=np.zeros(len(labels), np.int64),
        class_names=class_names,
        domain_names=(ONLY_DOMAIN,),
        inspect=arrays.inspect,
    )


def _open_part(name: str, root: Path, arguments: Mapping[str, Any]) -> Any:
    try:
        return getattr(torchvision.datasets, name)(str(root), **arguments)
    except (RuntimeError, OSError, ValueError) as error:
        part = " ".join(f"{key}={value}" for key, value in arguments.items())
        reason = str(error).partition(" You can use download")[0].rstrip(".")
        raise DataError(
            f"{root}: torchvision {name}{f' ({part})' if part else ''} cannot be read there ({reason}); nothing is "
            "downloaded: put it there first, or use --set data.source=world for generated images"
        ) from error


class _ArrayReader:
    """Data sets whose pixels are one array per part."""

    def __init__(self, name: str, parts: Sequence[Any], attribute: str) -> None:
        self._name = name
        self._parts = parts
        self._attribute = attribute
        self._ends = np.cumsum([len(part) for part in parts])

    def read(self, index: int) -> Image.Image:
        part, within = self._locate(index)
        image: Image.Image = part[within][0]
        return image.convert("RGB")

    def name(self, index: int) -> str:
        return f"torchvision {self._name} image {index}"

    def inspect(self, index: int) -> Inspection:
        part, within = self._locate(index)
        pixels = np.ascontiguousarray(np.asarray(getattr(part, self._attribute)[within]))
        return Inspection(f"{index} {pixels.shape} {hashlib.sha256(pixels.tobytes()).hexdigest()}", "")

    def _locate(self, index: int) -> tuple[Any, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[which], index - (int(self._ends[which - 1]) if which else 0)
