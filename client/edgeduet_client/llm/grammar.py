"""Constrained answers: JSON of a schema, a regular expression or a Lark grammar, through llguidance.

A :class:`GrammarState` is a place in a grammar and never changes: going on makes a copy of the matcher (a few
microseconds), so a draft that is rejected leaves nothing behind. End-of-text is allowed exactly where the answer may
end; where it must end, it is the only token left.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def grammar_tokenizer(tokenizer_json: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer as llguidance sees it; takes up to a second, so once per model.

    Raises:
        ModelError: no end-of-text token, or a tokenizer llguidance cannot read.
    """
    from llguidance import LLTokenizer

    if not eos_ids:
        raise ModelError("a grammar needs a model that has an end-of-text token; import the model again")
    try:
        return LLTokenizer(tokenizer_json.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_ids))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{tokenizer_json} cannot be used for grammars ({reason}); import the model again") from None


class GrammarState:
    """A place in a grammar.

    Attributes:
        field: the request's field the grammar comes from.
    """

    def __init__(self, matcher: LLMatcher, field: str) -> None:
        self._matcher = matcher
        self.field = field
        self._allowed: NDArray[np.bool_] | None = None

    @classmethod
    def start(cls, kind: str, constraint: str | dict[str, Any], tokenizer: LLTokenizer) -> GrammarState:
        """Return the start of a constraint.

        Args:
            kind: the request's field it comes from: ``json_schema``, ``regex`` or ``grammar``.
            constraint: its value.
            tokenizer: see :func:`grammar_tokenizer`.

        Raises:
            RequestError: the constraint is malformed, too complex, or of a feature that is not supported.
        """
        from llguidance import LLMatcher

        if isinstance(constraint, dict):
            grammar = LLMatcher.grammar_from_json_schema(_as_json(constraint))
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(constraint)
        else:
            grammar = LLMatcher.grammar_from_lark(constraint)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"{kind} cannot be used: {_reason(matcher)}; correct or simplify it", kind)
        return cls(matcher, kind)

    def allowed(self) -> NDArray[np.bool_]:
        """Return which ids may come next, (vocab_size,) bool.

        Raises:
            RequestError: the grammar is too complex at this place.
        """
        if self._allowed is None:
            # A copy computes the mask: computing may only ever warm caches, but a failure is kept by the matcher.
            matcher = self._matcher.deep_copy()
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                raise RequestError(f"{self.field} cannot be followed: {_reason(matcher)}; simplify it", self.field)
            self._allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
            self._allowed.flags.writeable = False
        return self._allowed

    def after(self, token: int) -> GrammarState:
        """Return the place after ``token``, which must be allowed.

        Raises:
            ValueError: the grammar does not allow ``token`` here.
        """
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise ValueError(f"token {token} does not follow the {self.field}")
        return GrammarState(matcher, self.field)

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete here."""
        return bool(self._matcher.is_accepting())


def _as_json(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema cannot be used: {error}; give plain JSON values", "json_schema") from None


def _reason(matcher: LLMatcher) -> str:
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    return lines[0] if lines else str(matcher.stop_reason())
