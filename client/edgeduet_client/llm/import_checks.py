"""What an import proves before it publishes a model.

Three questions, answered with numbers that the manifest keeps:

1. Is the graph the model? In float32, every token our graph picks greedily must be the token the source
   model picks after the same prefix (by induction the two then generate the same text). Where the source's
   two best logits lie closer than rounding, either counts, and the tie is reported.
2. Do weights and tokenizer belong together? A fixed text (``import_check.txt``: prose, code, arithmetic, four
   languages) must be no surprise: its perplexity is far below that of drawing lots.
3. What did quantisation cost? The perplexity of the same text, as a ratio to the float32 graph's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.session import TargetSession, prefill_chunks

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Question: What is 7 times 8?\nAnswer:",
    "Der Fluss entspringt in den Bergen",
)
GREEDY_TOKENS = 24

# Logits that differ by less are one number to float32 kernels that add in different orders.
_TIE = 1e-3
# Largest difference of logits between two float32 implementations of a right graph (measured: 2e-4).
_LARGEST_DIFFERENCE = 0.05

# A trained model behind the wrong tokenizer is sure of wrong tokens, which is worse than drawing lots (measured
# with ids of another tokenizer: 2.1 times the vocabulary for SmolLM2, 24 times for Gemma 3; with their own: 0.0005).
_WORSE_THAN_LOTS = 1.2

# More perplexity than this factor, and an import is refused.
LARGEST_RATIO = {"int8": 1.02, "w8a8": 1.05, "int4": 1.10}

SourceLogits = Callable[[Sequence[int]], np.ndarray]
"""Ids of S tokens to the source model's logits, float32 ``(S, V)``."""


@dataclass(frozen=True)
class GreedyIdentity:
    """What the comparison with the source found."""

    tokens: int
    ties: int
    largest_logit_difference: float


@dataclass(frozen=True)
class GreedyText:
    """What a graph wrote after a prompt.

    Attributes:
        logits_RV: float32, one row for each of ``tokens``: what it was picked from.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logits_RV: np.ndarray


def check_text() -> str:
    """Return the fixed text on which perplexity is measured."""
    return Path(__file__).with_name("import_check.txt").read_text("utf-8")


def generate_greedily(session: TargetSession, prompt: Sequence[int]) -> GreedyText:
    """Write on after ``prompt``, at most :data:`GREEDY_TOKENS` tokens and no further than the context reaches."""
    cache = session.new_cache()
    row = session.prefill(prompt, cache).logits[0].copy()
    tokens, rows = [int(row.argmax())], [row]
    wanted = min(GREEDY_TOKENS, session.cache_shape.limit - len(prompt))
    while len(tokens) < wanted:
        row = session.forward(tokens[-1:], cache).logits[0].copy()
        rows.append(row)
        tokens.append(int(row.argmax()))
    return GreedyText(prompt, tokens, np.stack(rows))


def check_greedy_identity(
    texts: Sequence[GreedyText],
    source: SourceLogits,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GreedyIdentity:
    """Compare each token that was picked greedily with what the source picks there.

    Raises:
        ModelError: a token differs, or logits are further apart than rounding explains.
    """
    tokens = ties = 0
    largest = 0.0
    for done, text in enumerate(texts):
        prompt, ours, rows = text.prompt, text.tokens, text.logits_RV
        theirs = source([*prompt, *ours[:-1]])[len(prompt) - 1 :]
        if theirs.shape != rows.shape:
            raise ModelError(
                f"the source has logits of width {theirs.shape[1]}, the exported graph of {rows.shape[1]}; "
                "settings and weights belong to different models"
            )
        largest = float(np.maximum(largest, np.abs(theirs - rows).max()))  # keeps a NaN, which max() would lose
        for place, token in enumerate(ours):
            best = int(theirs[place].argmax())
            if token == best:
                continue
            gap = float(theirs[place, best] - theirs[place, token])
            if gap > _TIE:
                raise ModelError(
                    f"the exported graph differs from its source: after {place} tokens of prompt {done + 1} it picks "
                    f"token {token}, the source {best} (logits {gap:.3g} apart); please report this model"
                )
            ties += 1
        tokens += len(ours)
        progress(done + 1, len(texts))
    if not largest <= _LARGEST_DIFFERENCE:
        raise ModelError(
            f"the exported graph differs from its source: logits are up to {largest:.3g} apart; "
            "please report this model"
        )
    return GreedyIdentity(tokens, ties, largest)


def check_ratio(quantisation: str, ratio: float, limit: float | None) -> None:
    """Refuse a quantisation that costs too much.

    Args:
        ratio: perplexity over that of float32.
        limit: the largest ratio to accept; ``None``: :data:`LARGEST_RATIO`.

    Raises:
        ModelError: says the ratio and what to do.
    """
    allowed = LARGEST_RATIO.get(quantisation, 1.001) if limit is None else limit
    if not ratio <= allowed:
        raise ModelError(
            f"{quantisation} multiplies the perplexity by {ratio:.3f}, more than {allowed:g}; choose --quantize int8 "
            "or none, import a GGUF file quantised with care, or accept it with "
            f"--max-perplexity-ratio {ratio + 0.005:.2f}"
        )


def check_perplexity(value: float, vocab_width: int) -> None:
    """Refuse a model that predicts the text worse than drawing lots would.

    That is what weights look like that belong to another tokenizer, or that hold no numbers.

    Args:
        value: perplexity of the float32 graph.
        vocab_width: tokens there are; the perplexity of drawing lots.

    Raises:
        ModelError: it is not finite, or beyond :data:`_WORSE_THAN_LOTS` times ``vocab_width``.
    """
    if not value <= _WORSE_THAN_LOTS * vocab_width:
        raise ModelError(
            f"the model predicts ordinary text worse than chance (perplexity {value:.4g} of {vocab_width} tokens); "
            "weights and tokenizer belong to different models, or the weights are damaged: fetch both again"
        )


def perplexity(
    session: TargetSession, ids: Sequence[int], progress: Callable[[int, int], None] = lambda done, total: None
) -> float:
    """Return the perplexity of ``ids`` (all but the first) under the model, read in one context."""
    if len(ids) < 2:
        raise ModelError("perplexity needs a text of at least two tokens; give a longer one")
    cache = session.new_cache()
    total = 0.0
    for start, chunk in prefill_chunks(ids):
        logits = session.forward(chunk, cache, rows=range(len(chunk))).logits
        following = np.asarray(ids[start + 1 : start + 1 + len(chunk)])
        total -= float(log_probabilities(logits[: len(following)], following).sum())
        progress(min(start + len(chunk), len(ids)), len(ids))
    return float(np.exp(total / (len(ids) - 1)))


def log_probabilities(logits_RV: np.ndarray, ids_R: np.ndarray) -> np.ndarray:
    """Return the log-probability of one id per row, float64 ``(R,)``."""
    best_R1 = logits_RV.max(axis=1, keepdims=True)
    normaliser_R = np.log(np.exp(logits_RV - best_R1).sum(axis=1, dtype=np.float64)) + best_R1[:, 0]
    chosen: np.ndarray = logits_RV[np.arange(len(ids_R)), ids_R] - normaliser_R
    return chosen


def torch_logits(model: Any) -> SourceLogits:
    """Wrap a ``transformers`` causal language model."""
    import torch

    def logits(ids: Sequence[int]) -> np.ndarray:
        with torch.no_grad():
            rows: np.ndarray = model(torch.tensor([list(ids)])).logits[0].float().numpy()
        return rows

    return logits
