"""The size of a message is that of its encoding, whatever is inside."""

from __future__ import annotations

import dataclasses

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.messages import TrainReply, TrainRequest, WireArrays, encode, serialised_bytes
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
