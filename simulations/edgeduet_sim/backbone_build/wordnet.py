"""The noun part of WordNet 3.0, read from its own database files (Debian package wordnet-base).

ImageNet's class identifiers are WordNet 3.0 offsets (``n02084071`` is the noun at byte 2084071), so
the hypernym graph connects every noun of WordNet with the classes an ImageNet network knows.

File formats: wndb(5WN), lexnames(5WN), cntlist(5WN).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from edgeduet_shared.errors import BackboneError

DATABASE = Path("/usr/share/wordnet")

VISUAL_TOPICS = frozenset({3, 5, 6, 8, 13, 17, 18, 20, 27})
"""lexnames that can be photographed: things in general, animals, artefacts, body parts, food,
natural objects, people, plants, substances."""


@dataclass(frozen=True)
class Synset:
    """One meaning: its words (first is the usual one), topic (lexname), parents and definition.

    ``named`` marks an individual (a person, a city) rather than a kind.
    """

    offset: int
    topic: int
    words: tuple[str, ...]
    parents: tuple[int, ...]
    definition: str
    named: bool


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: it holds the whole database
class WordNet:
    """Meanings by offset, and for each word its meanings with their share of use."""

    synsets: dict[int, Synset]
    senses: dict[str, tuple[tuple[int, float], ...]]

    @functools.cache  # noqa: B019 - one instance lives as long as the build
    def ancestors(self, offset: int) -> frozenset[int]:
        """Return the synset itself and everything above it."""
        above = {offset}
        for parent in self.synsets[offset].parents:
            above |= self.ancestors(parent)
        return frozenset(above)


def read_wordnet(database: Path = DATABASE) -> WordNet:
    """Parse the noun files.

    Raises:
        BackboneError: the files are not there.
    """
    try:
        synsets = dict(_read_synsets(database / "data.noun"))
        counts = _read_counts(database / "cntlist.rev")
        senses = dict(_read_senses(database / "index.noun", synsets, counts))
    except OSError as error:
        raise BackboneError(
            f"WordNet 3.0 is not in {database} ({error.strerror}); install it with: apt-get install wordnet-base"
        ) from error
    return WordNet(synsets, senses)


def _lines(file: Path) -> list[str]:
    # The licence text at the top is indented by two spaces.
    return [line for line in file.read_text("utf-8").splitlines() if not line.startswith("  ")]


def _read_synsets(file: Path) -> list[tuple[int, Synset]]:
    found = []
    for line in _lines(file):
        data, _, gloss = line.partition(" | ")
        fields = data.split()
        offset, topic, count = int(fields[0]), int(fields[1]), int(fields[3], 16)
        words = tuple(word.replace("_", " ") for word in fields[4 : 4 + 2 * count : 2])
        pointers = fields[5 + 2 * count :]
        parents = tuple(int(pointers[i + 1]) for i in range(0, len(pointers), 4) if pointers[i] in ("@", "@i"))
        definition = gloss.split(";")[0].strip()
        named = "@i" in pointers
        found.append((offset, Synset(offset, topic, words, parents, definition, named)))
    return found


def _read_counts(file: Path) -> dict[tuple[str, int], int]:
    """(word, sense number) -> occurrences in the tagged corpus; nouns only."""
    counts: dict[tuple[str, int], int] = {}
    for line in file.read_text("utf-8").splitlines():
        key, number, count = line.split()
        word, _, rest = key.partition("%")
        if rest.startswith("1:"):
            counts[word.replace("_", " "), int(number)] = int(count)
    return counts


def _read_senses(
    file: Path, synsets: dict[int, Synset], counts: dict[tuple[str, int], int]
) -> list[tuple[str, tuple[tuple[int, float], ...]]]:
    """Share of use of each sense: tagged occurrences plus 1/rank, non-visual senses at a fifth.

    The word is used to name what a picture shows, which is why the sense that can be photographed
    counts more than its share in text.
    """
    found = []
    for line in _lines(file):
        fields = line.split()
        word, number = fields[0].replace("_", " "), int(fields[2])
        shares: dict[int, float] = defaultdict(float)
        for rank, offset in enumerate(map(int, fields[-number:]), start=1):
            visual = 1.0 if synsets[offset].topic in VISUAL_TOPICS else 0.2
            shares[offset] += visual * (counts.get((word, rank), 0) + 1.0 / rank)
        total = sum(shares.values())
        found.append((word, tuple((offset, share / total) for offset, share in shares.items())))
    return found
