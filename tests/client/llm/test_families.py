"""Token families: the rules of the paper and its code, and what surprises about them."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.families import (
    Family,
    bytes_family,
    character_family,
    family_table,
    make_family_table,
    may_become_cjk,
    split_partial,
    text_families,
)
from edgeduet_client.llm.token_bytes import TokenBytes

CJ, LATIN, SYMBOLS, LOW_RES = Family


def table_of(*pieces: bytes | None, special: frozenset[int] = frozenset(), width: int | None = None) -> list[Family]:
    table = make_family_table(TokenBytes(pieces, special, ""), len(pieces) if width is None else width)
    return [Family(family) for family in table]


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("漢", CJ),
        ("ひ", CJ),
        ("カ", CJ),
        ("ｶ", CJ),  # half-width katakana
        ("ー", CJ),  # U+30FC, prolonged sound mark: KATAKANA in its name
        ("㐀", CJ),  # extension A counts where the character is complete
        ("々", LOW_RES),  # U+3005, iteration mark: a letter without CJK in its name
        ("〆", LOW_RES),  # U+3006
        ("hello", LATIN),
        ("é", LATIN),
        ("Ａ", LATIN),  # full-width
        ("𝐀", LOW_RES),  # mathematical bold: no LATIN in its name
        ("µ", LOW_RES),  # U+00B5
        ("ª", LOW_RES),
        ("º", LOW_RES),
        ("ㄅ", LOW_RES),  # bopomofo
        ("ꀀ", LOW_RES),  # Yi
        ("한", LOW_RES),
        ("Ж", LOW_RES),
        ("λ", LOW_RES),
        ("ع", LOW_RES),
        ("ש", LOW_RES),
        ("ก", LOW_RES),
        ("ह", LOW_RES),
        ("\u0e31", SYMBOLS),  # Thai vowel sign
        ("\u093f", SYMBOLS),  # Devanagari vowel sign
        ("\u05b8", SYMBOLS),  # Hebrew point
        ("\u064e", SYMBOLS),  # Arabic fatha
        ("7", SYMBOLS),
        ("٣", SYMBOLS),
        ("三", CJ),  # a letter, not a digit
        ("。", SYMBOLS),
        ("「", SYMBOLS),
        ("🙂", SYMBOLS),
        (" \n", SYMBOLS),
        ("\ufffd", SYMBOLS),
        ("", SYMBOLS),
        ("漢a", CJ),
        ("漢ж", CJ),
        ("aж", LATIN),  # as in the authors' code; their text says Low-Res
        ("a1.", LATIN),
        ("3ж", LOW_RES),
    ],
)
def test_a_text_belongs_to_the_family_of_its_letters(text: str, family: Family) -> None:
    assert bytes_family(text.encode("utf-8")) == family


def test_a_letter_without_a_name_is_skipped() -> None:
    assert character_family("\U000187f8") == SYMBOLS  # unassigned or unnamed: no evidence for a script


@pytest.mark.parametrize(
    ("piece", "family"),
    [
        (b"\xe4\xb8", CJ),  # U+4E00..
        (b"\xe9\xbf", CJ),  # ..U+9FFF
        (b"\xe4\xb7", SYMBOLS),  # U+4DC0..4DFF, hexagrams
        (b"\xe4", SYMBOLS),  # a single lead byte says too little
        (b"\xb8\x80", SYMBOLS),  # the end of a character that another token began
        (b"\x80\xe4\xb8", CJ),  # leading end, then a beginning
        (b"\xf0\xa0", CJ),  # extension B
        (b"\xf0\xa0\x80", CJ),
        (b"\xf0\x9f", SYMBOLS),  # emoji
        (b"\xf0\xb0\x80", CJ),  # extension G
        (b"\xf0\xaf\xa0", CJ),  # compatibility supplement
        (b"\xe3\x81", SYMBOLS),  # kana: listed but ignored by the released test
        (b"\xe3\x90", SYMBOLS),  # extension A: not in the release's list
        (b"\xef\xa4", SYMBOLS),  # compatibility ideographs: nor these
        (b"\xea\xb0", SYMBOLS),  # Hangul
        (b"a\xe4\xb8", CJ),  # a beginning of CJ beside a Latin letter
        (b"a\xea\xb0", LATIN),
        (b"\xd8", SYMBOLS),  # half an Arabic letter
        ("ж".encode() + b"\xd8", LOW_RES),
        (b"\xff\xfe", SYMBOLS),  # bytes of no UTF-8 text
        (b"\xffa", LATIN),
    ],
)
def test_an_incomplete_character_counts_only_if_it_can_become_an_ideograph(piece: bytes, family: Family) -> None:
    assert bytes_family(piece) == family


@given(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF))
def test_every_beginning_of_two_bytes_of_an_ideograph_is_cj(character: str) -> None:
    assert may_become_cjk(character.encode("utf-8")[:2])


@given(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]))
def test_a_beginning_is_cj_only_if_some_completion_is_in_a_block(character: str) -> None:
    """Reference: try every completion of the last byte that is missing."""
    encoded = character.encode("utf-8")
    if len(encoded) < 3:
        return
    partial = encoded[:-1]
    completions = [ord((partial + bytes([last])).decode("utf-8")) for last in range(0x80, 0xC0)]
    ideograph = any(
        0x4E00 <= c <= 0x9FFF
        or 0x20000 <= c <= 0x2A6DF
        or 0x2A700 <= c <= 0x2EE5F
        or 0x2F800 <= c <= 0x2FA1F
        # the blocks G and H meet
        or 0x30000 <= c <= 0x323AF
        for c in completions
    )
    assert may_become_cjk(partial) == ideograph


@given(st.text(max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_cutting_bytes_off_both_ends_keeps_the_complete_characters(text: str, front: int, back: int) -> None:
    encoded = text.encode("utf-8")
    piece = encoded[front : len(encoded) - back]
    characters, partial = split_partial(piece)
    assert characters in text
    assert len(partial) <= 3
    assert piece.endswith(partial)


def test_special_tokens_and_ids_without_a_token_are_symbols() -> None:
    assert table_of(b"hello", b"<eos>", None, special=frozenset({1}), width=5) == [LATIN, *[SYMBOLS] * 4]


def test_ids_beyond_the_logits_are_left_out() -> None:
    assert table_of(b"a b", "字".encode(), b"more", width=2) == [LATIN, CJ]


def test_the_letters_of_multiple_choice_and_the_role_name_are_symbols() -> None:
    assert table_of(b"A", b" G", b"assistant") == [SYMBOLS] * 3
    assert table_of(b"H", b"a", b"AB", b" assistant", b"  A") == [LATIN] * 5


def test_a_byte_fallback_token_of_a_letter_is_that_letter() -> None:
    assert table_of(b"Z", b"\xe4", b"\x80") == [LATIN, SYMBOLS, SYMBOLS]


def test_text_families_are_measured_on_characters() -> None:
    assert text_families("Привет, 世界! ok 42") == {LOW_RES, CJ, LATIN}
    assert text_families("42!") == frozenset()


# --- the cached table -------------------------------------------------------------------------------


def tokenizer_json(folder: Path, *pieces: str) -> Path:
    path = folder / "tokenizer.json"
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    return path


def test_a_table_is_cached_and_cannot_be_written_to(tmp_path: Path) -> None:
    path, cache = tokenizer_json(tmp_path, "hello", "字"), tmp_path / "families.npy"
    first = family_table(path, 3, cache=cache)
    second = family_table(path, 3, cache=cache)
    assert first.tolist() == second.tolist() == [LATIN, CJ, SYMBOLS]
    assert first.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        second[0] = 2


def test_a_cache_of_another_tokenizer_or_width_is_made_again(tmp_path: Path) -> None:
    cache = tmp_path / "families.npy"
    family_table(tokenizer_json(tmp_path, "hello", "字"), 2, cache=cache)
    path = tokenizer_json(tmp_path, "字", "hello")
    assert family_table(path, 2, cache=cache).tolist() == [CJ, LATIN]
    assert family_table(path, 4, cache=cache).tolist() == [CJ, LATIN, SYMBOLS, SYMBOLS]


@pytest.mark.parametrize("damage", [b"", b"rubbish"])
def test_a_damaged_cache_is_made_again(damage: bytes, tmp_path: Path) -> None:
    path, cache = tokenizer_json(tmp_path, "hello", "字"), tmp_path / "families.npy"
    family_table(path, 2, cache=cache)
    cache.write_bytes(damage)
    assert family_table(path, 2, cache=cache).tolist() == [LATIN, CJ]
    assert np.load(cache).tolist() == [LATIN, CJ]


def test_a_vocabulary_of_a_quarter_million_takes_seconds(tmp_path: Path) -> None:
    scripts = ["word", "слово", "漢字", "שלום", "12"]
    pieces = tuple(f"{scripts[i % 5]}{i}".encode() for i in range(262_144))
    start = time.process_time()
    table = make_family_table(TokenBytes(pieces, frozenset(), ""), 262_144)
    assert time.process_time() - start < 10
    assert np.bincount(table, minlength=4).tolist() == [52429, 52429, 52428, 104858]
