"""Texts the confusion gate is trained and evaluated on: short requests and answers in many languages.

Either the user's own folder, or, where no data hub can be reached, what packages ship:

- Django's gettext catalogues (BSD licence): an English message and its translation, about 400 clean pairs for
  each of a hundred languages. Rendered with the paper's translation pattern (arXiv 2510.17555, data section).
- chatterbot-corpus (BSD licence): short dialogues in 28 languages, a stand-in for instruction data.

Every text has a ``source``: what was asked. Splits go by source, never by text, so that the same English
sentence is never trained on in one language and tested in another.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family, text_families

# Code (Django's spelling, with "-" for "_") to the name used in prompts, and chatterbot-corpus' folder.
LANGUAGES: dict[str, tuple[str, str | None]] = {
    "ar": ("Arabic", None),
    "bg": ("Bulgarian", None),
    "bn": ("Bengali", "bengali"),
    "cs": ("Czech", None),
    "da": ("Danish", None),
    "de": ("German", "german"),
    "el": ("Greek", None),
    "en": ("English", "english"),
    "es": ("Spanish", "spanish"),
    "fa": ("Persian", "persian"),
    "fi": ("Finnish", None),
    "fr": ("French", "french"),
    "he": ("Hebrew", "hebrew"),
    "hi": ("Hindi", "hindi"),
    "hu": ("Hungarian", None),
    "hy": ("Armenian", None),
    "id": ("Indonesian", "indonesian"),
    "it": ("Italian", "italian"),
    "ja": ("Japanese", "japanese"),
    "ka": ("Georgian", None),
    "kk": ("Kazakh", None),
    "km": ("Khmer", None),
    "kn": ("Kannada", None),
    "ko": ("Korean", "korean"),
    "mk": ("Macedonian", None),
    "ml": ("Malayalam", None),
    "mr": ("Marathi", "marathi"),
    "ne": ("Nepali", None),
    "nl": ("Dutch", "dutch"),
    "pl": ("Polish", None),
    "pt": ("Portuguese", "portuguese"),
    "ro": ("Romanian", None),
    "ru": ("Russian", "russian"),
    "sr": ("Serbian", None),
    "sv": ("Swedish", "swedish"),
    "ta": ("Tamil", "tamil"),
    "te": ("Telugu", "telugu"),
    "th": ("Thai", "thai"),
    "tr": ("Turkish", "turkish"),
    "uk": ("Ukrainian", "ukrainian"),
    "ur": ("Urdu", "urdu"),
    "vi": ("Vietnamese", None),
    "zh-hans": ("Chinese", "chinese"),
    "zh-hant": ("Traditional Chinese", "traditionalchinese"),
}

DEFAULT_LANGUAGES = (
    *("ar", "he", "ko", "th", "el", "ru", "fa", "hi"),  # scripts that a confused model leaves
    *("ja", "zh-hans", "de", "es", "fr", "vi"),  # and the two it falls into
)

TEST_SHARE = 0.2  # of the sources
_TEST_SPLIT = 2**31 - 1  # a seed of its own, so that it is independent of every training's split
SHORTEST = 8  # characters; shorter catalogue messages ("OK", "Save") say nothing about a language
_NOT_PLAIN_TEXT = re.compile(r"[%{}<>\n]")


@dataclass(frozen=True)
class GateText:
    """One request and its answer.

    Attributes:
        prompt: what was asked, as plain text; empty where only a text is given.
        response: the answer; the gate learns from its positions only.
        language: code, or "und" where unknown.
        source: what splits go by.
    """

    prompt: str
    response: str
    language: str
    source: str

    @property
    def families(self) -> frozenset[Family]:
        """Families of the letters of the response: what a right answer may contain."""
        return text_families(self.response)

    @property
    def rank(self) -> str:
        """A place in an order that depends on the source alone, the same in every language and on every machine."""
        return hashlib.sha256(self.source.encode("utf-8")).hexdigest()


def package_texts(languages: Sequence[str], *, per_language: int) -> list[GateText]:
    """Return up to ``per_language`` texts for each language, from Django and chatterbot-corpus.

    Chosen by a hash of the source: the same sources in every language, and a larger number contains the
    texts of a smaller one.

    Raises:
        ModelError: a language is unknown or has no text, or a package is not installed (says which and how).
    """
    unknown = [language for language in languages if language not in LANGUAGES]
    if unknown:
        known = ", ".join(sorted(LANGUAGES))
        raise ModelError(f"no packaged texts for {', '.join(unknown)}; languages: {known}; or give a folder of texts")
    texts: list[GateText] = []
    for language in dict.fromkeys(languages):
        found = [*_django_texts(language), *_dialogue_texts(language)]
        if not found:
            raise ModelError(f"the installed packages hold no text in {LANGUAGES[language][0]} ({language})")
        texts += sorted(found, key=lambda text: (text.rank, text.prompt))[:per_language]
    return texts


def folder_texts(folder: Path | str, *, per_language: int | None = None) -> list[GateText]:
    """Return the texts of a folder: every line of its ``.txt`` files, every object of its ``.jsonl`` files.

    A JSON object has ``response`` (or ``text``), and may have ``prompt``, ``language`` and ``source``. Where no
    language is given it is the file's name, if that is a known code (``ar.txt``).

    Raises:
        ModelError: no such folder, no text in it, or a line that is no such object (says which).
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder; give a folder with .txt or .jsonl files")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".jsonl"))
    texts = list(dict.fromkeys(text for path in files for text in _file_texts(path)))
    if not texts:
        raise ModelError(f"{folder} holds no text; put .txt files (a text a line) or .jsonl files there")
    if per_language is None:
        return texts
    kept: list[GateText] = []
    for language in dict.fromkeys(text.language for text in texts):
        kept += sorted((t for t in texts if t.language == language), key=lambda text: text.rank)[:per_language]
    return kept


