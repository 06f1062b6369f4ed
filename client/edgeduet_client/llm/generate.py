"""The decoding loop: read the prompt, then draw, commit and step until something ends it.

Each act is a unit of its own, so that a loop that drafts and verifies can use the same ones: :func:`read_prompt`
(prefix reuse and prefill), :func:`draw_next` (distribution, draw, sampler state), :class:`Answer` (commit token by
token, up to the end-of-text token, a stop string or the budget), :class:`Interruption` (cancel, time-out).

Shapes: R rows, V width of the logits, H hidden width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgeduet_client.llm.distribution import sampling_distributions
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.logprobs import TokenLogprob, token_logprob
from edgeduet_client.llm.plan import SamplingPlan
from edgeduet_client.llm.sampler_state import SamplerState, advance
from edgeduet_client.llm.session import Forward, TargetSession, prefill_chunks
from edgeduet_client.llm.speculation.stats import SpeculationStats
from edgeduet_client.llm.text_stream import Release, TextStream

Reason = Literal["stop", "length", "cancelled", "timeout"]
Clock = Callable[[], float]


@dataclass(frozen=True)
class TextPiece:
    """Text that has become visible, and the tokens that became visible with it (perhaps none, or without text).

    The pieces of a generation, joined, are its text; their ids, joined, are its tokens without the end-of-text
    token and without what a stop string cut off.

    Attributes:
        logprobs: one entry per id, or ``None`` where the request wanted none.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class Finished:
    """The last event of a generation.

    Attributes:
        reason: ``stop`` (end-of-text token or stop string), ``length`` (budget used up), ``cancelled``, ``timeout``.
        prompt_tokens: tokens of the prompt as it was read, after any truncation.
        completion_tokens: tokens drawn, an end-of-text token and tokens of a stop string included.
        cached_tokens: of the prompt, those the cache held already.
        gate_interventions: draws at which the confusion gate changed the distribution.
        seconds_prefill: from the start to the first distribution.
        seconds_decode: from there to the end.
        speculation: what drafting and verifying did; ``None`` where nothing speculates.
    """

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    gate_interventions: int
    seconds_prefill: float
    seconds_decode: float
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class Drawn:
    """One token that was drawn."""

    token: int
    gate_fired: bool
    logprob: TokenLogprob | None


class Interruption:
    """Says whether a generation has to end now, and why."""

    def __init__(self, cancel: threading.Event | None, clock: Clock, timeout_s: float | None) -> None:
        self._cancel = cancel
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s

    def reason(self) -> Reason | None:
        """Return ``cancelled``, ``timeout`` or ``None``."""
        if self._cancel is not None and self._cancel.is_set():
            return "cancelled"
        if self._deadline is not None and self._clock() >= self._deadline:
            return "timeout"
        return None


class Answer:
    """What has been generated so far, and what of it is visible.

    Args:
        stream: turns bytes into visible text, and knows the stop strings.
        token_bytes: bytes of a token.
        eos_ids: tokens that end the text.
        budget: most tokens to draw.

    Attributes:
        ids: the tokens drawn.
        gate_interventions: how many of them the confusion gate had a say in.
    """

    def __init__(
        self, stream: TextStream, token_bytes: Callable[[int], bytes], *, eos_ids: frozenset[int], budget: int
    ) -> None:
        self.ids: list[int] = []
        self.gate_interventions = 0
        self._stream = stream
        self._token_bytes = token_bytes
        self._eos_ids = eos_ids
        self._budget = budget
        self._invisible: list[Drawn] = []
        self._text = ""
        self._visible: list[Drawn] = []

    @property
    def left(self) -> int:
        """Tokens that may still be drawn."""
        return self._budget - len(self.ids)

    def commit(self, drawn: Drawn) -> Reason | None:
        """Take up one token; return why the answer ends with it, or ``None`` if it goes on."""
        self.ids.append(drawn.token)
        self.gate_interventions += drawn.gate_fired
        if drawn.token in self._eos_ids:
            return "stop"
        self._invisible.append(drawn)
        self._show(self._stream.push(self._token_bytes(drawn.token)))
        if self._stream.stopped:
            return "stop"
        return "length" if len(self.ids) >= self._budget else None

    def finish(self, reason: Reason) -> Reason:
        """Make visible what was held back for a character or a stop string that did not come; return the reason.

        A text that ends inside a character ends in U+FFFD, which may complete a stop string.
        """
        self._show(self._stream.finish())
        return "stop" if self._stream.stopped else reason

    def take_piece(self) -> TextPiece | None:
        """Return what became visible since the last call, or ``None`` if nothing did."""
        if not self._text and not self._visible:
            return None
        entries = tuple(drawn.logprob for drawn in self._visible if drawn.logprob is not None)
        piece = TextPiece(self._text, tuple(drawn.token for drawn in self._visible), entries or None)
        self._text, self._visible = "", []
        return piece

    def _show(self, release: Release) -> None:
        self._text += release.text
        self._visible += self._invisible[: release.tokens]
        del self._invisible[: release.tokens]


