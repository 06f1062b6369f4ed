"""Texts that must never appear in an answer, whatever tokens would spell them.

A list of token sequences (what most libraries ban) misses every other way to split the same text: the tokenizer would
write "secret" as one token, a model may well write "sec" + "ret". So the rule here is about bytes: a token is banned
at a position iff the answer so far plus that token would hold one of the texts, complete. The answer's bytes
therefore never contain any of them; a text inside a longer word counts (" ass" with its space spares "class").

Finding the tokens is a scan of all their bytes laid end to end, a few numpy passes, remembered per text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class TokenIndex:
    """The bytes of a vocabulary, ready to be searched. One per model."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """``pieces[i]`` are the bytes that id ``i`` adds to a text; empty for special tokens."""
        self.pieces = tuple(pieces)
        lengths = np.fromiter(map(len, self.pieces), dtype=np.int64, count=len(self.pieces))
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._bytes = np.frombuffer(b"".join(self.pieces), dtype=np.uint8)
        self.starting_with = lru_cache(maxsize=4096)(self._starting_with)

    def containing(self, text: bytes) -> Ids:
        """Return the ids whose bytes contain ``text``, ascending."""
        places = np.flatnonzero(self._bytes[: max(len(self._bytes) - len(text) + 1, 0)] == text[0])
        for offset, byte in enumerate(text[1:], start=1):
            places = places[self._bytes[places + offset] == byte]
        owners = np.searchsorted(self._ends, places, side="right")
        return np.unique(owners[places + len(text) <= self._ends[owners]]).astype(np.int64)

    def _starting_with(self, text: bytes) -> Ids:
        """Return the ids whose bytes start with ``text``, ascending."""
        ids = np.flatnonzero(self._ends - self._starts >= len(text))
        for offset, byte in enumerate(text):
            ids = ids[self._bytes[self._starts[ids] + offset] == byte]
        found: Ids = ids.astype(np.int64)
        found.flags.writeable = False  # remembered, and handed out again
        return found


class BadWords:
    """The texts of one request against one vocabulary."""

    def __init__(self, words: Sequence[str], index: TokenIndex) -> None:
        self.words = tuple(sorted({word.encode() for word in words}))
        self._index = index
        self._always = _union([index.containing(word) for word in self.words])
        self._longest = max(map(len, self.words))
        self._rests: dict[bytes, list[bytes]] = {}
        for word in self.words:
            for begun in range(1, len(word)):
                self._rests.setdefault(word[:begun], []).append(word[begun:])

    def banned(self, tail: bytes) -> Ids:
        """Return the ids that would complete a text after an answer that ends in ``tail``, ascending.

        Args:
            tail: the last bytes of the answer, as many as :meth:`extend_tail` keeps.
        """
        completing = [
            self._index.starting_with(rest)
            for begun in range(1, len(tail) + 1)
            for rest in self._rests.get(tail[-begun:], ())
        ]
        return _union([self._always, *completing]) if completing else self._always

    def extend_tail(self, tail: bytes, token: int) -> bytes:
        """Return the tail after one more ``token``: no longer than the longest text less one byte."""
        keep = self._longest - 1
        return (tail + self._index.pieces[token])[-keep:] if keep else b""


def _union(parts: Sequence[Ids]) -> Ids:
    return np.unique(np.concatenate(parts))
