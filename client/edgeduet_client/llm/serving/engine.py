"""One model that answers: admission of a request, its turn, and the caches kept for the next.

Text becomes ids, and every bound is checked, before a request takes a place in the line (:meth:`Engine.admit_chat`,
:meth:`Engine.admit_text`): what cannot be answered is refused at once. On its turn the worker decodes the answers
of the request one after the other and tells them to ``deliver``, which must not block: a caller who reads slowly
slows nobody else down, and holds no more memory than its own answer.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeduet_client.llm.context_limit import fit_prompt
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.model_folder import MANIFEST, ModelFolder
from edgeduet_client.llm.request import GenerationRequest, request_with_defaults
from edgeduet_client.llm.serving.cache_pool import CachePool
from edgeduet_client.llm.serving.embedding import embed
from edgeduet_client.llm.serving.events import ChoiceDone, Done, Embedded, Event, Failed, Piece, Started
from edgeduet_client.llm.serving.folder_watch import FolderWatch
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from edgeduet_client.llm.serving.refusals import ContextExceeded, WaitedTooLong, WorkerFailed
from edgeduet_client.llm.serving.work_queue import Ticket, WorkQueue
from edgeduet_client.llm.settings import usable_defaults, with_budget
from edgeduet_shared.errors import EdgeDuetError

if TYPE_CHECKING:
    from edgeduet_client.llm.kv_cache import KVCache
    from edgeduet_client.llm.local_model import LocalModel

Deliver = Callable[[Event], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """One answer to give.

    Attributes:
        prompt: ids of the prompt.
        request: how to answer; its ``timeout_s`` counts from arrival.
    """

    prompt: tuple[int, ...]
    request: GenerationRequest


class Engine:
    """A loaded model, its line, its caches.

    Args:
        folder: where the model was loaded from.
        model: the model; it belongs to the engine from now on.
        limits: bounds of the server.
        metrics: where to count.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: ModelFolder,
        model: LocalModel,
        limits: ServingLimits,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.model = model
        self.name = name = folder.name
        self.limits = limits
        self.metrics = metrics
        self.created = int(folder.file(MANIFEST).stat().st_mtime)
        self.context_length = model.session.cache_shape.limit
        self.defaults = usable_defaults(folder.generation_defaults())
        self._watch = FolderWatch(folder)
        # OpenAI's word for "the same seed gives the same answer as long as this stays".
        self.fingerprint = f"fp_{self._watch.digest[:12]}"
        self._clock = clock
        self.queue = WorkQueue(limits.queue, name=f"edgeduet {name}", clock=clock)
        self.caches = CachePool(model.session.new_cache, limits.cache_bytes)
        metrics.watch(
            name,
            queue_depth=lambda: self.queue.waiting,
            running=lambda: self.queue.running,
            caches=lambda: len(self.caches),
            cache_bytes=lambda: self.caches.bytes,
        )

    def check_alive(self) -> None:
        """Raise why this server answers nothing new for a longer time: ``Draining`` or ``ModelChanged``."""
        self.queue.check_open()
        self._watch.check()

    def check_ready(self) -> None:
        """Raise why a new request would be refused now: ``Draining``, ``QueueFull`` or ``ModelChanged``."""
        self.queue.check_room()
        self._watch.check()

    def card(self) -> dict[str, Any]:
        """Return what a caller may want to know of the model."""
        manifest = self.folder.manifest
        return {
            "architecture": manifest.architecture,
            "context_length": self.context_length,
            "vocab_size": manifest.vocab_size,
            "dtype": manifest.dtype,
            "licence": manifest.licence,
            "chat": self.model.tokenizer.template is not None,
            "gate": self.model.gate is not None,
            "speculation": self.model.speculates,
        }

    def admit_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Return the ids of a conversation that waits for its answer.

        Raises:
            RequestError: the model is no chat model, the template refuses the messages, or the prompt is too long.
        """
        return self._checked(self.model.tokenizer.encode_chat(messages), "messages")

    def admit_text(self, prompt: str | Sequence[int], field: str = "prompt") -> tuple[int, ...]:
        """Return the ids of a prompt or a text, given as text or as ids.

        Raises:
            RequestError: it is empty or too long, or holds ids the model does not know.
        """
        if isinstance(prompt, str):
            return self._checked(self.model.tokenizer.encode_prompt(prompt), field)
        unknown = [token for token in prompt if not 0 <= token < self.model.tokenizer.vocab_size]
        if unknown:
            raise RequestError(
                f"{field!r} holds the token {unknown[0]}; this model knows 0 to {self.model.tokenizer.vocab_size - 1}",
                field,
            )
        return self._checked(prompt, field)

    def choices(self, prompt: tuple[int, ...], settings: Mapping[str, Any], count: int) -> list[Choice]:
        """Return ``count`` answers to give to ``prompt``, on top of the model's own defaults.

        An answer whose request does not say how long it may be gets the server's default, or what the context
        has left. Seeds go up by one from answer to answer, or all answers were the same.

        Raises:
            RequestError: a setting out of range, settings that contradict each other, more tokens than this server
                gives, or more than the context holds.
        """
        limit = self.limits.max_tokens or self.context_length
        wanted = settings.get("max_tokens")
        if wanted is not None and wanted > limit:
            raise RequestError(f"'max_tokens' is {wanted}; this server gives {limit} at most", "max_tokens")
        given = with_budget(
            settings,
            prompt=len(prompt),
            context=self.context_length,
            default=min(self.limits.default_max_tokens, limit),
        )
        request = request_with_defaults(given, self.defaults)
        try:
            fit_prompt(
                prompt,
                limit=self.context_length,
                max_tokens=request.max_tokens,
                policy=request.context_policy,
                bos_id=self.folder.manifest.bos_id,
            )
        except RequestError as error:
            raise ContextExceeded(str(error), error.field) from error
        return [Choice(prompt, _numbered(request, number)) for number in range(count)]

    def check_count(self, count: int) -> None:
        """Refuse a request for more than the server gives at once; ``count`` is prompts times n."""
        if count > self.limits.choices:
            raise RequestError(
                f"the request asks for {count} answers (prompts times n); this server gives "
                f"{self.limits.choices} at most",
                "n",
            )

    def generate(self, choices: Sequence[Choice], deliver: Deliver, *, call: str) -> Ticket:
        """Take a place in the line for ``choices``; ``call`` names the API call in the metrics.

        Raises:
            RequestError: too many answers at once, or more tokens than this server gives.
            QueueFull, Draining, ModelChanged: as :meth:`check_ready`.
        """
        self.check_count(len(choices))
        self.check_ready()
        return self.queue.submit(_Generation(self, tuple(choices), deliver, call))

    def embed(self, texts: Sequence[tuple[int, ...]], deliver: Deliver) -> Ticket:
        """Take a place in the line for the vectors of ``texts`` (ids); raises as :meth:`generate`."""
        if len(texts) > self.limits.inputs:
            raise RequestError(f"{len(texts)} texts at once; this server takes {self.limits.inputs} at most", "input")
        self.check_ready()
        return self.queue.submit(_Embedding(self, tuple(texts), deliver))

    def _checked(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        if not ids and self.folder.manifest.bos_id is None:
            raise RequestError(f"{field!r} is empty; give at least one character", field)
        ids = ids or [self.folder.manifest.bos_id or 0]
        if self.limits.prompt_tokens is not None and len(ids) > self.limits.prompt_tokens:
            raise RequestError(
                f"{field!r} has {len(ids)} tokens; this server reads {self.limits.prompt_tokens} at most", field
            )
        return tuple(ids)


def _numbered(request: GenerationRequest, number: int) -> GenerationRequest:
    if request.seed is None:
        return request
    return request.model_copy(update={"seed": (request.seed + number) % 2**64})


class _Asked(ABC):
    """What the two kinds of work share: counting, and telling how they ended."""

    call = ""

    def __init__(self, engine: Engine, deliver: Deliver) -> None:
        self.engine = engine
        self.deliver = deliver
        self.numbers: dict[str, float] = {}

    def run(self, ticket: Ticket) -> None:
        waited = self.engine._clock() - ticket.submitted
        self.engine.metrics.waited.labels(self.engine.name).observe(waited)
        self.numbers["waited_s"] = round(waited, 4)
        try:
            self.deliver(Started(waited))
            complete = self.work(ticket)
        except EdgeDuetError as error:
            self.refuse(error)
        except Exception as error:
            log.exception("the worker failed", extra={"fields": {"model": self.engine.name, "call": self.call}})
            self.refuse(WorkerFailed(f"the server failed on this request ({type(error).__name__}); its log says more"))
        else:
            self.count("ok" if complete else "cancelled")
            self.deliver(Done())

    @abstractmethod
    def work(self, ticket: Ticket) -> bool:
        """Do it; return whether it was done to the end."""

    def refuse(self, error: EdgeDuetError) -> None:
        self.count("refused" if isinstance(error, RequestError) else "failed")
        self.deliver(Failed(error))

    def abandon(self) -> None:
        self.count("cancelled")

    def count(self, outcome: str) -> None:
        self.engine.metrics.requests.labels(self.engine.name, self.call, outcome).inc()
        fields = {"model": self.engine.name, "call": self.call, "outcome": outcome, **self.numbers}
        log.debug("request", extra={"fields": fields})


class _Generation(_Asked):
    def __init__(self, engine: Engine, choices: tuple[Choice, ...], deliver: Deliver, call: str) -> None:
        super().__init__(engine, deliver)
        self.choices = choices
        self.call = call

    def work(self, ticket: Ticket) -> bool:
        for index, choice in enumerate(self.choices):
            if ticket.cancelled.is_set():
                return False
            cache = self._cache(choice)
            pieces = self.engine.model.generate(
                list(choice.prompt), self._within_time(choice.request, ticket), cache=cache, cancel=ticket.cancelled
            )
            for piece in pieces:
                if isinstance(piece, Finished):
                    self._count(piece)
                    self.deliver(ChoiceDone(index, piece))
                else:
                    if index == 0:
                        self._first(ticket)
                    self.deliver(Piece(index, piece))
            # A cache of a generation that raised is not worth trusting; this line is not reached then.
            self.engine.caches.put(cache)
        return not ticket.cancelled.is_set()

    def _cache(self, choice: Choice) -> KVCache:
        """Return the cache to answer with.

        A seed asks for the same answer whatever came before, so nothing that came before is used: kernels for
        quantised weights round differently for one token than for many, and a prompt that was computed in other
        steps gives other tokens (measured on SmolLM2 at 4 bits: 12 of 12 sampled answers differed).
        """
        if choice.request.seed is not None:
            return self.engine.caches.fresh()
        return self.engine.caches.take(choice.prompt)

    def _within_time(self, request: GenerationRequest, ticket: Ticket) -> GenerationRequest:
        """Return ``request`` with what is left of its time."""
        allowed = min(request.timeout_s or self.engine.limits.timeout_s, self.engine.limits.timeout_s)
        left = ticket.submitted + allowed - self.engine._clock()
        if left <= 0:
            raise WaitedTooLong(f"the {allowed:g} seconds of this request were over before its turn came", 1)
        return request.model_copy(update={"timeout_s": left})

    def _first(self, ticket: Ticket) -> None:
        if self._first_told:
            return
        self._first_told = True
        took = self.engine._clock() - ticket.submitted
        self.engine.metrics.first_token.labels(self.engine.name).observe(took)

    _first_told = False

    def _count(self, finished: Finished) -> None:
        metrics, name = self.engine.metrics, self.engine.name
        metrics.tokens.labels(name, "prompt").inc(finished.prompt_tokens - finished.cached_tokens)
        metrics.tokens.labels(name, "cached").inc(finished.cached_tokens)
        metrics.tokens.labels(name, "answer").inc(finished.completion_tokens)
        for key in ("prompt_tokens", "completion_tokens", "seconds_decode"):
            self.numbers[key] = round(self.numbers.get(key, 0) + getattr(finished, key), 4)
        metrics.gate_interventions.labels(name).inc(finished.gate_interventions)
        if (drafts := finished.speculation) is not None:
            metrics.draft_tokens.labels(name, "accepted").inc(drafts.accepted)
            metrics.draft_tokens.labels(name, "rejected").inc(drafts.evaluated - drafts.accepted)
            metrics.draft_tokens.labels(name, "unseen").inc(drafts.proposed - drafts.evaluated)
        if finished.seconds_decode > 0:
            metrics.tokens_per_second.labels(name).observe(finished.completion_tokens / finished.seconds_decode)


class _Embedding(_Asked):
    call = "embeddings"

    def __init__(self, engine: Engine, texts: tuple[tuple[int, ...], ...], deliver: Deliver) -> None:
        super().__init__(engine, deliver)
        self.texts = texts

    def work(self, ticket: Ticket) -> bool:
        deadline = ticket.submitted + self.engine.limits.timeout_s
        vectors = []
        for ids in self.texts:
            if ticket.cancelled.is_set():
                return False
            if self.engine._clock() > deadline:
                raise WaitedTooLong(f"the {self.engine.limits.timeout_s:g} seconds of this request are over", 1)
            vectors.append(embed(self.engine.model.session, ids))
        self.engine.metrics.tokens.labels(self.engine.name, "prompt").inc(sum(map(len, self.texts)))
        self.deliver(Embedded(vectors, sum(map(len, self.texts))))
        return True
