"""Draft with another, smaller language model that means the same by the same tokens.

It has a cache of its own. That is brought up to the committed text in one prefill when the drafter is next asked,
whether for a draft or for evidence; drafted tokens stay in it as long as the text agrees with them and are cropped
when it does not. What it says behind every committed token is kept, so evidence about past places costs no call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.model_folder import TOKENIZER, ModelFolder
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation.draft import Draft, Redraft
from edgeduet_client.llm.speculation.drafter_options import checked_options
from edgeduet_client.llm.speculation.proposal_law import law_of, until_end_of_text
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.speculation.vocabulary import common_ids
from edgeduet_client.llm.token_bytes import read_token_bytes

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel

LONGEST = 16
_KEPT = 1024
"""Places whose opinion is kept; more than a committed text keeps of its own."""


@dataclass(frozen=True)
class Opinion:
    """What the drafter says behind some token.

    Attributes:
        best: its most probable token, or ``None`` where a draft ends before it.
        law: what it draws from; ``None`` where its proposals are certain.
    """

    best: int | None
    law: Distribution | None


class LanguageModelDrafter:
    """Proposes what a model of its own would say.

    Args:
        name: as configured.
        kind: ``model`` or ``truncated``.
        session: the model.
        vocabulary_N: ids its logits stand for, ascending; ``None``: 0 to ``known`` - 1.
        known: ids that target and drafter share, from 0 on.
        eos_ids: a draft ends with the first of them.
        threshold: a draft ends before a token that the model gives a smaller probability.
        temperature: ``None``: propose the best token (certain); else draw from p-less at this temperature.
        memory: bytes of weights that are its own.
    """

    needs_hidden = False
    longest = LONGEST

    def __init__(
        self,
        name: str,
        kind: str,
        session: TargetSession,
        *,
        vocabulary_N: NDArray[np.int64] | None = None,
        known: int,
        eos_ids: Iterable[int] = (),
        threshold: float = 0.4,
        temperature: float | None = None,
        memory: int = 0,
    ) -> None:
        self.name = name
        self.kind = kind
        self._session = session
        self._vocabulary = vocabulary_N
        self._known = known
        self._eos_ids = frozenset(eos_ids)
        self._threshold = threshold
        self._temperature = temperature
        self._memory = memory
        self._cache = session.new_cache()
        self._agreed = 0
        self._opinions: dict[int, Opinion] = {}

    def start(self, text: CommittedText) -> None:
        """Forget the old text; what the new one shares with it stays in the cache."""
        self._agreed = 0
        self._opinions.clear()

    def draft(self, text: CommittedText, length: int, rng: np.random.Generator) -> Draft:
        """Propose up to ``length`` tokens; none where the text is longer than the drafter's context."""
        room = self._cache.shape.limit - len(text) + 1
        if room < 1:
            return Draft()
        self._catch_up(text)
        tokens: list[int] = []
        laws: list[Distribution | None] = []
        while True:
            opinion = self._opinions[len(text) + len(tokens)]
            if opinion.best is None:
                break
            tokens.append(opinion.best if opinion.law is None else draw(opinion.law, rng))
            laws.append(opinion.law)
            if len(tokens) == min(length, room) or tokens[-1] in self._eos_ids:
                break
            step = self._session.forward(tokens[-1:], self._cache)
            self._opinions[len(text) + len(tokens)] = self._opinion(step.logits[0])
        return Draft(tuple(tokens), tuple(laws))

    def redraft(self, text: CommittedText, starts: Sequence[int], depth: int) -> list[Redraft]:
        """Return what it would have proposed at each start.

        A certain proposal is right up to its first token that is not the text's. Nothing survives behind that; there
        stands what the drafter says along the text, which shows about how long it would have gone on.
        """
        if len(text) > self._cache.shape.limit:
            return [self._evidence(text, start, 0) for start in starts]
        self._catch_up(text)
        return [self._evidence(text, start, depth) for start in starts]

    def memory_bytes(self) -> int:
        """Return the bytes of its own weights and of its cache."""
        return self._memory + self._cache.length * self._cache.shape.bytes_per_token

    def _evidence(self, text: CommittedText, start: int, depth: int) -> Redraft:
        tokens: list[int] = []
        laws: list[Distribution] = []
        for place in range(start, start + depth):
            opinion = self._opinions.get(place)
            if opinion is None or opinion.best is None:
                break
            tokens.append(opinion.best)
            if opinion.law is not None:
                laws.append(opinion.law)
                if text.tokens[place] in self._eos_ids:
                    break
        if self._temperature is None:
            return Redraft(start, until_end_of_text(tokens, self._eos_ids))
        return Redraft(start, laws=tuple(laws))

    def _catch_up(self, text: CommittedText) -> None:
        """Bring the cache to all tokens of the text, with an opinion behind each of the answer's."""
        held, tokens = self._cache.tokens, text.tokens
        agreed = min(self._agreed, len(held))
        while agreed < min(len(held), len(tokens)) and held[agreed] == tokens[agreed]:
            agreed += 1
        if agreed == len(tokens) and agreed in self._opinions:
            self._cache.crop(agreed)
            self._agreed = agreed
            return
        agreed = min(agreed, len(tokens) - 1)
        self._cache.crop(agreed)
        # Opinions behind rejected tokens are about another text.
        self._opinions = {place: kept for place, kept in self._opinions.items() if place <= agreed}
        rest = tokens[agreed:]
        # Places before the answer are never asked for.
        first = max(text.prompt_length - 1 - agreed, 0)
        rows = range(max(first, len(rest) - _KEPT), len(rest))
        logits_RV = self._session.prefill(rest, self._cache, rows=rows).logits
        for row, logits in zip(rows, logits_RV, strict=True):
            self._opinions[agreed + row + 1] = self._opinion(logits)
        while len(self._opinions) > _KEPT:
            del self._opinions[min(self._opinions)]
        self._agreed = len(tokens)

    def _opinion(self, logits: NDArray[np.float32]) -> Opinion:
        row = logits[: self._known] if self._vocabulary is None else logits
        if self._temperature is not None:
            law = law_of(row, self._vocabulary, temperature=self._temperature, threshold=self._threshold)
            return Opinion(None if law is None else int(law.ids[law.probabilities.argmax()]), law)
        place = int(row.argmax())
        share = 1.0 / float(np.exp(row - row[place]).sum())
        if share < self._threshold:
            return Opinion(None, None)
        return Opinion(place if self._vocabulary is None else int(self._vocabulary[place]), None)