def split_by_source(texts: Sequence[GateText], *, held_out: float, seed: int) -> tuple[list[GateText], list[GateText]]:
    """Return (training, held-out) texts; all texts of a source are on the same side.

    A source's side depends on the seed and itself only, so that more texts never move an old one.
    """

    def place(text: GateText) -> float:
        digest = hashlib.sha256(f"{seed}\0{text.source}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    return [t for t in texts if place(t) >= held_out], [t for t in texts if place(t) < held_out]


def part_test_texts(texts: Sequence[GateText]) -> tuple[list[GateText], list[GateText]]:
    """Return (texts for training and validation, texts that only evaluations look at); the same for every gate."""
    return split_by_source(texts, held_out=TEST_SHARE, seed=_TEST_SPLIT)


def without_latin(texts: Iterable[GateText]) -> list[GateText]:
    """Return the texts whose responses hold no Latin letter (NO-LATIN): a Latin letter in an answer is confusion."""
    return [text for text in texts if Family.LATIN not in text.families]


def with_latin(texts: Iterable[GateText]) -> list[GateText]:
    """Return the texts that mix Latin letters with another script (WITH-LATIN): legitimate code switching."""
    return [text for text in texts if Family.LATIN in text.families and len(text.families) > 1]


# --- sources -------------------------------------------------------------------------------------------


def _django_texts(language: str) -> Iterator[GateText]:
    """Yield the clean translations of Django's catalogues into ``language``."""
    root = _package_folder("django")
    polib = _reader("polib", "polib", "Django's catalogues")
    script, _, variant = language.partition("-")
    locale = f"{script}_{variant.capitalize()}" if variant else script
    name, seen = LANGUAGES[language][0], set()
    for catalogue in sorted(root.glob(f"**/locale/{locale}/LC_MESSAGES/django.mo")):
        for entry in polib.mofile(str(catalogue)):
            source, translation = entry.msgid, entry.msgstr.strip()
            plain = not _NOT_PLAIN_TEXT.search(source + translation)
            if plain and len(source) >= SHORTEST and translation not in ("", source) and source not in seen:
                seen.add(source)
                yield GateText(translation_prompt(source, name), translation, language, source)


def translation_prompt(source: str, language: str) -> str:
    """Return the request to translate an English ``source`` into ``language``."""
    return f"Translate from English to {language}.\n\nEnglish: {source}\n\n{language}:"


def _dialogue_texts(language: str) -> Iterator[GateText]:
    """Yield question and first answer of chatterbot-corpus' dialogues, where it has the language."""
    folder = LANGUAGES[language][1]
    if folder is None:
        return
    root = _package_folder("chatterbot_corpus", install="chatterbot-corpus")
    yaml = _reader("yaml", "pyyaml", "chatterbot-corpus")
    seen = set()
    for path in sorted((root / "data" / folder).glob("*.yml")):
        for dialogue in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            turns = [str(turn).strip() for turn in dialogue[:2]]
            if len(turns) == 2 and len(turns[1]) >= SHORTEST and turns[0] and turns[0] not in seen:
                seen.add(turns[0])
                yield GateText(turns[0], turns[1], language, turns[0])


def _reader(module: str, install: str, what: str) -> Any:
    """Import the library that reads a format; neither has type information."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ModelError(f"reading {what} needs {install}; install it with: pip install {install}") from None


def _package_folder(package: str, *, install: str | None = None) -> Path:
    """Return where an installed package lies, without importing it."""
    found = importlib.util.find_spec(package)
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        name = install or package
        raise ModelError(f"the texts of {name} are not installed; pip install {name}, or give a folder of texts")
    return Path(places[0])


def _file_texts(path: Path) -> Iterator[GateText]:
    language = path.stem.lower().replace("_", "-")
    language = language if language in LANGUAGES else "und"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path} as UTF-8 text ({error})") from None
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line:
            continue
        if path.suffix == ".txt":
            yield GateText("", line, language, line)
        else:
            yield _json_text(line, language, f"{path}, line {number}")


def _json_text(line: str, language: str, where: str) -> GateText:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{where}: not JSON ({error})") from None
    known = {"prompt", "response", "text", "language", "source"}
    if not isinstance(fields, dict) or not set(fields) <= known or not all(isinstance(v, str) for v in fields.values()):
        raise ModelError(f"{where}: expected an object of texts with the fields {', '.join(sorted(known))}")
    response = fields.get("response") or fields.get("text")
    if not response:
        raise ModelError(f"{where}: the field response (or text) is missing or empty")
    prompt = fields.get("prompt", "")
    return GateText(prompt, response, fields.get("language", language), fields.get("source") or prompt or response)
