"""Read labelled images from wherever they are into one :class:`ImageTable`.

Sources (``data.source``):

* ``world``: the generated caption world; domains are its styles, classes its shapes. Always works.
* ``folder:PATH``: ``PATH/[domain/]class/*.{jpg,jpeg,png}``; the depth is detected.
* ``torchvision:NAME:ROOT``: a torchvision data set already on disk. Nothing is ever downloaded.
* ``hub:NAME``: a Hugging Face data set with an image and a label column, and possibly ``domain``.

Official train/test divisions of torchvision and hub data sets are joined: the division into
training and test images is ours (``data.test_fraction``), the same way for every source.

A table is deterministic: the same files and configuration give the same rows in the same order.
Rows are ordered by (domain, class, name). ``N`` is the number of images.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared import world
from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.image_check import CORRUPT_REMEDY, decode
from edgeduet_shared.data.image_folder import FileIndex, find_images
from edgeduet_shared.data.progress import progress_bar
from edgeduet_shared.errors import ConfigError, DataError, nearest
from edgeduet_shared.seeds import derive_seed

WORLD_PER_CLASS = 60
"""Pictures per (style, shape) of the generated world when ``data.max_per_class`` is 0."""

OTHER_DATA = "use --set data.source=folder:PATH for images on disk or --set data.source=world for generated ones"


class ImageReader(Protocol):
    """Hands out single images. ``index`` counts the reader's own images, not table rows."""

    def read(self, index: int) -> Image.Image:
        """Return the image in RGB; raise :class:`DataError` that names it when it cannot be decoded."""

    def name(self, index: int) -> str:
        """What an error message calls the image: a path, or source and position."""


@dataclass(frozen=True, eq=False)
class ImageTable:
    """One row per image, in a deterministic order.

    ``labels`` and ``domains`` ``[N]`` int64 index ``class_names`` and ``domain_names`` (both as in the
    source, underscores included). ``fingerprint``: 16 hex digits over the content of every image and
    its place in the table, the identity under which features are cached. ``skipped``: corrupt
    images left out (only with ``data.skip_corrupt``).
    """

    labels: NDArray[np.int64]
    domains: NDArray[np.int64]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    fingerprint: str
    skipped: int
    source: str
    reader: ImageReader = field(repr=False)
    positions: NDArray[np.int64] = field(repr=False)
    """``[N]``: the reader's index of each row."""

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, row: int) -> Image.Image:
        """Decode one image (RGB). Raises :class:`DataError` naming the file when it is corrupt."""
        return self.reader.read(int(self.positions[row]))

    def image_name(self, row: int) -> str:
        """The path of a row, or its place in the source: for messages."""
        return self.reader.name(int(self.positions[row]))


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


# --- choosing domains, classes and images ---------------------------------------------------------


def choose(wanted: Sequence[str], known: Sequence[str], what: str, source: str) -> tuple[str, ...]:
    """Return ``wanted`` in its order, or all ``known`` sorted when nothing is wanted.

    Raises :class:`ConfigError` for an unknown or repeated name.
    """
    for name in wanted:
        if name not in known:
            raise ConfigError(f"data.{what}: {source} has no '{name}'{nearest(name, known)}")
    if len(set(wanted)) != len(wanted):
        raise ConfigError(f"data.{what}: a name is listed twice in {', '.join(wanted)}")
    return tuple(wanted) if wanted else tuple(sorted(known))


def kept_first(count: int, limit: int, seed: int, domain: str, class_name: str) -> NDArray[np.int64]:
    """Order in which ``count`` images of one (domain, class) are taken until ``limit`` are in.

    Seeded by the names, so that it does not depend on which other domains or classes are used.
    """
    if limit == 0 or count <= limit:
        return np.arange(count)
    return np.random.default_rng(derive_seed(seed, "max-per-class", domain, class_name)).permutation(count)


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


# --- image folders --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _FolderReader:
    root: Path
    paths: tuple[str, ...]

    def read(self, index: int) -> Image.Image:
        path = self.root / self.paths[index]
        return decode(path, str(path))

    def name(self, index: int) -> str:
        return str(self.root / self.paths[index])


def _load_folder(path: str, config: DataConfig, seed: int) -> ImageTable:
    root = Path(path).expanduser()
    found = find_images(root)
    domains = choose(config.domains, sorted({domain for domain, _ in found}), "domains", str(root))
    classes = choose(config.classes, sorted({name for _, name in found}), "classes", str(root))
    index = FileIndex(root, full_decode=config.skip_corrupt)
    wanted = [found.get((domain, name), ()) for domain in domains for name in classes]
    checked, skipped = _check_files(index, wanted, domains, classes, config, seed)
    index.save()
    paths, labels, domain_ids, digest = [], [], [], hashlib.sha256()
    for d, _domain in enumerate(domains):
        for c, _name in enumerate(classes):
            for relative, content in checked[d * len(classes) + c]:
                paths.append(relative)
                labels.append(c)
                domain_ids.append(d)
                digest.update(f"{relative}\0{content}\n".encode())
    return ImageTable(
        labels=np.array(labels, np.int64),
        domains=np.array(domain_ids, np.int64),
        class_names=classes,
        domain_names=domains,
        fingerprint=digest.hexdigest()[:16],
        skipped=skipped,
        source=config.source,
        reader=_FolderReader(root, tuple(paths)),
        positions=np.arange(len(paths)),
    )


def _check_files(
    index: FileIndex,
    wanted: Sequence[Sequence[str]],
    domains: Sequence[str],
    classes: Sequence[str],
    config: DataConfig,
    seed: int,
) -> tuple[list[list[tuple[str, str]]], int]:
    """Per (domain, class): the kept files as sorted ``(relative path, size and hash)``; and the number skipped."""
    limit = config.max_per_class
    kept: list[list[tuple[str, str]]] = []
    skipped = 0
    with progress_bar("checking images", sum(map(len, wanted))) as advance:
        for cell, files in enumerate(wanted):
            domain, name = domains[cell // len(classes)], classes[cell % len(classes)]
            good: list[tuple[str, str]] = []
            for position in kept_first(len(files), limit, seed, domain, name):
                if limit and len(good) == limit:
                    break
                record = index.check(files[position])
                if not record.problem:
                    good.append((files[position], f"{record.size}:{record.sha256}"))
                elif config.skip_corrupt:
                    skipped += 1
                else:
                    path = index.root / files[position]
                    raise DataError(f"{path}: corrupt image ({record.problem}); {CORRUPT_REMEDY}")
            kept.append(sorted(good))
            advance(len(files))
    return kept, skipped


# --- torchvision and the Hugging Face hub ---------------------------------------------------------


def _load_torchvision(rest: str, config: DataConfig, seed: int) -> ImageTable:
    from edgeduet_shared.data.torchvision_source import load_torchvision

    return load_torchvision(rest, config, seed)


def _load_hub(rest: str, config: DataConfig, seed: int) -> ImageTable:
    from edgeduet_shared.data.hub_source import load_hub

    return load_hub(rest, config, seed)


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