class OwnModelOptions(BaseModel):
    """Options that every drafter with a model of its own understands."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: float = Field(0.4, ge=0, lt=1, description="end a draft before a token less probable than that")
    temperature: float | None = Field(
        None, gt=0, le=4, description="draw from p-less at this temperature; default: always the best token"
    )
    threads: int | None = Field(None, ge=1, le=64, description="cores to use; default: as many as the target")


class ModelDrafterOptions(OwnModelOptions):
    """Options of the kind ``model``."""

    model: str = Field(min_length=1, description="an imported model, by name or folder")


class ModelDrafterFactory:
    """Opens drafters of the kind ``model``."""

    kind = "model"

    def open(self, name: str, options: Mapping[str, Any], model: LocalModel) -> LanguageModelDrafter:
        """Return a drafter for ``model``.

        Raises:
            ModelError: there is no such model, or its tokenizer is another.
            RequestError: an option is wrong.
        """
        chosen = checked_options(ModelDrafterOptions, name, options)
        home = model.session.path.parent
        folder = ModelFolder.open(chosen.model, home.parent)
        known = _known_ids(folder, home, model)
        return LanguageModelDrafter(
            name,
            self.kind,
            TargetSession(
                folder.graph,
                context_length=folder.manifest.context_length,
                threads=chosen.threads or model.session.threads,
            ),
            known=known,
            eos_ids=model.manifest.eos_ids,
            threshold=chosen.threshold,
            temperature=chosen.temperature,
            memory=folder.manifest.memory_weights,
        )


def _known_ids(folder: ModelFolder, home: Any, model: LocalModel) -> int:
    """Return how many ids both models share; raise ModelError where they mean different things by one."""
    target = ModelFolder.open(home)
    if folder.manifest.tokenizer_sha256 == target.manifest.tokenizer_sha256:
        return min(folder.manifest.vocab_size, model.vocabulary.used)
    ours, theirs = (read_token_bytes(place.file(TOKENIZER)) for place in (target, folder))
    if theirs.vocab_size > folder.manifest.vocab_width:
        raise ModelError(f"{folder.name} has a tokenizer of another model; import it again")
    return common_ids(ours, theirs, drafter_name=f"the drafter {folder.name}")


FACTORY = ModelDrafterFactory()
