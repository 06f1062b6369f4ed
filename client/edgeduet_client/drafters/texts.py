"""The texts of a domain: what clients that train drafters hold, and what drafters are judged on.

A scenario names a source per domain (``NAME=SOURCE``). What a source stands for:

* ``python:stdlib``, ``python:PACKAGE``: Python source code of the standard library, or of an installed package,
* ``docstrings:stdlib``, ``docstrings:PACKAGE``: the docstrings in it: English prose about programs,
* ``packaged:LANGUAGE``: translations out of Django's catalogues and dialogues of chatterbot-corpus in a language
  (``pip install django chatterbot-corpus polib pyyaml``),
* ``folder:PATH``: the ``.txt``, ``.md``, ``.rst`` and ``.py`` files below a folder.

Files are cut into pieces of about ``PIECE`` characters at line ends. A piece's place in any order, and whether its file
is for testing, depend on names alone: not on the seed, the number of clients, or what else is installed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edgeduet_client.llm.gate_texts import package_texts
from edgeduet_shared.errors import ConfigError, DataError, nearest

PIECE = 1500
TEST_SHARE = 0.2
_SUFFIXES = (".txt", ".md", ".rst", ".py")
_MOST_FILES = 400
_MOST_ENTRIES = 4000
_NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data")


@dataclass(frozen=True)
class Piece:
    """A piece of text of a domain.

    Attributes:
        source: the file or catalogue entry it is from; all pieces of a source are on one side of the split.
        prompt: the part that is given, where the text has one by nature (a question); else empty.
        text: the rest.
    """

    source: str
    prompt: str
    text: str

    @property
    def for_test(self) -> bool:
        """Whether drafters are judged on it; nothing trains on it then."""
        return _share("test", self.source) < TEST_SHARE


def domain_pieces(source: str) -> tuple[Piece, ...]:
    """Return the pieces of a domain, in an order made of their names.

    Raises:
        ConfigError: no such kind of source.
        DataError: it holds no text.
    """
    return _pieces(source)


@lru_cache(maxsize=16)
def _pieces(source: str) -> tuple[Piece, ...]:
    kind, _, where = source.partition(":")
    if kind not in _KINDS:
        raise ConfigError(f"drafter.domains: unknown kind of source '{kind}'{nearest(kind, _KINDS)}")
    found = tuple(_KINDS[kind](where))
    if not found:
        raise DataError(f"drafter.domains: {source} holds no text")
    return found


def client_pieces(pieces: Sequence[Piece], *, part: int, parts: int, seed: int) -> list[Piece]:
    """Return the training pieces of one of the ``parts`` clients that share a domain; the seed says who holds which."""
    return [
        piece
        for piece in pieces
        if not piece.for_test and int(_share("client", seed, piece.source) * parts) % parts == part
    ]


def held_out_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the pieces drafters are judged on, at most one of each source."""
    return list({piece.source: piece for piece in reversed(pieces) if piece.for_test}.values())[::-1]


# --- sources ------------------------------------------------------------------------------------------


def _python(package: str) -> Iterator[Piece]:
    return _file_pieces(_code_files(package), lambda path: path.read_text("utf-8"))


def _docstrings(package: str) -> Iterator[Piece]:
    return _file_pieces(_code_files(package), _docstrings_of)


def _folder(folder: str) -> Iterator[Piece]:
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"drafter.domains: {root} is no folder")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.suffix in _SUFFIXES}
    return _file_pieces(files, lambda path: path.read_text("utf-8"))


def _packaged(language: str) -> Iterator[Piece]:
    for text in package_texts([language], per_language=_MOST_ENTRIES):
        yield Piece(text.source, text.prompt, f" {text.response}\n")


_KINDS: dict[str, Callable[[str], Iterator[Piece]]] = {
    "python": _python,
    "docstrings": _docstrings,
    "folder": _folder,
    "packaged": _packaged,
}


def _code_files(package: str) -> dict[str, Path]:
    """Return the Python files of a package by their name in it, those of tests left out."""
    if package == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
    else:
        found = importlib.util.find_spec(package) if package.isidentifier() else None
        places = list(found.submodule_search_locations or ()) if found else []
        if not places:
            raise DataError(f"drafter.domains: there is no installed package '{package}'; pip install {package}")
        root = Path(places[0])
    names = {path.relative_to(root): path for path in root.rglob("*.py")}
    return {name.as_posix(): path for name, path in names.items() if not set(name.parts[:-1]) & set(_NOT_LIBRARY)}


def _file_pieces(files: dict[str, Path], read: Callable[[Path], str]) -> Iterator[Piece]:
    """Yield the pieces of files: of each its first, then of each its second, and so on, files in order of a hash."""
    ordered = sorted(files, key=lambda name: _share("order", name))
    cut: list[tuple[str, list[str]]] = []
    for name in ordered:
        try:
            text = read(files[name])
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue  # a file that Python itself could not read, such as those that test encodings
        pieces = list(_cut(text))
        if pieces:
            cut.append((name, pieces))
        if len(cut) >= _MOST_FILES:
            break
    for turn in range(max((len(pieces) for _, pieces in cut), default=0)):
        for name, pieces in cut:
            if turn < len(pieces):
                # Not from the top: every file begins with the same licence.
                yield Piece(name, "", pieces[(turn + len(pieces) // 2) % len(pieces)])


def _cut(text: str) -> Iterator[str]:
    """Cut a text at line ends into pieces of about ``PIECE`` characters; a short rest is left out."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        piece.append(line[:PIECE])
        length += len(piece[-1])
        if length >= PIECE:
            yield "".join(piece)
            piece, length = [], 0
    if length >= PIECE // 4:
        yield "".join(piece)


def _docstrings_of(path: Path) -> str:
    tree = ast.parse(path.read_text("utf-8"))
    places = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, places)]
    return "\n\n".join(textwrap.dedent(text) for text in found if text and len(text) >= 80)


def _share(*parts: object) -> float:
    """Return a number in [0, 1) that depends on ``parts`` alone."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
