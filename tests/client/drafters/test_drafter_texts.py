"""Who holds which texts: fixed by names, disjoint, never what drafters are judged on."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.drafters.texts import PIECE, Piece, client_pieces, domain_pieces, held_out_pieces
from edgeduet_shared.errors import ConfigError, DataError

PIECES = [Piece(f"file-{number % 60}", "", f"text {number}") for number in range(150)]


@given(st.integers(1, 7), st.integers(0, 5))
def test_clients_of_a_domain_part_its_training_texts_among_them(parts: int, seed: int):
    held = [client_pieces(PIECES, part=part, parts=parts, seed=seed) for part in range(parts)]
    together = [piece for pieces in held for piece in pieces]
    assert sorted(piece.text for piece in together) == sorted(p.text for p in PIECES if not p.for_test)
    sources = [{piece.source for piece in pieces} for pieces in held]
    assert sum(map(len, sources)) == len(set().union(*sources)), "a file is held by one client"


def test_held_out_texts_are_of_files_nobody_trains_on_one_each():
    held_out = held_out_pieces(PIECES)
    names = [piece.source for piece in held_out]
    assert len(names) == len(set(names)) and 0 < len(names) < 30
    trained = {piece.source for piece in client_pieces(PIECES, part=0, parts=1, seed=0)}
    assert not trained & set(names) and len(trained) + len(names) == 60


def test_a_folder_is_cut_at_line_ends_and_every_file_has_its_turn(tmp_path: Path):
    for name in ("a.py", "b.md", "c.txt", "d.png"):
        (tmp_path / name).write_text("".join(f"line {number} of {name}\n" for number in range(400)))
    (tmp_path / "broken.txt").write_bytes(b"\xff\xfe\xff" * 900)
    pieces = domain_pieces(f"folder:{tmp_path}")
    assert {piece.source for piece in pieces[:3]} == {"a.py", "b.md", "c.txt"}
    assert all(PIECE // 4 <= len(piece.text) < PIECE + 100 and piece.text.endswith("\n") for piece in pieces)
    whole = (tmp_path / "a.py").read_text()
    assert all(piece.text in whole for piece in pieces if piece.source == "a.py")


def test_the_standard_library_is_code_and_its_docstrings_are_prose():
    code, prose = domain_pieces("python:json"), domain_pieces("docstrings:json")
    assert any("import re" in piece.text for piece in code)
    assert prose and not any("import re" in piece.text for piece in prose)


@pytest.mark.parametrize(
    ("source", "error", "says"),
    [
        ("pyton:stdlib", ConfigError, "did you mean 'python'"),
        ("python:no_such_package", DataError, "pip install no_such_package"),
        ("folder:/no/such/folder", DataError, "is no folder"),
        ("python:../etc", DataError, "no installed package"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_clear_line(source: str, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        domain_pieces(source)
