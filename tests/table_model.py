"""A language model that is a table, and randomness whose every outcome can be tried: for exact laws of real decoding.

The table target has the interface of a TargetSession, and the speculative loop runs on it unchanged. Instead of
random numbers the loop gets an :class:`Enumerator`: each question it asks (which token of this distribution? is u
below that ratio?) branches, and :func:`enumerate_outcomes` runs the loop once for every branch, with its probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeduet_client.llm import generate as generating
from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.generate import Answer, Finished, Interruption, Sampling, TextPiece
from edgeduet_client.llm.kv_cache import CacheShape, KVCache
from edgeduet_client.llm.plan import SamplingPlan, Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import initial_state
from edgeduet_client.llm.session import Forward
from edgeduet_client.llm.speculation import verify as verifying
from edgeduet_client.llm.speculation.arms import Arm, Round
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.text_stream import TextStream
from edgeduet_client.llm.token_bytes import TokenBytes
from toy_sampling import toy_gate

PIECES = (b"<|end|>", "日".encode(), b"a", b".", "ж".encode(), b"b", "本".encode(), b" ")
FAMILIES = np.array([2, 0, 1, 2, 3, 1, 0, 2], dtype=np.uint8)
EOS = 0
Law = dict[tuple[int, ...], float]
PROMPT = [2, 1]


def table_vocabulary(size: int) -> Vocabulary:
    """Return the first ``size`` tokens; 0 ends a text."""
    tokens = TokenBytes(PIECES[:size], frozenset({EOS}), "0" * 64)
    return Vocabulary(size, size, (EOS,), tokens, lambda text: [])


def table_plan(size: int, *, gated: bool = False, **settings: Any) -> SamplingPlan:
    """Return the plan of a request; by default the untruncated distribution."""
    request = GenerationRequest(**({"sampler": "temperature"} | settings))
    return make_plan(
        request,
        table_vocabulary(size),
        families=FAMILIES[:size],
        gate=toy_gate() if gated else None,
        prompt_ids=PROMPT,
    )


class TableTarget:
    """A target whose logits depend on the last two tokens; reads every row from the cache's own tokens.

    Args:
        size: of the vocabulary.
        seed: of the table.
        spread: standard deviation of the logits.
        limit: context in tokens.
    """

    def __init__(self, size: int, seed: int = 0, *, spread: float = 1.0, limit: int = 64) -> None:
        self.size = self.vocab_width = size
        self.hidden_width = 5
        self.cache_shape = CacheShape(layers=1, kv_heads=1, head_dim=1, limit=limit)
        rng = np.random.default_rng(seed)
        self.logits = (spread * rng.standard_normal((size + 1, size, size))).astype(np.float32)
        # Symbols and rare scripts may follow, no Latin and no CJ: the gate fires where its history lets it.
        self.hidden_row = np.array([0, 0, 1, 1, 1], np.float32)
        self.forwards: list[tuple[int, ...]] = []
        self.reached = 0

    def new_cache(self) -> KVCache:
        return KVCache(self.cache_shape, capacity=8)

    def forward(
        self, ids: Sequence[int], cache: KVCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Forward:
        start = cache.length
        cache.reserve(start + len(ids))
        cache.append(ids)
        self.forwards.append(tuple(ids))
        self.reached = max(self.reached, cache.length)
        wanted = [len(ids) - 1] if rows is None else list(rows)
        logits = np.array([self.row(cache.tokens[: start + row + 1]) for row in wanted]).reshape(len(wanted), self.size)
        return Forward(logits, np.tile(self.hidden_row, (len(wanted), 1)) if hidden else None)

    def prefill(self, ids: Sequence[int], cache: KVCache, **asked: Any) -> Forward:
        return self.forward(ids, cache, **asked)

    def row(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits behind ``tokens``."""
        before = tokens[-2] if len(tokens) > 1 else self.size
        return self.logits[before, tokens[-1]]


