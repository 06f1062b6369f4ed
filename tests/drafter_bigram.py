"""The smallest drafter that can be trained: one number per pair of tokens, (V, V) logits of the next token.

A real one: trained by gradient descent on what the target reads, greedy, and in no way like the recurrent drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from edgeduet_client.drafters.kind import Arrays, Parameters, Trained, Training
from edgeduet_client.drafters.target_data import greedy_answer
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.config import DrafterConfig


class BigramDrafter:
    """Proposes the likeliest successor of the last token, and so on."""

    kind = "bigram"
    needs_hidden = False
    longest = 16

    def __init__(self, name: str, logits_VV: np.ndarray) -> None:
        self.name = name
        self._next = logits_VV.argmax(axis=1)

    def start(self, text: CommittedText) -> None:
        """Keep nothing."""

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Follow the chain."""
        return Draft.certain(self._chain(text.tokens[-1], length))

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Follow the chain from each start."""
        return [Redraft(start, self._chain(text.tokens[start - 1], depth)) for start in starts]

    def memory_bytes(self) -> int:
        """Bytes of the table."""
        return int(self._next.nbytes)

    def _chain(self, token: int, length: int) -> tuple[int, ...]:
        chain = []
        for _ in range(length):
            token = int(self._next[token])
            chain.append(token)
        return tuple(chain)


class Bigram:
    """A :class:`~edgeduet_client.drafters.kind.DrafterKind`."""

    def initial_parameters(self, model: LocalModel, config: DrafterConfig, seed: int) -> Parameters:
        """Small random logits."""
        width = model.manifest.vocab_width
        return {"logits": (0.01 * np.random.default_rng(seed).standard_normal((width, width))).astype(np.float32)}

    def capture(self, model: LocalModel, texts: Sequence[tuple[int, ...]], config: DrafterConfig) -> Arrays:
        """The pairs of neighbours, (N, 2), in what the target writes behind the beginnings of the texts."""
        written = [greedy_answer(model, text[:6], 24)[0] for text in texts]
        pairs = [pair for text in written for pair in pairwise(text)]
        return {"pairs": np.array(pairs, np.int32)}

    def train(self, parameters: Parameters, data: Mapping[str, np.ndarray], config: DrafterConfig, how: Training):
        """Full-batch gradient descent on the cross-entropy, with the proximal term."""
        start = parameters["logits"]
        logits, (before, after) = start.astype(np.float64), data["pairs"].T
        for _ in range(how.optimiser.local_epochs):
            rows = np.exp(logits[before] - logits[before].max(axis=1, keepdims=True))
            rows /= rows.sum(axis=1, keepdims=True)
            loss = float(-np.log(rows[np.arange(len(after)), after]).mean())
            rows[np.arange(len(after)), after] -= 1
            gradient = np.zeros_like(logits)
            np.add.at(gradient, before, rows)
            logits -= how.optimiser.lr * (gradient + how.proximal * (logits - start))
        right = float((logits[before].argmax(axis=1) == after).mean())
        return Trained({"logits": logits.astype(np.float32)}, loss, right, how.optimiser.local_epochs, len(after))

    def open(self, name: str, parameters: Parameters, model: LocalModel, config: DrafterConfig) -> BigramDrafter:
        """Return the drafter."""
        return BigramDrafter(name, parameters["logits"])


KIND = Bigram()
