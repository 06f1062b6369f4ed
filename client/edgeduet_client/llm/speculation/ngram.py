"""Drafting by lookup: the tokens that followed the last occurrence of the last few tokens.

For n from the largest down to the smallest: if the last n tokens occur earlier, propose what followed their most
recent occurrence. A continuation that runs into the end of the text is short; the lookup then goes on behind the
proposed tokens (chained), until the draft is long enough or nothing is found. Looked into, in this order for each
n: the request's own text, answers of earlier requests, a corpus.

Only committed tokens are indexed, each in O(1); a past place is looked up as it was then, so counterfactual drafts
are exact and free of model calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.text import CommittedText

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel

Gram = tuple[int, ...]


class GrowingIndex:
    """Where each n-gram of a growing text was followed by what.

    Args:
        least, most: lengths of the n-grams.

    Attributes:
        tokens: the indexed text.
    """

    def __init__(self, least: int, most: int) -> None:
        self.tokens: list[int] = []
        self._sizes = range(least, most + 1)
        self._followed: dict[Gram, list[int]] = {}

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ``tokens``; each costs one entry per length of n-gram."""
        held, followed = self.tokens, self._followed
        for token in tokens:
            place = len(held)
            for size in self._sizes:
                if size > place:
                    break
                gram = tuple(held[place - size :])
                places = followed.get(gram)
                if places is None:
                    followed[gram] = [place]
                else:
                    places.append(place)
            held.append(token)

    def find(self, gram: Gram, end: int) -> int | None:
        """Return where the text went on after the last ``gram`` that was followed by something before ``end``."""
        places = self._followed.get(gram)
        if places is None:
            return None
        if places[-1] < end:
            return places[-1]
        before = bisect_left(places, end)
        return places[before - 1] if before else None


class FixedIndex:
    """The same for a long text that does not change: sorted arrays instead of a dictionary (12 bytes an n-gram)."""

    def __init__(self, tokens: NDArray[np.int32], least: int, most: int) -> None:
        self.tokens = tokens
        self._last = {size: _last_places(tokens, size) for size in range(least, most + 1)}

    def find(self, gram: Gram) -> int | None:
        """Return where the text went on after the last ``gram``."""
        keys, places = self._last[len(gram)]
        key = _keys(np.array(gram, np.int32), len(gram))[0]
        found = int(keys.searchsorted(key))
        if found == len(keys) or keys[found] != key:
            return None
        place = int(places[found])
        # Keys are hashes.
        return place if tuple(self.tokens[place - len(gram) : place].tolist()) == gram else None

    def memory_bytes(self) -> int:
        """Return the bytes of text and arrays."""
        return self.tokens.nbytes + sum(keys.nbytes + places.nbytes for keys, places in self._last.values())


