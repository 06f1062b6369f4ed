"""What methods that train drafters have in common: the server knows nothing of a drafter but names and shapes.

A drafter's parameters are named arrays. What clients begin with follows from scenario and seed, so that the first
round sends nothing down; names and shapes are those that most replies of the first usable round have. From then on
every reply is checked against them. A drafter of another kind needs no change on the server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgeduet_server.reply_checks import ExpectedReply
from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.messages import TrainReply, TrainRequest
from edgeduet_shared.plan import Group, Parts

log = logging.getLogger("edgeduet.server")

DRAFTER: tuple[Group, ...] = ("drafter",)

Layout = tuple[tuple[str, tuple[int, ...]], ...]


class DrafterStrategy(Strategy):
    """A method for scenarios with a ``drafter.target``."""

    learns = "drafter"

    @property
    def parts(self) -> Parts:
        """No part of a classifier."""
        return Parts()

    @property
    def owns(self) -> tuple[Group, ...]:
        """The averaged drafter."""
        return DRAFTER

    def initial_state(self, seed: int) -> ServerState:
        """Nothing yet: clients begin with the values that scenario and seed give."""
        return ServerState()

    def expect(self, state: ServerState, request: TrainRequest) -> ExpectedReply:
        """Return the shapes of a right reply, as far as they are known."""
        if not request.plan.upload:
            return ExpectedReply()
        if not state.shared:
            return ExpectedReply(update=None)
        return ExpectedReply(update={name: value.shape for name, value in state.shared.items()})


def settle_layout(state: ServerState, replies: Sequence[TrainReply]) -> tuple[ServerState, list[TrainReply]]:
    """Return the state with names and shapes, and the replies that have them; once known they do not change.

    Unknown, they are those of most replies, of the lowest client among equals. Other replies are left out.
    """
    if state.shared:
        return state, list(replies)
    layouts = [layout_of(reply) for reply in replies]
    settled = Counter(layouts).most_common(1)[0][0]
    kept = [reply for reply, layout in zip(replies, layouts, strict=True) if layout == settled]
    if len(kept) < len(replies):
        odd = [reply.client for reply, layout in zip(replies, layouts, strict=True) if layout != settled]
        log.warning("clients %s sent a drafter of another shape than most; it is left out", odd)
    return replace(state, shared={name: np.zeros(shape, np.float32) for name, shape in settled}), kept


def layout_of(reply: TrainReply) -> Layout:
    """Return names and shapes of what a client sent, sorted by name."""
    return tuple(sorted((name, value.shape) for name, value in reply.update.items()))
