"""A language model of its own as drafter: cache in step with the text, evidence, whose tokens are whose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.model_drafter import FACTORY, LanguageModelDrafter
from edgeduet_client.llm.speculation.text import CommittedText
from tiny_llm import byte_fallback_tokenizer, write_model

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "target", seed=0)
    write_model(root / "small", seed=1, name="small")
    return root


@pytest.fixture(scope="module")
def target(models: Path) -> LocalModel:
    return LocalModel.open(models / "target", threads=1)


def opened(target: LocalModel, **options: object) -> LanguageModelDrafter:
    return FACTORY.open("d", {"model": "small", "threshold": 0.0, **options}, target)


def commit(text: CommittedText, tokens: list[int]) -> None:
    text.extend(tokens, [Distribution(np.array([token]), CERTAIN) for token in tokens])


def greedy_after(models: Path, tokens: list[int], count: int) -> list[int]:
    """What the drafter's model writes greedily, computed from scratch for every token."""
    session = LocalModel.open(models / "small", threads=1).session
    written: list[int] = []
    for _ in range(count):
        row = session.prefill([*tokens, *written], session.new_cache()).logits[0]
        written.append(int(row[:300].argmax()))
    return written


def test_it_proposes_what_its_model_would_write(models: Path, target: LocalModel) -> None:
    drafter, text = opened(target), CommittedText([5, 6, 7, 8])
    drafter.start(text)
    commit(text, [9])
    draft = drafter.draft(text, 4, RNG)
    expected = greedy_after(models, text.tokens, 4)
    if target.manifest.eos_ids[0] in expected:
        expected = expected[: expected.index(target.manifest.eos_ids[0]) + 1]
    assert list(draft.tokens) == expected
    assert draft.laws == (None,) * len(expected)


rounds = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(3, 290), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(played=rounds)
def test_its_cache_follows_the_text_through_any_acceptance(
    models: Path, target: LocalModel, played: list[tuple[int, int, int, bool]]
) -> None:
    drafter, text = opened(target), CommittedText([5, 6, 7, 8])
    drafter.start(text)
    commit(text, [9])
    for length, accepted, correction, looks in played:
        draft = drafter.draft(text, length, RNG) if length else Draft()
        commit(text, [*draft.tokens[:accepted], correction])
        if looks:
            drafter.redraft(text, [len(text) - 1], 1)
    fresh = opened(target)
    fresh.start(text)
    assert drafter.draft(text, 3, RNG).tokens == fresh.draft(text, 3, RNG).tokens


def test_evidence_is_the_draft_it_made_there_up_to_its_first_wrong_token(target: LocalModel) -> None:
    drafter, text = opened(target), CommittedText([5, 6, 7, 8])
    drafter.start(text)
    commit(text, [9])
    made = {}
    for turn in range(12):
        made[len(text)] = drafter.draft(text, 4, RNG).tokens
        commit(text, [*made[len(text)][: turn % 3], 20 + turn])
    commit(text, [30, 31, 32, 33])
    late = opened(target)  # one that was never in use says the same
    late.start(text)
    for asked in (drafter, late):
        for redraft in asked.redraft(text, sorted(made), 4):
            proposed, truth = made[redraft.start], text.tokens[redraft.start :]
            right = next((k for k, pair in enumerate(zip(proposed, truth, strict=False)) if pair[0] != pair[1]), 3)
            assert redraft.tokens is not None
            assert redraft.tokens[: right + 1] == proposed[: right + 1]


def test_drawn_drafts_say_what_they_were_drawn_from(target: LocalModel) -> None:
    drafter, text = opened(target, temperature=1.5), CommittedText([5, 6, 7, 8])
    drafter.start(text)
    commit(text, [9])
    start = len(text)
    drafts = [drafter.draft(text, 3, np.random.default_rng(seed)) for seed in range(20)]
    assert len({draft.tokens for draft in drafts}) > 1
    for draft in drafts:
        for token, law in zip(draft.tokens, draft.laws, strict=True):
            assert law is not None and law.probability(token) > 0
            assert law.probabilities.sum() == pytest.approx(1)
    draft = max(drafts, key=lambda draft: len(draft.tokens))
    commit(text, [*draft.tokens, 9])
    (redraft,) = drafter.redraft(text, [start], len(draft.tokens))
    assert redraft.laws is not None
    for mine, law in zip(redraft.laws, draft.laws, strict=True):
        assert law is not None
        np.testing.assert_array_equal(mine.ids, law.ids)
        np.testing.assert_allclose(mine.probabilities, law.probabilities, rtol=1e-4)


def test_an_unsure_model_proposes_nothing(target: LocalModel) -> None:
    drafter, text = opened(target, threshold=0.999), CommittedText([5, 6, 7, 8])
    drafter.start(text)
    commit(text, [9])
    assert drafter.draft(text, 4, RNG) == Draft()


def test_a_text_beyond_its_context_gets_no_draft_and_no_evidence(models: Path, target: LocalModel) -> None:
    drafter, text = opened(target), CommittedText([5] * 511)
    drafter.start(text)
    commit(text, [9])
    assert len(drafter.draft(text, 8, RNG).tokens) == 1  # one more place: the context holds 512
    commit(text, [9, 9])
    assert drafter.draft(text, 8, RNG) == Draft()
    assert drafter.redraft(text, [513], 1)[0].tokens == ()


def test_a_model_with_another_vocabulary_is_refused_in_one_line(models: Path, target: LocalModel) -> None:
    write_model(
        models / "other",
        tokenizer=byte_fallback_tokenizer(strips_leading_space=False),
        chat_template=None,
        name="other",
    )
    with pytest.raises(ModelError, match="another vocabulary") as refusal:
        FACTORY.open("d", {"model": "other"}, target)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("options", [{}, {"model": "small", "thresold": 0.1}, {"model": "small", "threshold": 2}])
def test_wrong_options_are_refused(target: LocalModel, options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="drafter d"):
        FACTORY.open("d", options, target)