class Enumerator:
    """Stands for a random generator; answers along a script, and says which answers there were.

    Attributes:
        path: (outcome, probabilities) of every question so far.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.path: list[tuple[int, tuple[float, ...]]] = []
        self.bit_generator = self

    def choose(self, probabilities: Sequence[float]) -> int:
        """Return the place of one of ``probabilities``, which sum to one."""
        place = len(self.path)
        outcome = self._script[place] if place < len(self._script) else _possible(probabilities, 0)
        self.path.append((outcome, tuple(probabilities)))
        return outcome

    def random(self) -> Uniform:
        """Return a uniform number that is not settled yet."""
        return Uniform(self)

    @property
    def probability(self) -> float:
        """Of the path."""
        return float(np.prod([probabilities[outcome] for outcome, probabilities in self.path]))

    def next_script(self) -> list[int] | None:
        """Return the script of the next path in depth-first order."""
        for place in reversed(range(len(self.path))):
            outcome, probabilities = self.path[place]
            following = _possible(probabilities, outcome + 1)
            if following < len(probabilities):
                return [answered for answered, _ in self.path[:place]] + [following]
        return None


class Uniform:
    """A number drawn uniformly from [low, high); a comparison narrows the interval."""

    def __init__(self, source: Enumerator) -> None:
        self._source = source
        self.low, self.high = 0.0, 1.0

    def __lt__(self, bound: float) -> bool:
        share = min(max((bound - self.low) / (self.high - self.low), 0.0), 1.0)
        below = self._source.choose((share, 1.0 - share)) == 0
        if below:
            self.high = min(self.high, bound)
        else:
            self.low = max(self.low, bound)
        return below


def _possible(probabilities: Sequence[float], place: int) -> int:
    while place < len(probabilities) and probabilities[place] == 0:
        place += 1
    return place


def enumerated_draw(distribution: Distribution, rng: Any) -> int:
    """Stands for :func:`edgeduet_client.llm.draw.draw`: every token of the support, with its probability."""
    if not isinstance(rng, Enumerator):
        raise TypeError("a test that enumerates must not draw from anything else")
    return int(distribution.ids[rng.choose(distribution.probabilities.tolist())])


def enumerate_outcomes(run: Callable[[Enumerator], Sequence[int]]) -> Law:
    """Return the law of what ``run`` returns, over all outcomes of its questions."""
    law: Law = {}
    script: list[int] | None = []
    while script is not None:
        chance = Enumerator(script)
        outcome = tuple(run(chance))
        law[outcome] = law.get(outcome, 0.0) + chance.probability
        script = chance.next_script()
    return law


def total_variation(first: Law, second: Law) -> float:
    """Return half the sum of absolute differences."""
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in first.keys() | second.keys())


def shortened(law: Law, length: int) -> Law:
    """Return the law of the first ``length`` tokens."""
    short: Law = {}
    for key, probability in law.items():
        short[key[:length]] = short.get(key[:length], 0.0) + probability
    return short


def new_answer(plan: SamplingPlan, budget: int, stops: Sequence[str] = ()) -> Answer:
    """Return an empty answer of ``budget`` tokens on the table's vocabulary."""
    return Answer(
        TextStream(stops),
        lambda token: b"" if token == EOS else PIECES[token],
        eos_ids=frozenset(plan.eos_ids.tolist()),
        budget=budget,
    )


def new_sampling(plan: SamplingPlan, rng: Any) -> Sampling:
    """Return the random side of a request at its beginning."""
    return Sampling(plan, initial_state(plan), rng)


def never_interrupted() -> Interruption:
    """Return an interruption that never comes."""
    return Interruption(None, lambda: 0.0, None)


def run_to_end(events: Iterator[TextPiece | Finished]) -> tuple[str, Finished]:
    """Return the text and how it ended."""
    text = ""
    for event in events:
        if isinstance(event, Finished):
            return text, event
        text += event.text
    raise AssertionError("a generation ends with Finished")


