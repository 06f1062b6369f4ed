"""The committed text of one request: what drafters and selectors may learn from, and nothing else.

Rejected drafts never get in here. Of the last positions it also keeps what the target said there, so that any
drafter can be scored at a past place without another call of the target.

Axes: N tokens committed at once, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.distribution import Distribution

DEFAULT_WINDOW = 256
"""Positions whose target distribution and hidden state are kept, as long as memory allows."""

MOST_ENTRIES = 8_000_000
"""Probabilities kept in all: 64 MB. Truncated distributions never get there; without truncation a vocabulary of 262
thousand leaves 30 positions."""


class CommittedText:
    """Prompt and answer so far, with the target's view of the latest positions.

    Args:
        prompt: at least one id.
        window: how many of the last answer positions keep their distribution and hidden state.

    Attributes:
        tokens: prompt and answer; read it, do not change it.
        prompt_length: how many of them are the prompt.
    """

    def __init__(self, prompt: Sequence[int], *, window: int = DEFAULT_WINDOW) -> None:
        if window < 1:
            raise ValueError(f"a window of {window} positions keeps nothing")
        self.tokens: list[int] = list(prompt)
        self.prompt_length = len(self.tokens)
        self.window = window
        self._targets: list[Distribution | None] = [None] * window
        self._entries = 0
        self._first = self.prompt_length
        self._hidden: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def first_kept(self) -> int:
        """The first position :meth:`target` answers for; ``len(self)`` while there is no answer."""
        return self._first

    @property
    def has_hidden(self) -> bool:
        """Whether hidden states are kept; settled by the first :meth:`extend`."""
        return self._hidden is not None

    def extend(
        self, tokens: Sequence[int], targets: Sequence[Distribution], hidden_NH: NDArray[np.float32] | None = None
    ) -> None:
        """Take up N committed tokens of the answer.

        Args:
            tokens: the ids.
            targets: what each was drawn from, the request's sampling settings included.
            hidden_NH: the target's last hidden state at the position that predicted each; copied. ``None`` where
                nothing needs it.
        """
        if len(targets) != len(tokens) or (hidden_NH is not None and len(hidden_NH) != len(tokens)):
            raise ValueError(f"{len(tokens)} tokens need as many distributions and hidden states")
        for place, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            slot = self._make_room(len(target.ids))
            self._targets[slot] = target
            if hidden_NH is not None:
                if self._hidden is None:
                    self._hidden = np.zeros((self.window, hidden_NH.shape[1]), np.float32)
                self._hidden[slot] = hidden_NH[place]
            self.tokens.append(token)

    def _make_room(self, entries: int) -> int:
        """Forget the oldest positions where the next does not fit; return its slot."""
        self._entries += entries
        while self._first < len(self.tokens) and (
            len(self.tokens) - self._first >= self.window or self._entries > MOST_ENTRIES
        ):
            slot = self._first % self.window
            forgotten = self._targets[slot]
            self._entries -= 0 if forgotten is None else len(forgotten.ids)
            self._targets[slot] = None
            self._first += 1
        return len(self.tokens) % self.window

    def target(self, position: int) -> Distribution:
        """Return what ``tokens[position]`` was drawn from.

        Raises:
            LookupError: the position is in the prompt, not there yet, or no longer kept.
        """
        self._check_kept(position)
        kept = self._targets[position % self.window]
        if kept is None:
            raise LookupError(f"nothing is kept of position {position}")
        return kept

    def hidden(self, position: int) -> NDArray[np.float32]:
        """Return the target's hidden state (H,) at the position that predicted ``tokens[position]``: a view.

        Raises:
            LookupError: as :meth:`target`, or hidden states are not kept in this request.
        """
        self._check_kept(position)
        if self._hidden is None:
            raise LookupError("hidden states are not kept in this request")
        return self._hidden[position % self.window]

    def _check_kept(self, position: int) -> None:
        if not self.first_kept <= position < len(self.tokens):
            raise LookupError(
                f"position {position} is not kept; positions {self.first_kept} to {len(self.tokens) - 1} are"
            )
