"""What the target says on the texts of a client: computed once per machine, shared by all methods, rounds and seeds.

Drafters learn from, and are judged on, what the target itself writes behind the beginnings of a domain's texts. On
held-out texts it writes greedily, and since greedy text does not depend on any drafter, every drafter can be judged
at every place of it without running the target again.

Files lie in the cache folder (``$EDGEDUET_CACHE``), under names made of everything they depend on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as save_arrays

from edgeduet_client.drafters.kind import Arrays, DrafterKind
from edgeduet_client.drafters.texts import Piece, client_pieces, domain_pieces, held_out_pieces
from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_shared.atomic_files import atomic_write_bytes
from edgeduet_shared.config import DrafterConfig, Scenario
from edgeduet_shared.data.cache_folder import cache_folder, make_folder
from edgeduet_shared.errors import DataError

log = logging.getLogger("edgeduet.client")

FORMAT = 1


@dataclass(frozen=True)
class Answer:
    """A held-out text and what the target greedily adds to it.

    Attributes:
        prompt: ids given.
        answer: ids added, N of them.
        hidden_NH: float16, the target's last hidden state at the position that predicted each.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    hidden_NH: npt.NDArray[np.float16]

    def committed(self) -> CommittedText:
        """Return it as the text of a finished greedy request."""
        text = CommittedText(self.prompt, window=len(self.answer))
        laws = [Distribution(np.array([token], np.int64), CERTAIN) for token in self.answer]
        text.extend(self.answer, laws, self.hidden_NH.astype(np.float32))
        return text


@lru_cache(maxsize=2)
def open_target(name: str) -> LocalModel:
    """Return the language model, loaded once per process; one thread, as everything that must be repeatable."""
    return LocalModel.open(name, threads=1)


def training_data(scenario: Scenario, client: int, seed: int, kind: DrafterKind) -> Arrays:
    """Return what ``client`` trains on, as ``kind`` captures it.

    Raises:
        DataError: the client's part of its domain holds too little text.
    """
    config = scenario.drafter
    texts = training_texts(scenario, client, seed)
    facts = {
        "what": "training",
        "kind": config.kind,
        "texts": _digest(texts),
        "tokens": [config.train_tokens, config.given_tokens, config.written_tokens],
    }
    return _cached(config, facts, lambda: kind.capture(open_target(config.target), texts, config))


def judged_answers(config: DrafterConfig, domain: int) -> tuple[Answer, ...]:
    """Return what the target writes on the held-out texts of a domain.

    Raises:
        DataError: the domain has no text to test on.
    """
    return _judged_answers(config, domain)


@lru_cache(maxsize=64)
def _judged_answers(config: DrafterConfig, domain: int) -> tuple[Answer, ...]:
    model = open_target(config.target)
    prompts = _test_prompts(config, domain, model)
    facts = {"what": "answers", "prompts": _digest(prompts), "tokens": config.answer_tokens}
    found = _cached(config, facts, lambda: _answer_all(model, prompts, config.answer_tokens))
    answers = []
    for number, prompt in enumerate(prompts):
        tokens = tuple(int(token) for token in found[f"tokens/{number}"])
        if tokens:
            answers.append(Answer(prompt, tokens, found[f"hidden/{number}"]))
    return tuple(answers)


def training_texts(scenario: Scenario, client: int, seed: int) -> list[tuple[int, ...]]:
    """Return the beginnings (token ids) of the texts ``client`` trains on; the target goes on from them.

    Raises:
        DataError: its part of the domain holds none.
    """
    config = scenario.drafter
    model = open_target(config.target)
    domains, clients = len(config.domains), scenario.federation.clients
    domain, part = client % domains, client // domains
    parts = len(range(domain, clients, domains))
    pieces = client_pieces(domain_pieces(config.source(domain)), part=part, parts=parts, seed=seed)
    texts: list[tuple[int, ...]] = []
    left = config.train_tokens
    for piece in pieces:
        if left <= 0:
            break
        # Of a text with a prompt of its own (a question) that prompt is given, of others the beginning.
        ids = _encode(model, piece.prompt or piece.text)[: config.given_tokens]
        if len(ids) > 1:
            texts.append(ids)
            left -= len(ids) + config.written_tokens
    if not texts:
        raise DataError(
            f"client {client} holds no text of domain '{config.domain(client)}'; lower federation.clients, or give the "
            "domain more text"
        )
    return texts


