"""What can be said about speculation: which drafters, which selector, how exact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.fly import EntropyMode, FlyRule
from edgeduet_shared.errors import nearest

Mode = Literal["exact", "fast"]
LongestDraft = Annotated[int, Field(ge=1, le=64)]


class DrafterOptions(BaseModel):
    """One configured drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, description="what statistics call it; unique")
    kind: str = Field(
        min_length=1, description="ngram, recurrent, model, truncated, cascade, or a kind another package registers"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="what its kind understands")


class FlyOptions(BaseModel):
    """When loosely speculative verification lets a mismatch stand (arXiv 2511.22972)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    window: int = Field(6, ge=1, le=64, description="positions after a mismatch that must agree")
    theta: float = Field(0.3, ge=0, description="least uncertainty of the model at the mismatch")
    entropy: EntropyMode = Field(
        "topk", description="topk: of the most probable tokens, in nats; full-normalised: 0 to 1"
    )
    top_k: int = Field(3, ge=2, le=1000, description="tokens of topk")

    def rule(self) -> FlyRule:
        """Return the rule."""
        return FlyRule(self.window, self.theta, self.entropy, self.top_k)


class SpeculationOptions(BaseModel):
    """How a model speculates.

    Raises:
        RequestError: from :meth:`from_mapping`, naming the setting and what would be right.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Mode = Field("fast", description="exact: steps are filled up, so that kernels round alike; fast: not")
    drafters: tuple[DrafterOptions, ...] | None = Field(
        None, max_length=64, description="none given: n-gram lookup and the drafters in the model's folder"
    )
    selector: str = Field("ratio", description="rule that picks drafter and length every round")
    selector_options: dict[str, Any] = Field(default_factory=dict, description="what that rule understands")
    lengths: tuple[LongestDraft, ...] = Field((1, 2, 4, 8), min_length=1, description="draft lengths to choose from")
    eval_budget: float = Field(0.04, ge=0, lt=1, description="share of the time spent on scoring drafters")
    estimator: Literal["rao-blackwell", "ratio"] = Field("rao-blackwell", description="how survival is estimated")
    discount: float = Field(0.995, gt=0, le=1, description="weight of evidence that is one position older")
    carry_over: float = Field(4.0, ge=0, description="weight of what earlier requests showed, in positions")
    hysteresis: float = Field(1.03, ge=1, description="another arm must be so much faster to be switched to")
    calibrate: Literal["cached", "fresh"] = Field(
        "cached", description="measure costs once per machine, or at every start"
    )
    verify: Literal["exact", "fly"] = Field("exact", description="fly is LOSSY: faster with long drafts, other text")
    fly: FlyOptions = Field(default_factory=FlyOptions, description="only with verify=fly")
    seed: int = Field(0, ge=0, lt=2**64, description="of the selector, where it draws; never shared with sampling")
    trace: Path | None = Field(None, description="file that gets one line a round, for replay")

    @field_validator("lengths")
    @classmethod
    def _ascending(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(lengths)))

    @model_validator(mode="after")
    def _belongs_together(self) -> SpeculationOptions:
        names = [drafter.name for drafter in self.drafters or ()]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two drafters are called {twice.pop()}; give each a name of its own")
        if self.verify == "exact" and "fly" in self.model_fields_set:
            raise ValueError("settings of fly have no effect with verify=exact; add verify=fly or leave them out")
        return self

    @property
    def longest(self) -> int:
        """The longest draft that may be asked for."""
        return self.lengths[-1]

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SpeculationOptions:
        """Return the options that ``values`` say.

        Raises:
            RequestError: an unknown key or a value out of range.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _first_fault(error) from None


def options_from_command_line(
    mode: str | None, drafters: Sequence[str] = (), selector: str | None = None, pairs: Sequence[str] = ()
) -> SpeculationOptions | None:
    """Return what the options of a command say; ``None`` where nothing asks for speculation.

    Args:
        mode: of ``--speculate``: ``exact``, ``fast`` or ``off``.
        drafters: of ``--drafter``: ``KIND``, ``NAME=KIND`` or either with ``:KEY=VALUE,KEY=VALUE`` behind it; a
            single ``none``: no drafter at all.
        selector: of ``--selector``.
        pairs: of ``--speculation``: ``KEY=VALUE`` for every other option; ``fly.KEY=VALUE`` for those of fly.

    Raises:
        RequestError: something is written wrong, or options are given while speculation is off.
    """
    if mode is None or mode == "off":
        if drafters or selector or pairs:
            raise RequestError(
                "--drafter, --selector and --speculation do nothing without --speculate; add it", "speculate"
            )
        return None
    values: dict[str, Any] = {"mode": mode}
    if drafters:
        values["drafters"] = [] if list(drafters) == ["none"] else [_drafter_from(text) for text in drafters]
    if selector is not None:
        values["selector"] = selector
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise RequestError(f"--speculation {pair}: write KEY=VALUE", "speculation")
        group, dot, inner = key.partition(".")
        if dot:
            values.setdefault(group, {})[inner] = _value(value)
        else:
            values[key] = _value(value)
    return SpeculationOptions.from_mapping(values)


def _drafter_from(text: str) -> dict[str, Any]:
    head, _, tail = text.partition(":")
    name, equals, kind = head.partition("=")
    options = {}
    for pair in tail.split(",") if tail else ():
        key, given, value = pair.partition("=")
        if not given or not key:
            raise RequestError(f"--drafter {text}: write NAME=KIND:KEY=VALUE,KEY=VALUE", "drafter")
        options[key] = _value(value)
    return {"name": name, "kind": kind if equals else name, "options": options}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _first_fault(error: ValidationError) -> RequestError:
    fault = error.errors()[0]
    place = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known: Mapping[str, Any] = SpeculationOptions.model_fields
        if len(fault["loc"]) > 1:
            known = FlyOptions.model_fields if fault["loc"][0] == "fly" else DrafterOptions.model_fields
        unknown = str(fault["loc"][-1])
        return RequestError(f"speculation: no such setting: {place}{nearest(unknown, known)}", place)
    reason = str(fault["msg"]).removeprefix("Value error, ")
    return RequestError(f"speculation: {place + ': ' if place else ''}{reason}", place or None)
