"""Streamed text is the text, however it was split into tokens, and nothing of a stop string shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.text_stream import Release, TextStream

TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab é漢🙂👩‍👧")), max_size=40)
FEW = st.text("abAé漢", max_size=30)
STOPS = st.lists(st.text("abAé漢", min_size=1, max_size=5), max_size=4)


@st.composite
def split(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[bytes]]:
    """A text and its bytes, cut anywhere (empty pieces included)."""
    text = draw(texts)
    whole = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return text, [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def stream(pieces: list[bytes], stops: list[str] | None = None) -> tuple[list[Release], bool]:
    """Push pieces until a stop string; return every release."""
    text_stream = TextStream(stops or [])
    releases = []
    for piece in pieces:
        releases.append(text_stream.push(piece))
        if text_stream.stopped:
            break
    releases.append(text_stream.finish())
    return releases, text_stream.stopped


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the answer ends, read character by character: at the stop that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete))
    return None


@given(split(TEXTS))
def test_any_split_streams_to_exactly_the_text(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    releases, stopped = stream(pieces)
    assert "".join(release.text for release in releases) == text
    assert sum(release.tokens for release in releases) == len(pieces)
    assert not stopped


@given(split(FEW), STOPS)
def test_any_split_is_cut_at_the_first_stop_string(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    text, pieces = case
    releases, stopped = stream(pieces, stops)
    cut = first_stop(text, stops)
    assert "".join(release.text for release in releases) == text[:cut]
    assert stopped == (cut is not None)


@given(split(FEW), STOPS)
def test_text_shows_as_soon_as_it_cannot_be_a_stop_string(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    _, pieces = case
    text_stream, pushed, shown = TextStream(stops), b"", ""
    for piece in pieces:
        pushed += piece
        shown += text_stream.push(piece).text
        if text_stream.stopped:
            break
        complete = pushed.decode(errors="ignore")
        held = complete[len(shown) :]
        assert complete.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


@given(split(FEW), STOPS)
def test_tokens_come_with_their_first_character(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    text, pieces = case
    releases, stopped = stream(pieces, stops)
    tokens = sum(release.tokens for release in releases)
    if not stopped:
        assert tokens == len(pieces)
        return
    # Bytes before the cut belong to tokens that show; the token after those begins at or after the cut.
    cut = len(text[: first_stop(text, stops)].encode())
    assert len(b"".join(pieces[:tokens])) >= cut
    assert len(b"".join(pieces[: max(tokens - 1, 0)])) <= cut


def test_a_broken_character_shows_as_one_replacement() -> None:
    text_stream = TextStream()
    assert text_stream.push("漢".encode()[:2]).text == ""
    assert text_stream.push(b"a") == Release("\ufffda", 2)
    assert text_stream.push("漢".encode()[:2]).text == ""
    assert text_stream.finish() == Release("\ufffd", 1)


def test_only_the_very_first_space_is_dropped() -> None:
    text_stream = TextStream(drops_leading_space=True)
    assert [text_stream.push(piece).text for piece in (b"", b"  a", b" b")] == ["", " a", " b"]


def test_nothing_can_be_pushed_behind_a_stop_string() -> None:
    text_stream = TextStream(["\n\n"])
    assert text_stream.push(b"yes\n") == Release("yes", 1)
    assert text_stream.push(b"\nno") == Release("", 0)
    assert text_stream.stopped
    with pytest.raises(ValueError, match="nothing comes after"):
        text_stream.push(b"no")
    assert text_stream.finish() == Release("", 0)


def test_the_stop_string_that_is_complete_first_wins_whatever_the_split() -> None:
    for pieces in ([b"xabcd"], [b"x", b"a", b"b", b"c", b"d"]):
        releases, stopped = stream(pieces, ["abcd", "bc"])
        assert stopped
        assert "".join(release.text for release in releases) == "xa"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream([""])
