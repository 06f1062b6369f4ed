"""The message schema between server and clients: the only module that knows record keys.

A typed request or reply becomes one Flower ``RecordDict`` and back:

* ``meta`` (ConfigRecord): schema version, kind, the small fields as one JSON text, the plan as another
  (the same for many clients, so that it is checked once), and ``seconds`` as a double (as text its
  length, and with it the measured size of a message, would differ from run to run),
* ``arrays.<field>`` (ArrayRecord): named float32 arrays.

A record with another schema version, a missing field or a wrong type raises
:class:`~edgeduet_shared.errors.MessageError`; nothing is guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from io import BytesIO
from typing import Any, ClassVar, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from edgeduet_shared.errors import MessageError, VersionError
from edgeduet_shared.plan import LocalPlan

SCHEMA_VERSION = 3

FloatArray = npt.NDArray[np.float32]
Arrays = dict[str, FloatArray]


@dataclass(frozen=True)
class TrainRequest:
    """Work for one client in one round (indices are 0-based).

    ``shared`` holds the parameters the server owns; ``contexts`` the dispatched prompt contexts by
    pool index, each (L, W).
    """

    kind: ClassVar[str] = "train"
    array_fields: ClassVar[tuple[str, ...]] = ("shared", "contexts")

    stage: int
    round: int
    plan: LocalPlan
    shared: Arrays = field(default_factory=dict)
    contexts: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class TrainReply:
    """What a client sends back after training.

    ``update`` holds new values of the uploaded groups; ``digest`` has one (D,) array under "digest"
    when asked for; ``usage`` maps pool index to the attention mass that prompt received.
    """

    kind: ClassVar[str] = "train-reply"
    array_fields: ClassVar[tuple[str, ...]] = ("update", "digest")

    client: int
    stage: int
    round: int
    examples: int
    loss: float
    accuracy: float
    steps: int
    seconds: float
    usage: dict[str, float] = field(default_factory=dict)
    update: Arrays = field(default_factory=dict)
    digest: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateRequest:
    """Ask a client to evaluate its personal model and the plain global model after a stage.

    ``experts`` hands out the pool of drafters: parameters of other clients' drafters, keyed ``CLIENT/NAME``.
    """

    kind: ClassVar[str] = "evaluate"
    array_fields: ClassVar[tuple[str, ...]] = ("shared", "contexts", "experts")

    stage: int
    plan: LocalPlan
    common: bool = True
    shared: Arrays = field(default_factory=dict)
    contexts: Arrays = field(default_factory=dict)
    experts: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluateReply:
    """Counts per task of the stream, so that any accuracy can be derived.

    ``personal`` and ``shared`` are correct predictions of the client's personal model and of the
    plain global model on the client's own test slice of each task, out of ``totals``;
    ``personal_common`` is the personal model on each task's common test set (-1 where the client
    does not hold it, as on a device), out of ``common_totals``. Of a drafter they count first drafted tokens
    that the target agrees with; ``figures`` holds what else a client measured, by name.
    """

    kind: ClassVar[str] = "evaluate-reply"
    array_fields: ClassVar[tuple[str, ...]] = ()

    client: int
    stage: int
    personal: tuple[int, ...]
    shared: tuple[int, ...]
    totals: tuple[int, ...]
    personal_common: tuple[int, ...]
    common_totals: tuple[int, ...]
    held_out: int = -1
    held_out_total: int = 0
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class HelloRequest:
    """Ask a node which client (partition) it is; Flower's node ids are random and say nothing."""

    kind: ClassVar[str] = "hello"
    array_fields: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class HelloReply:
    """The partition id of the node that answers; needs neither torch nor data."""

    kind: ClassVar[str] = "hello-reply"
    array_fields: ClassVar[tuple[str, ...]] = ()

    client: int


HELLO = "query.hello"
"""Flower message type of a :class:`HelloRequest`: a ClientApp answers it with ``@app.query("hello")``."""

Body = TrainRequest | TrainReply | EvaluateRequest | EvaluateReply | HelloRequest | HelloReply
BodyT = TypeVar("BodyT", TrainRequest, TrainReply, EvaluateRequest, EvaluateReply, HelloRequest, HelloReply)

WireArrays = dict[int, tuple[FloatArray, Array]]
"""Arrays already encoded, by ``id`` (the array itself is kept, so that no id is ever reused)."""


def encode(body: Body, wire: WireArrays | None = None) -> RecordDict:
    """Return the record that carries ``body``.

    With ``wire``, an array met before is not encoded again: a model sent to a thousand clients is
    held in memory once.
    """
    wire = {} if wire is None else wire
    small: dict[str, Any] = {}
    record = RecordDict()
    for spec in fields(body):
        value = getattr(body, spec.name)
        if spec.name in body.array_fields:
            arrays = record[f"arrays.{spec.name}"] = ArrayRecord()
            for name, array in value.items():
                arrays[name] = _wire_array(array, wire)
        else:
            small[spec.name] = value
    meta: dict[str, Any] = {"schema": SCHEMA_VERSION, "kind": body.kind}
    if "plan" in small:
        meta["plan"] = _plan_text(small.pop("plan"))
    if "seconds" in small:
        meta["seconds"] = float(small.pop("seconds"))
    record["meta"] = ConfigRecord({**meta, "fields": json.dumps(small, separators=(",", ":"))})
    return record


