"""Settings of a generation from a command line: named options, and ``KEY=VALUE`` for all others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.request import REQUIRED, GenerationRequest
from edgeduet_shared.errors import nearest

_LISTS = ("stop", "bad_words")
_TEXTS = ("regex", "grammar")


def settings_from(pairs: Sequence[str], **options: Any) -> dict[str, Any]:
    """Return the settings that were given, by the names of ``GenerationRequest``; what is ``None`` was not.

    Raises:
        RequestError: a pair without '=', an unknown key, or a value that is no JSON where it must be.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise RequestError(f"--set {pair}: write KEY=VALUE", key)
        if key not in GenerationRequest.model_fields:
            raise RequestError(f"--set {key}: no such setting{nearest(key, GenerationRequest.model_fields)}", key)
        settings[key] = _value(key, value)
    if "sampler" not in settings and (sampler := implied_sampler(settings)) is not None:
        settings["sampler"] = sampler
    return settings


def implied_sampler(settings: Iterable[str]) -> str | None:
    """Return the sampler that the names of ``settings`` belong to; ``None`` where none of them chooses.

    Settings of several samplers that exclude each other choose the first, whose refusal names the other.
    """
    names = list(settings)
    return next((sampler for sampler, needs in REQUIRED.items() if any(name in needs for name in names)), None)


def usable_defaults(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return what we take over from a model's own generation settings: temperature and repetition penalty.

    Not its truncation (``top_p``, ``top_k``): p-less does that by itself, without a setting. A temperature of 0 or a
    missing one says nothing about sampling.
    """
    kept = {}
    for name in ("temperature", "repetition_penalty"):
        value = source.get(name)
        if isinstance(value, int | float) and value > 0:
            kept[name] = float(value)
    return kept


def with_budget(settings: Mapping[str, Any], *, prompt: int, context: int, default: int) -> dict[str, Any]:
    """Return ``settings`` with a length of the answer: where none is given, ``default`` or what the context has left.

    Args:
        prompt: tokens of the prompt.
        context: tokens of the model's context.
        default: tokens of an answer that may be as long as it likes.
    """
    if settings.get("max_tokens") is not None:
        return dict(settings)
    tokens = max(1, min(default, context - prompt), settings.get("min_tokens", 0))
    return {**settings, "max_tokens": tokens}


def _value(key: str, text: str) -> Any:
    if key in _TEXTS:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        value = text  # a word: sampler=greedy, gate=off
    if key in _LISTS:
        return tuple(value) if isinstance(value, list) else (text,)
    return value
