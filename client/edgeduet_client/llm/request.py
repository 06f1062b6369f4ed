"""What a caller may ask of one generation, with every fault refused by name.

Settings that would do nothing are refused like those that are out of range: ``top_k`` beside the sampler
``p-less`` is a misunderstanding, and silence about it is how options end up doing nothing for years.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from edgeduet_client.llm.errors import RequestError
from edgeduet_shared.errors import nearest

Sampler = Literal[
    "greedy",
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "typical",
    "epsilon",
    "eta",
    "mirostat",
    "top-n-sigma",
    "p-less",
    "p-less-norm",
]

REQUIRED: dict[str, dict[str, float]] = {
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "typical": {"typical_p": 0.95},
    "epsilon": {"epsilon": 0.0003},
    "eta": {"eta": 0.0003},
    "mirostat": {"mirostat_tau": 4.0, "mirostat_eta": 0.1},
    "top-n-sigma": {"top_n_sigma": 1.0},
}
"""What a sampler cannot do without, with a usual value to name in the remedy."""

CHAIN = ("top-k", "top-p", "min-p")
"""Samplers that may be given each other's settings; they then apply in this order."""

_CHAIN_SETTINGS = ("top_k", "top_p", "min_p")
SAMPLER_SETTINGS = tuple(name for settings in REQUIRED.values() for name in settings)
_CONSTRAINTS = ("json_schema", "regex", "grammar")

MIN_TEMPERATURE = 1e-6
MAX_ALTERNATIVES = 20


class GenerationRequest(BaseModel):
    """One generation: sampler, penalties, constraints, limits.

    Raises:
        RequestError: on construction, for an unknown, out-of-range, contradictory or inert setting; its
            ``field`` names the setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sampler: Sampler = Field("p-less", description="rule that says which tokens may be drawn")
    temperature: float = Field(
        1.0,
        ge=0,
        le=1e4,
        description=f"logits are divided by it before truncation; 0 = greedy, else at least {MIN_TEMPERATURE:g}",
    )
    top_k: int | None = Field(None, ge=1, description="top-k: keep the k most probable tokens")
    top_p: float | None = Field(None, gt=0, le=1, description="top-p: keep the smallest set holding this mass")
    min_p: float | None = Field(None, gt=0, le=1, description="min-p: keep what has this share of the best token's")
    typical_p: float | None = Field(None, gt=0, le=1, description="typical: mass of the most typical tokens kept")
    epsilon: float | None = Field(None, gt=0, lt=1, description="epsilon: keep probabilities of at least this")
    eta: float | None = Field(None, gt=0, lt=1, description="eta: as epsilon, lower where the entropy is high")
    mirostat_tau: float | None = Field(None, gt=0, le=100, description="mirostat: target surprise, bits a token")
    mirostat_eta: float | None = Field(None, gt=0, le=10, description="mirostat: how fast it corrects itself")
    top_n_sigma: float | None = Field(None, gt=0, le=100, description="top-n-sigma: deviations below the best logit")

    repetition_penalty: float = Field(
        1.0, gt=0, le=10, description="divides the positive logits of tokens of prompt and answer, multiplies negative"
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2, description="taken off tokens that are in the answer")
    frequency_penalty: float = Field(0.0, ge=-2, le=2, description="taken off for each time a token is in the answer")
    logit_bias: dict[int, float] = Field(default_factory=dict, description="added to raw logits, -100 to 100, by id")
    bad_words: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        (), max_length=1024, description="texts that never appear in the answer, however they are split into tokens"
    )

    min_tokens: int = Field(0, ge=0, description="no end of text before so many tokens")
    max_tokens: int | None = Field(None, ge=1, description="tokens at most; none = what the context holds")
    stop: tuple[Annotated[str, Field(max_length=1024)], ...] = Field(
        (), max_length=64, description="texts that end the answer and are not part of it"
    )
    seed: int | None = Field(None, ge=0, lt=2**64, description="same seed, same draws; none = a fresh one")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_ALTERNATIVES, description="log-probabilities, with so many alternatives a token"
    )
    timeout_s: float | None = Field(None, gt=0, description="seconds until the answer is cut off")
    context_policy: Literal["error", "truncate-left"] = Field(
        "error", description="what to do with a prompt longer than the context"
    )

    json_schema: dict[str, Any] | None = Field(None, description="the answer is JSON of this schema")
    regex: str | None = Field(None, min_length=1, description="the whole answer matches this (Rust syntax)")
    grammar: str | None = Field(None, min_length=1, description="the answer follows this Lark grammar")

    gate: Literal["auto", "on", "off"] = Field(
        "auto", description="language confusion gate: auto = where the model has one, on = refuse if it has none"
    )
    gate_rule: Literal["retruncate", "union"] = Field(
        "retruncate", description="when it fires: truncate again what is allowed, or the paper's union"
    )
    gate_confidence: Literal["tempered", "untempered"] = Field(
        "tempered", description="logits the gate's high-confidence sets look at: after temperature, or at 1"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _name_the_fault(cls, values: Any, handler: ModelWrapValidatorHandler[GenerationRequest]) -> GenerationRequest:
        try:
            request = handler(values)
        except ValidationError as error:
            raise _request_error(error) from None
        _refuse_contradictions(request)
        return request

    @property
    def greedy(self) -> bool:
        """Whether every token is the most probable one."""
        return self.sampler == "greedy" or self.temperature == 0


def request_with_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> GenerationRequest:
    """Return the request for ``given`` on top of a model's ``defaults``.

    Where the caller names a sampler, the defaults' sampler settings (and, for ``greedy``, their temperature)
    belong to another sampler and are left out; the same goes for a constraint and for ``gate="off"``.

    Raises:
        RequestError: as :class:`GenerationRequest`.
    """
    kept = dict(defaults)
    if "sampler" in given and given["sampler"] != defaults.get("sampler"):
        _leave_out(kept, SAMPLER_SETTINGS)
    if given.get("sampler") == "greedy":
        _leave_out(kept, ("temperature",))
    if any(given.get(name) is not None for name in _CONSTRAINTS):
        _leave_out(kept, _CONSTRAINTS)
    if given.get("gate") == "off":
        _leave_out(kept, ("gate_rule", "gate_confidence"))
    return GenerationRequest(**{**kept, **given})


def _leave_out(settings: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        settings.pop(name, None)


def _request_error(error: ValidationError) -> RequestError:
    """Return pydantic's first finding as one line of ours."""
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    if field is None:
        return RequestError(f"a request is a set of named settings, got {reprlib.repr(first.get('input'))}")
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown setting '{field}'{nearest(field, GenerationRequest.model_fields)}", field)
    place = ".".join(str(part) for part in first["loc"])
    message = first["msg"][0].lower() + first["msg"][1:]
    return RequestError(f"{place}: {message} (got {reprlib.repr(first.get('input'))})", field)