def _test_prompts(config: DrafterConfig, domain: int, model: LocalModel) -> list[tuple[int, ...]]:
    prompts: list[tuple[int, ...]] = []
    for piece in held_out_pieces(domain_pieces(config.source(domain))):
        ids = _prompt(piece, model, config.prompt_tokens)
        if ids:
            prompts.append(ids)
        if len(prompts) == config.test_prompts:
            return prompts
    if not prompts:
        raise DataError(f"domain '{config.domain_names[domain]}' has no held-out text; give it texts of more sources")
    return prompts


def _prompt(piece: Piece, model: LocalModel, count: int) -> tuple[int, ...]:
    """The text's own prompt, or its first ``count`` tokens; nothing where it is shorter than that."""
    if piece.prompt:
        return _encode(model, piece.prompt)
    ids = _encode(model, piece.text)[:count]
    return ids if len(ids) == count else ()


def _encode(model: LocalModel, text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in model.tokenizer.encode(text))


def _answer_all(model: LocalModel, prompts: Sequence[tuple[int, ...]], count: int) -> Arrays:
    arrays: Arrays = {}
    for number, prompt in enumerate(prompts):
        tokens, hidden_NH = greedy_answer(model, prompt, count)
        arrays[f"tokens/{number}"] = np.array(tokens, np.int32)
        arrays[f"hidden/{number}"] = hidden_NH.astype(np.float16)
    return arrays


def greedy_answer(model: LocalModel, prompt: Sequence[int], count: int) -> tuple[list[int], npt.NDArray[np.float32]]:
    """Return up to ``count`` tokens that the target adds to ``prompt``, and the (N, H) states that predicted them."""
    ends, used = set(model.manifest.eos_ids), model.vocabulary.used
    cache = model.new_cache()
    tokens: list[int] = []
    states: list[npt.NDArray[np.float32]] = []
    outcome = model.session.prefill(prompt, cache, hidden=True)
    while len(tokens) < count:
        assert outcome.hidden is not None
        token = int(outcome.logits[-1, :used].argmax())
        if token in ends:
            break
        tokens.append(token)
        states.append(outcome.hidden[-1].copy())
        outcome = model.session.forward([token], cache, hidden=True)
    return tokens, np.array(states, np.float32).reshape(len(states), model.session.hidden_width)


# --- cache --------------------------------------------------------------------------------------------


def _cached(config: DrafterConfig, facts: dict[str, Any], make: Callable[[], Arrays]) -> Arrays:
    manifest = open_target(config.target).manifest
    key = json.dumps(
        {
            "format": FORMAT,
            "target": {name: file.sha256 for name, file in sorted(manifest.files.items())},
            "onnxruntime": _onnxruntime_version(),
            **facts,
        },
        sort_keys=True,
    )
    folder = make_folder(cache_folder() / "drafter-texts")
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
    found = _read(path)
    if found is None:
        found = make()
        atomic_write_bytes(path, save_arrays({name: np.ascontiguousarray(value) for name, value in found.items()}))
    return found


def _read(path: Path) -> Arrays | None:
    if not path.is_file():
        return None
    try:
        return dict(load_arrays(path.read_bytes()))
    except (OSError, SafetensorError) as error:
        log.warning("%s is damaged (%s); it is made again", path, error)
        return None


def _digest(texts: Sequence[tuple[int, ...]]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


@lru_cache(maxsize=1)
def _onnxruntime_version() -> str:
    import onnxruntime

    return str(onnxruntime.__version__)
