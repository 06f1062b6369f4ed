"""A vocabulary of a dozen tokens and a gate whose prediction is written in the hidden state, for tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.distribution import Distribution, sampling_distributions
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import Gate, GateDescription, TrainingRecord
from edgeduet_client.llm.plan import SamplingPlan, Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import SamplerState, advance, initial_state
from edgeduet_client.llm.token_bytes import TokenBytes

PIECES: tuple[bytes | None, ...] = (
    b"<|end|>",
    "日".encode(),
    "本".encode(),
    b"a",
    b" the",
    b"ab",
    b".",
    b"1",
    "ж".encode(),
    "я".encode(),
    b" ",
    "語".encode(),
    b"\x02",  # llguidance puts it before a text to see how the text is split in the middle of another
    b"b",
)
FAMILIES = np.array([2, 0, 0, 1, 1, 1, 2, 2, 3, 3, 2, 0, 2, 1], dtype=np.uint8)
EOS = 0
SIZE = len(PIECES)
PADDING = 3


def toy_vocabulary(pieces: Sequence[bytes | None] = PIECES, eos_ids: tuple[int, ...] = (EOS,)) -> Vocabulary:
    """Return the vocabulary; logits are three wider than it."""
    tokens = TokenBytes(tuple(pieces), frozenset({EOS}), "0" * 64)

    def encode(text: str) -> list[int]:
        """Take the longest piece that fits, again and again."""
        rest, ids = text.encode(), []
        while rest:
            token = max(
                (token for token, piece in enumerate(pieces) if piece and rest.startswith(piece)),
                key=lambda token: len(pieces[token] or b""),
            )
            ids.append(token)
            rest = rest[len(pieces[token] or b"") :]
        return ids

    return Vocabulary(len(pieces) + PADDING, len(pieces), eos_ids, tokens, encode)


def toy_gate() -> Gate:
    """Return a gate whose four logits are 2 h_i - h_4: it predicts family i where h_i is 1, if h_4 is 1."""
    training = TrainingRecord(
        norms="none", top_k=20, top_p=0.95, samples=0, positions=0, languages=[], epochs=0, best_epoch=0, seed=0,
        learning_rate=1, weight_decay=0, batch=1, train_loss=0, validation_loss=0, seconds_collecting=0,
        seconds_training=0, texts="written by hand",
    )  # fmt: skip
    description = GateDescription(
        tokenizer_sha256="0" * 64, weights_sha256="0" * 64, hidden_width=5, rules_version=1, training=training
    )
    second = np.concatenate([2 * np.eye(4), -np.ones((4, 1))], axis=1)
    return Gate(np.eye(5, dtype=np.float32), second.astype(np.float32), description)


def hidden(*rows: Sequence[Family]) -> NDArray[np.float32]:
    """Return hidden states for which the gate predicts exactly these families, one row each."""
    states = np.zeros((len(rows), 5), dtype=np.float32)
    states[:, 4] = 1
    for row, families in enumerate(rows):
        states[row, list(families)] = 1
    return states


def toy_plan(*, gated: bool = False, prompt_ids: Sequence[int] = (), **settings: Any) -> SamplingPlan:
    """Return the plan of a request on the toy vocabulary."""
    request = GenerationRequest(**settings)
    families = np.concatenate([FAMILIES, np.full(PADDING, 2, np.uint8)])
    return make_plan(
        request, toy_vocabulary(), families=families, gate=toy_gate() if gated else None, prompt_ids=prompt_ids
    )


def row_of(values: Sequence[float], padding: float = 1e4) -> NDArray[np.float32]:
    """Return a row of logits as the model would: padded ids hold rubbish."""
    return np.concatenate([np.array(values), np.full(PADDING, padding)]).astype(np.float32)


def one(
    plan: SamplingPlan,
    logits: NDArray[np.floating],
    *,
    state: SamplerState | None = None,
    generated: Sequence[int] = (),
    hidden_row: NDArray[np.float32] | None = None,
) -> Distribution:
    """Return the distribution of a single position after ``generated`` (which is replayed if no state is given)."""
    state = state or replayed(plan, generated)
    distributions, _ = sampling_distributions(logits[None], hidden_row, generated, (), plan, state)
    return distributions[0]


def replayed(plan: SamplingPlan, generated: Sequence[int]) -> SamplerState:
    """Return the state after ``generated``, each token as if it had been certain."""
    state = initial_state(plan)
    for token in generated:
        certain = Distribution(np.array([token]), np.ones(1), kept_mass=1.0)
        state = advance(state, plan, token, certain)
    return state


def dense(distribution: Distribution, size: int = SIZE) -> NDArray[np.float64]:
    """Return the distribution as a vector."""
    vector = np.zeros(size)
    vector[distribution.ids] = distribution.probabilities
    return vector
