"""One prompt, one answer: what ``llm generate`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.interrupt_key import stops_on_interrupt
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.request import request_with_defaults
from edgeduet_client.llm.settings import usable_defaults, with_budget
from edgeduet_client.llm.speculation.options import SpeculationOptions
from edgeduet_client.llm.speculation.stats import SpeculationStats

DEFAULT_TOKENS = 512


def answer_once(
    model: str,
    text: str,
    settings: Mapping[str, Any],
    *,
    chat: bool,
    system: str | None = None,
    root: Path | None = None,
    threads: int | None = None,
    show: Callable[[str], None] | None = None,
    speculation: SpeculationOptions | None = None,
) -> dict[str, Any]:
    """Generate and return the answer with its numbers.

    Args:
        model: name or folder.
        text: what to go on with, or the message to answer.
        settings: of the generation, by the names of ``GenerationRequest``.
        chat: whether ``text`` is a message.
        system: system message of the chat.
        show: told each piece as it comes.
        speculation: how to draft and verify; ``None``: not at all.

    Raises:
        ModelError: the model cannot be loaded.
        RequestError: the request cannot be honoured.
    """
    folder = ModelFolder.open(model, root)
    local = LocalModel.open(folder, threads=threads, speculation=speculation)
    if chat:
        opening = [] if system is None else [{"role": "system", "content": system}]
        prompt = local.tokenizer.encode_chat([*opening, {"role": "user", "content": text}])
    else:
        prompt = local.tokenizer.encode_prompt(text)
    given = with_budget(settings, prompt=len(prompt), context=local.session.cache_shape.limit, default=DEFAULT_TOKENS)
    request = request_with_defaults(given, usable_defaults(folder.generation_defaults()))
    said: list[str] = []
    logprobs: list[dict[str, Any]] = []
    finished: Finished | None = None
    with stops_on_interrupt() as stop:
        for event in local.generate(prompt, request, cancel=stop):
            if isinstance(event, Finished):
                finished = event
                continue
            said.append(event.text)
            for entry in event.logprobs or ():
                name = local.tokenizer.token_name(entry.token)
                logprobs.append({"token": name, "id": entry.token, "logprob": entry.logprob, "top": entry.top})
            if show is not None:
                show(event.text)
    assert finished is not None
    return {
        "model": folder.name,
        "text": "".join(said),
        "finish": finished.reason,
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "gate_interventions": finished.gate_interventions,
        "seconds_prefill": round(finished.seconds_prefill, 6),
        "seconds_decode": round(finished.seconds_decode, 6),
        **({"logprobs": logprobs} if request.logprobs is not None else {}),
        **_speculation(finished.speculation),
    }


def _speculation(stats: SpeculationStats | None) -> dict[str, Any]:
    if stats is None:
        return {}
    return {"speculation": stats.as_json(), "speculation_messages": stats.messages()}
