"""The keys and values of the positions a model has seen: appended by the session, cropped by whoever rolls back.

One buffer per layer and kind, shaped ``(1, kv_heads, capacity, head_dim)``, float32. The attention operator reads
and writes it in place, so a step copies nothing; only growth does, and the capacity doubles, so that every position
is moved less than once on average and the memory stays proportional to the positions used (pages of the buffer
that were never written are not resident). Positions at or beyond ``length`` are never read: to forget them is
to lower a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import RequestError

FIRST_CAPACITY = 256
"""Positions a fresh cache has room for."""


@dataclass(frozen=True)
class CacheShape:
    """What a model's cache looks like; ``limit`` is the longest context in tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    limit: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True)
class CacheMark:
    """A place to return to, made by :meth:`KVCache.snapshot`: a length, not a copy."""

    length: int
    written: int


class KVCache:
    """Keys and values of ``tokens``, for one sequence; not to be used by two threads at once.

    Attributes:
        tokens: the ids held, oldest first; read it, do not change it.
        buffers: key and value buffer of every layer, in the order of the graph's inputs.
        prepared: bindings the session made for these very buffers; growth empties it.
    """

    def __init__(self, shape: CacheShape, *, capacity: int = FIRST_CAPACITY) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self.prepared: dict[Any, Any] = {}
        self._rollbacks = 0
        # For each position, how many rollbacks came before it was written.
        self._written: list[int] = []
        self._capacity = min(capacity, shape.limit)
        self.buffers = [self._new_buffer() for _ in range(2 * shape.layers)]

    @property
    def length(self) -> int:
        """Positions held."""
        return len(self.tokens)

    @property
    def capacity(self) -> int:
        """Positions there is room for without growing."""
        return self._capacity

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions in all.

        Raises:
            RequestError: the model's context is shorter than that.
        """
        if length <= self._capacity:
            return
        if length > self.shape.limit:
            raise RequestError(
                f"the model's context holds {self.shape.limit} tokens; {self.length} are in use and "
                f"{length - self.length} more do not fit; shorten the prompt or ask for fewer tokens"
            )
        while self._capacity < length:
            self._capacity = min(2 * self._capacity, self.shape.limit)
        # Bindings point into the old buffers and would keep them alive.
        self.prepared.clear()
        used = self.length
        for place, old in enumerate(self.buffers):
            new = self._new_buffer()
            new[:, :, :used] = old[:, :, :used]
            self.buffers[place] = new

    def append(self, ids: Sequence[int]) -> None:
        """Take up ``ids``, whose keys and values the session has just written behind the present ones."""
        self.tokens.extend(ids)
        self._written.extend([self._rollbacks] * len(ids))

    def crop(self, length: int) -> int:
        """Forget everything from position ``length`` on; return how many positions that was."""
        dropped = self.length - length
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}")
        if dropped:
            del self.tokens[length:]
            del self._written[length:]
            self._rollbacks += 1
        return dropped

    def snapshot(self) -> CacheMark:
        """Return a mark of the present length; it costs nothing and holds nothing."""
        return CacheMark(self.length, self._written[-1] if self._written else 0)

    def restore(self, mark: CacheMark) -> int:
        """Go back to ``mark``; return how many positions were dropped.

        Raises:
            ValueError: the positions of the mark were cropped away since, so there is nothing to go back to.
        """
        if mark.length > self.length or (mark.length and self._written[mark.length - 1] != mark.written):
            raise ValueError(f"the {mark.length} positions of this mark were cropped away after it was made")
        return self.crop(mark.length)

    def common_prefix(self, ids: Sequence[int]) -> int:
        """Return how many leading ids of ``ids`` are held already."""
        shared = 0
        for held, wanted in zip(self.tokens, ids, strict=False):
            if held != wanted:
                break
            shared += 1
        return shared

    def _new_buffer(self) -> NDArray[np.float32]:
        # Zeroed memory comes from the system untouched: a page costs memory once it is written.
        return np.zeros((1, self.shape.kv_heads, self._capacity, self.shape.head_dim), np.float32)
