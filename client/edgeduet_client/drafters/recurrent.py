"""The recurrent drafter as a kind that a federation trains (:mod:`edgeduet_client.llm.speculation.drafter_training`).

What all clients must have in common does not depend on anybody's texts: the shape, the values training begins with,
and the ids a drafter may propose (the first of the vocabulary). Head and embedding are the target's own and are never
sent.

Judged in float32, by its likeliest token: quantisation to run it on a device comes after training.

Axes: B starts, H hidden width, N vocabulary of the drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeduet_client.drafters.kind import Arrays, Parameters, Trained, Training
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.speculation import drafter_training
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.drafter_dataset import DrafterDataset, ReadText, TargetTables
from edgeduet_client.llm.speculation.drafter_export import export
from edgeduet_client.llm.speculation.drafter_reading import PromptIds, ReadingOptions, read_text
from edgeduet_client.llm.speculation.target_tables import target_tables
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.config import DrafterConfig

_PARTS = ("tokens", "hidden", "label_ids", "label_masses")
_SAMPLE = 8
"""Greedy texts on which a round's accuracy is measured."""
_SCALE_TEXT = "A drafter goes on from the state of a larger model, which has a size of its own."


class Recurrent:
    """A :class:`~edgeduet_client.drafters.kind.DrafterKind`."""

    def initial_parameters(self, model: LocalModel, config: DrafterConfig, seed: int) -> Parameters:
        """Return the values every client begins with; states begin with the size that the target's have."""
        settings = _settings(model.session.hidden_width, config)
        changes = {"seed": seed % 2**32, "output_scale": _hidden_scale(model)}
        return drafter_training.initial_parameters(settings.model_copy(update=changes))

    def capture(self, model: LocalModel, texts: Sequence[tuple[int, ...]], config: DrafterConfig) -> Arrays:
        """Let the target write on from the beginnings of ``texts``, every second one greedily; keep what it said."""
        options = ReadingOptions(
            prompt_tokens=max(4, config.given_tokens), answer_tokens=max(4, config.written_tokens), seed=0
        )
        cache = model.new_cache()
        read: list[ReadText] = []
        left = config.train_tokens
        for number, text in enumerate(texts):
            if left <= 0:
                break
            prompt = PromptIds("own", text[: config.given_tokens], 0, number % 2 == 0)
            read.append(read_text(model, cache, prompt, options))
            left -= len(read[-1])
        return {
            **{part: np.concatenate([getattr(text, part) for text in read]) for part in _PARTS},
            "lengths": np.array([len(text) for text in read], np.int32),
            "answers": np.array([text.answer for text in read], np.int32),
            "greedy": np.array([text.greedy for text in read], np.uint8),
        }

    def train(
        self, parameters: Parameters, data: Mapping[str, npt.NDArray[Any]], config: DrafterConfig, how: Training
    ) -> Trained:
        """Train for the round's passes over all starts."""
        dataset = DrafterDataset(_texts(data), _tables(config.target, config.vocabulary))
        optimiser = how.optimiser
        batch = min(optimiser.batch_size, dataset.positions)
        steps = max(1, optimiser.local_epochs * dataset.positions // batch)
        steps = min(steps, optimiser.max_steps) if optimiser.max_steps else steps
        settings = _settings(dataset.tables.hidden_width, config).model_copy(
            update={
                "batch": batch,
                "steps": steps,
                "learning_rate": optimiser.lr,
                "weight_decay": optimiser.weight_decay,
                "warm_up": round(optimiser.warmup * steps),
                "proximal": how.proximal,
                "seed": how.seed % 2**32,
            }
        )
        trained, figures = drafter_training.train(parameters, dataset, settings)
        greedy = [text for text in dataset.texts if text.greedy and len(text) > text.answer + 3][:_SAMPLE]
        accepted = (
            drafter_training.acceptance(trained, DrafterDataset(greedy, dataset.tables), settings, depth=1)[0]
            if greedy
            else None
        )
        return Trained(trained, figures["loss"], accepted or 0.0, int(figures["steps"]), dataset.positions)

    def open(self, name: str, parameters: Parameters, model: LocalModel, config: DrafterConfig) -> FloatRecurrent:
        """Return the drafter."""
        return FloatRecurrent(name, parameters, _tables(config.target, config.vocabulary), config.depth)

    def install(
        self, name: str, parameters: Parameters, data: Mapping[str, npt.NDArray[Any]], config: DrafterConfig
    ) -> None:
        """Export in 8 bits, compared with float32 on the way."""
        dataset = DrafterDataset(_texts(data), _tables(config.target, config.vocabulary))
        export(parameters, dataset, ModelFolder.open(config.target), name, training={"by": "federation"}, replace=True)


class FloatRecurrent:
    """Proposes its likeliest tokens, in float32.

    Args:
        name: what figures call it.
        parameters: of a recurrent drafter.
        tables: of the target.
        longest: longest draft.
    """

    kind = "recurrent"
    needs_hidden = True

    def __init__(self, name: str, parameters: Parameters, tables: TargetTables, longest: int) -> None:
        self.name, self.longest = name, longest
        self._parameters, self._tables = parameters, tables

    def start(self, text: CommittedText) -> None:
        """Keep nothing."""

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose what follows; nothing behind the prompt, where no hidden state is known."""
        if len(text) <= text.prompt_length:
            return Draft()
        return Draft.certain(self._roll(text, [len(text)], length)[0])

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return what it would have proposed at each start."""
        proposals = self._roll(text, starts, depth) if starts else []
        return [Redraft(start, tokens) for start, tokens in zip(starts, proposals, strict=True)]

    def memory_bytes(self) -> int:
        """Bytes of the parameters; the tables are the target's."""
        return sum(values.nbytes for values in self._parameters.values())

    def _roll(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[tuple[int, ...]]:
        import torch

        tables = self._tables
        parameters = {name: torch.from_numpy(values) for name, values in self._parameters.items()}
        states_BH = torch.from_numpy(np.stack([text.hidden(start - 1) for start in starts]))
        ids_B = np.array([text.tokens[start - 1] for start in starts])
        head_HN = torch.from_numpy(tables.head_NH).T
        drafted = []
        with torch.no_grad():
            for _ in range(depth):
                embedded_BH = torch.from_numpy(tables.embed(ids_B))
                states_BH = drafter_training.next_states(parameters, states_BH, embedded_BH)
                ids_B = tables.vocabulary_N[(states_BH @ head_HN).argmax(dim=1).numpy()]
                drafted.append(ids_B)
        return [tuple(int(token) for token in row) for row in np.stack(drafted, axis=1)]


def _settings(hidden_width: int, config: DrafterConfig) -> drafter_training.DrafterConfig:
    return drafter_training.DrafterConfig(
        hidden_width=hidden_width, inner_width=config.width, rollout=config.depth, warm_up=0
    )


@lru_cache(maxsize=2)
def _tables(target: str, vocabulary: int) -> TargetTables:
    folder = ModelFolder.open(target)
    return target_tables(folder, np.arange(min(vocabulary, folder.manifest.vocab_size)))


def _hidden_scale(model: LocalModel) -> float:
    """Return the root mean square of the target's last states on a text that nobody holds."""
    ids = model.tokenizer.encode(_SCALE_TEXT)
    outcome = model.session.prefill(ids, model.new_cache(), rows=range(len(ids)), hidden=True)
    assert outcome.hidden is not None
    return float(np.sqrt(np.square(outcome.hidden[1:], dtype=np.float64).mean()))


def _texts(data: Mapping[str, npt.NDArray[Any]]) -> list[ReadText]:
    ends = np.cumsum(data["lengths"])[:-1]
    parts = [np.split(data[part], ends) for part in _PARTS]
    facts = zip(data["greedy"], data["answers"], *parts, strict=True)
    return [ReadText("own", bool(greedy), int(answer), *arrays) for greedy, answer, *arrays in facts]


KIND = Recurrent()
