"""Token families of the Language Confusion Gate: which script a token belongs to.

Zhang, Huang, Yuan, Lin, "Language Confusion Gate", arXiv 2510.17555. Every id belongs to exactly one of four
families. A character counts only if its Unicode category is a letter (``L*``); it is CJ if its Unicode name
contains CJK, KATAKANA or HIRAGANA, Latin if the name contains LATIN, and otherwise of another script. A token is

1. **CJ** if any of its letters is CJ, or if it ends in an incomplete character that may become a CJK ideograph,
2. else **Latin** if any of its letters is Latin (a token that mixes Latin and, say, Cyrillic is Latin, as in
   the authors' code; their text would call it Low-Res),
3. else **Symbols** if it has no letter: digits, punctuation, emoji, white space, lone combining marks,
4. else **Low-Res**: every other script, however well resourced.

Special tokens, ids without a token (padding of the output matrix), the token ``assistant`` and the single
letters A to G with or without a leading space (answers of multiple-choice questions) are Symbols whatever they
contain. Symbols are never masked.

Where we differ from the released code: it decodes each id and looks for U+FFFD, which assumes byte-level BPE
with the 256 bytes at ids 0..255; we start from the bytes of the id (``token_bytes.py``), so that SentencePiece
and byte-fallback vocabularies follow the same rules. A byte-fallback token of a letter (``<0x41>``) therefore
counts as that letter. A CJK character emitted as three single bytes is invisible to any per-token rule, so
confusion is measured on decoded text (``text_families``), never on token families.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import unicodedata
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.token_bytes import TokenBytes, read_token_bytes
from edgeduet_shared.atomic_files import atomic_output, atomic_write_json

# Part of the cache key: raise it when a rule of this module changes.
RULES_VERSION = 1

FamilyTable = NDArray[np.uint8]  # (V,) family of every id of the logits


class Family(IntEnum):
    """The four families, in the order of the gate's outputs."""

    CJ = 0
    LATIN = 1
    SYMBOLS = 2
    LOW_RES = 3


# The CJK blocks of the partial-character rule, as in the release: ideographs, extensions B to I, compatibility
# supplement. Extension A, compatibility ideographs and kana are not among them there either.
_CJK_BLOCKS = (
    (0x4E00, 0x9FFF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0x2CEB0, 0x2EBEF),
    (0x2EBF0, 0x2EE5F),
    (0x2F800, 0x2FA1F),
    (0x30000, 0x3134F),
    (0x31350, 0x323AF),
)
_ALWAYS_SYMBOLS = frozenset([b"assistant", *(space + bytes([c]) for space in (b"", b" ") for c in b"ABCDEFG")])


@lru_cache(maxsize=1 << 16)
def character_family(character: str) -> Family:
    """Return the family of one character; what is no letter, or a letter without a name, is Symbols."""
    if not unicodedata.category(character).startswith("L"):
        return Family.SYMBOLS
    name = unicodedata.name(character, "")
    if not name:
        return Family.SYMBOLS
    if "CJK" in name or "KATAKANA" in name or "HIRAGANA" in name:
        return Family.CJ
    return Family.LATIN if "LATIN" in name else Family.LOW_RES


def text_families(text: str) -> frozenset[Family]:
    """Return the families of the letters of ``text`` (Symbols is never among them)."""
    return frozenset(map(character_family, set(text))) - {Family.SYMBOLS}


def bytes_family(piece: bytes) -> Family:
    """Return the family of a token that stands for ``piece``, before the overrides of single tokens."""
    text, partial = split_partial(piece)
    found = text_families(text)
    if Family.CJ in found or may_become_cjk(partial):
        return Family.CJ
    if Family.LATIN in found:
        return Family.LATIN
    return Family.LOW_RES if found else Family.SYMBOLS


def split_partial(piece: bytes) -> tuple[str, bytes]:
    """Return the complete characters of ``piece`` and the incomplete character it ends in.

    Continuation bytes at the start (the end of a character that another token began) and bytes that no
    UTF-8 text can contain belong to neither.
    """
    try:
        return piece.decode("utf-8"), b""
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        text = decoder.decode(piece, final=False)
        return text, decoder.getstate()[0]


def may_become_cjk(partial: bytes) -> bool:
    """Say whether the incomplete UTF-8 character ``partial`` can become an ideograph of the listed blocks.

    A single lead byte says too little and never counts.
    """
    if len(partial) < 2:
        return False
    missing = (4 if partial[0] >= 0xF0 else 3) - len(partial)
    first = ord((partial + b"\x80" * missing).decode("utf-8"))
    last = ord((partial + b"\xbf" * missing).decode("utf-8"))
    return any(first <= end and start <= last for start, end in _CJK_BLOCKS)


def make_family_table(tokens: TokenBytes, vocab_width: int) -> FamilyTable:
    """Return the family of each of the ``vocab_width`` ids of the logits, (V,) uint8.

    Ids that the tokenizer does not know are Symbols; whoever samples must mask them separately.
    Ids of the tokenizer beyond the width (Gemma 3's image token) cannot be produced and are left out.
    """
    table = np.full(vocab_width, Family.SYMBOLS, dtype=np.uint8)
    for token_id, piece in enumerate(tokens.pieces[:vocab_width]):
        if piece is not None and token_id not in tokens.special and piece not in _ALWAYS_SYMBOLS:
            table[token_id] = bytes_family(piece)
    return table


def family_table(tokenizer_json: Path | str, vocab_width: int, *, cache: Path | str | None = None) -> FamilyTable:
    """Return the family table of a tokenizer for logits of ``vocab_width``, (V,) uint8, read-only.

    With ``cache`` (the path of ``families.npy``) a table made earlier for the very same ``tokenizer.json``,
    width and rules is loaded, and otherwise a new one is stored there, with the key it was made for beside it
    in ``families.json``.

    Raises:
        ModelError: the tokenizer cannot be read or is of an unsupported type; see :func:`read_token_bytes`.
        EdgeDuetError: the cache cannot be written.
    """
    if cache is None:
        return _frozen(make_family_table(read_token_bytes(tokenizer_json), vocab_width))
    cache = Path(cache)
    key = {
        "tokenizer_sha256": _sha256(Path(tokenizer_json)),
        "vocab_width": vocab_width,
        "rules_version": RULES_VERSION,
    }
    table = _cached(cache, key)
    if table is None:
        table = make_family_table(read_token_bytes(tokenizer_json), vocab_width)
        with atomic_output(cache) as temporary, temporary.open("wb") as stream:
            np.save(stream, table)
        # The key goes last and names the table's hash: a crash between the two leaves a table that is made again.
        atomic_write_json(cache.with_suffix(".json"), key | {"table_sha256": _sha256(cache)})
    return _frozen(table)


def _cached(cache: Path, key: dict[str, object]) -> FamilyTable | None:
    """Return the stored table if it was made for ``key`` and is intact."""
    try:
        stored = json.loads(cache.with_suffix(".json").read_text(encoding="utf-8"))
        if stored != key | {"table_sha256": _sha256(cache)}:
            return None
        table: FamilyTable = np.load(cache, allow_pickle=False)
    except (OSError, ValueError, ModelError):
        return None  # no cache, or a damaged one: the caller makes it again
    return table


def _frozen(table: FamilyTable) -> FamilyTable:
    table.flags.writeable = False
    return table


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}; import the model again") from None
