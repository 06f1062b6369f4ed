"""Answers as OpenAI's API spells them: whole, or in chunks of a stream.

What OpenAI has no word for stands under ``edgeduet``: why an answer ended (``timeout`` is ``length`` to OpenAI's
clients), how much of the prompt was computed before, how often the gate intervened, the seconds it took, and what
speculation did; the usage has a summary of that under ``edgeduet_speculation``.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeduet_client.llm.serving.refusals import Refusal, verdict
from edgeduet_shared.errors import EdgeDuetError

if TYPE_CHECKING:
    from edgeduet_client.llm.generate import Finished, TextPiece
    from edgeduet_client.llm.speculation.stats import SpeculationStats
    from edgeduet_client.llm.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """What all parts of one reply carry.

    Attributes:
        chat: whether this is a chat, or a completion.
        model: name of the model.
        fingerprint: stays as long as the model does.
        tokenizer: shows tokens in log-probabilities.
    """

    chat: bool
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Json], usage: Json) -> Json:
        """Return a complete answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": list(choices), "usage": usage}

    def chunk(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        """Return one chunk of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": list(choices), **({"usage": usage} if usage else {})}

    def _head(self, kind: str) -> Json:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass
class Answer:
    """One answer as it comes together.

    Attributes:
        index: its number.
        echo: what a completion repeats before it.
        first_of_prompt: whether it is the first answer to its prompt, which then counts in the usage.
    """

    envelope: Envelope
    index: int
    echo: str = ""
    first_of_prompt: bool = True
    pieces: list[TextPiece] = field(default_factory=list)
    finished: Finished | None = None
    _offset: int = 0

    def first_chunk(self) -> Json:
        """Return the chunk that opens the answer in a stream."""
        if self.envelope.chat:
            return self._choice({"delta": {"role": "assistant", "content": ""}}, None)
        return self._choice({"text": self.echo}, None)

    def piece_chunk(self, piece: TextPiece) -> Json:
        """Return the chunk of one piece."""
        body = {"delta": {"content": piece.text}} if self.envelope.chat else {"text": piece.text}
        return self._choice(body, self._logprobs([piece]))

    def last_chunk(self) -> Json:
        """Return the chunk that closes the answer in a stream."""
        return self._choice({"delta": {}} if self.envelope.chat else {"text": ""}, None)

    def whole(self) -> Json:
        """Return the answer in one."""
        text = "".join(piece.text for piece in self.pieces)
        if self.envelope.chat:
            body: Json = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            body = {"text": self.echo + text}
        return self._choice(body, self._logprobs(self.pieces))

    def _choice(self, body: Json, logprobs: Json | None) -> Json:
        choice = {"index": self.index, **body, "logprobs": logprobs, "finish_reason": None}
        if self.finished is not None:
            choice["finish_reason"] = "stop" if self.finished.reason == "stop" else "length"
            choice["edgeduet"] = _details(self.finished)
        return choice

    def _logprobs(self, pieces: Sequence[TextPiece]) -> Json | None:
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        if not entries:
            return None
        tokenizer = self.envelope.tokenizer
        if self.envelope.chat:
            return {
                "content": [
                    {
                        **_token(tokenizer, entry.token, entry.logprob),
                        "top_logprobs": [_token(tokenizer, token, logprob) for token, logprob in entry.top],
                    }
                    for entry in entries
                ],
                "refusal": None,
            }
        names = [tokenizer.token_name(entry.token) for entry in entries]
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(tokenizer.token_bytes(entry.token).decode("utf-8", "replace"))
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {tokenizer.token_name(token): logprob for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }


def usage(answers: Sequence[Answer]) -> Json:
    """Return the tokens of all answers; a prompt counts once, however many answers it has (``n``)."""
    done = [answer.finished for answer in answers if answer.finished is not None]
    asked = [answer.finished for answer in answers if answer.finished is not None and answer.first_of_prompt]
    prompt = sum(finished.prompt_tokens for finished in asked)
    cached = sum(finished.cached_tokens for finished in asked)
    completion = sum(finished.completion_tokens for finished in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **_predicted([finished.speculation for finished in done if finished.speculation is not None]),
    }


def _predicted(answers: Sequence[SpeculationStats]) -> Json:
    """Return what drafting did over all answers, as an extension of the usage."""
    if not answers:
        return {}
    counts = {
        name: sum(getattr(answer, name) for answer in answers)
        for name in ("rounds", "emitted", "proposed", "evaluated", "accepted", "discarded", "relaxed", "switches")
    }
    return {
        "edgeduet_speculation": {
            "mode": answers[0].mode,
            "verify": answers[0].verify,
            "lossy": any(answer.lossy for answer in answers),
            "row_invariant": answers[0].invariant,
            **counts,
            "mean_accepted_tokens": round(counts["emitted"] / counts["rounds"], 4) if counts["rounds"] else None,
            "acceptance": round(counts["accepted"] / counts["evaluated"], 4) if counts["evaluated"] else None,
        },
    }


def embeddings(model: str, vectors: Sequence[np.ndarray], tokens: int, encoding: str) -> Json:
    """Return the vectors, as lists of numbers or as base64 of little-endian float32."""
    spelt = [vector.tolist() if encoding == "float" else _base64(vector) for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": numbers} for index, numbers in enumerate(spelt)]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def error_body(error: EdgeDuetError) -> Json:
    """Return OpenAI's error object."""
    how = verdict(error)
    return {
        "error": {"message": str(error), "type": how.kind, "param": getattr(error, "field", None), "code": how.code}
    }


def error_headers(error: EdgeDuetError) -> dict[str, str]:
    """Return the headers that go with a refusal."""
    headers = {}
    if isinstance(error, Refusal) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if verdict(error).http == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def server_sent(value: Json) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> Json:
    raw = tokenizer.token_bytes(token)
    return {"token": tokenizer.token_name(token), "logprob": logprob, "bytes": list(raw) if raw else None}


def _details(finished: Finished) -> Json:
    return {
        "finish": finished.reason,
        "cached_tokens": finished.cached_tokens,
        "gate_interventions": finished.gate_interventions,
        "seconds_prefill": round(finished.seconds_prefill, 6),
        "seconds_decode": round(finished.seconds_decode, 6),
        **({"speculation": finished.speculation.as_json()} if finished.speculation is not None else {}),
    }


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
