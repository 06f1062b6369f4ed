"""The cache: room, rollback, marks, prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.kv_cache import CacheShape, KVCache

SHAPE = CacheShape(layers=2, kv_heads=2, head_dim=4, limit=100)


def filled(ids: list[int], capacity: int = 8) -> KVCache:
    """A cache that holds ``ids``, each position filled with its id."""
    cache = KVCache(SHAPE, capacity=capacity)
    write(cache, ids)
    return cache


def write(cache: KVCache, ids: list[int]) -> None:
    start = cache.length
    cache.reserve(start + len(ids))
    for buffer in cache.buffers:
        buffer[:, :, start : start + len(ids)] = np.array(ids, np.float32)[:, None]
    cache.append(ids)


def held(cache: KVCache) -> list[float]:
    """The ids as the buffers have them; all buffers agree."""
    values = np.concatenate([buffer[0, :, : cache.length] for buffer in cache.buffers])
    assert (values == values[:1, :, :1]).all()
    return values[0, :, 0].tolist()


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=3))
def test_growth_keeps_what_is_held_and_doubles(parts: list[list[int]]) -> None:
    cache = filled([])
    for part in parts:
        write(cache, part)
    ids = [token for part in parts for token in part]
    assert cache.tokens == ids
    assert held(cache) == ids
    assert cache.capacity in (8, 16, 32, 64, 100)
    assert cache.capacity < max(2 * len(ids), 9)


def test_the_context_limit_names_the_numbers() -> None:
    cache = filled(list(range(90)))
    with pytest.raises(RequestError, match=r"holds 100 tokens; 90 are in use and 11 more do not fit"):
        cache.reserve(101)
    assert cache.capacity == 100
    assert held(cache) == list(range(90))


def test_growth_lets_go_of_bindings_to_the_old_buffers() -> None:
    cache = filled([1])
    cache.prepared["form"] = object()
    cache.reserve(8)
    assert cache.prepared
    cache.reserve(9)
    assert not cache.prepared


def test_crop_says_how_much_it_dropped_and_copies_nothing() -> None:
    cache = filled([1, 2, 3, 4])
    buffers = [id(buffer) for buffer in cache.buffers]
    assert cache.crop(1) == 3
    assert cache.crop(1) == 0
    assert cache.tokens == [1]
    assert [id(buffer) for buffer in cache.buffers] == buffers
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match="cannot crop"):
            cache.crop(wrong)


def test_restore_goes_back_across_growth() -> None:
    cache = filled([1, 2, 3])
    mark = cache.snapshot()
    write(cache, list(range(40)))
    assert cache.restore(mark) == 40
    assert cache.tokens == [1, 2, 3]
    assert held(cache) == [1, 2, 3]
    assert cache.restore(mark) == 0


def test_a_mark_whose_positions_were_cropped_away_is_refused() -> None:
    cache = filled([1, 2, 3])
    mark = cache.snapshot()
    cache.crop(2)
    with pytest.raises(ValueError, match="cropped away"):
        cache.restore(mark)
    write(cache, [3, 4])
    with pytest.raises(ValueError, match="cropped away"):
        cache.restore(mark)


def test_nested_marks_hold_after_a_rollback_between_them() -> None:
    cache = filled([1, 2])
    outer = cache.snapshot()
    write(cache, [3, 4])
    inner = cache.snapshot()
    write(cache, [5])
    assert cache.restore(inner) == 1
    write(cache, [6, 7])
    assert cache.restore(outer) == 4
    assert cache.restore(KVCache(SHAPE).snapshot()) == 2


@given(st.lists(st.integers(0, 2), max_size=20), st.lists(st.integers(0, 2), max_size=20))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    shared = filled(left).common_prefix(right)
    assert left[:shared] == right[:shared]
    assert shared == min(len(left), len(right)) or left[shared] != right[shared]


def test_a_token_costs_keys_and_values_of_all_layers() -> None:
    cache = filled([], capacity=16)
    assert sum(buffer.nbytes for buffer in cache.buffers) == 16 * SHAPE.bytes_per_token