def decode(record: RecordDict, expected: type[BodyT]) -> BodyT:
    """Return the typed body of ``record``.

    Raises:
        VersionError: other schema version.
        MessageError: other kind, or fields that are missing or malformed.
    """
    meta = record.get("meta")
    if not isinstance(meta, ConfigRecord) or "schema" not in meta:
        raise MessageError("message has no edgeduet header; the sender is not an edgeduet client or server")
    if meta["schema"] != SCHEMA_VERSION:
        raise VersionError(
            f"message uses schema version {meta['schema']!r}, this side speaks {SCHEMA_VERSION}; "
            "install the same edgeduet version on server and clients"
        )
    if meta.get("kind") != expected.kind:
        raise MessageError(f"expected a '{expected.kind}' message, got {meta.get('kind')!r}")
    try:
        values = json.loads(str(meta["fields"]))
        if "plan" in meta:
            values["plan"] = _plan(str(meta["plan"]))
        if "seconds" in meta:
            values["seconds"] = meta["seconds"]
        for name in expected.array_fields:
            arrays = record[f"arrays.{name}"]
            if not isinstance(arrays, ArrayRecord):
                raise TypeError(f"'arrays.{name}' holds no arrays")
            values[name] = {key: _values(array) for key, array in arrays.items()}
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        # What the recorder could not write down as JSON would end the run.
        for name, value in {"seconds": values.get("seconds", 0.0), **values.get("figures", {})}.items():
            if not math.isfinite(value):
                raise ValueError(f"'{name}' is {value}")
        for name, right in _CHECKS_OF[expected.kind]:
            if name in values and not right(values[name]):
                raise TypeError(f"'{name}' is {str(values[name])[:40]!r}")
        return expected(**values)
    except (KeyError, TypeError, ValueError, EOFError) as error:
        raise MessageError(f"malformed '{expected.kind}' message: {error}") from error


@lru_cache(maxsize=256)
def _plan_text(plan: LocalPlan) -> str:
    return plan.model_dump_json()


@lru_cache(maxsize=256)
def _plan(text: str) -> LocalPlan:
    return LocalPlan.model_validate_json(text)


Check = Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value)


_CHECKS: dict[Any, Check] = {
    int: _is_whole,
    float: _is_number,
    bool: lambda value: isinstance(value, bool),
    dict[str, float]: lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    tuple[int, ...]: lambda value: isinstance(value, tuple) and all(map(_is_whole, value)),
}


# What the small fields of each body must be: what comes over the network is not trusted.
_CHECKS_OF: dict[str, tuple[tuple[str, Check], ...]] = {
    body.kind: tuple((name, _CHECKS[hint]) for name, hint in get_type_hints(body).items() if hint in _CHECKS)
    for body in (TrainRequest, TrainReply, EvaluateRequest, EvaluateReply, HelloRequest, HelloReply)
}


def serialised_bytes(record: RecordDict) -> int:
    """Size of ``record`` on the wire, in bytes (protobuf encoding, as Flower sends it).

    The sizes of array contents are added up from the encoding rules, so that nothing large is copied;
    the result is that of ``recorddict_to_proto(record).ByteSize()``.
    """
    from flwr.common.serde import recorddict_to_proto

    total = 0
    for key, value in record.items():
        if not isinstance(value, ArrayRecord):
            total += recorddict_to_proto(RecordDict({key: value})).ByteSize()
            continue
        content = 0
        for name, array in value.items():
            size = _header_bytes(array.dtype, array.shape, array.stype) + (
                _field_bytes(len(array.data)) if array.data else 0
            )
            content += _field_bytes(_text_bytes(name) + _field_bytes(size))
        total += _field_bytes(_text_bytes(key) + _field_bytes(content))
    return int(total)


@lru_cache(maxsize=4096)
def _header_bytes(dtype: str, shape: tuple[int, ...], stype: str) -> int:
    from flwr.proto.recorddict_pb2 import Array as ProtoArray

    return int(ProtoArray(dtype=dtype, shape=shape, stype=stype).ByteSize())


def _field_bytes(length: int) -> int:
    """Bytes of a protobuf field with ``length`` bytes of content: tag (field numbers below 16), length, content."""
    return 1 + max(1, (length.bit_length() + 6) // 7) + length


def _text_bytes(text: str) -> int:
    """Bytes of a protobuf text field; an empty text is not sent at all."""
    return _field_bytes(len(text.encode())) if text else 0


def context_arrays(contexts: Mapping[int, npt.NDArray[Any]]) -> Arrays:
    """Key dispatched prompt contexts by their pool index."""
    return {str(index): _float32(array) for index, array in contexts.items()}


def _float32(array: npt.NDArray[Any]) -> FloatArray:
    return np.asarray(array, dtype=np.float32, order="C")


def _values(array: Array) -> FloatArray:
    """Return an array's values as float32, in memory of their own.

    numpy parses the header of each ``.npy`` text with Python's compiler, which takes longer than
    everything else about a small array; the form that every float32 sender writes is read directly.
    """
    data = array.data
    start = 10 + int.from_bytes(data[8:10], "little")
    if data[:8] == b"\x93NUMPY\x01\x00" and data[10:start].startswith(_FLOAT32_HEADER):
        return np.frombuffer(data, dtype="<f4", offset=start).reshape(array.shape).copy()
    return _float32(array.numpy())


_FLOAT32_HEADER = b"{'descr': '<f4', 'fortran_order': False, "


def _wire_array(array: npt.NDArray[Any], wire: WireArrays) -> Array:
    known = wire.get(id(array))
    if known is None:
        values = _float32(array)
        data = _npy_header(values.shape) + values.tobytes()
        known = wire[id(array)] = (array, Array("float32", values.shape, "numpy.ndarray", data))
    return known[1]


@lru_cache(maxsize=4096)
def _npy_header(shape: tuple[int, ...]) -> bytes:
    """Return what ``numpy.save`` writes before the values of a float32 array in row order."""
    text = BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return text.getvalue()
