"""A chat with the local model: its messages, what to forget when they no longer fit, and the cache between turns.

The whole conversation is rendered anew for each turn, as the model's template wants it; what the cache holds of it
already is not computed again (:func:`edgeduet_client.llm.generate.reuse_prefix`).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Literal

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from edgeduet_client.llm.generate import Finished, TextPiece
    from edgeduet_client.llm.local_model import LocalModel
    from edgeduet_client.llm.request import GenerationRequest

TrimPolicy = Literal["error", "drop-oldest"]


def fit_messages(
    tokenizer: Tokenizer, messages: Sequence[Message], *, room: int, policy: TrimPolicy
) -> tuple[list[int], int]:
    """Return the ids of a chat that fits into ``room`` tokens, and how many of its messages were left out.

    ``drop-oldest`` leaves out the oldest turns, whole ones: a user's message and what followed it. System messages at
    the beginning and everything from the last user message on stay.

    Raises:
        RequestError: it does not fit, not even trimmed; or the model's template refuses the messages.
    """
    ids = tokenizer.encode_chat(messages)
    if len(ids) <= room:
        return ids, 0
    whole = len(ids)
    opening = next((place for place, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    turns = [place for place in range(opening + 1, len(messages)) if messages[place].get("role") == "user"]
    # The fewest turns to drop, by halving: the more are dropped, the shorter is the prompt.
    low, high = 0, len(turns) if policy == "drop-oldest" else 0
    best: tuple[list[int], int] | None = None
    while low < high:
        middle = (low + high) // 2
        ids = tokenizer.encode_chat([*messages[:opening], *messages[turns[middle] :]])
        if len(ids) <= room:
            best, high = (ids, turns[middle] - opening), middle
        else:
            low = middle + 1
    if best is not None:
        return best
    if policy == "error":
        advice = "start a new chat, or let the oldest turns be dropped"
    else:
        advice = f"the last turn alone has {len(ids)} tokens; shorten it, or lower max_tokens"
    raise RequestError(
        f"the chat has {whole} tokens and the model's context has room for {room} beside the answer; {advice}",
        field="messages",
    )


class Conversation:
    """A chat of one person with one model; not to be used by two threads at once.

    Args:
        model: an instruction-tuned model.
        system: system prompt.
        trimming: what to do when the turns no longer fit into the context.

    Attributes:
        messages: what was said, oldest first, never trimmed.
        left_out: how many messages the last turn had to leave out.

    Raises:
        RequestError: the model has no chat template.
    """

    def __init__(self, model: LocalModel, *, system: str | None = None, trimming: TrimPolicy = "drop-oldest") -> None:
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.left_out = 0
        self._model = model
        self._trimming = trimming
        self._cache = model.new_cache()
        model.tokenizer.require_template()

    def reply(
        self, text: str, request: GenerationRequest, *, cancel: threading.Event | None = None
    ) -> Generator[TextPiece | Finished, None, None]:
        """Say ``text``; yield the answer as it comes.

        The turn joins the conversation, with as much of the answer as was generated, when the answer ends or is
        abandoned; it does not when it is refused.

        Raises:
            RequestError: the request cannot be honoured, or the conversation no longer fits (see ``trimming``).
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        limit = self._model.session.cache_shape.limit
        room = limit - (request.max_tokens or max(limit // 4, 1))
        ids, self.left_out = fit_messages(self._model.tokenizer, asked, room=room, policy=self._trimming)
        return self._record(asked, self._model.generate(ids, request, cache=self._cache, cancel=cancel))

    def _record(
        self, asked: list[dict[str, str]], events: Generator[TextPiece | Finished, None, None]
    ) -> Generator[TextPiece | Finished, None, None]:
        said: list[str] = []
        try:
            for event in events:
                said.append(getattr(event, "text", ""))
                yield event
        finally:
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
