"""Drafting by lookup: what is proposed, from where, and what a past place would have got."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.ngram import FACTORY, FixedIndex, GrowingIndex, NgramDrafter
from edgeduet_client.llm.speculation.text import CommittedText

RNG = np.random.default_rng(0)
TEXTS = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def commit(text: CommittedText, *tokens: int) -> None:
    text.extend(tokens, [Distribution(np.array([token]), CERTAIN) for token in tokens])


def proposal(drafter: NgramDrafter, prompt: list[int], length: int = 8) -> tuple[int, ...]:
    text = CommittedText(prompt)
    drafter.start(text)
    return drafter.draft(text, length, RNG).tokens


def searched(tokens: list[int], length: int, least: int, most: int) -> tuple[int, ...]:
    """The rule, by searching the whole text again for every token."""
    tail, proposed = list(tokens), []
    while len(proposed) < length:
        for size in range(most, least - 1, -1):
            places = [
                end
                for end in range(size, len(tokens))
                if len(tail) >= size and tokens[end - size : end] == tail[-size:]
            ]
            if places:
                found = tokens[places[-1] : places[-1] + length - len(proposed)]
                break
        else:
            break
        proposed += found
        tail += found
    return tuple(proposed)


@given(tokens=TEXTS, length=st.integers(1, 10), least=st.integers(1, 3), more=st.integers(0, 2))
def test_the_index_finds_what_a_search_of_the_whole_text_finds(
    tokens: list[int], length: int, least: int, more: int
) -> None:
    drafter = NgramDrafter(least=least, most=least + more)
    assert proposal(drafter, tokens, length) == searched(tokens, length, least, least + more)


@given(tokens=st.lists(st.integers(0, 3), min_size=3, max_size=40), cut=st.integers(1, 39), depth=st.integers(1, 6))
def test_a_past_place_gets_what_it_got_when_it_was_the_end(tokens: list[int], cut: int, depth: int) -> None:
    cut = min(cut, len(tokens) - 1)
    then = proposal(NgramDrafter(), tokens[:cut], depth)
    text = CommittedText(tokens[:1])
    now = NgramDrafter()
    now.start(text)
    commit(text, *tokens[1:])
    (redraft,) = now.redraft(text, [cut], depth)
    assert redraft.start == cut
    assert redraft.tokens == then


def test_the_most_recent_occurrence_is_copied() -> None:
    assert proposal(NgramDrafter(), [1, 2, 7, 5, 1, 2, 8, 5, 1, 2], 1) == (8,)


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    assert proposal(NgramDrafter(), [3, 1, 2, 7, 4, 1, 2, 8, 3, 1, 2], 1) == (7,)


def test_a_continuation_that_hits_the_end_of_the_text_goes_on_behind_itself() -> None:
    assert proposal(NgramDrafter(), [1, 2, 3, 1, 2], 8) == (3, 1, 2, 3, 1, 2, 3, 1)


def test_a_text_without_repetition_gets_no_draft() -> None:
    assert proposal(NgramDrafter(), [1, 2, 3, 4, 5]) == ()
    assert proposal(NgramDrafter(), [1]) == ()


def test_a_proposal_ends_with_an_end_of_text() -> None:
    assert proposal(NgramDrafter(eos_ids=[9]), [1, 2, 9, 4, 1, 2]) == (9,)


def test_a_draft_is_certain() -> None:
    text = CommittedText([1, 2, 3, 1, 2])
    drafter = NgramDrafter()
    drafter.start(text)
    assert drafter.draft(text, 2, RNG).laws == (None, None)


def test_drafted_tokens_are_never_indexed() -> None:
    text = CommittedText([1, 2, 3, 1, 2])
    drafter = NgramDrafter()
    drafter.start(text)
    drafter.draft(text, 8, RNG)
    commit(text, 4)
    commit(text, 1, 2)
    # Had the rejected draft been indexed, "1 2" would be followed by 3 most recently.
    assert drafter.draft(text, 1, RNG).tokens == (4,)


def test_an_index_takes_one_entry_per_token_and_size() -> None:
    index = GrowingIndex(2, 4)
    index.extend(range(1000))
    entries = sum(len(places) for places in index._followed.values())
    assert entries == (1000 - 2) + (1000 - 3) + (1000 - 4)


def test_a_new_request_knows_nothing_of_the_last_one() -> None:
    drafter = NgramDrafter()
    assert proposal(drafter, [1, 2, 3, 1, 2]) != ()
    assert proposal(drafter, [5, 1, 2]) == ()


def test_earlier_answers_are_looked_into_where_asked_for() -> None:
    drafter = NgramDrafter(remember=100)
    text = CommittedText([8, 9])
    drafter.start(text)
    commit(text, 1, 2, 3, 4, 5)
    drafter.draft(text, 1, RNG)
    assert proposal(drafter, [6, 1, 2], 2) == (3, 4)
    assert proposal(drafter, [6, 8, 9], 2) == ()  # prompts are not kept


def test_what_is_remembered_is_bounded() -> None:
    drafter = NgramDrafter(remember=10)
    for first in range(0, 1000, 10):
        text = CommittedText([0])
        drafter.start(text)
        commit(text, *range(first, first + 10))
        drafter.draft(text, 1, RNG)
    assert len(drafter._earlier.tokens) <= 20


def test_a_corpus_is_looked_into_last() -> None:
    drafter = NgramDrafter(corpus=[1, 2, 7, 7, 7, 3, 4, 5])
    assert proposal(drafter, [3, 4], 1) == (5,)
    assert proposal(drafter, [1, 2, 6, 1, 2], 1) == (6,)


@given(tokens=st.lists(st.integers(0, 5), min_size=2, max_size=80), size=st.integers(1, 4))
def test_the_fixed_index_finds_the_last_place_of_every_gram(tokens: list[int], size: int) -> None:
    index = FixedIndex(np.array(tokens, np.int32), size, size)
    for end in range(size, len(tokens)):
        gram = tuple(tokens[end - size : end])
        last = max(e for e in range(size, len(tokens)) if tuple(tokens[e - size : e]) == gram)
        assert index.find(gram) == last
    assert index.find((77,) * size) is None


def model(text_ids: list[int]) -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(eos_ids=[9]), tokenizer=SimpleNamespace(encode=lambda _: text_ids))


def test_the_factory_reads_a_corpus_of_the_devices_own(tmp_path: Path) -> None:
    corpus = tmp_path / "notes.txt"
    corpus.write_text("whatever", "utf-8")
    drafter = FACTORY.open("mine", {"corpus": str(corpus), "longest": 3}, model([1, 2, 3, 4, 5, 6]))
    assert drafter.name == "mine"
    assert drafter.longest == 3
    assert proposal(drafter, [1, 2], 3) == (3, 4, 5)
    assert drafter.memory_bytes() > 0


@pytest.mark.parametrize(
    "options", [{"longst": 3}, {"least": 4, "most": 2}, {"corpus": "/nowhere/at/all"}, {"longest": 0}]
)
def test_the_factory_refuses_options_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="drafter mine: ") as refused:
        FACTORY.open("mine", options, model([]))
    assert "\n" not in str(refused.value)
