from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_ids", "sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class ChatRequest(_message.Message):
    __slots__ = ("model", "messages", "sampling")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    sampling: Sampling
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("sampler", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon", "eta", "mirostat_tau", "mirostat_eta", "top_n_sigma", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens", "max_tokens", "stop", "seed", "logprobs", "json_schema", "regex", "grammar", "gate", "gate_rule", "timeout_s", "context_policy", "n")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    ETA_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_TAU_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_ETA_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    GATE_RULE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_POLICY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    sampler: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon: float
    eta: float
    mirostat_tau: float
    mirostat_eta: float
    top_n_sigma: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    min_tokens: int
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    logprobs: int
    json_schema: str
    regex: str
    grammar: str
    gate: str
    gate_rule: str
    timeout_s: float
    context_policy: str
    n: int
    def __init__(self, sampler: _Optional[str] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., epsilon: _Optional[float] = ..., eta: _Optional[float] = ..., mirostat_tau: _Optional[float] = ..., mirostat_eta: _Optional[float] = ..., top_n_sigma: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., bad_words: _Optional[_Iterable[str]] = ..., min_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., gate: _Optional[str] = ..., gate_rule: _Optional[str] = ..., timeout_s: _Optional[float] = ..., context_policy: _Optional[str] = ..., n: _Optional[int] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("choice", "piece", "finished")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    piece: Piece
    finished: Finished
    def __init__(self, choice: _Optional[int] = ..., piece: _Optional[_Union[Piece, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("text", "ids", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, text: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("id", "token", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    token: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, id: _Optional[int] = ..., token: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("id", "token", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    token: bytes
    logprob: float
    def __init__(self, id: _Optional[int] = ..., token: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "prompt_tokens", "completion_tokens", "cached_tokens", "gate_interventions", "seconds_prefill", "seconds_decode", "speculation")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finished.Reason]
        STOP: _ClassVar[Finished.Reason]
        LENGTH: _ClassVar[Finished.Reason]
        CANCELLED: _ClassVar[Finished.Reason]
        TIMEOUT: _ClassVar[Finished.Reason]
    REASON_UNSPECIFIED: Finished.Reason
    STOP: Finished.Reason
    LENGTH: Finished.Reason
    CANCELLED: Finished.Reason
    TIMEOUT: Finished.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GATE_INTERVENTIONS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    SECONDS_DECODE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    reason: Finished.Reason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gate_interventions: int
    seconds_prefill: float
    seconds_decode: float
    speculation: Speculation
    def __init__(self, reason: _Optional[_Union[Finished.Reason, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., gate_interventions: _Optional[int] = ..., seconds_prefill: _Optional[float] = ..., seconds_decode: _Optional[float] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("mode", "verify", "lossy", "row_invariant", "rounds", "proposed", "evaluated", "accepted", "emitted", "discarded", "relaxed", "switches", "evaluation_share", "arms", "unused", "failed", "notes", "survival", "best_fixed_arm")
    class UnusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class FailedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SurvivalEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SpeculationSurvival
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SpeculationSurvival, _Mapping]] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    ROW_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SHARE_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    BEST_FIXED_ARM_FIELD_NUMBER: _ClassVar[int]
    mode: str
    verify: str
    lossy: bool
    row_invariant: bool
    rounds: int
    proposed: int
    evaluated: int
    accepted: int
    emitted: int
    discarded: int
    relaxed: int
    switches: int
    evaluation_share: float
    arms: _containers.RepeatedCompositeFieldContainer[SpeculationArm]
    unused: _containers.ScalarMap[str, str]
    failed: _containers.ScalarMap[str, str]
    notes: _containers.RepeatedScalarFieldContainer[str]
    survival: _containers.MessageMap[str, SpeculationSurvival]
    best_fixed_arm: SpeculationHindsight
    def __init__(self, mode: _Optional[str] = ..., verify: _Optional[str] = ..., lossy: bool = ..., row_invariant: bool = ..., rounds: _Optional[int] = ..., proposed: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted: _Optional[int] = ..., discarded: _Optional[int] = ..., relaxed: _Optional[int] = ..., switches: _Optional[int] = ..., evaluation_share: _Optional[float] = ..., arms: _Optional[_Iterable[_Union[SpeculationArm, _Mapping]]] = ..., unused: _Optional[_Mapping[str, str]] = ..., failed: _Optional[_Mapping[str, str]] = ..., notes: _Optional[_Iterable[str]] = ..., survival: _Optional[_Mapping[str, SpeculationSurvival]] = ..., best_fixed_arm: _Optional[_Union[SpeculationHindsight, _Mapping]] = ...) -> None: ...

class SpeculationSurvival(_message.Message):
    __slots__ = ("starts", "mean", "standard_error", "reach")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STANDARD_ERROR_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    starts: int
    mean: _containers.RepeatedScalarFieldContainer[float]
    standard_error: _containers.RepeatedScalarFieldContainer[float]
    reach: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, starts: _Optional[int] = ..., mean: _Optional[_Iterable[float]] = ..., standard_error: _Optional[_Iterable[float]] = ..., reach: _Optional[_Iterable[float]] = ...) -> None: ...

class SpeculationHindsight(_message.Message):
    __slots__ = ("drafter", "length", "tokens_per_second", "regret_seconds")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REGRET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    length: int
    tokens_per_second: float
    regret_seconds: float
    def __init__(self, drafter: _Optional[str] = ..., length: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., regret_seconds: _Optional[float] = ...) -> None: ...

class SpeculationArm(_message.Message):
    __slots__ = ("drafter", "length", "rounds", "proposed", "evaluated", "accepted", "emitted", "seconds")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    length: int
    rounds: int
    proposed: int
    evaluated: int
    accepted: int
    emitted: int
    seconds: _containers.ScalarMap[str, float]
    def __init__(self, drafter: _Optional[str] = ..., length: _Optional[int] = ..., rounds: _Optional[int] = ..., proposed: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., emitted: _Optional[int] = ..., seconds: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "architecture", "context_length", "vocab_size", "dtype", "licence", "chat", "gate", "speculation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LICENCE_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    context_length: int
    vocab_size: int
    dtype: str
    licence: str
    chat: bool
    gate: bool
    speculation: str
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., dtype: _Optional[str] = ..., licence: _Optional[str] = ..., chat: bool = ..., gate: bool = ..., speculation: _Optional[str] = ...) -> None: ...
