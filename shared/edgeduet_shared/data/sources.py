"""Read labelled images from wherever they are into one :class:`ImageTable`.

Sources (``data.source``):

* ``world``: the generated caption world; domains are its styles, classes its shapes. Always works.
* ``folder:PATH``: ``PATH/[domain/]class/*.{jpg,jpeg,png}``; the depth is detected.
* ``torchvision:NAME:ROOT``: a torchvision data set already on disk. Nothing is ever downloaded.
* ``hub:NAME``: a Hugging Face data set with an image and a label column, and possibly ``domain``.

Official train/test divisions of torchvision and hub data sets are joined: the division into
training and test images is ours (``data.test_fraction``), the same way for every source.

A table is deterministic: the same files and configuration give the same rows in the same order.
Rows are ordered by (domain, class, name).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared import world
from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.image_folder import list_folder
from edgeduet_shared.data.image_table import ImageTable, build_table, choose
from edgeduet_shared.errors import ConfigError, DataError, nearest

__all__ = ["WORLD_PER_CLASS", "ImageTable", "load_table"]

WORLD_PER_CLASS = 60
"""Pictures per (style, shape) of the generated world when ``data.max_per_class`` is 0."""

OTHER_DATA = "use --set data.source=folder:PATH for images on disk or --set data.source=world for generated ones"


def load_table(config: DataConfig, *, seed: int = 0) -> ImageTable:
    """Read ``config.source``.

    ``seed`` decides which images ``data.max_per_class`` keeps, and what the generated world shows.

    Raises:
        ConfigError: the source is not of a known form, or a domain or class is unknown.
        DataError: the images are missing, unreadable or in a layout that cannot be understood.
    """
    kind, _, rest = config.source.partition(":")
    if kind not in _LOADERS:
        raise ConfigError(f"data.source: unknown source '{config.source}'{nearest(kind, _LOADERS)} ({OTHER_DATA})")
    if kind == "world" and rest:
        raise ConfigError(f"data.source: 'world' takes no argument, got '{config.source}'")
    if kind != "world" and not rest:
        raise ConfigError(f"data.source: '{config.source}' lacks its argument, as in {_EXAMPLES[kind]}")
    table = _LOADERS[kind](rest, config, seed)
    if len(table) == 0:
        raise DataError(f"{config.source}: no usable image is left; {OTHER_DATA}")
    return table


# --- the generated world --------------------------------------------------------------------------


@dataclass(eq=False)
class _WorldReader:
    """Draws pictures on demand, one (style, shape) at a time."""

    cells: tuple[tuple[str, str], ...]
    per_class: int
    seed: int
    _drawn: dict[int, NDArray[np.uint8]] = field(default_factory=dict)

    def read(self, index: int) -> Image.Image:
        cell, within = divmod(index, self.per_class)
        if cell not in self._drawn:
            style, shape = self.cells[cell]
            self._drawn[cell], _ = world.world_images(style, (shape,), self.per_class, self.seed)
        return Image.fromarray(self._drawn[cell][within])

    def name(self, index: int) -> str:
        cell, within = divmod(index, self.per_class)
        return f"world {'/'.join(self.cells[cell])}/{within}"


def _load_world(_: str, config: DataConfig, seed: int) -> ImageTable:
    domains = choose(config.domains, world.STYLES, "domains", "the generated world")
    classes = choose(config.classes, world.SHAPES, "classes", "the generated world")
    per_class = config.max_per_class or WORLD_PER_CLASS
    cells = tuple((style, shape) for style in domains for shape in classes)
    rows = len(cells) * per_class
    # A picture is a pure function of the drawing code and these values, so they identify the pixels
    # without drawing them: a run whose features are cached draws nothing.
    code = hashlib.sha256(Path(world.__file__).read_bytes()).hexdigest()
    versions = [f"{package} {importlib.metadata.version(package)}" for package in ("numpy", "pillow")]
    identity = repr((code, versions, cells, per_class, seed))
    return ImageTable(
        labels=np.tile(np.repeat(np.arange(len(classes)), per_class), len(domains)),
        domains=np.repeat(np.arange(len(domains)), len(classes) * per_class),
        class_names=classes,
        domain_names=domains,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
        skipped=0,
        source=config.source,
        reader=_WorldReader(cells, per_class, seed),
        positions=np.arange(rows),
    )


# --- sources on disk and on the hub ---------------------------------------------------------------


def _load_folder(path: str, config: DataConfig, seed: int) -> ImageTable:
    return build_table(list_folder(Path(path).expanduser(), full_decode=config.skip_corrupt), config, seed)


def _load_torchvision(rest: str, config: DataConfig, seed: int) -> ImageTable:
    # Imported here: torchvision and datasets take seconds and are needed by these two sources only.
    try:
        from edgeduet_shared.data.torchvision_source import list_torchvision
    except ModuleNotFoundError as error:
        raise _lacking("torchvision", error, "train") from error
    return build_table(list_torchvision(rest, full_decode=config.skip_corrupt), config, seed)


def _load_hub(rest: str, config: DataConfig, seed: int) -> ImageTable:
    try:
        from edgeduet_shared.data.hub_source import list_hub
    except ModuleNotFoundError as error:
        raise _lacking("hub", error, "sim") from error
    return build_table(list_hub(rest, full_decode=config.skip_corrupt), config, seed)


def _lacking(source: str, error: ModuleNotFoundError, extra: str) -> DataError:
    return DataError(f"data.source={source}: needs the package '{error.name}'; pip install 'edgeduet[{extra}]'")


_LOADERS: Mapping[str, Callable[[str, DataConfig, int], ImageTable]] = {
    "world": _load_world,
    "folder": _load_folder,
    "torchvision": _load_torchvision,
    "hub": _load_hub,
}
_EXAMPLES = {
    "folder": "folder:/data/pacs",
    "torchvision": "torchvision:FashionMNIST:/data",
    "hub": "hub:flwrlabs/pacs",
}
