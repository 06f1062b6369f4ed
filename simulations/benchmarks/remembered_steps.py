"""A session that computes no step twice: for drawing many answers to one prompt.

Answers of careful samplers to the same question run along the same tokens most of the time. Here, the logits after
every sequence of tokens are kept, and the real cache is brought up to date only where a sequence is new. A step that
catches up on several tokens at once may differ from single steps in the last bits (8-bit products are rounded for
other shapes of input), as it may between any two machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_REMEMBERED = 1500
"""Rows of logits kept; 300 MB for 49 000 tokens."""


class FollowedCache:
    """The tokens of a sequence, and a real cache that follows it when it has to."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.tokens)

    def reserve(self, length: int) -> None:
        """Make room in the real cache."""
        self.real.reserve(length)

    def crop(self, length: int) -> int:
        """Forget all tokens from ``length`` on; return how many."""
        dropped = len(self.tokens) - length
        del self.tokens[length:]
        return dropped

    def common_prefix(self, ids: Sequence[int]) -> int:
        """Return how many leading ids are those of the sequence."""
        pairs = enumerate(zip(self.tokens, ids, strict=False))
        return next((place for place, (held, wanted) in pairs if held != wanted), min(self.length, len(ids)))


class RememberedSteps:
    """Stands where a ``TargetSession`` does, for decoding with one row and without hidden states."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._rows: dict[tuple[int, ...], Any] = {}
        self.cache_shape = session.cache_shape
        self.computed = 0
        self.asked = 0

    def new_cache(self) -> FollowedCache:
        """Return an empty cache."""
        return FollowedCache(self._session.new_cache())

    def forward(
        self, ids: Sequence[int], cache: FollowedCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Any:
        """As ``TargetSession.forward``, computed only if this sequence is new."""
        if hidden or rows not in (None, ()):
            raise ValueError("only the last row is remembered, and no hidden states")
        cache.tokens.extend(ids)
        self.asked += 1
        if rows == ():
            return None  # computed with what follows
        key = tuple(cache.tokens)
        if key not in self._rows:
            if len(self._rows) >= MOST_REMEMBERED:
                self._rows.clear()
            self._rows[key] = self._compute(cache)
        return self._rows[key]

    def _compute(self, cache: FollowedCache) -> Any:
        from edgeduet_client.llm.session import Forward

        real = cache.real
        real.crop(min(real.common_prefix(cache.tokens), cache.length - 1))
        self.computed += 1
        logits = self._session.prefill(cache.tokens[real.length :], real).logits
        return Forward(np.array(logits), None)