@dataclass
class TableDrafter:
    """Draws from a table of its own, given the last token.

    Attributes:
        target: what it drafts for.
        seed: of its table; the same seed as the target's gives a different table all the same.
        draws: how a token is made from its law: the enumerated draw, or the real one.
        certain: whether it proposes its best token instead of drawing.
        sharpness: its logits are multiplied by it; large: nearly certain, other tokens underflow.
        stop_below: ends a draft before a token whose largest probability is smaller: decided from the law alone.
    """

    size: int
    seed: int = 1
    draws: Callable[[Distribution, Any], int] = enumerated_draw
    certain: bool = False
    sharpness: float = 1.0
    stop_below: float = 0.0
    name: str = "table"
    kind: str = "table"
    needs_hidden: bool = False
    longest: int = 64
    started: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        logits = np.random.default_rng([self.seed, 99]).standard_normal((self.size, self.size))
        self.logits = self.sharpness * logits

    def law(self, last: int) -> Distribution:
        """Return what follows ``last``."""
        weights = np.exp(self.logits[last] - self.logits[last].max())
        ids = np.flatnonzero(weights > 1e-6)
        return Distribution(ids, weights[ids] / weights[ids].sum())

    def start(self, text: CommittedText) -> None:
        self.started.append(len(text))

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        tokens: list[int] = []
        laws: list[Distribution | None] = []
        last = text.tokens[-1]
        while len(tokens) < length:
            law = self.law(last)
            if law.probabilities.max() < self.stop_below:
                break
            last = int(law.ids[law.probabilities.argmax()]) if self.certain else self.draws(law, rng)
            tokens.append(last)
            laws.append(None if self.certain else law)
        return Draft(tuple(tokens), tuple(laws))

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        made = []
        for start in starts:
            if self.certain:
                tokens = []
                last = text.tokens[start - 1]
                for _ in range(depth):
                    last = int(self.law(last).ids[self.law(last).probabilities.argmax()])
                    tokens.append(last)
                made.append(Redraft(start, tokens=tuple(tokens)))
            else:
                made.append(Redraft(start, laws=tuple(self.law(t) for t in text.tokens[start - 1 : start + depth - 1])))
        return made

    def memory_bytes(self) -> int:
        return self.logits.nbytes


@dataclass
class ScriptedSelector:
    """Plays arms in turn; or, given an enumerator, any of them at every round (a selector that draws)."""

    arms: Sequence[Arm]
    chance: Enumerator | None = None
    played_rounds: list[Round] = field(default_factory=list)
    learnt: int = 0
    requests: int = 0

    def start_request(self) -> None:
        self.requests += 1

    def choose(self, costs: Any, context_length: int) -> Arm:
        if self.chance is not None:
            return self.arms[self.chance.choose([1 / len(self.arms)] * len(self.arms))]
        return self.arms[len(self.played_rounds) % len(self.arms)]

    def learn(self, survival: Any, proposed: Any = None, start: int | None = None) -> None:
        self.learnt += 1

    def played(self, round: Round) -> None:
        self.played_rounds.append(round)


def draw_every_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both loops branch where they would draw: all their tokens come out of ``draw``."""
    monkeypatch.setattr(generating, "draw", enumerated_draw)
    monkeypatch.setattr(verifying, "draw", enumerated_draw)


def plain_law(target: TableTarget, plan: SamplingPlan, budget: int, prompt: Sequence[int] = PROMPT) -> Law:
    """Return the law of a plain answer of at most ``budget`` tokens."""

    def run(chance: Enumerator) -> list[int]:
        answer = new_answer(plan, budget)
        events = generating.generate(
            target, target.new_cache(), prompt, answer, new_sampling(plan, chance),
            interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        run_to_end(events)
        return answer.ids

    return enumerate_outcomes(run)


def speculative_law(
    target: TableTarget,
    plan: SamplingPlan,
    budget: int,
    drafters: Callable[[], Mapping[str, Any]],
    arms: Sequence[Arm] | Callable[[Enumerator], Any],
    *,
    prompt: Sequence[int] = PROMPT,
    granule: int = 1,
    enough: int | None = None,
) -> Law:
    """Return the law of a speculative answer; with ``enough``, of its first tokens, without the rounds behind them.

    ``drafters`` makes new ones for every run; ``arms`` are played in turn, or make a selector of a run's enumerator.
    """

    def run(chance: Enumerator) -> list[int]:
        answer = new_answer(plan, budget)
        selector = arms(chance) if callable(arms) else ScriptedSelector(arms)
        events = speculate(
            target, target.new_cache(), prompt, answer, new_sampling(plan, chance),
            means=Means(drafters(), selector, granule=granule), draft_rng=chance, counted=Counted(),
            interruption=never_interrupted(), clock=lambda: 0.0,
        )  # fmt: skip
        for _ in events:
            if enough is not None and len(answer.ids) >= enough:
                break
        return answer.ids[:enough]

    return enumerate_outcomes(run)
