"""Bad words: no way of splitting them into tokens gets them into an answer, and nothing else is banned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.bad_words import BadWords, TokenIndex

# Special tokens and control ids add nothing; a byte of a longer character stands alone.
PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"\xc3", b"\xa9", b" ", b" a", b"bab", "é".encode(), b"c", b"abcab"]
INDEX = TokenIndex(PIECES)

words = st.lists(st.text("abcé ", min_size=1, max_size=5), min_size=1, max_size=4)


@given(words, st.lists(st.integers(0, len(PIECES) - 1), max_size=12))
def test_a_token_is_banned_iff_the_answer_would_then_hold_a_word(texts: list[str], chosen: list[int]) -> None:
    bad = BadWords(texts, INDEX)
    answer, tail = b"", b""
    for token in chosen:
        banned = set(bad.banned(tail).tolist())
        for candidate, piece in enumerate(PIECES):
            completes = any(text.encode() in answer + piece for text in texts)
            assert (candidate in banned) == completes
        if token in banned:
            continue
        answer += PIECES[token]
        tail = bad.extend_tail(tail, token)
    assert not any(text.encode() in answer for text in texts)


@pytest.mark.parametrize(
    "split", [[b"secret"], [b"sec", b"ret"], [b"s", b"e", b"c", b"r", b"e", b"t"], [b"xse", b"crety"]]
)
def test_a_word_is_banned_however_it_is_split(split: list[bytes]) -> None:
    index = TokenIndex([b"hello", *split])
    bad = BadWords(["secret"], index)
    tail = b""
    for token in range(1, len(split)):
        assert token not in bad.banned(tail), "only its last piece is banned"
        tail = bad.extend_tail(tail, token)
    assert len(split) in bad.banned(tail)
    assert 0 not in bad.banned(tail)


@given(st.lists(st.binary(max_size=4), min_size=1, max_size=30), st.binary(min_size=1, max_size=3))
def test_searching_the_vocabulary_is_the_same_as_asking_every_token(pieces: list[bytes], text: bytes) -> None:
    index = TokenIndex(pieces)
    assert index.containing(text).tolist() == [i for i, piece in enumerate(pieces) if text in piece]
    assert index.starting_with(text).tolist() == [i for i, piece in enumerate(pieces) if piece.startswith(text)]


def test_tails_are_never_longer_than_they_need_to_be() -> None:
    bad = BadWords(["abc", "é"], INDEX)
    tail = b""
    for token in itertools.chain(range(len(PIECES)), range(len(PIECES))):
        tail = bad.extend_tail(tail, token)
        assert len(tail) <= 2
    assert BadWords(["a"], INDEX).extend_tail(b"", 1) == b""


def test_ids_come_ascending_and_once() -> None:
    banned = BadWords(["a", "ab"], INDEX).banned(b"")
    np.testing.assert_array_equal(banned, np.unique(banned))
