"""From tokens to text as it comes: whole characters only, and nothing of a stop string.

A token is bytes. Bytes become text when the character they belong to is complete; text becomes visible when it can
no longer be the beginning of a stop string. Of several stop strings, the one that is complete first wins; of those
complete at the same character, the longest. So the result does not depend on how the text was split into tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """Text that has become visible.

    Attributes:
        text: the text, perhaps empty.
        tokens: how many tokens, in the order they were pushed, become visible with it. A token does with its
            first character; one without text, with what follows it.
    """

    text: str
    tokens: int


class TextStream:
    """Turns the bytes of pushed tokens into visible text, up to the first stop string.

    Args:
        stops: stop strings, none of them empty.
        drops_leading_space: leave out a space at the very beginning, as SentencePiece does at the beginning of a
            text.
    """

    def __init__(self, stops: Sequence[str] = (), *, drops_leading_space: bool = False) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self.stopped = False
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_leading_space = drops_leading_space
        self._held = ""
        self._visible = 0
        # Where the text of each token that is not visible yet begins, in characters.
        self._starts: deque[int] = deque()

    def push(self, piece: bytes) -> Release:
        """Take the bytes of the next token; return what became visible.

        Raises:
            ValueError: the text had ended at a stop string.
        """
        if self.stopped:
            raise ValueError("the text has ended at a stop string; nothing comes after it")
        self._starts.append(self._visible + len(self._held))
        self._hold(self._decoder.decode(piece))
        if not self._stops:
            return self._release(len(self._held))
        found = self._first_stop()
        if found is None:
            return self._release(len(self._held) - self._possible_stop())
        return self._end(found)

    def finish(self) -> Release:
        """End the text; return what was held back. Bytes of an incomplete character show as U+FFFD."""
        if self.stopped:
            return Release("", 0)
        self._hold(self._decoder.decode(b"", final=True))
        found = self._first_stop()
        if found is not None:
            return self._end(found)
        release = self._release(len(self._held))
        without_text = len(self._starts)
        self._starts.clear()
        return Release(release.text, release.tokens + without_text)

    def _hold(self, text: str) -> None:
        if text and self._drops_leading_space:
            self._drops_leading_space = False
            text = text.removeprefix(" ")
        self._held += text

    def _end(self, cut: int) -> Release:
        self.stopped = True
        return self._release(cut)

    def _release(self, length: int) -> Release:
        text, self._held = self._held[:length], self._held[length:]
        self._visible += length
        tokens = 0
        while self._starts and self._starts[0] < self._visible:
            self._starts.popleft()
            tokens += 1
        return Release(text, tokens)

    def _first_stop(self) -> int | None:
        """Return where in the held text the stop string that is complete first begins."""
        found = [(self._held.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in self._held]
        if not found:
            return None
        end, negative_length = min(found)
        return end + negative_length

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the held text that a stop string begins with."""
        return max(_overlap(self._held, stop) for stop in self._stops)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of ``stop`` that ``text`` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
