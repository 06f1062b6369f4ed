"""What ``tokenizer.json`` of a model folder must say, whatever the source said.

Two things go wrong silently when a tokenizer is taken over as it comes:

- A GGUF file holds vocabulary and merges, and only the *name* of the rule that cuts text up before merging
  (``tokenizer.ggml.pre``). With another rule the text falls into other tokens than the model was trained on,
  now and then (SmolLM2 cuts every digit off; without that, ``"  12"`` begins with one space too few). The
  rules by name are those of llama.cpp (``llama-vocab.cpp``), spelled as the models' own ``tokenizer.json``
  spell them.
- A ``tokenizer.json`` may truncate or pad, and may hold special tokens that the model has no row for (Gemma 3's
  image token; the ``<|endoftext|>`` that a converter adds to a vocabulary of Llama 3); such an id would point
  outside the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import TOKENIZER
from edgeduet_shared.atomic_files import atomic_write_text

Description = dict[str, Any]
"""The content of a ``tokenizer.json``."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2_SPLIT = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
# Their vocabularies hold every word they mean whole, and a text begins with the first token.
LLAMA_3_CUTS = frozenset({"llama3", "llama-v3", "llama-bpe"})


def _byte_level(*, use_regex: bool) -> Description:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> Description:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, _byte_level(use_regex=False)]}


def _llama_3(description: Description) -> None:
    description["pre_tokenizer"] = _split(_LLAMA_3_SPLIT)
    description["model"]["ignore_merges"] = True


def _qwen_2(description: Description) -> None:
    description["pre_tokenizer"] = _split(_QWEN_2_SPLIT)
    description["normalizer"] = {"type": "NFC"}


def _smollm(description: Description) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]}


def _gpt_2(description: Description) -> None:
    description["pre_tokenizer"] = _byte_level(use_regex=True)


_CUTS: Mapping[str, Callable[[Description], None]] = {
    **dict.fromkeys(LLAMA_3_CUTS, _llama_3),
    "qwen2": _qwen_2,
    "deepseek-r1-qwen": _qwen_2,
    "smollm": _smollm,
    "gpt-2": _gpt_2,
}


def set_gguf_cuts(description: Description, fields: Mapping[str, Any], place: Path) -> None:
    """Give a byte-level tokenizer converted from a GGUF file the rule that the file names.

    Args:
        description: changed in place; a SentencePiece tokenizer (``tokenizer.ggml.model`` other than ``gpt2``)
            has no such rule and stays as it is.
        fields: the file's metadata.
        place: the file, for messages.

    Raises:
        ModelError: no rule is named, or an unknown one.
    """
    if fields.get("tokenizer.ggml.model") != "gpt2":
        return
    name = str(fields.get("tokenizer.ggml.pre", "default"))
    if name not in _CUTS:
        raise ModelError(
            f"{place}: how its tokenizer cuts text up is named '{name}', which is not supported (known: "
            f"{', '.join(sorted(_CUTS))}); import the model's Hugging Face folder"
        )
    _CUTS[name](description)


def write_tokenizer_json(
    description: Description, folder: Path, *, vocab_width: int, template: str | None, place: Path
) -> Description:
    """Write ``tokenizer.json``, without truncation, padding, and special tokens beyond the logits' width.

    Returns:
        What was written.

    Args:
        template: the chat template; a token it writes must not be one of those.
        place: the source, for messages.

    Raises:
        ModelError: the chat template needs a token that the model has no row for.
    """
    added = description.get("added_tokens") or []
    beyond = [token["content"] for token in added if token["id"] >= vocab_width and token["special"]]
    needed = next((content for content in beyond if template and content in template), None)
    if needed is not None:
        raise ModelError(
            f"{place}: the chat template writes '{needed}', for which the model has no row; "
            "tokenizer and weights belong to different models"
        )
    kept = [token for token in added if token["content"] not in beyond]
    cleaned = {**description, "truncation": None, "padding": None, "added_tokens": kept}
    atomic_write_text(folder / TOKENIZER, json.dumps(cleaned, ensure_ascii=False))
    return cleaned


def special_ids_named(description: Description, names: tuple[str, ...]) -> list[int]:
    """Return the ids of the special tokens with one of ``names``.

    A plain token of such a name (Gemma's ``</s>``, a tag of HTML) means nothing.
    """
    added = description.get("added_tokens") or []
    return [int(token["id"]) for token in added if token["special"] and token["content"] in names]
