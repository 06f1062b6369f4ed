"""What the target is asked to write while a drafter learns from it: prompts of several sorts.

From a folder of the user's (``.txt``, ``.md``, ``.rst``, ``.py`` and other sources, ``.jsonl`` of the gate's form),
from translated catalogues in given languages, or, without either, from what this machine's Python ships: sources of
the standard library (``code``), its reference and the descriptions of installed packages (``prose``), questions
about modules and everyday topics (``questions``), texts to copy, edit or sum up (``edits``), and, most of all,
conversations of which the model itself thinks up both sides (``chats``): they are the widest.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from pathlib import Path

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gate_texts import folder_texts, package_texts

_CODE = {".py", ".js", ".ts", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".sh", ".sql", ".toml", ".yaml", ".yml"}
_PROSE = {".txt", ".md", ".rst"}
_PIECE = 700
"""Characters of a document that one prompt is made of."""
_LEAST = 200
_EDITED = 240
"""Characters to edit: request, text and chat frame then fit into a prompt."""
_LARGEST_FILE = 1 << 20
_CHATS = 3
"""Conversations the model thinks up itself, for each prompt of another sort."""
_READ_A_TURN = 1
"""Pieces of code, and of prose, that are only read, for each one that is continued."""

_TOPICS = (
    "rainbows",
    "volcanoes",
    "bread",
    "the moon",
    "bicycles",
    "photosynthesis",
    "chess",
    "the Roman Empire",
    "electric cars",
    "sleep",
    "coffee",
    "bees",
    "the internet",
    "vaccines",
    "gravity",
    "opera",
    "football",
    "the ocean",
    "paper",
    "batteries",
    "clouds",
    "dinosaurs",
    "money",
    "glass",
    "earthquakes",
    "tea",
    "windmills",
    "the heart",
    "languages",
    "trains",
    "coral reefs",
    "cheese",
    "telescopes",
    "maps",
    "deserts",
    "memory",
    "printing",
    "bridges",
    "magnets",
    "music theory",
    "gardening",
    "cats",
    "the stock market",
    "probability",
    "climate",
    "painting",
    "swimming",
    "rice",
    "satellites",
    "radio",
    "fairy tales",
    "democracy",
    "mirrors",
    "soap",
    "wolves",
    "insurance",
)
_QUESTIONS = (
    "What is interesting about {}?",
    "Explain {} to a child of ten.",
    "Write a short paragraph about {}.",
    "List five facts about {}.",
    "Why do people care about {}? Answer in three sentences.",
    "What should I know before I learn more about {}?",
    "Write the beginning of a story in which {} matter.",
    "Compare {} with something similar.",
)
_ABOUT_MODULES = (
    "What is the Python module {} for?",
    "Show a short example that uses the Python module {}.",
    "Write a Python function that uses {} and explain it.",
)
_EDITS = (
    "Copy the following text word for word.\n\n{}",
    "Correct spelling and grammar of the following text, and change nothing else.\n\n{}",
    "Summarise the following text in two sentences.\n\n{}",
    "Rewrite the following text in simpler words.\n\n{}",
    "Make a list of the main points of this text.\n\n{}",
)
_CODE_EDITS = (
    "Add a docstring to this code.\n\n```\n{}\n```",
    "Rename the variables of this code so that they are clearer.\n\n```\n{}\n```",
    "Explain what this code does.\n\n```\n{}\n```",
)
_PIECE_OF_CODE = re.compile(r"^(?=(?:    )?(?:async def|def|class) )", re.MULTILINE)


@dataclass(frozen=True)
class TrainingPrompt:
    """What the target goes on from.

    Attributes:
        domain: what sort of text.
        text: of a chat's request, or of a beginning to be continued.
        chat: whether it is a request.
        write: whether the target goes on from it; else it only reads it.
        asks: where the target is to think up the request itself, the number of the attempt.
    """

    domain: str
    text: str
    chat: bool = False
    write: bool = True
    asks: int | None = None

    @property
    def rank(self) -> str:
        """A place in an order that depends on the prompt alone."""
        return hashlib.sha256(f"{self.domain}\0{self.text}".encode("utf-8", "surrogatepass")).hexdigest()


def choose_prompts(
    corpus: Path | str | None = None, languages: Sequence[str] | None = None, *, per_domain: int = 400
) -> list[TrainingPrompt]:
    """Return prompts in the order they should be used: the domains take turns.

    Between those to be continued stand further pieces of code and prose that are only read: the target's opinion of
    them costs a quarter of a written token's. They are never pieces that a prompt is made of.

    Args:
        corpus: a folder of texts; or
        languages: codes of languages (:data:`~edgeduet_client.llm.gate_texts.LANGUAGES`); neither: what Python ships.
        per_domain: prompts of each domain, at most.

    Raises:
        ModelError: both are given, or there is no usable text.
    """
    if corpus is not None and languages is not None:
        raise ModelError("texts of a folder have languages of their own; give --corpus or --languages")
    if corpus is not None:
        found = list(_folder_prompts(Path(corpus)))
        if not found:
            raise ModelError(f"{corpus} holds no text of {_LEAST} characters or more; give another folder")
    elif languages is not None:
        texts = package_texts(languages, per_language=per_domain)
        found = [TrainingPrompt("languages", text.prompt, chat=True) for text in texts]
    else:
        found = [*_own_code(), *_own_prose(), *_own_questions()]
        found += _edits([prompt for prompt in found if prompt.domain in ("code", "prose")])
        found += [TrainingPrompt("chats", str(number), chat=True, asks=number) for number in range(_CHATS * per_domain)]
    domains: dict[str, list[TrainingPrompt]] = {}
    left: dict[str, list[TrainingPrompt]] = {}
    for prompt in sorted(set(found), key=lambda prompt: prompt.rank):
        chosen = domains.setdefault(prompt.domain, [])
        if len(chosen) < per_domain * (_CHATS if prompt.asks is not None else 1):
            chosen.append(prompt)
        elif prompt.domain in ("code", "prose"):
            left.setdefault(prompt.domain, []).append(prompt)
    edited = {prompt.text for prompt in domains.get("edits", ())}
    ordered = []
    for turn in range(max(len(chosen) for chosen in domains.values())):
        for domain, chosen in sorted(domains.items()):
            each = _CHATS if domain == "chats" else 1
            ordered += chosen[each * turn : each * (turn + 1)]
        for _, pieces in sorted(left.items()):
            for piece in pieces[_READ_A_TURN * turn : _READ_A_TURN * (turn + 1)]:
                if not any(piece.text[:_EDITED] in text for text in edited):
                    ordered.append(replace(piece, write=False))
    return ordered


def _folder_prompts(folder: Path) -> Iterator[TrainingPrompt]:
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; give a folder with texts")
    pieces: list[TrainingPrompt] = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _CODE | _PROSE):
        code = path.suffix in _CODE
        cut = _code_pieces if code else _paragraphs
        pieces += [TrainingPrompt("code" if code else "prose", piece) for piece in cut(_read(path))]
    yield from pieces
    yield from _edits(pieces)
    if any(folder.rglob("*.jsonl")):
        for text in folder_texts(folder):
            if text.prompt:
                yield TrainingPrompt("questions", text.prompt, chat=True)


def _read(path: Path) -> str:
    if path.stat().st_size > _LARGEST_FILE:
        with path.open("rb") as file:
            return file.read(_LARGEST_FILE).decode("utf-8", "ignore")
    return path.read_text("utf-8", "ignore")


def _code_pieces(text: str) -> Iterator[str]:
    """Yield functions and classes, from their first line on; of a source without any, parts of even length."""
    pieces = _PIECE_OF_CODE.split(text)[1:] or [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    for piece in pieces:
        if len(piece) >= _LEAST:
            yield piece[:_PIECE]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield runs of paragraphs that are mostly words."""
    run = ""
    for paragraph in re.split(r"\n\s*\n", text):
        words = sum(character.isalpha() or character == " " for character in paragraph)
        if words < 0.8 * len(paragraph):
            continue
        run = f"{run}\n\n{paragraph.strip()}" if run else paragraph.strip()
        if len(run) >= _LEAST:
            yield run[:_PIECE]
            run = ""


def _own_code() -> Iterator[TrainingPrompt]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for piece in _code_pieces(_read(path)):
            yield TrainingPrompt("code", piece)


def _own_prose() -> Iterator[TrainingPrompt]:
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    described = {found.metadata["Name"]: found.metadata.json.get("description") for found in distributions()}
    texts += [text for _, text in sorted(described.items()) if isinstance(text, str)]
    for text in texts:
        for piece in _paragraphs(text):
            yield TrainingPrompt("prose", piece)


def _own_questions() -> Iterator[TrainingPrompt]:
    for question in _QUESTIONS:
        for topic in _TOPICS:
            yield TrainingPrompt("questions", question.format(topic), chat=True)
    modules = sorted(path.stem for path in Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    for question in _ABOUT_MODULES:
        for module in modules:
            yield TrainingPrompt("questions", question.format(module), chat=True)


def _edits(pieces: Sequence[TrainingPrompt]) -> list[TrainingPrompt]:
    edits = []
    for place, piece in enumerate(sorted(pieces, key=lambda piece: piece.rank)):
        templates = _CODE_EDITS if piece.domain == "code" else _EDITS
        edits.append(TrainingPrompt("edits", templates[place % len(templates)].format(piece.text[:_EDITED]), chat=True))
    return edits
