import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "time", "token", "role", "run", "last_round", "devices", "devices_online", "warnings", "promoted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_ONLINE_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    time: _timestamp_pb2.Timestamp
    token: str
    role: str
    run: Run
    last_round: Round
    devices: int
    devices_online: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    promoted: Model
    def __init__(self, version: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., token: _Optional[str] = ..., role: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., last_round: _Optional[_Union[Round, _Mapping]] = ..., devices: _Optional[int] = ..., devices_online: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., promoted: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class DoctorRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DoctorReply(_message.Message):
    __slots__ = ("time", "checks")
    TIME_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("what", "ok", "text")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    what: str
    ok: bool
    text: str
    def __init__(self, what: _Optional[str] = ..., ok: bool = ..., text: _Optional[str] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListRunsReply(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("name", "state", "method", "options_json", "scenario", "seed", "stages_done", "rounds_done", "stages", "rounds_per_stage", "clients", "tasks", "stop_ordered", "pause_ordered", "excluded", "overrides_json", "error", "requested_by", "flower_run_id", "starts", "folder", "created_at", "started_at", "ended_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    SCENARIO_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STAGES_DONE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_DONE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PER_STAGE_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    STOP_ORDERED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_ORDERED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_BY_FIELD_NUMBER: _ClassVar[int]
    FLOWER_RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    method: str
    options_json: str
    scenario: str
    seed: int
    stages_done: int
    rounds_done: int
    stages: int
    rounds_per_stage: int
    clients: int
    tasks: _containers.RepeatedScalarFieldContainer[str]
    stop_ordered: bool
    pause_ordered: bool
    excluded: _containers.RepeatedScalarFieldContainer[int]
    overrides_json: str
    error: str
    requested_by: str
    flower_run_id: str
    starts: int
    folder: str
    created_at: _timestamp_pb2.Timestamp
    started_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., method: _Optional[str] = ..., options_json: _Optional[str] = ..., scenario: _Optional[str] = ..., seed: _Optional[int] = ..., stages_done: _Optional[int] = ..., rounds_done: _Optional[int] = ..., stages: _Optional[int] = ..., rounds_per_stage: _Optional[int] = ..., clients: _Optional[int] = ..., tasks: _Optional[_Iterable[str]] = ..., stop_ordered: bool = ..., pause_ordered: bool = ..., excluded: _Optional[_Iterable[int]] = ..., overrides_json: _Optional[str] = ..., error: _Optional[str] = ..., requested_by: _Optional[str] = ..., flower_run_id: _Optional[str] = ..., starts: _Optional[int] = ..., folder: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., started_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class StartRunRequest(_message.Message):
    __slots__ = ("name", "scenario", "scenario_toml", "set", "method", "options_json", "seed", "checkpoint_every")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCENARIO_FIELD_NUMBER: _ClassVar[int]
    SCENARIO_TOML_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_EVERY_FIELD_NUMBER: _ClassVar[int]
    name: str
    scenario: str
    scenario_toml: str
    set: _containers.RepeatedScalarFieldContainer[str]
    method: str
    options_json: str
    seed: int
    checkpoint_every: int
    def __init__(self, name: _Optional[str] = ..., scenario: _Optional[str] = ..., scenario_toml: _Optional[str] = ..., set: _Optional[_Iterable[str]] = ..., method: _Optional[str] = ..., options_json: _Optional[str] = ..., seed: _Optional[int] = ..., checkpoint_every: _Optional[int] = ...) -> None: ...

class StopRunRequest(_message.Message):
    __slots__ = ("run", "now")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    run: str
    now: bool
    def __init__(self, run: _Optional[str] = ..., now: bool = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("run", "limit")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run: str
    limit: int
    def __init__(self, run: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListRoundsReply(_message.Message):
    __slots__ = ("run", "rounds")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    def __init__(self, run: _Optional[str] = ..., rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("stage", "round", "skipped", "asked", "used", "rejected", "missing", "failures", "loss", "accuracy", "bytes_down", "bytes_up", "seconds", "excluded", "overrides_json", "ended_at")
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_JSON_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    stage: int
    round: int
    skipped: bool
    asked: _containers.RepeatedScalarFieldContainer[int]
    used: _containers.RepeatedScalarFieldContainer[int]
    rejected: _containers.ScalarMap[str, int]
    missing: _containers.RepeatedScalarFieldContainer[int]
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    loss: float
    accuracy: float
    bytes_down: int
    bytes_up: int
    seconds: float
    excluded: _containers.RepeatedScalarFieldContainer[int]
    overrides_json: str
    ended_at: _timestamp_pb2.Timestamp
    def __init__(self, stage: _Optional[int] = ..., round: _Optional[int] = ..., skipped: bool = ..., asked: _Optional[_Iterable[int]] = ..., used: _Optional[_Iterable[int]] = ..., rejected: _Optional[_Mapping[str, int]] = ..., missing: _Optional[_Iterable[int]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., bytes_down: _Optional[int] = ..., bytes_up: _Optional[int] = ..., seconds: _Optional[float] = ..., excluded: _Optional[_Iterable[int]] = ..., overrides_json: _Optional[str] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("client", "reason", "text")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    client: int
    reason: str
    text: str
    def __init__(self, client: _Optional[int] = ..., reason: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Metrics(_message.Message):
    __slots__ = ("run", "tasks", "global_matrix", "personal_matrix", "numbers", "clients")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_MATRIX_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_MATRIX_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    tasks: _containers.RepeatedScalarFieldContainer[str]
    global_matrix: _containers.RepeatedCompositeFieldContainer[Row]
    personal_matrix: _containers.RepeatedCompositeFieldContainer[Row]
    numbers: _containers.ScalarMap[str, float]
    clients: _containers.RepeatedCompositeFieldContainer[ClientAccuracy]
    def __init__(self, run: _Optional[str] = ..., tasks: _Optional[_Iterable[str]] = ..., global_matrix: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., personal_matrix: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., numbers: _Optional[_Mapping[str, float]] = ..., clients: _Optional[_Iterable[_Union[ClientAccuracy, _Mapping]]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("stage", "tasks")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    tasks: _containers.RepeatedCompositeFieldContainer[Accuracy]
    def __init__(self, stage: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[Accuracy, _Mapping]]] = ...) -> None: ...

class Accuracy(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: float
    def __init__(self, value: _Optional[float] = ...) -> None: ...

class ClientAccuracy(_message.Message):
    __slots__ = ("client", "name", "personal", "general")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PERSONAL_FIELD_NUMBER: _ClassVar[int]
    GENERAL_FIELD_NUMBER: _ClassVar[int]
    client: int
    name: str
    personal: float
    general: float
    def __init__(self, client: _Optional[int] = ..., name: _Optional[str] = ..., personal: _Optional[float] = ..., general: _Optional[float] = ...) -> None: ...

class Prompts(_message.Message):
    __slots__ = ("run", "pool", "dispatched_per_client", "uses", "clients")
    class UsesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    DISPATCHED_PER_CLIENT_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    pool: int
    dispatched_per_client: int
    uses: _containers.ScalarMap[int, int]
    clients: _containers.RepeatedCompositeFieldContainer[ClientPrompts]
    def __init__(self, run: _Optional[str] = ..., pool: _Optional[int] = ..., dispatched_per_client: _Optional[int] = ..., uses: _Optional[_Mapping[int, int]] = ..., clients: _Optional[_Iterable[_Union[ClientPrompts, _Mapping]]] = ...) -> None: ...

class ClientPrompts(_message.Message):
    __slots__ = ("client", "name", "prompts", "stage", "round", "distinct")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DISTINCT_FIELD_NUMBER: _ClassVar[int]
    client: int
    name: str
    prompts: _containers.RepeatedScalarFieldContainer[int]
    stage: int
    round: int
    distinct: int
    def __init__(self, client: _Optional[int] = ..., name: _Optional[str] = ..., prompts: _Optional[_Iterable[int]] = ..., stage: _Optional[int] = ..., round: _Optional[int] = ..., distinct: _Optional[int] = ...) -> None: ...

class Config(_message.Message):
    __slots__ = ("run", "settings")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    run: str
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, run: _Optional[str] = ..., settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value_json", "scenario_value_json", "settable", "pending", "by", "since", "meaning")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    SCENARIO_VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    SETTABLE_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MEANING_FIELD_NUMBER: _ClassVar[int]
    key: str
    value_json: str
    scenario_value_json: str
    settable: bool
    pending: bool
    by: str
    since: _timestamp_pb2.Timestamp
    meaning: str
    def __init__(self, key: _Optional[str] = ..., value_json: _Optional[str] = ..., scenario_value_json: _Optional[str] = ..., settable: bool = ..., pending: bool = ..., by: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., meaning: _Optional[str] = ...) -> None: ...

class SetConfigRequest(_message.Message):
    __slots__ = ("run", "key", "value_json")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_JSON_FIELD_NUMBER: _ClassVar[int]
    run: str
    key: str
    value_json: str
    def __init__(self, run: _Optional[str] = ..., key: _Optional[str] = ..., value_json: _Optional[str] = ...) -> None: ...

class ListClientsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListClientsReply(_message.Message):
    __slots__ = ("clients", "flower_problem")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    FLOWER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedCompositeFieldContainer[Client]
    flower_problem: str
    def __init__(self, clients: _Optional[_Iterable[_Union[Client, _Mapping]]] = ..., flower_problem: _Optional[str] = ...) -> None: ...

class ClientRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Client(_message.Message):
    __slots__ = ("name", "status", "connection", "node_id", "public_key", "fingerprint", "approved_by", "created_at", "approved_at", "revoked_at", "run", "client", "excluded", "last_seen", "rounds_asked", "rounds_used", "last_failure", "refused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    APPROVED_BY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    APPROVED_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ASKED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_USED_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: str
    connection: str
    node_id: str
    public_key: str
    fingerprint: str
    approved_by: str
    created_at: _timestamp_pb2.Timestamp
    approved_at: _timestamp_pb2.Timestamp
    revoked_at: _timestamp_pb2.Timestamp
    run: str
    client: int
    excluded: bool
    last_seen: _timestamp_pb2.Timestamp
    rounds_asked: int
    rounds_used: int
    last_failure: str
    refused: str
    def __init__(self, name: _Optional[str] = ..., status: _Optional[str] = ..., connection: _Optional[str] = ..., node_id: _Optional[str] = ..., public_key: _Optional[str] = ..., fingerprint: _Optional[str] = ..., approved_by: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., approved_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., run: _Optional[str] = ..., client: _Optional[int] = ..., excluded: bool = ..., last_seen: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rounds_asked: _Optional[int] = ..., rounds_used: _Optional[int] = ..., last_failure: _Optional[str] = ..., refused: _Optional[str] = ...) -> None: ...

class ApproveClientRequest(_message.Message):
    __slots__ = ("request", "code")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    request: str
    code: str
    def __init__(self, request: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class RunClientRequest(_message.Message):
    __slots__ = ("run", "client")
    RUN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    client: str
    def __init__(self, run: _Optional[str] = ..., client: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class ListModelsReply(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ModelRequest(_message.Message):
    __slots__ = ("run", "stage", "promoted")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: int
    promoted: bool
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[int] = ..., promoted: bool = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("run", "stage", "sha256", "size", "promoted", "promoted_by", "promoted_at", "created_at")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_BY_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_AT_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    run: str
    stage: int
    sha256: str
    size: int
    promoted: bool
    promoted_by: str
    promoted_at: _timestamp_pb2.Timestamp
    created_at: _timestamp_pb2.Timestamp
    def __init__(self, run: _Optional[str] = ..., stage: _Optional[int] = ..., sha256: _Optional[str] = ..., size: _Optional[int] = ..., promoted: bool = ..., promoted_by: _Optional[str] = ..., promoted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class RollbackModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackModelReply(_message.Message):
    __slots__ = ("rolled_back", "promoted")
    ROLLED_BACK_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_FIELD_NUMBER: _ClassVar[int]
    rolled_back: Model
    promoted: Model
    def __init__(self, rolled_back: _Optional[_Union[Model, _Mapping]] = ..., promoted: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("name", "size", "sha256", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    sha256: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("name", "role", "days")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    days: int
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., days: _Optional[int] = ...) -> None: ...

class CreateTokenReply(_message.Message):
    __slots__ = ("token", "secret")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    token: Token
    secret: str
    def __init__(self, token: _Optional[_Union[Token, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class TokenRequest(_message.Message):
    __slots__ = ("token",)
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    token: str
    def __init__(self, token: _Optional[str] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensReply(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "name", "role", "created_by", "created_at", "expires_at", "revoked_at", "last_used_at", "state")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CREATED_BY_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_AT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    role: str
    created_by: str
    created_at: _timestamp_pb2.Timestamp
    expires_at: _timestamp_pb2.Timestamp
    revoked_at: _timestamp_pb2.Timestamp
    last_used_at: _timestamp_pb2.Timestamp
    state: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[str] = ..., created_by: _Optional[str] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., revoked_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_used_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., state: _Optional[str] = ...) -> None: ...

class ListAuditRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListAuditReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[AuditEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[AuditEntry, _Mapping]]] = ...) -> None: ...

class AuditEntry(_message.Message):
    __slots__ = ("time", "token", "role", "peer", "action", "target", "detail_json", "outcome")
    TIME_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DETAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    token: str
    role: str
    peer: str
    action: str
    target: str
    detail_json: str
    outcome: str
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., token: _Optional[str] = ..., role: _Optional[str] = ..., peer: _Optional[str] = ..., action: _Optional[str] = ..., target: _Optional[str] = ..., detail_json: _Optional[str] = ..., outcome: _Optional[str] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BackupName(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class BackupFile(_message.Message):
    __slots__ = ("name", "size", "created_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    created_at: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ListBackupsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBackupsReply(_message.Message):
    __slots__ = ("backups",)
    BACKUPS_FIELD_NUMBER: _ClassVar[int]
    backups: _containers.RepeatedCompositeFieldContainer[BackupFile]
    def __init__(self, backups: _Optional[_Iterable[_Union[BackupFile, _Mapping]]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("rows", "saved_as")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAVED_AS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    saved_as: str
    def __init__(self, rows: _Optional[int] = ..., saved_as: _Optional[str] = ...) -> None: ...
