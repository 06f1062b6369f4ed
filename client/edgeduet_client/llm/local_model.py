"""A model folder, opened: session, tokenizer, vocabulary and, where there is one, the confusion gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeduet_client.llm.chat_template import ChatTemplate
from edgeduet_client.llm.context_limit import fit_prompt
from edgeduet_client.llm.draw import generator
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.families import FamilyTable, family_table
from edgeduet_client.llm.free_memory import available_memory
from edgeduet_client.llm.gate import Gate
from edgeduet_client.llm.generate import Answer, Clock, Finished, Interruption, Sampling, TextPiece, generate
from edgeduet_client.llm.kv_cache import FIRST_CAPACITY, KVCache
from edgeduet_client.llm.model_folder import CHAT_TEMPLATE, FAMILIES, TOKENIZER, Manifest, ModelFolder
from edgeduet_client.llm.plan import Vocabulary, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import initial_state
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgeduet_client.llm.speculation.options import SpeculationOptions
    from edgeduet_client.llm.speculation.speculator import Speculator


@dataclass(frozen=True)
class LocalModel:
    """A model that is ready to answer; any number of threads may use it, each with a cache of its own.

    Attributes:
        gate: the language confusion gate, or ``None`` where none was trained.
        families: token families of the gate; (V,) uint8.
        speculator: drafters and what selects among them, or ``None`` where every token takes a step of its own.
    """

    manifest: Manifest
    session: TargetSession
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    gate: Gate | None = None
    families: FamilyTable | None = None
    speculator: Speculator | None = None

    @classmethod
    def open(
        cls,
        name_or_path: str | Path | ModelFolder,
        root: Path | None = None,
        *,
        threads: int | None = None,
        speculation: SpeculationOptions | None = None,
    ) -> LocalModel:
        """Load a model.

        Args:
            name_or_path: an imported model's name, a path, or an open folder.
            root: where models lie.
            threads: cores a step may use; see :class:`TargetSession`.
            speculation: draft and verify; ``None``: do not. The first time on a machine this measures what steps
                and drafters cost, which takes some seconds.

        Raises:
            ModelError: the folder, one of its files, a drafter or a library cannot be used, or the machine has too
                little memory for it; one line that says which.
            RequestError: ``speculation`` names something that does not exist.
        """
        folder = name_or_path if isinstance(name_or_path, ModelFolder) else ModelFolder.open(name_or_path, root)
        manifest = folder.manifest
        _refuse_too_large(folder)
        tokenizer_json = folder.file(TOKENIZER)
        tokenizer = Tokenizer(tokenizer_json, name=manifest.name, bos_id=manifest.bos_id, add_bos=manifest.add_bos)
        tokenizer.template = ChatTemplate.read(folder.file(CHAT_TEMPLATE), special_tokens=_names(manifest, tokenizer))
        gate = Gate.of_model(folder)
        model = cls(
            manifest=manifest,
            session=TargetSession(folder.graph, context_length=manifest.context_length, threads=threads),
            tokenizer=tokenizer,
            vocabulary=Vocabulary(
                manifest.vocab_width,
                manifest.vocab_size,
                tuple(manifest.eos_ids),
                tokens=tokenizer.tokens,
                encode=tokenizer.encode,
            ),
            gate=gate,
            families=family_table(tokenizer_json, manifest.vocab_width, cache=folder.file(FAMILIES)) if gate else None,
        )
        if speculation is None:
            return model
        from edgeduet_client.llm.speculation.speculator import Speculator

        return replace(model, speculator=Speculator.open(model, speculation))

    @property
    def speculates(self) -> str:
        """Whether and how: empty, ``exact``, ``fast``, or either with ``lossy (fly)`` behind it."""
        return "" if self.speculator is None else self.speculator.name

    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""
        return self.session.new_cache()

    def generate(
        self,
        prompt_ids: Sequence[int],
        request: GenerationRequest,
        *,
        cache: KVCache | None = None,
        cancel: threading.Event | None = None,
        clock: Clock = time.monotonic,
    ) -> Generator[TextPiece | Finished, None, None]:
        """Return the answer to a prompt as it comes: pieces of text, then :class:`Finished`.

        What is wrong with the request is raised by this call, before any work.

        Args:
            prompt_ids: the prompt, encoded; empty means a text from its beginning, where the model has a token for
                that.
            request: how to sample, and when to end.
            cache: of an earlier turn; what it shares with the prompt is not computed again. It belongs to this
                answer until the answer has ended.
            cancel: set it, from any thread, to end the answer after the token in work.
            clock: seconds, for time-out and timings.

        Raises:
            RequestError: the request cannot be honoured.
        """
        prompt = self._checked(prompt_ids)
        prompt, budget = fit_prompt(
            prompt,
            limit=self.session.cache_shape.limit,
            max_tokens=request.max_tokens,
            policy=request.context_policy,
            bos_id=self.manifest.bos_id,
        )
        plan = make_plan(request, self.vocabulary, families=self.families, gate=self.gate, prompt_ids=prompt)
        # A text begins after a special token; after anything else the answer goes on in one.
        stream = self.tokenizer.stream(request.stop, starts_text=prompt[-1] in self.tokenizer.special_ids)
        decode = generate if self.speculator is None else self.speculator.generate
        return decode(
            self.session,
            cache if cache is not None else self.new_cache(),
            prompt,
            Answer(stream, self.tokenizer.token_bytes, eos_ids=frozenset(self.manifest.eos_ids), budget=budget),
            Sampling(plan, initial_state(plan), generator(request.seed), request.logprobs),
            interruption=Interruption(cancel, clock, request.timeout_s),
            clock=clock,
        )

    def _checked(self, prompt_ids: Sequence[int]) -> list[int]:
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            if self.manifest.bos_id is None:
                raise RequestError("the prompt is empty; give at least one character", field="prompt")
            return [self.manifest.bos_id]
        for token in prompt:
            if not 0 <= token < self.vocabulary.used:
                raise RequestError(
                    f"the prompt holds token {token}, but {self.manifest.name} knows 0 to {self.vocabulary.used - 1}",
                    field="prompt",
                )
        return prompt


def _refuse_too_large(folder: ModelFolder) -> None:
    """Say so before the system ends the process for it: weights are copied into the kernels' own layout."""
    needed, free = folder.memory_bytes(FIRST_CAPACITY), available_memory()
    if needed > free:
        raise ModelError(
            f"{folder.name} needs {needed / 1e6:,.0f} MB of memory and {free / 1e6:,.0f} MB are free; "
            "close other programs, or import a smaller model or one of fewer bits"
        )


def _names(manifest: Manifest, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that chat templates call by name."""
    stated = {
        "bos_token": manifest.bos_id,
        "eos_token": manifest.eos_ids[0] if manifest.eos_ids else None,
        "pad_token": manifest.pad_id,
    }
    return {name: tokenizer.token_name(token) for name, token in stated.items() if token is not None}
