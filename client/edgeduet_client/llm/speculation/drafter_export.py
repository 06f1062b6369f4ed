"""From trained parameters to a drafter in a model's folder: vocabulary, 8 bits, parity, acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.speculation.drafter_artefact import (
    DRAFTER_GRAPH,
    PARAMETERS,
    DrafterCard,
    DrafterFolder,
    new_drafter,
    write_card,
)
from edgeduet_client.llm.speculation.drafter_dataset import DrafterDataset, Positions, ReadText
from edgeduet_client.llm.speculation.drafter_training import Parameters, next_states, shares
from edgeduet_client.llm.speculation.recurrent import VOCABULARY, RecurrentSession
from edgeduet_client.llm.speculation.recurrent_graph import quantised_products, write_recurrent_graph

CALIBRATION = "calibration.safetensors"
"""Largest magnitudes that were seen in front of each product: what another export needs."""
DEPTH = 3
_ANSWERS_COUNT = 4.0  # as much as positions of prompts: what the target writes is what must be guessed
_STARTS = 2048
_LEAST_AGREEMENT = 0.8


def choose_vocabulary(
    texts: Sequence[ReadText], size: int, *, used: int, always: Iterable[int] = ()
) -> NDArray[np.int64]:
    """Return the ids a drafter should be able to propose: those the target says most, ascending.

    Counted are the probabilities of all kept labels, so that the rarer ids are ranked by more than luck; ids that are
    level are taken in the tokenizer's order, which is roughly that of their frequency.

    Args:
        texts: read ones.
        size: how many ids, at most.
        used: ids there are.
        always: ids to take in any case (the end of text).
    """
    scores = np.zeros(used)
    for text in texts:
        weights = np.where(np.arange(len(text)) >= text.answer, _ANSWERS_COUNT, 1.0)[:, None]
        np.add.at(scores, text.label_ids, weights * text.label_masses.astype(np.float64))
    scores[list(always)] = np.inf
    best = np.lexsort((np.arange(used), -scores))[:size]
    return np.sort(best).astype(np.int64)


def export(
    parameters: Parameters,
    dataset: DrafterDataset,
    model: ModelFolder,
    name: str,
    *,
    training: dict[str, Any] | None = None,
    held_out: DrafterDataset | None = None,
    replace: bool = False,
) -> DrafterCard:
    """Store a drafter in the folder of ``model``.

    Args:
        parameters: trained.
        dataset: texts to measure activations and parity on; its tables say what is shared with the target.
        name: of the drafter.
        training: what to note about its making.
        held_out: answers to measure acceptance on.
        replace: take the place of a drafter of that name.

    Raises:
        ModelError: the name is taken or impossible, or the graph differs too much from the network.
        EdgeDuetError: the system refused.
    """
    sample = Positions.of(dataset, DEPTH)
    rows = np.linspace(0, len(sample.starts) - 1, min(_STARTS, len(sample.starts))).astype(int)
    starts = sample.starts[rows]
    reach = activation_reach(parameters, sample, starts)
    with new_drafter(model, name, replace=replace) as folder:
        session = _write(folder, model, parameters, dataset.tables.vocabulary_N, dataset.tables.head_NH, reach)
        agreement = parity(parameters, dataset, sample, starts, session)
        if agreement["same_best"] < _LEAST_AGREEMENT:
            raise ModelError(
                f"in 8 bits the drafter picks another token in {1 - agreement['same_best']:.0%} of places; "
                "train it longer, or with --seed of another number"
            )
        measured = {} if held_out is None else acceptance_by_domain(session, held_out)
        return write_card(
            folder,
            model,
            name=name,
            kind="recurrent",
            vocabulary=len(dataset.tables.vocabulary_N),
            training=training or {},
            parity=agreement,
            acceptance=measured,
        )


def export_to(drafter: DrafterFolder, model: ModelFolder, name: str, *, replace: bool = False) -> DrafterCard:
    """Make a drafter of one model a drafter of another import of the same weights (at other bits).

    Raises:
        ModelError: the models differ in more than their bits.
    """
    from edgeduet_client.llm.speculation.target_tables import target_tables

    if drafter.card.kind != "recurrent":
        raise ModelError(f"the drafter {drafter.path} is {drafter.card.kind}; make it anew for {model.name}")
    if drafter.card.target.tokenizer_sha256 != model.manifest.tokenizer_sha256:
        raise ModelError(f"{model.name} has another tokenizer than the model of the drafter {drafter.path}")
    parameters = load_file(drafter.path / PARAMETERS)
    if parameters["state_norm"].shape != (model.manifest.hidden_width,):
        raise ModelError(f"{model.name} has another width than the model of the drafter {drafter.path}")
    vocabulary = np.load(drafter.path / VOCABULARY)
    with new_drafter(model, name, replace=replace) as folder:
        head_NH = target_tables(model, vocabulary).head_NH
        _write(folder, model, parameters, vocabulary, head_NH, load_file(drafter.path / CALIBRATION))
        kept = drafter.card.model_dump(include={"kind", "vocabulary", "training", "parity", "acceptance"})
        return write_card(folder, model, name=name, **kept)


def _write(
    folder: Path,
    model: ModelFolder,
    parameters: Parameters,
    vocabulary_N: NDArray[np.int64],
    head_NH: NDArray[np.float32],
    reach: dict[str, NDArray[np.float32]],
) -> RecurrentSession:
    products = quantised_products(parameters, head_NH, reach)
    write_recurrent_graph(folder / DRAFTER_GRAPH, model, parameters, vocabulary_N, products)
    np.save(folder / VOCABULARY, vocabulary_N)
    save_file({key: np.ascontiguousarray(values) for key, values in parameters.items()}, folder / PARAMETERS)
    save_file(reach, folder / CALIBRATION)
    return RecurrentSession(folder / DRAFTER_GRAPH, model.path)


def activation_reach(
    parameters: Parameters, data: Positions, starts: NDArray[np.int64]
) -> dict[str, NDArray[np.float32]]:
    """Return the largest magnitude of every number in front of ``joint``, ``down`` and the head on real texts.

    Whatever lies beyond on other texts is cut off there.
    """
    import torch

    tensors = {key: torch.from_numpy(np.asarray(values)) for key, values in parameters.items()}
    largest: dict[str, NDArray[np.float32]] = {}

    def seen(name: str, values: Any) -> None:
        found = np.abs(values.numpy()).max(axis=0)
        largest[name] = np.maximum(largest.get(name, found), found)

    with torch.no_grad():
        states = torch.from_numpy(data.hidden_PH[starts].astype(np.float32))
        for depth in range(1, DEPTH + 1):
            embedded = torch.from_numpy(data.embedding_UH[data.tokens_P[starts + depth]])
            states = next_states(tensors, states, embedded, seen=seen)
            seen("head", states)
    return largest


def parity(
    parameters: Parameters,
    dataset: DrafterDataset,
    data: Positions,
    starts: NDArray[np.int64],
    session: RecurrentSession,
) -> dict[str, float]:
    """Compare the graph with the float32 network, ``DEPTH`` tokens deep along the texts.

    Returns:
        ``same_best`` (share of places with the same best token), ``mean_difference`` and ``largest_difference`` of
        logits, ``rows``.
    """
    import torch

    tensors = {key: torch.from_numpy(np.asarray(values)) for key, values in parameters.items()}
    head = torch.from_numpy(dataset.tables.head_NH)
    ids = np.concatenate([text.tokens for text in dataset.texts]).astype(np.int64)
    ours = data.hidden_PH[starts].astype(np.float32)
    theirs = torch.from_numpy(ours)
    same, differences = [], []
    with torch.no_grad():
        for depth in range(1, DEPTH + 1):
            places = starts + depth
            theirs = next_states(tensors, theirs, torch.from_numpy(data.embedding_UH[data.tokens_P[places]]))
            wanted = (theirs @ head.T).numpy()
            ours, found = session.step(ids[places], ours)
            same.append(wanted.argmax(axis=1) == found.argmax(axis=1))
            differences.append(np.abs(wanted - found))
    return {
        "same_best": float(np.mean(same)),
        "mean_difference": float(np.mean([part.mean() for part in differences])),
        "largest_difference": float(max(part.max() for part in differences)),
        "rows": float(DEPTH * len(starts)),
    }


def acceptance_by_domain(
    session: RecurrentSession, dataset: DrafterDataset, depth: int = DEPTH
) -> dict[str, list[float | None]]:
    """Return how often the k-th token of a greedy draft is the target's, given those before it were; by domain.

    Measured at every place of the answers that the target wrote greedily: those are what it would have said.
    """
    found = {}
    for domain in dataset.domains():
        tried, right = np.zeros(depth), np.zeros(depth)
        for text in dataset.texts:
            starts = np.arange(text.answer + 1, len(text) - depth)
            if text.domain != domain or not text.greedy or not len(starts):
                continue
            states = text.hidden[starts - 1].astype(np.float32)
            made, _ = session.draft(text.tokens[starts].astype(np.int64), states, depth, 0.0)
            alive = np.ones(len(starts), bool)
            for level in range(depth):
                tried[level] += alive.sum()
                alive &= made[level] == text.tokens[starts + level + 1]
                right[level] += alive.sum()
        found[domain] = shares(right, tried)
    return found
