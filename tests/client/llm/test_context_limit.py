"""Prompt and answer fit the context, or the refusal names the numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.context_limit import fit_prompt
from edgeduet_client.llm.errors import RequestError

PROMPTS = st.lists(st.integers(0, 5), min_size=1, max_size=60)
BUDGETS = st.none() | st.integers(1, 60)


@given(PROMPTS, BUDGETS, st.integers(2, 50))
def test_error_policy_reads_the_whole_prompt_or_refuses(prompt: list[int], budget: int | None, limit: int) -> None:
    if len(prompt) + (budget or 1) <= limit:
        read, room = fit_prompt(prompt, limit=limit, max_tokens=budget, policy="error", bos_id=None)
        assert read == prompt
        assert room == (limit - len(prompt) if budget is None else budget)
    else:
        with pytest.raises(RequestError, match=rf"\b{len(prompt)} tokens.* {limit}\b"):
            fit_prompt(prompt, limit=limit, max_tokens=budget, policy="error", bos_id=None)


@given(PROMPTS, BUDGETS, st.integers(3, 50), st.booleans())
def test_truncate_left_keeps_the_newest_tokens_and_bos(
    prompt: list[int], budget: int | None, limit: int, has_bos: bool
) -> None:
    bos = 9
    prompt = [bos, *prompt] if has_bos else prompt
    most = limit - 1 - has_bos
    if budget is not None and budget > most:
        with pytest.raises(RequestError, match=f"set it to at most {most}"):
            fit_prompt(prompt, limit=limit, max_tokens=budget, policy="truncate-left", bos_id=bos)
        return
    read, room = fit_prompt(prompt, limit=limit, max_tokens=budget, policy="truncate-left", bos_id=bos)
    assert len(read) + room <= limit
    assert room == budget or budget is None
    assert (read[0] == bos) == has_bos
    tail = read[has_bos:]
    assert tail == prompt[len(prompt) - len(tail) :]
    if len(prompt) + (budget or max(limit // 4, 1)) <= limit:
        assert read == prompt
    else:
        assert len(read) == limit - (budget or max(limit // 4, 1))


def test_the_refusals_name_the_remedy() -> None:
    with pytest.raises(RequestError, match="set max_tokens to at most 2, shorten the prompt") as caught:
        fit_prompt([1] * 8, limit=10, max_tokens=3, policy="error", bos_id=None)
    assert caught.value.field == "max_tokens"
    with pytest.raises(RequestError, match="set context_policy to truncate-left") as caught:
        fit_prompt([1] * 10, limit=10, max_tokens=None, policy="error", bos_id=None)
    assert caught.value.field == "prompt"
