"""Key-value caches kept between requests, so that the next turn of a chat computes only what is new.

A client sends the whole conversation with every turn. Most of it was computed for the turn before: the pool
gives out the cache that shares the longest beginning with the new prompt. A cache that is given out belongs to
one request until it comes back. Where the prompt leaves a conversation early (another chat under the same system
prompt), the shared beginning is copied and the conversation keeps its cache: copying a position is some thousand
times cheaper than computing it. The least recently used caches go when those in the pool hold more than their
budget of bytes; the one at work comes on top of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgeduet_client.llm.kv_cache import KVCache

#: A beginning of fewer tokens is not worth a cache: computing it takes one step.
_WORTH_KEEPING = 8
#: The end of a conversation that its next turn may lack: a cut answer, tokens that join with the new text.
_LOOSE_END = 64


class CachePool:
    """Caches that wait for a prompt that goes on from them. For one thread.

    Args:
        new_cache: makes an empty cache.
        budget: bytes the waiting caches may hold together.
    """

    def __init__(self, new_cache: Callable[[], KVCache], budget: int) -> None:
        self._new_cache = new_cache
        self._budget = budget
        self._waiting: list[KVCache] = []  # the most recently used last

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes(self) -> int:
        """Bytes the waiting caches hold."""
        return sum(map(_size, list(self._waiting)))

    def take(self, prompt: Sequence[int]) -> KVCache:
        """Return the cache to answer ``prompt`` with: empty, or with a beginning of it and perhaps a loose end."""
        ids = list(prompt)
        best, shared = -1, 0
        for index, cache in enumerate(self._waiting):
            common = common_prefix(cache.tokens, ids)
            if common >= max(shared, _WORTH_KEEPING):
                best, shared = index, common
        if best < 0:
            return self._new_cache()
        if self._waiting[best].length - shared <= _LOOSE_END:
            return self._waiting.pop(best)
        self._waiting.append(self._waiting.pop(best))
        return self._copy_beginning(self._waiting[-1], shared)

    def fresh(self) -> KVCache:
        """Return an empty cache, whatever is kept."""
        return self._new_cache()

    def put(self, cache: KVCache) -> None:
        """Take ``cache`` back; it, or the least recently used ones, go where the budget would be exceeded."""
        if cache.length < _WORTH_KEEPING or _size(cache) > self._budget:
            return
        # Bindings hold rows of logits, a megabyte each with a large vocabulary, and are made anew in a millisecond.
        cache.prepared.clear()
        self._waiting.append(cache)
        while self.bytes > self._budget:
            del self._waiting[0]

    def _copy_beginning(self, cache: KVCache, length: int) -> KVCache:
        copy = self._new_cache()
        copy.reserve(length)
        for target, source in zip(copy.buffers, cache.buffers, strict=True):
            target[:, :, :length] = source[:, :, :length]
        copy.append(cache.tokens[:length])
        return copy


def common_prefix(left: list[int], right: list[int]) -> int:
    """Return how many ids ``left`` and ``right`` share from their beginning."""
    high = min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    # The first difference by halving: slices compare at the speed of C.
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _size(cache: KVCache) -> int:
    return cache.capacity * cache.shape.bytes_per_token
