"""Requests: what is refused, and that the refusal names the setting and the way out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.request import (
    CHAIN,
    MIN_TEMPERATURE,
    REQUIRED,
    SAMPLER_SETTINGS,
    SAMPLERS,
    GenerationRequest,
    request_with_defaults,
)


def refusal(**settings: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        GenerationRequest(**settings)
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_default_is_p_less_at_temperature_1_and_needs_nothing_else() -> None:
    request = GenerationRequest()
    assert (request.sampler, request.temperature, request.greedy) == ("p-less", 1.0, False)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_accepts_exactly_what_it_needs(sampler: str) -> None:
    needed = REQUIRED.get(sampler, {})
    assert GenerationRequest(sampler=sampler, **needed).sampler == sampler
    for missing in needed:
        error = refusal(sampler=sampler, **{name: value for name, value in needed.items() if name != missing})
        assert error.field == missing
        assert f"{needed[missing]:g}" in str(error), "the remedy names a usual value"


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("setting", SAMPLER_SETTINGS)
def test_a_setting_that_would_do_nothing_is_refused(sampler: str, setting: str) -> None:
    owner = next(owner for owner, settings in REQUIRED.items() if setting in settings)
    settings = REQUIRED.get(sampler, {}) | {setting: REQUIRED[owner][setting]}
    if owner == sampler or {owner, sampler} <= set(CHAIN):
        assert getattr(GenerationRequest(sampler=sampler, **settings), setting) is not None
        return
    error = refusal(sampler=sampler, **settings)
    assert error.field == setting
    assert owner in str(error) and sampler in str(error)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": MIN_TEMPERATURE / 2}, "temperature"),
        ({"temperature": 1e5}, "temperature"),
        ({"sampler": "greedy", "temperature": 0.7}, "temperature"),
        ({"sampler": "top-k", "top_k": 0}, "top_k"),
        ({"sampler": "top-p", "top_p": 0.0}, "top_p"),
        ({"sampler": "top-p", "top_p": 1.1}, "top_p"),
        ({"sampler": "min-p", "min_p": 0.0}, "min_p"),
        ({"sampler": "typical", "typical_p": 2}, "typical_p"),
        ({"sampler": "epsilon", "epsilon": 1.0}, "epsilon"),
        ({"sampler": "eta", "eta": 0.0}, "eta"),
        ({"sampler": "mirostat", "mirostat_tau": 0.0, "mirostat_eta": 0.1}, "mirostat_tau"),
        ({"sampler": "top-n-sigma", "top_n_sigma": -1}, "top_n_sigma"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": ["x" * 1025]}, "stop"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"context_policy": "drop"}, "context_policy"),
        ({"json_schema": {"type": "object"}, "regex": "a+"}, "regex"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar"),
        ({"regex": ""}, "regex"),
        ({"gate": "maybe"}, "gate"),
        ({"gate": "off", "gate_rule": "union"}, "gate_rule"),
        ({"gate": "off", "gate_confidence": "untempered"}, "gate_confidence"),
        ({"tempreature": 1.0}, "tempreature"),
    ],
)
def test_out_of_range_and_contradictory_settings_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    error = refusal(**settings)
    assert error.field == field
    assert field in str(error)


def test_an_unknown_setting_comes_with_the_nearest_known_one() -> None:
    assert "did you mean 'temperature'" in str(refusal(tempreature=1.0))


def test_what_is_no_set_of_settings_is_refused() -> None:
    with pytest.raises(RequestError, match="named settings"):
        GenerationRequest.model_validate("p-less")


def test_a_long_value_does_not_flood_the_message() -> None:
    assert len(str(refusal(seed="9" * 100_000))) < 300


@pytest.mark.parametrize(
    "settings", [{"sampler": "greedy"}, {"temperature": 0}, {"sampler": "greedy", "temperature": 0}]
)
def test_greedy_and_temperature_0_are_the_same_wish(settings: dict[str, Any]) -> None:
    assert GenerationRequest(**settings, seed=3).greedy


def test_temperature_0_may_stand_beside_any_sampler() -> None:
    assert GenerationRequest(sampler="top-p", top_p=0.9, temperature=0).greedy


def test_a_request_inside_another_model_raises_the_same_error() -> None:
    class Envelope(BaseModel):
        request: GenerationRequest

    with pytest.raises(RequestError, match="top_k has no effect"):
        Envelope(request={"top_k": 4})  # type: ignore[arg-type]


def test_keys_of_logit_bias_may_be_texts_as_json_writes_them() -> None:
    assert GenerationRequest.model_validate({"logit_bias": {"17": -100}}).logit_bias == {17: -100.0}


@given(st.sampled_from([name for name in SAMPLERS if name != "top-p"]))
def test_a_callers_sampler_drops_the_defaults_settings_of_another(sampler: str) -> None:
    defaults = {"sampler": "top-p", "top_p": 0.8, "top_k": 20, "temperature": 0.7, "stop": ["END"]}
    request = request_with_defaults({"sampler": sampler, **REQUIRED.get(sampler, {})}, defaults)
    assert request.sampler == sampler
    assert request.top_p is None
    assert request.stop == ("END",)
    assert request.temperature == (1.0 if sampler == "greedy" else 0.7)


def test_defaults_hold_where_the_caller_says_nothing() -> None:
    defaults = {"sampler": "top-p", "top_p": 0.8, "temperature": 0.7, "gate_rule": "union", "regex": "a"}
    request = request_with_defaults({"temperature": 1.5}, defaults)
    assert (request.sampler, request.top_p, request.temperature) == ("top-p", 0.8, 1.5)
    assert request_with_defaults({"gate": "off"}, defaults).gate == "off"
    assert request_with_defaults({"grammar": 'start: "a"'}, defaults).regex is None
