"""A request resolved against a model: everything the sampling pipeline needs, computed once per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm import truncation
from edgeduet_client.llm.bad_words import BadWords, TokenIndex
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.families import FamilyTable
from edgeduet_client.llm.gate import Gate
from edgeduet_client.llm.grammar import GrammarState, grammar_tokenizer
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Truncation = Callable[[truncation.Row], truncation.Mask]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Vocabulary:
    """What sampling knows of a model's tokens. One per model: the parts that are slow to make are made once.

    Attributes:
        width: width of the logits.
        size: ids from here on are no tokens; the logits beyond are padding.
        eos_ids: ids that end a text.
        tokens: the bytes of every id.
        encode: the tokenizer, from a text to its ids (without beginning-of-text).
    """

    width: int
    size: int
    eos_ids: tuple[int, ...]
    tokens: TokenBytes = field(repr=False)
    encode: Callable[[str], Sequence[int]] = field(repr=False)

    def __post_init__(self) -> None:
        if self.used <= 0:
            raise ModelError(f"a vocabulary of {self.size} tokens and logits of width {self.width}: import it again")

    @property
    def used(self) -> int:
        """How many of the logits belong to tokens."""
        return min(self.size, self.width, self.tokens.vocab_size)

    @cached_property
    def all_ids(self) -> Ids:
        """All ids, read-only."""
        ids = np.arange(self.used)
        ids.flags.writeable = False
        return ids

    @cached_property
    def unknown_ids(self) -> Ids:
        """Ids among those used that stand for nothing."""
        pieces = self.tokens.pieces[: self.used]
        return np.array([token for token, piece in enumerate(pieces) if piece is None], dtype=np.int64)

    @cached_property
    def token_index(self) -> TokenIndex:
        """What every id adds to a text, searchable; special tokens add nothing."""
        special = self.tokens.special
        pieces = self.tokens.pieces[: self.used]
        return TokenIndex([b"" if token in special else piece or b"" for token, piece in enumerate(pieces)])

    @cached_property
    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer as the grammar library sees it."""
        return grammar_tokenizer(self.tokens, self.used, self.eos_ids, self.encode)


@dataclass(frozen=True)
class SamplingPlan:
    """A request resolved against a model; immutable, safe to share between positions and threads.

    Attributes:
        request: what was asked.
        vocab_width: width of the logits rows.
        vocab_size: how many of them belong to tokens; the others are never sampled.
        all_ids: every id below; shared by all plans of a model, read-only.
        unknown_ids: ids below that stand for nothing either.
        truncations: rules that make the nominal set, in order.
        bias_ids, bias: logit bias; ascending ids and what is added to their logits.
        prompt_ids: tokens of the prompt, each once, where there is a repetition penalty.
        eos_ids: tokens that end a text, masked while fewer than ``min_tokens`` were generated.
        bad_words: banned texts, if any.
        grammar: start of the constraint, if any.
        gate, families: the language confusion gate, and the family of every id; both or neither.
    """

    request: GenerationRequest
    vocab_width: int
    vocab_size: int
    all_ids: Ids = field(repr=False)
    unknown_ids: Ids = field(repr=False)
    truncations: tuple[Truncation, ...]
    bias_ids: Ids = field(repr=False)
    bias: NDArray[np.float32] = field(repr=False)
    prompt_ids: Ids = field(repr=False)
    eos_ids: Ids
    bad_words: BadWords | None
    grammar: GrammarState | None
    gate: Gate | None
    families: FamilyTable | None = field(repr=False)

    @property
    def needs_hidden(self) -> bool:
        """Whether the pipeline looks at hidden states."""
        return self.gate is not None

    @cached_property
    def greedy(self) -> bool:
        """Whether every token is the best one."""
        return self.request.greedy

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether any penalty depends on what was generated."""
        request = self.request
        return request.repetition_penalty != 1 or bool(request.presence_penalty or request.frequency_penalty)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether anything but a minimum length may change the raw logits."""
        edits = len(self.bias_ids) or len(self.unknown_ids) or self.counts_tokens
        return bool(edits) or self.bad_words is not None or self.grammar is not None

    @cached_property
    def mirostat(self) -> bool:
        """Whether the state carries a surprise bound."""
        return self.request.sampler == "mirostat" and not self.greedy


