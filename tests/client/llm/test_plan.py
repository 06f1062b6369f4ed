"""Requests resolved against a model: what the model cannot honour, and the rules a sampler becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.plan import Vocabulary, make_plan
from edgeduet_client.llm.request import REQUIRED, SAMPLERS, GenerationRequest
from toy_sampling import EOS, PIECES, SIZE, dense, one, row_of, toy_gate, toy_plan, toy_vocabulary

LOGITS = row_of(np.linspace(0, 3, SIZE))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_of_the_request_becomes_a_rule_that_samples(sampler: str) -> None:
    plan = toy_plan(sampler=sampler, **REQUIRED.get(sampler, {}))
    distribution = one(plan, LOGITS)
    assert len(distribution.ids) >= 1
    np.testing.assert_allclose(distribution.probabilities.sum(), 1)


def test_samplers_really_differ() -> None:
    settings = REQUIRED | {
        "top-k": {"top_k": 5},
        "top-p": {"top_p": 0.6},
        "mirostat": {"mirostat_tau": 1.0, "mirostat_eta": 0.1},
    }
    sets = {
        sampler: one(toy_plan(sampler=sampler, **settings.get(sampler, {})), LOGITS).ids.tolist()
        for sampler in SAMPLERS
    }
    assert sets["greedy"] == [SIZE - 1]
    assert sets["temperature"] == list(range(SIZE))
    assert sets["top-k"] == list(range(SIZE - 5, SIZE))
    assert len(sets["p-less"]) < len(sets["top-p"]) < SIZE


def test_top_k_then_top_p_then_min_p_each_on_what_the_one_before_left() -> None:
    logits = row_of(np.log([0.4, 0.3, 0.2, 0.1] + [1e-9] * (SIZE - 4)))
    # Of the three largest, 0.4 + 0.3 are 0.78 of the mass: enough for 0.75, but not for the whole row's 0.75.
    chained = one(toy_plan(sampler="top-p", top_p=0.75, top_k=3), logits)
    alone = one(toy_plan(sampler="top-p", top_p=0.75), logits)
    assert chained.ids.tolist() == [0, 1]
    assert alone.ids.tolist() == [0, 1, 2]
    assert one(toy_plan(sampler="top-k", top_k=3, top_p=0.75, min_p=0.8), logits).ids.tolist() == [0]
    same = one(toy_plan(sampler="min-p", top_k=3, top_p=0.75, min_p=0.7), logits)
    np.testing.assert_array_equal(dense(same), dense(chained))


@pytest.mark.parametrize(
    ("settings", "field", "remedy"),
    [
        ({"logit_bias": {SIZE: 1.0}}, "logit_bias", f"0 to {SIZE - 1}"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias", "correct it"),
        ({"gate": "on"}, "gate", "gate train"),
    ],
)
def test_what_the_model_cannot_honour_is_refused(settings: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(RequestError, match=remedy) as caught:
        toy_plan(**settings)
    assert caught.value.field == field


def test_a_minimum_length_needs_an_end_of_text() -> None:
    with pytest.raises(RequestError, match="min_tokens has no effect"):
        make_plan(GenerationRequest(min_tokens=2), toy_vocabulary(eos_ids=()))


def test_the_gate_is_used_where_there_is_one_unless_it_is_turned_off() -> None:
    assert toy_plan(gated=True).needs_hidden
    assert not toy_plan().needs_hidden
    families = np.zeros(SIZE, np.uint8)
    assert not make_plan(
        GenerationRequest(gate="off"), toy_vocabulary(), families=families, gate=toy_gate()
    ).needs_hidden
    assert make_plan(GenerationRequest(gate="on"), toy_vocabulary(), families=families, gate=toy_gate()).needs_hidden


def test_a_gate_without_families_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="family"):
        make_plan(GenerationRequest(), toy_vocabulary(), gate=toy_gate())


def test_ids_that_stand_for_nothing_are_never_sampled() -> None:
    pieces = list(PIECES)
    pieces[5] = None
    vocabulary = toy_vocabulary(pieces)
    plan = make_plan(GenerationRequest(sampler="temperature"), vocabulary)
    distribution = one(plan, row_of([0.0] * 5 + [50.0] + [0.0] * (SIZE - 6)))
    assert distribution.ids.tolist() == [token for token in range(SIZE) if token != 5]


def test_a_tokenizer_wider_than_the_logits_is_cut_to_them() -> None:
    whole = toy_vocabulary()
    narrow = Vocabulary(SIZE - 2, SIZE, (EOS, SIZE - 1), whole.tokens, whole.encode)
    plan = make_plan(GenerationRequest(sampler="temperature", min_tokens=1), narrow)
    assert plan.eos_ids.tolist() == [EOS]
    assert one(plan, np.zeros(SIZE - 2, np.float32)).ids.tolist() == list(range(1, SIZE - 2))


def test_a_model_without_tokens_is_refused() -> None:
    whole = toy_vocabulary()
    with pytest.raises(ModelError, match="vocabulary of 0"):
        Vocabulary(8, 0, (), whole.tokens, whole.encode)
