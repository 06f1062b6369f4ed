"""Messages of the admin service as plain values for JSON: numbers stay numbers, times are ISO 8601 in UTC.

(protobuf's own JSON turns 64-bit numbers into text.) Fields ``*_json`` hold JSON and are unpacked under the name
without the ending.
"""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def as_json(message: Message) -> dict[str, Any]:
    """Return every field of ``message``; what is not set is None where absence can be told, else its default."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            if field.containing_oneof is None or field.containing_oneof.name.startswith("_"):
                result[field.name] = None
            continue
        if field.name.endswith("_json") and isinstance(value, str):
            result[field.name.removesuffix("_json")] = _unpacked(value)
        elif field.is_repeated:
            entry = field.message_type
            if entry is not None and entry.GetOptions().map_entry:
                result[field.name] = {str(key): _value(item) for key, item in value.items()}
            else:
                result[field.name] = [_value(item) for item in value]
        else:
            result[field.name] = _value(value)
    return result


def timestamp(moment: datetime | None) -> Timestamp | None:
    """Return a moment as protobuf has it."""
    if moment is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(moment.astimezone(UTC))
    return stamp


def _unpacked(text: str) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text  # what a caller sent may be anything


def _value(value: Any) -> Any:
    if isinstance(value, Timestamp):
        return value.ToDatetime(UTC).isoformat(timespec="seconds")
    if isinstance(value, Message):
        return as_json(value)
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
