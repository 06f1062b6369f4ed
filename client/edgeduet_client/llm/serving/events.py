"""What the worker tells whoever asked, in this order: ``Started``, the answers one after the other, ``Done``.

``Failed`` may come instead of any of them and is then the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeduet_shared.errors import EdgeDuetError

if TYPE_CHECKING:
    import numpy as np

    from edgeduet_client.llm.generate import Finished, TextPiece


@dataclass(frozen=True)
class Started:
    """The turn of the request has come, after ``waited_s`` seconds."""

    waited_s: float


@dataclass(frozen=True)
class Piece:
    """A piece of answer number ``choice``."""

    choice: int
    piece: TextPiece


@dataclass(frozen=True)
class ChoiceDone:
    """Answer number ``choice`` is complete."""

    choice: int
    finished: Finished


@dataclass(frozen=True)
class Embedded:
    """The vectors of all texts, shape (H,) each, of length one; ``tokens`` of all texts together."""

    vectors: list[np.ndarray]
    tokens: int


@dataclass(frozen=True)
class Done:
    """Nothing more will come."""


@dataclass(frozen=True)
class Failed:
    """The request was refused or broke off; nothing more will come."""

    error: EdgeDuetError


Event = Started | Piece | ChoiceDone | Embedded | Done | Failed
