"""The size of a message is that of its encoding, whatever is inside."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.errors import MessageError
from edgeduet_shared.messages import (
    EvaluateReply,
    EvaluateRequest,
    HelloReply,
    HelloRequest,
    TrainReply,
    TrainRequest,
    WireArrays,
    decode,
    encode,
    serialised_bytes,
)
from edgeduet_shared.plan import LocalPlan, Parts

_ARRAYS = st.dictionaries(
    st.text(max_size=200),
    st.tuples(st.lists(st.integers(0, 9), max_size=4), st.sampled_from([np.float32, np.int64, np.float16])),
    max_size=4,
)


@given(st.dictionaries(st.text(max_size=300), _ARRAYS, max_size=3), st.text(max_size=300))
def test_size_equals_the_protobuf_encoding(arrays: dict, text: str) -> None:
    record = RecordDict(
        {
            key: ArrayRecord({name: Array(np.zeros(shape, kind)) for name, (shape, kind) in content.items()})
            for key, content in arrays.items()
        }
    )
    record[text + "meta"] = ConfigRecord({"number": 3, "text": text})
    assert serialised_bytes(record) == recorddict_to_proto(record).ByteSize()


def test_a_large_array_is_measured_exactly() -> None:
    record = RecordDict({"a": ArrayRecord({"x": Array(np.zeros((1000, 3000), np.float32))})})
    assert serialised_bytes(record) == recorddict_to_proto(record).ByteSize()


def test_size_does_not_depend_on_measured_seconds() -> None:
    reply = TrainReply(1, 0, 0, 3, 0.5, 0.5, 3, 0.1)
    sizes = {serialised_bytes(encode(dataclasses.replace(reply, seconds=s))) for s in (0.0, 0.1, 1 / 3, 1e9)}
    assert len(sizes) == 1


def test_a_broadcast_array_is_encoded_once() -> None:
    wire: WireArrays = {}
    model = {"w": np.ones(5, np.float32)}
    plan = LocalPlan(parts=Parts())
    records = [encode(TrainRequest(0, round, plan, shared=model), wire) for round in range(2)]
    first, second = (record.array_records["arrays.shared"]["w"] for record in records)
    assert first.data is second.data


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(["C", "F"]), st.sampled_from([np.float32, np.float64]))
def test_arrays_arrive_as_they_were_sent(shape: list[int], order: str, kind: type) -> None:
    sent = np.asarray(np.random.default_rng(0).normal(size=shape), dtype=kind, order=order)
    record = encode(TrainRequest(0, 0, LocalPlan(parts=Parts()), shared={"w": sent}))
    received = decode(record, TrainRequest).shared["w"]
    assert received.dtype == np.float32
    assert received.shape == tuple(shape)
    assert received.tobytes() == np.asarray(sent, np.float32, order="C").tobytes()
    assert received.flags.writeable


@given(st.lists(st.integers(0, 4), max_size=4))
def test_arrays_are_encoded_as_flower_encodes_them(shape: list[int]) -> None:
    values = np.asarray(np.random.default_rng(0).normal(size=shape), np.float32)
    record = encode(TrainRequest(0, 0, LocalPlan(parts=Parts()), shared={"w": values}))
    assert record.array_records["arrays.shared"]["w"] == Array(values)


def test_an_array_that_is_not_what_it_says_is_an_error() -> None:
    record = encode(TrainRequest(0, 0, LocalPlan(parts=Parts()), shared={"w": np.zeros(6, np.float32)}))
    array = record.array_records["arrays.shared"]["w"]
    for data, shape in ((array.data, (7,)), (array.data[:-1], (6,)), (b"", (6,)), (b"\x93NUMPY", (6,))):
        record["arrays.shared"] = ArrayRecord({"w": Array(array.dtype, shape, array.stype, data)})
        with pytest.raises(MessageError, match="malformed 'train' message"):
            decode(record, TrainRequest)
    record["arrays.shared"] = ConfigRecord({"w": 1})
    with pytest.raises(MessageError, match=r"'arrays\.shared' holds no arrays"):
        decode(record, TrainRequest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("examples", "many"),
        ("examples", True),
        ("client", 1.0),
        ("loss", None),
        ("usage", {"3": "much"}),
        ("usage", [1.0]),
        ("steps", [1, 2]),
    ],
)
def test_a_field_of_another_type_is_an_error(field: str, value: object) -> None:
    record = encode(TrainReply(1, 0, 0, 3, 0.5, 0.5, 3, 0.1))
    meta = record.config_records["meta"]
    record["meta"] = ConfigRecord({**meta, "fields": json.dumps({**json.loads(str(meta["fields"])), field: value})})
    with pytest.raises(MessageError, match=f"malformed 'train-reply' message: '{field}' is"):
        decode(record, TrainReply)


def test_every_body_comes_back_as_it_was_sent() -> None:
    plan = LocalPlan(parts=Parts(prompt=True), train=("prompt",), mix=0.25)
    bodies = [
        HelloRequest(),
        HelloReply(7),
        TrainRequest(1, 2, plan),
        TrainReply(1, 0, 0, 3, 0.5, 0.5, 3, 0.1, usage={"3": 1.0}),
        EvaluateRequest(1, plan, common=False),
        EvaluateReply(1, 0, (1,), (2,), (3,), (-1,), (0,), 4, 5, 0.5),
        EvaluateReply(1, 0, (1,), (2,), (3,), (-1,), (0,), figures={"code/own/1": 0.25}),
    ]
    for body in bodies:
        assert decode(encode(body), type(body)) == body


@pytest.mark.parametrize("changes", [{"seconds": math.nan}, {"figures": {"code/own/1": math.inf}}])
def test_numbers_that_cannot_be_written_down_are_refused(changes: dict[str, Any]):
    reply = dataclasses.replace(EvaluateReply(1, 0, (1,), (2,), (3,), (-1,), (0,)), **changes)
    with pytest.raises(MessageError, match="malformed"):
        decode(encode(reply), EvaluateReply)