@dataclass
class Sampling:
    """The random side of one generation: what a distribution depends on besides the model, and the generator.

    Attributes:
        top_logprobs: how many alternatives to report with each token; ``None``: no log-probabilities.
    """

    plan: SamplingPlan
    state: SamplerState
    rng: np.random.Generator
    top_logprobs: int | None = None


def reuse_prefix(cache: KVCache, prompt: Sequence[int]) -> int:
    """Crop ``cache`` to what it shares with ``prompt``; return how many tokens that is.

    The last token of the prompt is never among them: it is computed again for its logits.
    """
    shared = min(cache.common_prefix(prompt), len(prompt) - 1)
    cache.crop(shared)
    return shared


def read_prompt(
    session: TargetSession, cache: KVCache, rest: Sequence[int], *, hidden: bool, interruption: Interruption
) -> Forward | Reason:
    """Append ``rest`` to ``cache`` in chunks; return the last token's row, or why it had to end before."""
    cache.reserve(cache.length + len(rest))
    for start, chunk in prefill_chunks(rest):
        if reason := interruption.reason():
            return reason
        last = start + len(chunk) == len(rest)
        forward = session.forward(chunk, cache, rows=None if last else (), hidden=hidden)
    return forward


def draw_next(forward: Forward, generated: Sequence[int], sampling: Sampling) -> Drawn:
    """Draw the token after the single row of ``forward``, and move the sampler's state past it."""
    distributions, states = sampling_distributions(
        forward.logits, forward.hidden, generated, (), sampling.plan, sampling.state
    )
    distribution = distributions[0]
    token = draw(distribution, sampling.rng)
    sampling.state = advance(states[0], sampling.plan, token, distribution)
    return Drawn(token, distribution.gate_fired, logprob_of(token, forward, 0, sampling))


def logprob_of(token: int, forward: Forward, row: int, sampling: Sampling) -> TokenLogprob | None:
    """Return what the request wants to know of ``token`` at a row; ``None`` where it wants nothing."""
    if sampling.top_logprobs is None:
        return None
    return token_logprob(forward.logits[row, : sampling.plan.vocab_size], token, sampling.top_logprobs)


def generate(
    session: TargetSession,
    cache: KVCache,
    prompt: Sequence[int],
    answer: Answer,
    sampling: Sampling,
    *,
    interruption: Interruption,
    clock: Clock,
) -> Generator[TextPiece | Finished, None, None]:
    """Yield the text of an answer as it becomes visible, then :class:`Finished`.

    Args:
        cache: holds the beginning of the prompt, something else, or nothing; afterwards the prompt and all drawn
            tokens but the last.
        prompt: at least one id.
        answer: new; filled by this.
    """
    hidden = sampling.plan.needs_hidden
    started = clock()
    cached = reuse_prefix(cache, prompt)
    step = read_prompt(session, cache, prompt[cached:], hidden=hidden, interruption=interruption)
    read = clock()
    while isinstance(step, Forward):
        drawn = draw_next(step, answer.ids, sampling)
        ended = answer.commit(drawn)
        if ended is None and (piece := answer.take_piece()):
            yield piece
        step = ended or interruption.reason() or session.forward((drawn.token,), cache, hidden=hidden)
    reason = answer.finish(step)
    if piece := answer.take_piece():
        yield piece
    yield Finished(
        reason=reason,
        prompt_tokens=len(prompt),
        completion_tokens=len(answer.ids),
        cached_tokens=cached,
        gate_interventions=answer.gate_interventions,
        seconds_prefill=read - started,
        seconds_decode=clock() - read,
    )
