"""Caches kept between requests: the longest common beginning, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.kv_cache import FIRST_CAPACITY, CacheShape, KVCache
from edgeduet_client.llm.serving.cache_pool import CachePool, common_prefix
from edgeduet_client.llm.session import TargetSession
from tiny_llm import TINY, write_graph

SHAPE = CacheShape(layers=1, kv_heads=1, head_dim=1, limit=4096)
ONE_CACHE = FIRST_CAPACITY * SHAPE.bytes_per_token


def filled(ids: Sequence[int]) -> KVCache:
    """Return a cache that says it holds ``ids``; its numbers are its positions."""
    cache = KVCache(SHAPE)
    cache.reserve(len(ids))
    for buffer in cache.buffers:
        buffer[0, 0, : len(ids), 0] = np.arange(len(ids))
    cache.append(ids)
    return cache


def pool(budget: int = 10 * ONE_CACHE) -> CachePool:
    return CachePool(lambda: KVCache(SHAPE), budget)


IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, IDS, IDS)
def test_common_prefix_is_the_longest_shared_beginning(shared: list[int], left: list[int], right: list[int]) -> None:
    one, other = shared + left, shared + right
    length = common_prefix(one, other)
    assert one[:length] == other[:length] and length >= len(shared)
    assert length == min(len(one), len(other)) or one[length] != other[length]


def test_the_next_turn_of_a_conversation_gets_its_cache() -> None:
    kept = pool()
    first, second = filled(range(50)), filled(range(100, 160))
    kept.put(first)
    kept.put(second)
    assert kept.take([*range(50), 7, 8, 9]) is first
    assert len(kept) == 1
    assert kept.take(range(100, 150)) is second  # a loose end of ten: answered again
    assert len(kept) == 0


def test_a_cache_that_is_given_out_is_given_to_nobody_else() -> None:
    kept = pool()
    kept.put(filled(range(50)))
    first, second = kept.take(range(60)), kept.take(range(60))
    assert first is not second and second.length == 0


def test_a_waiting_cache_holds_no_rows_of_logits() -> None:
    kept, cache = pool(), filled(range(50))
    cache.prepared["a form of step"] = object()
    kept.put(cache)
    assert kept.take(range(60)) is cache and not cache.prepared


def test_an_early_branch_gets_a_copy_and_the_conversation_keeps_its_cache() -> None:
    kept = pool()
    conversation = filled(range(300))
    kept.put(conversation)
    branch = kept.take([*range(100), 999])
    assert branch is not conversation and branch.tokens == list(range(100))
    for buffer in branch.buffers:
        np.testing.assert_array_equal(buffer[0, 0, :100, 0], np.arange(100))
    assert conversation.length == 300 and kept.take(range(301)) is conversation


def test_nothing_in_common_gets_an_empty_cache() -> None:
    kept = pool()
    kept.put(filled(range(50)))
    assert kept.take([1000, 1001]).length == 0
    assert kept.take([]).length == 0
    assert kept.take(range(5)).length == 0  # too little to be worth it
    assert len(kept) == 1


def test_the_least_recently_used_go_when_the_budget_is_used_up() -> None:
    kept = pool(2 * ONE_CACHE)
    for start in (0, 1000, 2000):
        kept.put(filled(range(start, start + 50)))
    assert len(kept) == 2 and kept.bytes <= 2 * ONE_CACHE
    assert kept.take(range(50)).length == 0
    kept.put(kept.take(range(1000, 1050)))  # used again, so 2000 is the older one now
    kept.put(filled(range(50)))
    assert kept.take(range(2000, 2050)).length == 0
    assert kept.take(range(1000, 1050)).length == 50


def test_a_cache_larger_than_the_budget_is_not_kept() -> None:
    kept = pool(ONE_CACHE)
    kept.put(filled(range(50)))
    kept.put(filled(range(2 * FIRST_CAPACITY)))
    assert len(kept) == 1
    nothing = pool(0)
    nothing.put(filled(range(50)))
    assert len(nothing) == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 600)), max_size=30))
def test_the_budget_holds_whatever_happens(steps: list[tuple[bool, int, int]]) -> None:
    kept = pool(3 * ONE_CACHE)
    for put, conversation, length in steps:
        ids = range(conversation * 10_000, conversation * 10_000 + length)
        cache = kept.take(ids)
        shared = common_prefix(cache.tokens, list(ids))
        cache.crop(shared)
        cache.reserve(length)
        cache.append(list(ids)[shared:])
        if put:
            kept.put(cache)
        assert kept.bytes <= 3 * ONE_CACHE


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> TargetSession:
    graph = write_graph(tmp_path_factory.mktemp("pool"))
    return TargetSession(graph, context_length=TINY.context_length, threads=1)


def test_a_copied_beginning_computes_what_a_fresh_prefill_computes(session: TargetSession, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(2, 300, 200).tolist()
    conversation = session.new_cache()
    session.prefill(ids, conversation)
    kept = CachePool(session.new_cache, 1 << 30)
    kept.put(conversation)
    branch = kept.take([*ids[:100], 5, 6])
    assert branch.length == 100 and branch is not conversation
    fresh = session.new_cache()
    session.prefill(ids[:100], fresh)
    np.testing.assert_allclose(session.prefill([5, 6], branch).logits, session.prefill([5, 6], fresh).logits, atol=1e-4)
    # The copy has memory of its own: the conversation still computes as before.
    again = session.new_cache()
    session.prefill(ids, again)
    np.testing.assert_allclose(session.forward([7], conversation).logits, session.forward([7], again).logits, atol=1e-4)
