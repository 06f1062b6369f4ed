"""What a recurrent drafter learns from: texts as the target read them, with what it said at every position.

Axes: P positions over all texts, L labels kept of each distribution, H hidden width, N ids of the drafter's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError

LABELS = 24
"""Most probable next tokens that are kept of each distribution."""


@dataclass(frozen=True)
class TargetTables:
    """What a drafter shares with its target and does not learn.

    Attributes:
        vocabulary_N: ids the drafter may propose, ascending.
        head_NH: float32 rows of the target's output matrix for them.
        embed: ids (n,) to what the target's first block reads, float32 (n, H).
    """

    vocabulary_N: NDArray[np.int64]
    head_NH: NDArray[np.float32]
    embed: Callable[[NDArray[np.integer]], NDArray[np.float32]]

    @property
    def hidden_width(self) -> int:
        """H."""
        return int(self.head_NH.shape[1])


@dataclass(frozen=True)
class ReadText:
    """One text with what the target said; n positions.

    Attributes:
        domain: what sort of text.
        greedy: whether the target wrote its answer greedily, so that drafts can be scored on it.
        answer: position of the last token before the answer: from here on the text is the target's own.
        tokens: (n,) what was read.
        hidden: (n, H) float16, the target's last state after each.
        label_ids: (n, L) its most probable next tokens, best first.
        label_masses: (n, L) float16, their probabilities at temperature 1.
    """

    domain: str
    greedy: bool
    answer: int
    tokens: NDArray[np.int32]
    hidden: NDArray[np.float16]
    label_ids: NDArray[np.int32]
    label_masses: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class DrafterDataset:
    """Texts of one device, ready to train on.

    Attributes:
        texts: at least one.
        tables: of the target.
    """

    texts: Sequence[ReadText]
    tables: TargetTables

    def __post_init__(self) -> None:
        if not self.texts:
            raise ModelError("there is no text to train a drafter on; give a corpus with more text")

    @property
    def positions(self) -> int:
        """Positions of all texts."""
        return sum(len(text) for text in self.texts)

    def hidden_scale(self) -> float:
        """Return the root mean square of the target's last states: where a new drafter starts from."""
        squares = sum(float(np.square(text.hidden, dtype=np.float32).sum()) for text in self.texts)
        return float(np.sqrt(squares / (self.positions * self.tables.hidden_width)))

    def of_domain(self, domain: str) -> DrafterDataset:
        """Return the texts of one domain."""
        return DrafterDataset([text for text in self.texts if text.domain == domain], self.tables)

    def domains(self) -> list[str]:
        """Return the domains, sorted."""
        return sorted({text.domain for text in self.texts})

    def split(self, held_out: float, seed: int) -> tuple[DrafterDataset, DrafterDataset]:
        """Return (texts to train on, texts held out): of every domain the same share, at least one text each.

        Raises:
            ModelError: a domain has a single text.
        """
        rng = np.random.default_rng(seed)
        train: list[ReadText] = []
        held: list[ReadText] = []
        for domain in self.domains():
            texts = [text for text in self.texts if text.domain == domain]
            if len(texts) < 2:
                raise ModelError(f"one text of '{domain}' is too few to hold some out; give a corpus with more text")
            order = rng.permutation(len(texts))
            count = min(max(1, round(held_out * len(texts))), len(texts) - 1)
            held += [texts[place] for place in order[:count]]
            train += [texts[place] for place in order[count:]]
        return DrafterDataset(train, self.tables), DrafterDataset(held, self.tables)


@dataclass(frozen=True)
class Positions:
    """All texts of a dataset, laid end to end, for drawing starts from.

    Attributes:
        tokens_P: places in ``embedding_UH``.
        hidden_PH: float16.
        labels_PL: places in the drafter's vocabulary.
        masses_PL: float32; a label outside the vocabulary has mass 0, the others sum to 1 (or 0, where none is in).
        starts: positions from which ``rollout`` more follow in the same text.
        embedding_UH: float32 rows of the U ids that occur.
        truth_P: place in the vocabulary of the token that follows in the text; -1 where it is not in it.
    """

    tokens_P: NDArray[np.int64]
    hidden_PH: NDArray[np.float16]
    labels_PL: NDArray[np.int64]
    masses_PL: NDArray[np.float32]
    starts: NDArray[np.int64]
    embedding_UH: NDArray[np.float32]
    truth_P: NDArray[np.int64]

    @classmethod
    def of(cls, dataset: DrafterDataset, rollout: int, *, answers_only: bool = False) -> Positions:
        """Lay out ``dataset`` for drafts of ``rollout`` tokens.

        Args:
            answers_only: only starts inside what the target wrote itself.

        Raises:
            ModelError: no text is long enough.
        """
        tables = dataset.tables
        starts, at = [], 0
        for text in dataset.texts:
            first = max(text.answer, 0) if answers_only else 0
            starts.append(np.arange(at + first, at + len(text) - rollout))
            at += len(text)
        joined = np.concatenate(starts)
        if not len(joined):
            raise ModelError(f"no text is longer than {rollout} tokens; give a corpus with longer texts")
        tokens = np.concatenate([text.tokens for text in dataset.texts])
        used, places = np.unique(tokens, return_inverse=True)
        labels = np.concatenate([text.label_ids for text in dataset.texts])
        masses = np.concatenate([text.label_masses for text in dataset.texts]).astype(np.float32)
        inside, known = _places(tables.vocabulary_N, labels)
        masses[~known] = 0.0
        total = masses.sum(axis=1, keepdims=True)
        following = np.append(tokens[1:], 0)
        truth, truth_known = _places(tables.vocabulary_N, following)
        return cls(
            tokens_P=places.astype(np.int64),
            hidden_PH=np.concatenate([text.hidden for text in dataset.texts]),
            labels_PL=inside,
            masses_PL=np.divide(masses, total, out=np.zeros_like(masses), where=total > 0),
            starts=joined,
            embedding_UH=tables.embed(used),
            truth_P=np.where(truth_known, truth, -1),
        )


def _places(vocabulary_N: NDArray[np.int64], ids: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where each id is in the vocabulary (anywhere, if it is not), and whether it is."""
    places = np.minimum(np.searchsorted(vocabulary_N, ids), len(vocabulary_N) - 1)
    return places, vocabulary_N[places] == ids
