"""What a drafter is: anything that proposes tokens to follow the committed text.

A drafter can never make the answer wrong, only slow: the verifier compares every proposal with the target. In
return a drafter must say truthfully what it drew its tokens from (:class:`~.draft.Draft`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.text import CommittedText

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens; used by one request at a time.

    Attributes:
        name: as configured; unique among the drafters of a model.
        kind: what sort of drafter it is; the name its factory is registered under.
        needs_hidden: whether it reads ``text.hidden``; the target then returns hidden states in every step.
        longest: the longest draft it can make, in tokens.
    """

    name: str
    kind: str
    needs_hidden: bool
    longest: int

    def start(self, text: CommittedText) -> None:
        """Begin a new request, of which ``text`` holds the prompt; forget the old one."""

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose what follows all of ``text.tokens``: at most ``length`` tokens, perhaps fewer or none.

        Between two calls the text has only grown, unless :meth:`start` came between them; by how much, and whether
        this drafter's proposals were in use, differs. An early stop is decided before the token it affects is drawn.

        Args:
            text: not changed.
            length: 1 <= length <= ``longest``.
            rng: draws that are taken from here are shared with nothing that decides about acceptance.
        """

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return what it would have proposed at each past start, ``depth`` tokens deep.

        A drafter that draws is teacher forced along the committed tokens.

        Args:
            text: not changed; the answer's positions ``start`` to ``start + depth - 1`` exist and are kept.
            starts: ascending; each the number of tokens that were there.
            depth: 1 <= depth <= ``longest``.
        """

    def memory_bytes(self) -> int:
        """Return how much memory it holds, weights included."""


class DrafterFactory(Protocol):
    """Opens drafters of one kind; registered under the entry-point group ``edgeduet.drafters``.

    Attributes:
        kind: what configurations call it.
    """

    kind: str

    def open(self, name: str, options: Mapping[str, Any], model: LocalModel) -> Drafter:
        """Return a new drafter for ``model``.

        Args:
            name: as configured; the drafter's ``name``.
            options: what the configuration says about it; unknown keys are refused.
            model: the target: its vocabulary, tokenizer, folder and session.

        Raises:
            ModelError: the drafter does not exist, is damaged, or belongs to another model.
            RequestError: an option is wrong.
        """
