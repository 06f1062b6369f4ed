"""Constraints: what they allow, that places are values, and that bad ones are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.grammar import GrammarState
from edgeduet_client.llm.plan import Vocabulary
from edgeduet_client.llm.token_bytes import read_token_bytes
from tiny_llm import byte_fallback_tokenizer, byte_level_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "cats": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "cats"],
    "additionalProperties": False,
}
KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level_tokenizer,
    "byte-fallback": lambda: byte_fallback_tokenizer(strips_leading_space=False),
}


def vocabulary_of(tokenizer: Any, folder: Path, eos: tuple[int, ...] = (1,)) -> Vocabulary:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    size = tokenizer.get_vocab_size()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    return Vocabulary(size + 13, size, eos, read_token_bytes(path), encode)


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    eos = (1,) if request.param == "byte-level" else (2,)
    return vocabulary_of(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer"), eos)


def start(kind: str, constraint: Any, vocabulary: Vocabulary) -> GrammarState:
    return GrammarState.start(kind, constraint, vocabulary.grammar_tokenizer)


def letter_a(state: GrammarState, vocabulary: Vocabulary) -> int:
    """The token "a" (of two with the same bytes, llguidance allows the one that is no single-byte fallback)."""
    return next(int(token) for token in np.flatnonzero(state.allowed()) if vocabulary.tokens.pieces[token] == b"a")


def random_answer(state: GrammarState, vocabulary: Vocabulary, rng: np.random.Generator) -> bytes:
    """Follow allowed tokens at random until the answer ends."""
    answer = b""
    for _ in range(400):
        allowed = np.flatnonzero(state.allowed()[: vocabulary.used])
        token = int(rng.choice(allowed))
        if token in vocabulary.eos_ids:
            return answer
        answer += vocabulary.tokens.pieces[token] or b""
        state = state.after(token)
    raise AssertionError(f"no end after 400 tokens: {answer!r}")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_under_a_schema_is_json_of_that_schema(vocabulary: Vocabulary, seed: int) -> None:
    answer = random_answer(start("json_schema", SCHEMA, vocabulary), vocabulary, np.random.default_rng(seed))
    value = json.loads(answer)
    assert set(value) == {"name", "cats"}
    assert len(value["name"]) <= 8 and 0 <= value["cats"] <= 99


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_under_a_regex_matches_it_whole(vocabulary: Vocabulary, seed: int) -> None:
    pattern = r"(the|cat) sat[0-9]{1,3}é?"
    answer = random_answer(start("regex", pattern, vocabulary), vocabulary, np.random.default_rng(seed))
    assert re.fullmatch(pattern, answer.decode())


def test_a_lark_grammar_allows_its_sentences_only(vocabulary: Vocabulary) -> None:
    state = start("grammar", 'start: "the " ("cat" | "dog")', vocabulary)
    answers = {random_answer(state, vocabulary, np.random.default_rng(seed)) for seed in range(30)}
    assert answers == {b"the cat", b"the dog"}


def may_end(state: GrammarState) -> bool:
    """What the library says of the place, beside the mask that we read."""
    return bool(state._matcher.is_accepting())


def test_the_answer_ends_exactly_where_it_may(vocabulary: Vocabulary) -> None:
    (eos,) = vocabulary.eos_ids
    state = start("regex", "a{1,2}", vocabulary)
    assert not state.allowed()[eos] and not may_end(state)
    letter = letter_a(state, vocabulary)
    state = state.after(letter)
    assert state.allowed()[eos] and may_end(state)
    state = state.after(letter)
    assert np.flatnonzero(state.allowed()[: vocabulary.used]).tolist() == [eos]
    assert may_end(state.after(eos))


def test_a_place_never_changes_whatever_was_tried_from_it(vocabulary: Vocabulary) -> None:
    state = start("json_schema", SCHEMA, vocabulary)
    for _ in range(6):
        allowed = state.allowed().copy()
        fresh = [int(token) for token in np.flatnonzero(allowed[: vocabulary.used])[:20]]
        for token in fresh:
            state.after(token).after  # noqa: B018 - a branch that is thrown away
        forbidden = int(np.flatnonzero(~allowed[: vocabulary.used])[0])
        with pytest.raises(ValueError, match="does not follow"):
            state.after(forbidden)
        np.testing.assert_array_equal(state.allowed(), allowed)
        assert all(state.after(token) is not None for token in fresh)
        state = state.after(fresh[0])


@pytest.mark.parametrize(
    ("kind", "constraint"),
    [
        ("regex", "(ab"),
        ("grammar", "start: foo"),
        ("grammar", "no grammar at all {"),
        ("json_schema", {"type": "strin"}),
        ("json_schema", {"$ref": "#/nowhere"}),
        ("json_schema", {"enum": [{1, 2}]}),
        ("json_schema", {"const": float("nan")}),
    ],
)
def test_a_constraint_that_cannot_be_used_is_refused_by_name_in_one_line(
    vocabulary: Vocabulary, kind: str, constraint: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        start(kind, constraint, vocabulary)
    assert caught.value.field == kind
    assert str(caught.value).startswith(kind)
    assert "\n" not in str(caught.value)


def test_a_constraint_that_grows_too_complex_on_the_way_is_refused_and_not_an_internal_error(
    vocabulary: Vocabulary,
) -> None:
    state = start("regex", "(a?){5000}a{5000}", vocabulary)
    letter = letter_a(state, vocabulary)
    with pytest.raises(RequestError, match="regex cannot be followed") as caught:
        for _ in range(50):
            state = state.after(letter)
    assert caught.value.field == "regex"


def test_a_model_without_end_of_text_cannot_have_a_grammar(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(byte_level_tokenizer(), tmp_path, eos=())
    with pytest.raises(ModelError, match="end-of-text"):
        start("regex", "a", vocabulary)


def test_every_end_of_text_token_may_end_the_answer(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(byte_level_tokenizer(), tmp_path, eos=(0, 1))
    state = start("regex", "a", vocabulary)
    state = state.after(letter_a(state, vocabulary))
    assert np.flatnonzero(state.allowed()[: vocabulary.used]).tolist() == [0, 1]