def _refuse_contradictions(request: GenerationRequest) -> None:
    _check_temperature(request)
    _check_sampler_settings(request)
    _check_texts(request)
    _check_bias(request)
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise RequestError(
            f"min_tokens {request.min_tokens} is more than max_tokens {request.max_tokens}; lower it", "min_tokens"
        )
    constraints = [name for name in _CONSTRAINTS if getattr(request, name) is not None]
    if len(constraints) > 1:
        raise RequestError(f"{' and '.join(constraints)} exclude each other; give one", constraints[1])
    if request.gate == "off":
        for name in ("gate_rule", "gate_confidence"):
            if name in request.model_fields_set:
                raise RequestError(f"{name} has no effect with gate=off; leave it out or turn the gate on", name)


def _check_temperature(request: GenerationRequest) -> None:
    temperature = request.temperature
    if 0 < temperature < MIN_TEMPERATURE:
        raise RequestError(
            f"temperature {temperature:g} is too small to divide by; use 0 for greedy, or at least {MIN_TEMPERATURE:g}",
            "temperature",
        )
    if request.sampler == "greedy" and temperature != 0 and "temperature" in request.model_fields_set:
        raise RequestError(
            f"temperature {temperature:g} has no effect with sampler greedy; leave it out or choose another sampler",
            "temperature",
        )


def _check_sampler_settings(request: GenerationRequest) -> None:
    sampler = request.sampler
    required = REQUIRED.get(sampler, {})
    usable = {*required, *(_CHAIN_SETTINGS if sampler in CHAIN else ())}
    for name in SAMPLER_SETTINGS:
        value = getattr(request, name)
        if value is None and name in required:
            raise RequestError(f"sampler {sampler} needs {name}; a usual value is {required[name]:g}", name)
        if value is not None and name not in usable:
            owner = next(owner for owner, settings in REQUIRED.items() if name in settings)
            raise RequestError(
                f"{name} has no effect with sampler {sampler}; leave it out or set sampler to {owner}", name
            )


def _check_texts(request: GenerationRequest) -> None:
    for name in ("stop", "bad_words"):
        if "" in getattr(request, name):
            raise RequestError(f"{name} holds an empty text; leave it out", name)
    for name, texts in (
        ("stop", request.stop),
        ("bad_words", request.bad_words),
        ("regex", (request.regex or "",)),
        ("grammar", (request.grammar or "",)),
    ):
        if any(0xD800 <= ord(character) <= 0xDFFF for text in texts for character in text):
            raise RequestError(f"{name} holds half a character (a lone surrogate); correct it", name)


def _check_bias(request: GenerationRequest) -> None:
    for token, bias in request.logit_bias.items():
        if not -100 <= bias <= 100:
            raise RequestError(f"logit_bias of token {token} is {bias:g}; give -100 to 100", "logit_bias")


SAMPLERS: tuple[str, ...] = get_args(Sampler)
"""All samplers, in the order of the documentation."""
