"""Whether two vocabularies are one: id by id, special tokens included, padded tails allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.vocabulary import common_ids
from edgeduet_client.llm.token_bytes import TokenBytes, read_token_bytes
from tiny_llm import byte_fallback_tokenizer, byte_level_tokenizer

PIECES = (b"<end>", b"a", b"b", b"ab", b" ")


def table(*pieces: bytes | None, special: tuple[int, ...] = (0,)) -> TokenBytes:
    return TokenBytes(pieces, frozenset(special), "0" * 64)


def test_equal_vocabularies_share_all_ids() -> None:
    assert common_ids(table(*PIECES), table(*PIECES)) == len(PIECES)


def test_a_padded_drafter_shares_what_the_target_has() -> None:
    assert common_ids(table(*PIECES), table(*PIECES, None, None)) == len(PIECES)


def test_a_padded_target_shares_what_the_drafter_has() -> None:
    assert common_ids(table(*PIECES, None, None, None), table(*PIECES)) == len(PIECES)


def test_further_tokens_of_the_drafter_are_beyond_the_common_ids() -> None:
    assert common_ids(table(*PIECES), table(*PIECES, b"more")) == len(PIECES)


def test_a_token_the_drafter_cannot_read_is_refused() -> None:
    with pytest.raises(ModelError, match=r"mine knows tokens 0 to 4 and cannot read token 5 \('more'\)"):
        common_ids(table(*PIECES, b"more"), table(*PIECES), drafter_name="mine")


@given(place=st.integers(0, len(PIECES) - 1), other=st.sampled_from([b"x", b"\xff", None]))
def test_one_id_that_means_something_else_is_refused_and_named(place: int, other: bytes | None) -> None:
    pieces: list[bytes | None] = list(PIECES)
    pieces[place] = other
    with pytest.raises(ModelError, match=f"token {place} is "):
        common_ids(table(*PIECES), table(*pieces))


def test_a_token_that_is_special_in_one_only_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token 3 \('ab'\) is a special token of the drafter only"):
        common_ids(table(*PIECES), table(*PIECES, special=(0, 3)))
    with pytest.raises(ModelError, match="is a special token of the model only"):
        common_ids(table(*PIECES), table(*PIECES, special=()))


def test_trained_tokenizers_of_other_texts_are_refused(tmp_path: Path) -> None:
    pieces = []
    for name, tokenizer in (
        ("level", byte_level_tokenizer()),
        ("fallback", byte_fallback_tokenizer(strips_leading_space=True)),
    ):
        tokenizer.save(str(tmp_path / name))
        pieces.append(read_token_bytes(tmp_path / name))
    with pytest.raises(ModelError, match="has another vocabulary than the model: token 0 "):
        common_ids(*pieces)
    assert common_ids(pieces[0], pieces[0]) == pieces[0].vocab_size
