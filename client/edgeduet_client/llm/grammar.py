"""Constrained answers: JSON of a schema, a regular expression or a Lark grammar, through llguidance.

A :class:`GrammarState` is a place in a grammar and never changes: going on makes a copy of the matcher (a few
microseconds), so a draft that is rejected leaves nothing behind. End-of-text is allowed exactly where the answer may
end; where it must end, it is the only token left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


def grammar_tokenizer(
    tokens: TokenBytes, vocab_size: int, eos_ids: Sequence[int], encode: Callable[[str], Sequence[int]]
) -> LLTokenizer:
    """Return the tokenizer as llguidance sees it; takes up to a second, so once per model.

    Made from the bytes of the tokens: reading ``tokenizer.json`` again would take three times as long.

    Raises:
        ModelError: no end-of-text token, or a vocabulary llguidance cannot use.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    known_eos = [token for token in eos_ids if token < vocab_size]
    if not known_eos:
        raise ModelError("a grammar needs a model that has an end-of-text token; import the model again")
    wrapper = TokenizerWrapper(_Spelling(tokens, vocab_size, known_eos[0], encode))
    try:
        return LLTokenizer(wrapper, eos_token=known_eos)
    except (ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"this model's tokenizer cannot be used for grammars: {reason}") from None


class _Spelling:
    """What llguidance wants to know of a tokenizer, under the names it looks for."""

    def __init__(
        self, tokens: TokenBytes, vocab_size: int, eos_id: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens = [piece or b"" for piece in tokens.pieces[:vocab_size]]
        self.special_token_ids = sorted(token for token in tokens.special if token < vocab_size)
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


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
                raise self._too_complex(matcher)
            self._allowed = np.unpackbits(bits, bitorder="little").view(np.bool_)
            self._allowed.flags.writeable = False
        return self._allowed

    def after(self, token: int) -> GrammarState:
        """Return the place after ``token``, which must be allowed.

        Raises:
            RequestError: the grammar is too complex at this place.
            ValueError: the grammar does not allow ``token`` here.
        """
        if not self.allowed()[token]:
            raise ValueError(f"token {token} does not follow the {self.field}")
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            raise self._too_complex(matcher)
        return GrammarState(matcher, self.field)

    def _too_complex(self, matcher: LLMatcher) -> RequestError:
        return RequestError(f"{self.field} cannot be followed: {_reason(matcher)}; simplify it", self.field)


def _as_json(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"json_schema cannot be used: {error}; give plain JSON values", "json_schema") from None


def _reason(matcher: LLMatcher) -> str:
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    return lines[0] if lines else str(matcher.stop_reason())
