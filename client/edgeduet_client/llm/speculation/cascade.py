"""Several drafters as one: the first of them that proposes anything is the one that is heard.

Lookup is nearly free and right where a text repeats itself, but finds something at every fifth place only; a small
network has always something to say. Played alone, each leaves the other's places to plain steps. In a row, the network
speaks where the lookup is silent.

Which part is heard depends on the committed text and on laws, never on a token that is being drawn, so the draft stays
one that can be verified exactly. The parts are drafters that are open already; a cascade holds nothing of its own.

A part behind the first is not offered to a selector by itself: where those before it are silent the cascade says the
same, and where they speak they are right more often than it. One choice less is evidence that says more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.drafter_options import checked_options
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.errors import nearest

KIND = "cascade"
SEPARATOR = "+"
"""Between the parts, in options and in the name of a cascade that nobody named."""


class CascadeDrafter:
    """Proposes what the first of its parts proposes that proposes anything.

    Args:
        name: as configured.
        parts: two or more, in the order they are asked; whoever opened them starts them.
        alone: whether parts behind the first are choices of their own as well.

    Attributes:
        first: name of the part that is asked first.
        stands_for: names of parts that are no choices of their own.
    """

    kind = KIND

    def __init__(self, name: str, parts: Sequence[Drafter], *, alone: bool = False) -> None:
        self.name = name
        self._parts = tuple(parts)
        self.first = parts[0].name
        self.stands_for = frozenset() if alone else frozenset(part.name for part in parts[1:])
        self.needs_hidden = any(part.needs_hidden for part in parts)
        self.longest = max(part.longest for part in parts)

    def start(self, text: CommittedText) -> None:
        """The parts are started as the drafters they are."""

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose up to ``length`` tokens, all of one part."""
        draft = Draft()
        for part in self._parts:
            draft = part.draft(text, min(length, part.longest), rng)
            if len(draft):
                return replace(draft, part=part.name)
        return draft

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return, for each start, what the first part says that says anything there."""
        found: dict[int, Redraft] = {}
        silent = list(starts)
        for part in self._parts:
            if not silent:
                break
            asked = part.redraft(text, silent, min(depth, part.longest))
            found |= {redraft.start: redraft for redraft in asked}
            silent = [redraft.start for redraft in asked if not (redraft.tokens or redraft.laws)]
        return [found[start] for start in starts]

    def memory_bytes(self) -> int:
        """Return 0: all it has belongs to its parts."""
        return 0


class CascadeOptions(BaseModel):
    """Options of the kind ``cascade``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parts: str = Field(
        min_length=1, description="names of other drafters, in the order they are asked: ngram+recurrent"
    )
    alone: bool = Field(False, description="parts behind the first are choices of their own as well")


def open_cascade(name: str, options: Mapping[str, Any], drafters: Mapping[str, Drafter]) -> CascadeDrafter:
    """Return the cascade that ``options`` describe.

    Args:
        name: as configured.
        options: see :class:`CascadeOptions`.
        drafters: those that are open, by name.

    Raises:
        RequestError: a part that is not among them, named twice, or alone.
    """
    chosen = checked_options(CascadeOptions, name, options)
    names = chosen.parts.split(SEPARATOR)
    place = f"drafters.{name}.parts"
    for part in names:
        if part not in drafters:
            raise RequestError(
                f"drafter {name}: no drafter before it is called {part!r}{nearest(part, drafters)}", place
            )
    if len(set(names)) != len(names) or len(names) < 2:
        raise RequestError(
            f"drafter {name}: name two or more different parts, such as ngram{SEPARATOR}recurrent", place
        )
    return CascadeDrafter(name, [drafters[part] for part in names], alone=chosen.alone)


def first_parts(drafters: Mapping[str, Drafter]) -> dict[str, str]:
    """Return, by cascade, the name of its first part, where that is a choice too."""
    offered = choices(drafters)
    cascades = {name: one for name, one in offered.items() if isinstance(one, CascadeDrafter)}
    return {name: one.first for name, one in cascades.items() if one.first in offered}


def choices(drafters: Mapping[str, Drafter]) -> dict[str, Drafter]:
    """Return the drafters a selector may pick: all but those a cascade stands for."""
    covered = {name for one in drafters.values() if isinstance(one, CascadeDrafter) for name in one.stands_for}
    return {name: drafter for name, drafter in drafters.items() if name not in covered}
