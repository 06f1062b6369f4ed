"""What to do about a prompt and an answer that together do not fit the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from edgeduet_client.llm.errors import RequestError

ContextPolicy = Literal["error", "truncate-left"]


def fit_prompt(
    prompt: Sequence[int], *, limit: int, max_tokens: int | None, policy: ContextPolicy, bos_id: int | None
) -> tuple[list[int], int]:
    """Return the prompt to read and the most tokens to draw, which together fit into ``limit`` tokens.

    ``error``: a prompt that leaves no room for ``max_tokens`` (without it: for one token) is refused.
    ``truncate-left``: its oldest tokens go, until ``max_tokens`` fit (without it: a quarter of the context). A
    beginning-of-text token at its start stays. A system message does not: whole turns of a chat are dropped, and
    the system message kept, by :func:`edgeduet_client.llm.chat.fit_messages`.

    Raises:
        RequestError: names the numbers and the remedy.
    """
    length = len(prompt)
    if policy == "error":
        if length >= limit:
            raise RequestError(
                f"the prompt has {length} tokens and the model's context holds {limit}, the answer included; "
                "shorten the prompt or set context_policy to truncate-left",
                field="prompt",
            )
        if max_tokens is not None and length + max_tokens > limit:
            raise RequestError(
                f"a prompt of {length} tokens and max_tokens {max_tokens} do not fit the context of {limit} tokens; "
                f"set max_tokens to at most {limit - length}, shorten the prompt, "
                "or set context_policy to truncate-left",
                field="max_tokens",
            )
        return list(prompt), max_tokens or limit - length
    kept = list(prompt[:1]) if bos_id is not None and prompt[0] == bos_id else []
    most = limit - len(kept) - 1
    if max_tokens is not None and max_tokens > most:
        raise RequestError(
            f"max_tokens {max_tokens} leaves no room for a prompt in the model's context of {limit} tokens; "
            f"set it to at most {most}",
            field="max_tokens",
        )
    room = limit - (max_tokens or max(limit // 4, 1))
    if length > room:
        tail = room - len(kept)
        prompt = kept + list(prompt[length - tail :])
    return list(prompt), max_tokens or limit - len(prompt)
