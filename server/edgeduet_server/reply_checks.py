"""What a training reply must satisfy before it may touch the server's state.

One odd client must not spoil a round: Flower's own averaging ends the run when a reply has other
names, and averages NaN into the model when a value is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edgeduet_shared.messages import TrainReply, TrainRequest


@dataclass(frozen=True)
class ExpectedReply:
    """Shapes of what a request asks for: the uploaded parameters by name, and the digest if any.

    ``update`` is None where the server learns names and shapes from the replies: any finite arrays will do.
    """

    update: Mapping[str, tuple[int, ...]] | None = field(default_factory=dict)
    digest: tuple[int, ...] | None = None


def rejection(reply: TrainReply, client: int, request: TrainRequest, expected: ExpectedReply) -> tuple[str, str] | None:
    """Return (reason, what is wrong) where ``reply`` to ``request`` cannot be used, else None.

    Reasons: ``mismatched`` (another client, stage or round), ``zero-examples``, ``unknown-name``,
    ``missing-name``, ``wrong-shape``, ``non-finite``.
    """
    if (reply.client, reply.stage, reply.round) != (client, request.stage, request.round):
        return "mismatched", f"the reply is of client {reply.client}, stage {reply.stage}, round {reply.round}"
    if reply.examples <= 0:
        return "zero-examples", "the client has no training example for this task"
    digest = {"digest": expected.digest} if expected.digest is not None else {}
    update = {name: array.shape for name, array in reply.update.items()} if expected.update is None else expected.update
    if expected.update is None and not update:
        return "missing-name", "the update is empty"
    for what, arrays, shapes in (("update", reply.update, update), ("digest", reply.digest, digest)):
        for name, array in arrays.items():
            if name not in shapes:
                return "unknown-name", f"{what} '{name}' was not asked for"
            if array.shape != tuple(shapes[name]):
                return "wrong-shape", f"{what} '{name}' has shape {array.shape}, expected {tuple(shapes[name])}"
            if not np.isfinite(array).all():
                return "non-finite", f"{what} '{name}' holds NaN or infinity"
        missing = sorted(set(shapes) - set(arrays))
        if missing:
            return "missing-name", f"{what} '{missing[0]}' is missing ({len(missing)} in all)"
    for name, value in (("loss", reply.loss), ("accuracy", reply.accuracy)):
        if not math.isfinite(value):
            return "non-finite", f"{name} is {value}"
    for index, mass in reply.usage.items():
        if index not in request.contexts:
            return "unknown-name", f"usage names prompt {index}, which was not dispatched"
        if not (math.isfinite(mass) and mass >= 0):
            return "non-finite", f"usage of prompt {index} is {mass}"
    if reply.usage and set(reply.usage) != set(request.contexts):
        return "missing-name", "usage does not name every dispatched prompt"
    return None
