"""Requests as OpenAI's API spells them, and what they mean here.

Three kinds of parameters: those of OpenAI that we honour, those of OpenAI that we do not (refused unless they ask
for nothing; ignoring one would be answering another question), and our own (``sampler``, ``min_p``, ``gate``, ...,
``extra_body`` in OpenAI's client). An unknown one is an error that names the nearest known one.

Where OpenAI's clients leave something out, or send OpenAI's default for it (``top_p=1``), the model's own default
holds: p-less. ``top_p`` below 1, or another sampler's parameter, chooses that sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from edgeduet_client.llm.errors import RequestError
from edgeduet_shared.errors import nearest

#: Parameters of OpenAI that say nothing about the answer: taken and not used.
_WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
#: Parameters of OpenAI that are refused, but for the values that ask for nothing.
_NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
#: Fields of one message that are refused unless empty; clients send answers back with them.
_NOT_IN_MESSAGES = ("name", "refusal", "annotations", "audio", "function_call", "tool_calls", "tool_call_id")


def _valid_unicode(text: str) -> str:
    """Refuse lone surrogates, which JSON can spell (``"\\ud800"``) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"is not valid Unicode at character {error.start}") from error
    return text


Text = Annotated[str, AfterValidator(_valid_unicode)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _only_what_we_honour(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for key, value in values.items():
            if key in cls.model_fields:
                # OpenAI's clients send null for "not given".
                if value is not None or key in ("model", "messages", "prompt", "input"):
                    kept[key] = value
            elif key in _NOT_SUPPORTED:
                if value is not None and value not in _NOT_SUPPORTED[key]:
                    raise RequestError(f"{key!r} is not supported by this server; leave it out", key)
            elif key not in _WITHOUT_EFFECT:
                raise RequestError(f"unknown parameter {key!r}{nearest(key, cls.model_fields)}", key)
        return kept


class TextPart(BaseModel):
    """A part of a message's content; text is the only kind here."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in _NOT_IN_MESSAGES:
            if values.get(key) not in (None, [], ""):
                raise RequestError(f"{key!r} in a message is not supported by this server; leave it out", "messages")
        return {key: value for key, value in values.items() if key not in _NOT_IN_MESSAGES}

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates read it; ``developer`` is what newer clients call ``system``."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(BaseModel):
    """What a stream brings beside the text."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchemaFormat(BaseModel):
    """The schema of ``response_format``."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, hide_input_in_errors=True)

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What an answer must be: text, any JSON object, or JSON that follows a schema."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class SamplingBody(_Body):
    """The parameters that chats and completions share; the second group is ours."""

    model: Text
    temperature: float | None = None
    top_p: float | None = None
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Text | list[Text] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None

    sampler: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon: float | None = None
    eta: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[Text] | None = None
    min_tokens: int | None = None
    json_schema: dict[str, Any] | None = None
    regex: Text | None = None
    grammar: Text | None = None
    gate: str | None = None
    gate_rule: str | None = None
    timeout_s: float | None = None
    context_policy: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' is for streams; leave it out, or set 'stream'", "stream_options")
        if self.response_format is not None:
            if self.json_schema is not None or self.regex is not None or self.grammar is not None:
                raise RequestError(
                    "'response_format' and 'json_schema', 'regex' or 'grammar' each constrain the answer; keep one",
                    "response_format",
                )
            if (self.response_format.type == "json_schema") != (self.response_format.json_schema is not None):
                raise RequestError(
                    "'response_format.json_schema' goes with type 'json_schema', and only with it", "response_format"
                )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def answer_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema the answer must follow, if any."""
        if self.response_format is None or self.response_format.type == "text":
            return self.json_schema
        if self.response_format.json_schema is None:
            return {"type": "object"}
        return self.response_format.json_schema.schema_


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _one_budget(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("'max_tokens' and 'max_completion_tokens' differ; keep one", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs' set to true", "top_logprobs")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of log-probabilities wanted beside the chosen token's; ``None`` = none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def budget(self) -> int | None:
        """Tokens the answer may have, if the request says."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: Text | list[Text] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _echo_alone(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise RequestError(
                "'echo' with 'logprobs' would need log-probabilities of the prompt, which this server does not give",
                "echo",
            )
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of log-probabilities wanted beside the chosen token's; ``None`` = none at all."""
        return self.logprobs

    @property
    def budget(self) -> int | None:
        """Tokens the answer may have, if the request says."""
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, each as text or as ids; raises ``RequestError`` where there is none."""
        return _listed(self.prompt, "prompt")


class EmbeddingsBody(_Body):
    """``POST /v1/embeddings``."""

    model: Text
    input: Text | list[Text] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def inputs(self) -> list[str | list[int]]:
        """Return the texts as a list, each as text or as ids; raises ``RequestError`` where there is none."""
        return _listed(self.input, "input")


BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_body(kind: type[BodyT], values: Any) -> BodyT:
    """Check ``values`` (decoded JSON) as a request of ``kind``.

    Raises:
        RequestError: something is wrong; names the first parameter at fault.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise from_validation(error) from error


def _listed(given: str | Sequence[str | int | list[int]], field: str) -> list[str | list[int]]:
    """Return what OpenAI allows in four forms (a text, texts, ids, lists of ids) as texts or lists of ids."""
    if isinstance(given, str):
        return [given]
    ids = [entry for entry in given if isinstance(entry, int)]
    if ids:
        return [ids]
    if not given:
        raise RequestError(f"{field!r} is an empty list; give at least one text", field)
    return [entry for entry in given if not isinstance(entry, int)]


def from_validation(error: ValidationError) -> RequestError:
    """Turn the first finding of pydantic into one line; what was sent is not repeated, it may be private."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in found["loc"] if not _is_type_name(part))
    message = found["msg"].removeprefix("Value error, ")
    field = str(found["loc"][0]) if found["loc"] else None
    return RequestError(f"{place!r}: {message[:1].lower()}{message[1:]}" if place else message, field)


def _is_type_name(part: str | int) -> bool:
    """Whether pydantic names a member of a union here (``list[str]``, ``function-after[...]``), not a place."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
