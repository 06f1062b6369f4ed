"""Draft with a small network on the target's last hidden state (see :mod:`.drafter_training` for what it is).

It has no memory of its own: the target's state at the position that predicted the last committed token says all it
knows of the text. So there is nothing to catch up with, nothing to roll back, and a past place is drafted from as
it was then. A whole greedy draft is one call of a graph (:mod:`.recurrent_graph`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.drafter_artefact import DrafterFolder, find_drafter
from edgeduet_client.llm.speculation.drafter_options import checked_options
from edgeduet_client.llm.speculation.proposal_law import law_of, until_end_of_text
from edgeduet_client.llm.speculation.target_graph import WEIGHTS_FOLDER_KEY
from edgeduet_client.llm.speculation.text import CommittedText

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel

LONGEST = 16


class RecurrentSession:
    """The graph, loaded.

    Args:
        graph: ``drafter.onnx``.
        weights: folder of the target's weights.

    Raises:
        ModelError: onnxruntime cannot load it.
    """

    def __init__(self, graph: Path, weights: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # Steps of a tenth of a millisecond: a second thread would cost more than it brings.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry(WEIGHTS_FOLDER_KEY, str(weights))
        try:
            self._session = onnxruntime.InferenceSession(
                graph.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its errors have no common base class
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise ModelError(f"{graph} cannot be loaded: {reason}; train the drafter again") from error
        self.hidden_width = int(self._session.get_inputs()[1].shape[1])
        self._count, self._threshold = np.zeros((), np.int64), np.zeros((), np.float32)

    def draft(
        self, tokens_B: NDArray[np.int64], states_BH: NDArray[np.float32], steps: int, threshold: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return greedy tokens and their probabilities, both (K, B), K <= ``steps``."""
        made, sure = self._run(["tokens", "confidences"], tokens_B, states_BH, steps, threshold)
        return made, sure

    def step(
        self, tokens_B: NDArray[np.int64], states_BH: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the states (B, H) and logits (B, N) behind one more token."""
        states, logits = self._run(["next_state", "logits"], tokens_B, states_BH, 1, 0.0)
        return states, logits

    def _run(
        self,
        outputs: list[str],
        tokens_B: NDArray[np.int64],
        states_BH: NDArray[np.float32],
        steps: int,
        threshold: float,
    ) -> Any:
        self._count[()], self._threshold[()] = steps, threshold
        inputs = {"token": tokens_B, "state": states_BH, "steps": self._count, "threshold": self._threshold}
        return self._session.run(outputs, inputs)


class RecurrentDrafter:
    """Proposes what the network makes of the target's last state.

    Args:
        name: as configured.
        session: the graph.
        vocabulary_N: ids it may propose, ascending.
        eos_ids: a draft ends with the first of them.
        threshold: a draft ends before a token that the network gives a smaller probability.
        temperature: ``None``: propose the best token (certain); else draw from p-less at this temperature.
        memory: bytes of weights that are its own.
    """

    kind = "recurrent"
    needs_hidden = True
    longest = LONGEST

    def __init__(
        self,
        name: str,
        session: RecurrentSession,
        vocabulary_N: NDArray[np.int64],
        *,
        eos_ids: Iterable[int] = (),
        threshold: float = 0.3,
        temperature: float | None = None,
        memory: int = 0,
    ) -> None:
        self.name = name
        self._session = session
        self._vocabulary = vocabulary_N
        self._eos_ids = frozenset(eos_ids)
        self._threshold = threshold
        self._temperature = temperature
        self._memory = memory

    def start(self, text: CommittedText) -> None:
        """Nothing is kept of a text."""

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose up to ``length`` tokens; none behind the prompt itself, whose last state is not there."""
        if len(text) == text.prompt_length:
            return Draft()
        token, state = self._place(text, len(text))
        if self._temperature is None:
            made, sure = self._session.draft(token, state, length, self._threshold)
            return Draft.certain(self._kept(made[:, 0], sure[:, 0]))
        return self._drawn(token, state, length, rng)

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return what it would have proposed at each start.

        Drafts that stop early are made one by one: in a batch all go on until the last one stops, which takes longer.
        """
        places = [self._place(text, start) for start in starts]
        if self._temperature is None:
            drafts = [self._session.draft(token, state, depth, self._threshold) for token, state in places]
            return [
                Redraft(start, self._kept(made[:, 0], sure[:, 0]))
                for start, (made, sure) in zip(starts, drafts, strict=True)
            ]
        tokens = np.concatenate([token for token, _ in places])
        states = np.concatenate([state for _, state in places])
        return self._relived(text, starts, tokens, states, depth)

    def memory_bytes(self) -> int:
        """Return the bytes of its weights; the table of tokens is the target's."""
        return self._memory

    def _place(self, text: CommittedText, start: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return what a draft after the first ``start`` tokens begins with: (1,) and (1, H)."""
        return np.array([text.tokens[start - 1]], np.int64), text.hidden(start - 1)[None, :]

    def _kept(self, made: NDArray[np.int64], sure: NDArray[np.float32]) -> tuple[int, ...]:
        """Return the tokens up to the first unsure one, or up to an end of text."""
        unsure = sure < self._threshold
        count = int(unsure.argmax()) if unsure.any() else len(made)
        return until_end_of_text(made[:count].tolist(), self._eos_ids)

    def _drawn(
        self, token: NDArray[np.int64], state: NDArray[np.float32], length: int, rng: np.random.Generator
    ) -> Draft:
        tokens: list[int] = []
        laws: list[Distribution] = []
        while len(tokens) < length:
            state, logits = self._session.step(token, state)
            law = self._law(logits[0])
            if law is None:
                break
            tokens.append(draw(law, rng))
            laws.append(law)
            if tokens[-1] in self._eos_ids:
                break
            token = np.array(tokens[-1:], np.int64)
        return Draft(tuple(tokens), tuple(laws))

    def _relived(
        self,
        text: CommittedText,
        starts: Sequence[int],
        tokens: NDArray[np.int64],
        states: NDArray[np.float32],
        depth: int,
    ) -> list[Redraft]:
        """Return its laws along the committed tokens."""
        laws: list[list[Distribution]] = [[] for _ in starts]
        over = [False] * len(starts)
        for level in range(depth):
            states, logits = self._session.step(tokens, states)
            tokens = np.array([text.tokens[start + level] for start in starts], np.int64)
            for row, known in enumerate(laws):
                law = None if over[row] else self._law(logits[row])
                if law is not None:
                    known.append(law)
                over[row] |= law is None or int(tokens[row]) in self._eos_ids
        return [Redraft(start, laws=tuple(known)) for start, known in zip(starts, laws, strict=True)]

    def _law(self, logits_N: NDArray[np.float32]) -> Distribution | None:
        """Return what the next token is drawn from, or ``None`` where the draft ends before it."""
        assert self._temperature is not None
        return law_of(logits_N, self._vocabulary, temperature=self._temperature, threshold=self._threshold)


class RecurrentOptions(BaseModel):
    """Options of the kind ``recurrent``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str | None = Field(None, description="name or folder of the drafter; default: the drafter's own name")
    threshold: float = Field(0.3, ge=0, lt=1, description="end a draft before a token less probable than that")
    temperature: float | None = Field(
        None, gt=0, le=4, description="draw from p-less at this temperature; default: always the best token"
    )


class RecurrentFactory:
    """Opens drafters of the kind ``recurrent``."""

    kind = "recurrent"

    def open(self, name: str, options: Mapping[str, Any], model: LocalModel) -> RecurrentDrafter:
        """Return a drafter for ``model``.

        Raises:
            ModelError: there is no such drafter, it is damaged, or it belongs to another model.
            RequestError: an option is wrong.
        """
        chosen = checked_options(RecurrentOptions, name, options)
        folder = DrafterFolder.open(find_drafter(chosen.path or name, model), model.manifest)
        if folder.card.kind != self.kind:
            raise ModelError(f"the drafter {folder.path} is of the kind {folder.card.kind}, not {self.kind}")
        return RecurrentDrafter(
            name,
            RecurrentSession(folder.graph, model.session.path.parent),
            np.load(folder.path / VOCABULARY),
            eos_ids=model.manifest.eos_ids,
            threshold=chosen.threshold,
            temperature=chosen.temperature,
            # Held three times: as the file, as read, and in the kernels' own layout (measured).
            memory=3 * folder.card.bytes,
        )


VOCABULARY = "vocabulary.npy"
"""Ids a drafter may propose, ascending, int64."""

FACTORY = RecurrentFactory()