class NgramDrafter:
    """Proposes what followed the last occurrence of the last tokens; every proposal is certain.

    Args:
        name: as configured.
        eos_ids: tokens that end a text: a proposal ends with the first of them.
        longest: tokens of a draft at most.
        least, most: lengths of the n-grams looked up.
        remember: tokens of earlier answers to look into as well; 0: none, so that no request can be felt by another.
        corpus: ids of a further text, or ``None``.
    """

    kind = "ngram"
    needs_hidden = False

    def __init__(
        self,
        name: str = "ngram",
        *,
        eos_ids: Iterable[int] = (),
        longest: int = 16,
        least: int = 2,
        most: int = 4,
        remember: int = 0,
        corpus: Sequence[int] | None = None,
    ) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"n-grams of {least} to {most} tokens")
        self.name = name
        self.longest = longest
        self._sizes = range(most, least - 1, -1)
        self._bounds = (least, most)
        self._eos_ids = frozenset(eos_ids)
        self._remember = remember
        self._own = GrowingIndex(*self._bounds)
        self._prompt_length = 0
        self._earlier = GrowingIndex(*self._bounds)
        self._corpus = None if corpus is None else FixedIndex(np.array(corpus, np.int32), *self._bounds)

    def start(self, text: CommittedText) -> None:
        """Take up the prompt; what was answered before it becomes an earlier answer."""
        if self._remember:
            self._keep(self._own.tokens[self._prompt_length :])
        self._own = GrowingIndex(*self._bounds)
        self._own.extend(text.tokens)
        self._prompt_length = text.prompt_length

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose up to ``length`` tokens; none where the last tokens are new."""
        self._follow(text)
        return Draft.certain(self._propose(len(text.tokens), length))

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return what it would have proposed at each start."""
        self._follow(text)
        return [Redraft(start, tokens=self._propose(start, depth)) for start in starts]

    def memory_bytes(self) -> int:
        """Return about how much the indices hold: a dictionary entry with its tuple and list takes some 200 bytes."""
        entries = sum(len(index.tokens) for index in (self._own, self._earlier)) * len(self._sizes)
        return 200 * entries + (self._corpus.memory_bytes() if self._corpus is not None else 0)

    def _follow(self, text: CommittedText) -> None:
        self._own.extend(text.tokens[len(self._own.tokens) :])

    def _keep(self, answer: list[int]) -> None:
        self._earlier.extend(answer)
        if len(self._earlier.tokens) > 2 * self._remember:
            latest = self._earlier.tokens[-self._remember :]
            self._earlier = GrowingIndex(*self._bounds)
            self._earlier.extend(latest)

    def _propose(self, end: int, length: int) -> tuple[int, ...]:
        """Return up to ``length`` tokens to follow the first ``end`` tokens of the text."""
        tail = self._own.tokens[max(0, end - self._bounds[1]) : end]
        proposed: list[int] = []
        while len(proposed) < length:
            found = self._continuation(tail, end, length - len(proposed))
            for token in found:
                proposed.append(token)
                if token in self._eos_ids:
                    return tuple(proposed)
            if not found:
                break
            tail = (tail + found)[-self._bounds[1] :]
        return tuple(proposed)

    def _continuation(self, tail: list[int], end: int, count: int) -> list[int]:
        """Return at most ``count`` tokens that once followed the end of ``tail``."""
        for size in self._sizes:
            if size > len(tail):
                continue
            gram = tuple(tail[-size:])
            if (place := self._own.find(gram, end)) is not None:
                return self._own.tokens[place : min(place + count, end)]
            if (place := self._earlier.find(gram, len(self._earlier.tokens))) is not None:
                return self._earlier.tokens[place : place + count]
            if self._corpus is not None and (place := self._corpus.find(gram)) is not None:
                return self._corpus.tokens[place : place + count].tolist()
        return []


def _keys(tokens: NDArray[np.int32], size: int) -> NDArray[np.uint64]:
    """Return a hash of every n-gram of ``tokens``, in order."""
    wide = tokens.astype(np.uint64)
    count = len(tokens) - size + 1
    keys = np.zeros(max(count, 0), np.uint64)
    for place in range(size):
        keys = keys * np.uint64(0x9E3779B97F4A7C15) + wide[place : place + count] + np.uint64(1)
    return keys


def _last_places(tokens: NDArray[np.int32], size: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return the n-grams that something follows, as ascending hashes, and where their last occurrence went on."""
    keys = _keys(tokens[:-1], size)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    last = np.append(ordered[1:] != ordered[:-1], True) if len(ordered) else np.zeros(0, np.bool_)
    return ordered[last], (order[last] + size).astype(np.int32)


class NgramOptions(BaseModel):
    """Options of the kind ``ngram``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    longest: int = Field(16, ge=1, le=64, description="tokens of a draft at most")
    least: int = Field(2, ge=1, le=8, description="shortest n-gram looked up")
    most: int = Field(4, ge=1, le=8, description="longest n-gram looked up")
    remember: int = Field(0, ge=0, le=1_000_000, description="tokens of earlier answers to look into as well")
    corpus: Path | None = Field(None, description="UTF-8 text to look into as well")


class NgramFactory:
    """Opens drafters of the kind ``ngram``."""

    kind = "ngram"

    def open(self, name: str, options: Mapping[str, Any], model: LocalModel) -> NgramDrafter:
        """Return a drafter for ``model``.

        Raises:
            RequestError: an option is wrong, or the corpus cannot be read.
        """
        try:
            chosen = NgramOptions.model_validate(dict(options))
            if chosen.least > chosen.most:
                raise ValueError(f"least={chosen.least} is more than most={chosen.most}")
            text = None if chosen.corpus is None else chosen.corpus.read_text("utf-8")
        except ValidationError as error:
            fault = error.errors()[0]
            field = ".".join(map(str, fault["loc"]))
            raise RequestError(f"drafter {name}: {field}: {fault['msg']}", f"drafters.{name}.{field}") from None
        except (OSError, ValueError) as error:
            raise RequestError(f"drafter {name}: {error}", f"drafters.{name}") from None
        return NgramDrafter(
            name,
            eos_ids=model.manifest.eos_ids,
            longest=chosen.longest,
            least=chosen.least,
            most=chosen.most,
            remember=chosen.remember,
            corpus=None if text is None else model.tokenizer.encode(text),
        )


FACTORY = NgramFactory()
