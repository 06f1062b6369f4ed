"""A language model of 64 tokens in four scripts, small enough to know everything about it.

Sixteen tokens per family. The hidden state (width 12) says which families may follow and which word of them: the
model goes on in the family of the last token that is not Symbols, with symbols between. The rows of the output
matrix have lengths that can be chosen, so that the bias the gate corrects can be planted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from edgeduet_client.llm.families import Family
from edgeduet_client.llm.session import Forward

PER_FAMILY = 16
VOCABULARY = 4 * PER_FAMILY
HIDDEN = 12
FAMILIES = np.repeat(np.arange(4), PER_FAMILY).astype(np.uint8)
EOS = int(Family.SYMBOLS) * PER_FAMILY  # the first symbol


@dataclass
class ToyCache:
    """Tokens, and nothing else: the toy computes everything from them."""

    tokens: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def crop(self, length: int) -> int:
        dropped = len(self.tokens) - length
        del self.tokens[length:]
        return dropped


class ToyTarget:
    """Has the interface of a TargetSession.

    Args:
        row_scale: (64,) lengths of the rows of the output matrix.
    """

    def __init__(self, row_scale: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(7)
        directions = np.zeros((VOCABULARY, HIDDEN))
        directions[np.arange(VOCABULARY), FAMILIES] = 1.0
        directions[:, 4:] = 0.7 * rng.standard_normal((VOCABULARY, HIDDEN - 4)) / np.sqrt(HIDDEN - 4)
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        scale = np.ones(VOCABULARY) if row_scale is None else row_scale
        self.head = (directions * scale[:, None]).astype(np.float32)
        self.hidden_width, self.vocab_width = HIDDEN, VOCABULARY
        self.steps = 0

    def new_cache(self) -> ToyCache:
        return ToyCache()

    def forward(
        self, ids: Sequence[int], cache: ToyCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Forward:
        self.steps += 1
        start = cache.length
        cache.tokens += ids
        wanted = [len(ids) - 1] if rows is None else list(rows)
        states = np.array([self.state(cache.tokens[: start + row + 1]) for row in wanted], dtype=np.float32)
        states = states.reshape(len(wanted), HIDDEN)
        return Forward(states @ self.head.T, states if hidden else None)

    @staticmethod
    def state(tokens: Sequence[int]) -> np.ndarray:
        """Return the hidden state after ``tokens``: the language of the text, and noise that is a function of it."""
        spoken = [FAMILIES[token] for token in tokens if FAMILIES[token] != Family.SYMBOLS]
        state = 2.0 * np.random.default_rng([len(tokens), *tokens[-3:]]).standard_normal(HIDDEN)
        state[:4] = 1.0
        state[Family.SYMBOLS] = 7.0
        if spoken:
            state[spoken[-1]] = 9.0
        return state
