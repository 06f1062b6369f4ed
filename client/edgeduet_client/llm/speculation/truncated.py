"""Draft with the target's own first layers and its head, perhaps for a part of its vocabulary only.

The graph is the target's with its upper blocks left out (:mod:`.target_graph`); it names the target's own weights
file, so it takes next to no disk. Without training, the first layers of a small model predict little: on SmolLM2-135M
(30 layers) 24 are needed for a third of the tokens. It is there for models that were trained to be left early.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation.drafter_artefact import (
    DRAFTER_GRAPH,
    DrafterCard,
    DrafterFolder,
    find_drafter,
    new_drafter,
    write_card,
)
from edgeduet_client.llm.speculation.drafter_options import checked_options
from edgeduet_client.llm.speculation.model_drafter import LanguageModelDrafter, OwnModelOptions
from edgeduet_client.llm.speculation.recurrent import VOCABULARY
from edgeduet_client.llm.speculation.target_graph import write_truncated_graph

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel


def truncate(
    model: ModelFolder,
    name: str,
    *,
    layers: int,
    head_vocabulary: NDArray[np.int64] | None = None,
    replace: bool = False,
) -> DrafterCard:
    """Make a drafter of the first ``layers`` blocks of a model.

    Args:
        model: the target.
        name: of the drafter.
        layers: 1 to those of the model.
        head_vocabulary: ids it may propose, ascending; ``None``: all, with the target's own head.
        replace: take the place of a drafter of that name.

    Raises:
        ModelError: the model has no such number of layers, or the name is taken.
        EdgeDuetError: the system refused.
    """
    if not 1 <= layers <= model.manifest.layers:
        raise ModelError(f"{model.name} has {model.manifest.layers} layers; choose --layers between 1 and that")
    with new_drafter(model, name, replace=replace) as folder:
        write_truncated_graph(folder / DRAFTER_GRAPH, model, layers, head_vocabulary)
        if head_vocabulary is not None:
            np.save(folder / VOCABULARY, head_vocabulary)
        card = write_card(
            folder,
            model,
            name=name,
            kind="truncated",
            layers=layers,
            vocabulary=model.manifest.vocab_size if head_vocabulary is None else len(head_vocabulary),
        )
        _session(folder, model.path, model.manifest.context_length, threads=1)  # it loads
    return card


def frequent_ids(model: ModelFolder, count: int) -> NDArray[np.int64]:
    """Return roughly the most frequent ids of a tokenizer, ascending: the end of text and the first of the others.

    Merges are learnt most frequent first, so the order of ids is roughly that of frequency. A trained drafter of the
    model knows better; see :func:`~.drafter_export.choose_vocabulary`.
    """
    if not 1 <= count <= model.manifest.vocab_size:
        raise ModelError(f"{model.name} knows {model.manifest.vocab_size} tokens; choose --head-vocabulary up to that")
    first = [token for token in range(model.manifest.vocab_size) if token not in model.manifest.eos_ids]
    ends = model.manifest.eos_ids[:count]
    return np.array(sorted([*ends, *first[: count - len(ends)]]), np.int64)


def _session(folder: Path, weights: Path, context_length: int, *, threads: int) -> TargetSession:
    return TargetSession(folder / DRAFTER_GRAPH, context_length=context_length, threads=threads, weights=weights)


class TruncatedOptions(OwnModelOptions):
    """Options of the kind ``truncated``."""

    path: str | None = Field(None, description="name or folder of the drafter; default: the drafter's own name")


class TruncatedFactory:
    """Opens drafters of the kind ``truncated``."""

    kind = "truncated"

    def open(self, name: str, options: Mapping[str, Any], model: LocalModel) -> LanguageModelDrafter:
        """Return a drafter for ``model``.

        Raises:
            ModelError: there is no such drafter, it is damaged, or it belongs to another model.
            RequestError: an option is wrong.
        """
        chosen = checked_options(TruncatedOptions, name, options)
        folder = DrafterFolder.open(find_drafter(chosen.path or name, model), model.manifest)
        if folder.card.kind != self.kind:
            raise ModelError(f"the drafter {folder.path} is of the kind {folder.card.kind}, not {self.kind}")
        trimmed = folder.path / VOCABULARY
        return LanguageModelDrafter(
            name,
            self.kind,
            _session(
                folder.path,
                model.session.path.parent,
                model.manifest.context_length,
                threads=chosen.threads or model.session.threads,
            ),
            vocabulary_N=np.load(trimmed) if trimmed.is_file() else None,
            known=model.vocabulary.used,
            eos_ids=model.manifest.eos_ids,
            threshold=chosen.threshold,
            temperature=chosen.temperature,
            memory=folder.card.bytes,
        )


FACTORY = TruncatedFactory()