def make_plan(
    request: GenerationRequest,
    vocabulary: Vocabulary,
    *,
    families: FamilyTable | None = None,
    gate: Gate | None = None,
    prompt_ids: Sequence[int] = (),
) -> SamplingPlan:
    """Resolve ``request`` against a model.

    Args:
        request: what was asked.
        vocabulary: the model's tokens.
        families: (V,) family of every id; needed with ``gate``.
        gate: the model's gate, if it has one.
        prompt_ids: the prompt, which counts for the repetition penalty (as in transformers and vLLM).

    Raises:
        RequestError: the model cannot honour the request (ids it does not have, no gate, no end-of-text token, a
            constraint that cannot be compiled).
        ModelError: the tokenizer cannot be used.
    """
    bias_ids = _known_ids(request.logit_bias, vocabulary)
    if request.min_tokens and not vocabulary.eos_ids:
        raise RequestError("min_tokens has no effect: this model has no end-of-text token; leave it out", "min_tokens")
    active_gate = _resolve_gate(request, gate)
    if active_gate is not None and (families is None or len(families) < vocabulary.used):
        raise ValueError("a gate needs the family of every id")
    return SamplingPlan(
        request=request,
        vocab_width=vocabulary.width,
        vocab_size=vocabulary.used,
        all_ids=vocabulary.all_ids,
        unknown_ids=vocabulary.unknown_ids,
        truncations=() if request.greedy else truncations_of(request),
        bias_ids=bias_ids,
        bias=np.array([request.logit_bias[int(token)] for token in bias_ids], dtype=np.float32),
        prompt_ids=_below(vocabulary.used, prompt_ids if request.repetition_penalty != 1 else ()),
        eos_ids=_below(vocabulary.used, vocabulary.eos_ids),
        bad_words=BadWords(request.bad_words, vocabulary.token_index) if request.bad_words else None,
        grammar=_grammar_of(request, vocabulary),
        gate=active_gate,
        families=families[: vocabulary.used] if families is not None and active_gate is not None else None,
    )


def truncations_of(request: GenerationRequest) -> tuple[Truncation, ...]:
    """Return the rules that make the nominal set, in the order top-k, top-p, min-p; mirostat's is in its state."""
    if request.sampler == "p-less":
        return (truncation.p_less,)
    if request.sampler == "p-less-norm":
        return (truncation.p_less_norm,)
    if request.sampler == "temperature":
        return (truncation.possible,)
    rules: list[Truncation] = []
    if request.top_k is not None:
        rules.append(partial(truncation.top_k, k=request.top_k))
    if request.top_p is not None:
        rules.append(partial(truncation.top_p, p=request.top_p))
    if request.min_p is not None:
        rules.append(partial(truncation.min_p, share=request.min_p))
    if request.typical_p is not None:
        rules.append(partial(truncation.typical, mass=request.typical_p))
    if request.epsilon is not None:
        rules.append(partial(truncation.epsilon, least=request.epsilon))
    if request.eta is not None:
        rules.append(partial(truncation.eta, least=request.eta))
    if request.top_n_sigma is not None:
        rules.append(partial(truncation.top_n_sigma, n=request.top_n_sigma))
    return tuple(rules)


def _known_ids(logit_bias: dict[int, float], vocabulary: Vocabulary) -> Ids:
    for token in logit_bias:
        if not 0 <= token < vocabulary.used:
            raise RequestError(
                f"logit_bias names token {token}, but this model's ids are 0 to {vocabulary.used - 1}; correct it",
                "logit_bias",
            )
    return np.array(sorted(logit_bias), dtype=np.int64)


def _below(size: int, ids: Sequence[int]) -> Ids:
    unique = np.unique(np.array(ids, dtype=np.int64))
    return unique[(unique >= 0) & (unique < size)]


def _resolve_gate(request: GenerationRequest, gate: Gate | None) -> Gate | None:
    if request.gate == "on" and gate is None:
        raise RequestError(
            "gate=on, but this model has no language confusion gate; train one (edgeduet-client llm gate train) "
            "or leave gate out",
            "gate",
        )
    return None if request.gate == "off" else gate


def _grammar_of(request: GenerationRequest, vocabulary: Vocabulary) -> GrammarState | None:
    for kind in ("json_schema", "regex", "grammar"):
        constraint = getattr(request, kind)
        if constraint is not None:
            return GrammarState.start(kind, constraint, vocabulary.grammar_tokenizer)
    return None
