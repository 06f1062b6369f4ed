"""A table of labelled images, and how one is built from any source.

Building does what is the same for all sources: pick domains and classes, keep at most
``data.max_per_class`` images of each (domain, class), check every image, count or report corrupt ones,
and fingerprint what is left. ``N`` is the number of images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.image_check import CORRUPT_REMEDY
from edgeduet_shared.data.progress import progress_bar
from edgeduet_shared.errors import ConfigError, DataError, nearest
from edgeduet_shared.seeds import derive_seed


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
    images left out (only with ``data.skip_corrupt``). ``positions`` ``[N]``: the reader's index of each row.
    ``contents``: what names the bytes of each row's image wherever they lie; empty where only the table as a whole is
    named.
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
    contents: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, row: int) -> Image.Image:
        """Decode one image (RGB). Raises :class:`DataError` naming the file when it is corrupt."""
        return self.reader.read(int(self.positions[row]))

    def image_name(self, row: int) -> str:
        """The path of a row, or its place in the source: for messages."""
        return self.reader.name(int(self.positions[row]))


class Inspection(NamedTuple):
    """What a look at one image found: an identity of its content, and why it is no image (or ``""``).

    ``content`` may name its place too; ``sha256`` is that of its file, where it is one.
    """

    content: str
    problem: str
    sha256: str = ""


@dataclass(frozen=True, eq=False)
class Listing:
    """All images of a source before any choice: ``labels`` and ``domains`` per reader index.

    ``finish`` is called once all wanted images have been inspected.
    """

    reader: ImageReader
    labels: NDArray[np.int64]
    domains: NDArray[np.int64]
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    inspect: Callable[[int], Inspection]
    finish: Callable[[], None] = lambda: None


def build_table(listing: Listing, config: DataConfig, seed: int) -> ImageTable:
    """Choose, check and fingerprint; rows are ordered by (domain, class, reader index).

    Raises:
        ConfigError: ``data.domains`` or ``data.classes`` names something the source lacks.
        DataError: a corrupt image, unless ``data.skip_corrupt``.
    """
    domains = choose(config.domains, listing.domain_names, "domains", config.source)
    classes = choose(config.classes, listing.class_names, "classes", config.source)
    cells = _cells(listing, domains, classes)
    positions: list[int] = []
    contents: list[str] = []
    counts, skipped, digest = [], 0, hashlib.sha256()
    with progress_bar("checking images", sum(map(len, cells))) as advance:
        for cell, members in enumerate(cells):
            domain, name = domains[cell // len(classes)], classes[cell % len(classes)]
            order = kept_first(len(members), config.max_per_class, seed, domain, name)
            good, bad = _inspected(listing, members[order], config)
            skipped += bad
            counts.append(len(good))
            for index, found in sorted(good):
                positions.append(index)
                contents.append(found.sha256)
                digest.update(f"{found.content}\n".encode())
            advance(len(members))
    listing.finish()
    cell_of_row = np.repeat(np.arange(len(cells)), counts)
    return ImageTable(
        labels=cell_of_row % len(classes),
        domains=cell_of_row // len(classes),
        class_names=classes,
        domain_names=domains,
        fingerprint=digest.hexdigest()[:16],
        skipped=skipped,
        source=config.source,
        reader=listing.reader,
        positions=np.array(positions, np.int64),
        contents=tuple(contents) if all(contents) else (),
    )


def _cells(listing: Listing, domains: Sequence[str], classes: Sequence[str]) -> list[NDArray[np.int64]]:
    """Reader indices of each (domain, class), domains outermost."""
    width = len(listing.class_names)
    key = listing.domains * width + listing.labels
    order = np.argsort(key, kind="stable")
    wanted = np.array(
        [listing.domain_names.index(domain) * width + listing.class_names.index(name)
         for domain in domains for name in classes],
        np.int64,
    )  # fmt: skip
    starts = np.searchsorted(key[order], wanted, side="left")
    stops = np.searchsorted(key[order], wanted, side="right")
    return [order[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _inspected(
    listing: Listing, candidates: NDArray[np.int64], config: DataConfig
) -> tuple[list[tuple[int, Inspection]], int]:
    """Take sound images until the limit; return what was found of each by index, and the number of corrupt ones."""
    good: list[tuple[int, Inspection]] = []
    bad = 0
    for index in candidates.tolist():
        if config.max_per_class and len(good) == config.max_per_class:
            break
        found = listing.inspect(index)
        if not found.problem:
            good.append((index, found))
        elif config.skip_corrupt:
            bad += 1
        else:
            raise DataError(f"{listing.reader.name(index)}: corrupt image ({found.problem}); {CORRUPT_REMEDY}")
    return good, bad


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
