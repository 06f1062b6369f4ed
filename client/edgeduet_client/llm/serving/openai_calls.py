"""From a request as OpenAI spells it to answers for the engine to give, and back to a reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.serving import openai_reply
from edgeduet_client.llm.serving.engine import Choice, Engine
from edgeduet_client.llm.serving.event_stream import EventStream
from edgeduet_client.llm.serving.events import ChoiceDone, Piece
from edgeduet_client.llm.serving.openai_schema import ChatBody, CompletionBody, SamplingBody
from edgeduet_client.llm.settings import implied_sampler

#: Parameters that mean the same here and there.
_SAME = tuple(
    name
    for name in GenerationRequest.model_fields
    if name in SamplingBody.model_fields and name not in ("max_tokens", "stop", "bad_words", "json_schema")
)


@dataclass(frozen=True)
class Asked:
    """A request that was checked: what to decode, and the empty answers to fill."""

    choices: tuple[Choice, ...]
    envelope: openai_reply.Envelope
    answers: tuple[openai_reply.Answer, ...]


def asked_chat(body: ChatBody, engine: Engine) -> Asked:
    """Check a chat and turn it into ids; raises ``RequestError``."""
    engine.check_count(body.n)
    settings = request_settings(body)
    prompt = engine.admit_chat([message.plain() for message in body.messages])
    return _asked(body, engine, [prompt], [""], settings)


def asked_completion(body: CompletionBody, engine: Engine) -> Asked:
    """Check a completion and turn it into ids; raises ``RequestError``."""
    prompts = body.prompts()
    engine.check_count(len(prompts) * body.n)
    settings = request_settings(body)
    ids = [engine.admit_text(prompt) for prompt in prompts]
    decode = engine.model.tokenizer.decode
    texts = [(prompt if isinstance(prompt, str) else decode(prompt)) if body.echo else "" for prompt in prompts]
    return _asked(body, engine, ids, texts, settings)


def request_settings(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return what ``body`` asks for by the names of :class:`GenerationRequest`; what it leaves out is left out."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    if values.get("top_p") == 1 and values.get("sampler") != "top-p":
        del values["top_p"]  # the API's own default, sent by many clients: "do not truncate", not a choice of sampler
    if "sampler" not in values and (sampler := implied_sampler(values)) is not None:
        values["sampler"] = sampler
    if body.budget is not None:
        values["max_tokens"] = body.budget
    if body.stop is not None:
        values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.bad_words is not None:
        values["bad_words"] = tuple(body.bad_words)
    if (schema := body.answer_schema()) is not None:
        values["json_schema"] = schema
    if body.alternatives is not None:
        values["logprobs"] = body.alternatives
    return values


async def whole_reply(stream: EventStream, asked: Asked) -> openai_reply.Json:
    """Return the complete answers.

    Raises:
        EdgeDuetError: the request broke off.
    """
    while (event := await stream.next()) is not None:
        if isinstance(event, Piece):
            asked.answers[event.choice].pieces.append(event.piece)
        elif isinstance(event, ChoiceDone):
            asked.answers[event.choice].finished = event.finished
    return asked.envelope.whole([answer.whole() for answer in asked.answers], openai_reply.usage(asked.answers))


async def reply_chunks(stream: EventStream, asked: Asked, include_usage: bool) -> AsyncIterator[openai_reply.Json]:
    """Yield the chunks of a stream as the answers come.

    Raises:
        EdgeDuetError: the request broke off.
    """
    opened: set[int] = set()
    while (event := await stream.next()) is not None:
        if not isinstance(event, Piece | ChoiceDone):
            continue
        answer = asked.answers[event.choice]
        if answer.index not in opened:
            opened.add(answer.index)
            yield asked.envelope.chunk([answer.first_chunk()])
        if isinstance(event, Piece):
            yield asked.envelope.chunk([answer.piece_chunk(event.piece)])
        else:
            answer.finished = event.finished
            yield asked.envelope.chunk([answer.last_chunk()])
    if include_usage:
        yield asked.envelope.chunk([], openai_reply.usage(asked.answers))


def _asked(
    body: ChatBody | CompletionBody,
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    echoes: Sequence[str],
    settings: Mapping[str, Any],
) -> Asked:
    envelope = openai_reply.Envelope(
        isinstance(body, ChatBody), engine.name, engine.fingerprint, engine.model.tokenizer
    )
    choices: list[Choice] = []
    answers: list[openai_reply.Answer] = []
    for prompt, echo in zip(prompts, echoes, strict=True):
        for number, choice in enumerate(engine.choices(prompt, settings, body.n)):
            choices.append(choice)
            answers.append(openai_reply.Answer(envelope, len(answers), echo, first_of_prompt=number == 0))
    return Asked(tuple(choices), envelope, tuple(answers))
