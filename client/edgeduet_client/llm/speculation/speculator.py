"""What one loaded model speculates with: drafters, selector and costs, over all its requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from edgeduet_client.llm.generate import Answer, Clock, Finished, Interruption, Sampling, TextPiece
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.model_folder import GRAPH
from edgeduet_client.llm.session import TargetSession
from edgeduet_client.llm.speculation import cascade
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round, Selector
from edgeduet_client.llm.speculation.calibration import calibrated_costs
from edgeduet_client.llm.speculation.decode import Counted, Means, speculate
from edgeduet_client.llm.speculation.drafter import Drafter
from edgeduet_client.llm.speculation.evaluation_budget import EvaluationBudget
from edgeduet_client.llm.speculation.invariance import Invariance, cached_invariance, filled
from edgeduet_client.llm.speculation.options import DrafterOptions, SpeculationOptions
from edgeduet_client.llm.speculation.registry import drafter_factory
from edgeduet_client.llm.speculation.regret import hindsight
from edgeduet_client.llm.speculation.scoring import Scoring
from edgeduet_client.llm.speculation.selectors import new_selector
from edgeduet_client.llm.speculation.selectors.fixed import FixedSelector
from edgeduet_client.llm.speculation.stats import SpeculationStats, SurvivalStats
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.speculation.trace import TraceWriter

if TYPE_CHECKING:
    from edgeduet_client.llm.local_model import LocalModel
    from edgeduet_client.llm.speculation.costs import CostModel

DRAFTERS_FOLDER = "drafters"
"""Where trained drafters lie in a model's folder, each in a folder of its own."""


def draft_generator(seed: int | None) -> np.random.Generator:
    """Return what drafters draw from in a request of ``seed``: a stream beside the one tokens are drawn from."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))


class Speculator:
    """Drafters, selector and costs of one loaded model.

    Args:
        options: as configured.
        drafters: what proposes.
        selector: what picks.
        costs: what it costs; ``None`` where nothing looks at it.
        invariance: in exact mode, what was found about this machine's kernels.
        scoring: scores drafters for the selector.
        trace: hears of every round.
    """

    def __init__(
        self,
        options: SpeculationOptions,
        drafters: Sequence[Drafter],
        selector: Selector,
        costs: CostModel | None = None,
        *,
        invariance: Invariance | None = None,
        scoring: Scoring | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        self.options = options
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.invariance = invariance
        self._trace = trace
        self._means = Means(
            self.drafters,
            selector,
            costs,
            scoring,
            granule=1 if invariance is None else invariance.granule,
            fly=options.fly.rule() if options.verify == "fly" else None,
        )
        # Drafters hold the state of one text.
        self._in_use = threading.Lock()

    @classmethod
    def open(cls, model: LocalModel, options: SpeculationOptions) -> Speculator:
        """Open the drafters, measure what they cost, and choose the selector.

        Raises:
            ModelError: a drafter cannot be used with this model.
            RequestError: a drafter kind, a selector or one of their options does not exist.
        """
        drafters = open_drafters(default_drafters(model) if options.drafters is None else options.drafters, model)
        found = None
        files = model.manifest.files
        weights = "".join(files[name].sha256 for name in sorted(files) if name.startswith(GRAPH))
        if options.mode == "exact":
            found = cached_invariance(model.session, model.vocabulary.used, options.longest + 1, weights_sha256=weights)
        granule = 1 if found is None else found.granule
        named = cascade.choices({drafter.name: drafter for drafter in drafters})
        lengths = {name: lengths_for(drafter, options.lengths, granule) for name, drafter in named.items()}
        selector = _selector_for(options, lengths, cascade.first_parts(named))
        depth = max((of[-1] for of in lengths.values()), default=1)
        costs = calibrated_costs(
            model.session,
            named,
            vocabulary=model.vocabulary.used,
            longest=depth,
            granule=granule,
            weights_sha256=weights,
            calibrate="on" if options.calibrate == "fresh" else "cached",
            clock=time.perf_counter,
        )
        trace = None
        if options.trace is not None:
            trace = TraceWriter(options.trace, named, lengths, depth=depth, costs=costs, form=options.estimator)
        return cls(
            options,
            drafters,
            selector,
            costs,
            invariance=found,
            scoring=scoring_for(options, named, depth, selector),
            trace=trace,
        )

    def lengths_of(self, drafter: str) -> list[int]:
        """Return the draft lengths ``drafter`` may be asked for; in exact mode those that fill a step."""
        return lengths_for(self.drafters[drafter], self.options.lengths, self._means.granule)

    def fixed(self, arm: Arm) -> Speculator:
        """Return a speculator with the same drafters that always plays ``arm``; the two are not used at once."""
        return Speculator(
            self.options,
            list(self.drafters.values()),
            FixedSelector([arm], drafter=arm.drafter or "none", length=arm.length or None),
            self._means.costs,
            invariance=self.invariance,
        )

    def with_selector(self, name: str, selector_options: Mapping[str, Any] | None = None) -> Speculator:
        """Return a speculator with the same drafters and costs that another selector rules; not both are used at once.

        Raises:
            RequestError: no such selector or option.
        """
        options = self.options.model_copy(
            update={"selector": name, "selector_options": dict(selector_options or {}), "trace": None}
        )
        offered = cascade.choices(self.drafters)
        lengths = {drafter: self.lengths_of(drafter) for drafter in offered}
        selector = _selector_for(options, lengths, cascade.first_parts(offered))
        depth = max((of[-1] for of in lengths.values()), default=1)
        return Speculator(
            options,
            list(self.drafters.values()),
            selector,
            self._means.costs,
            invariance=self.invariance,
            scoring=scoring_for(options, offered, depth, selector),
        )

    @property
    def name(self) -> str:
        """How it speculates, in a few words."""
        return f"{self.options.mode}, lossy (fly)" if self.options.verify == "fly" else self.options.mode

    def description(self) -> dict[str, Any]:
        """Return what a log should say about it."""
        return {
            "speculation": self.name,
            "selector": self.options.selector,
            "drafters": list(self.drafters),
            "drafter_bytes": sum(drafter.memory_bytes() for drafter in self.drafters.values()),
            **({} if self.invariance is None else {"row_invariant": self.invariance.holds}),
        }

    def generate(
        self,
        session: TargetSession,
        cache: KVCache,
        prompt: Sequence[int],
        answer: Answer,
        sampling: Sampling,
        *,
        interruption: Interruption,
        clock: Clock,
    ) -> Generator[TextPiece | Finished, None, None]:
        """As :func:`~edgeduet_client.llm.generate.generate`; :class:`Finished` says what speculation did.

        While another request uses the drafters, this one takes plain steps, and says so. In exact mode a seed gives
        the same answer whatever is drafted.
        """
        seed = sampling.plan.request.seed
        free = self._in_use.acquire(blocking=False)
        try:
            means = (
                self._means
                if free
                else replace(self._means, drafters={}, selector=FixedSelector([NO_DRAFT]), costs=None, scoring=None)
            )
            means = replace(means, coupled=self.options.mode == "exact" and seed is not None)
            counted = Counted()
            events = speculate(
                session,
                cache,
                prompt,
                answer,
                sampling,
                means=means,
                draft_rng=draft_generator(seed),
                counted=counted,
                interruption=interruption,
                clock=clock,
                told=self._told(counted, coupled=means.coupled) if free else lambda text, round: None,
            )
            for event in events:
                if isinstance(event, Finished):
                    event = replace(event, speculation=self._stats(counted, event, busy=not free))
                yield event
        finally:
            if free:
                if self._trace is not None:
                    self._trace.end_request(list(counted.failed))
                self._in_use.release()

    def _told(self, counted: Counted, *, coupled: bool) -> Callable[[CommittedText, Round], None]:
        trace = self._trace
        if trace is None:
            return lambda text, round: None
        return lambda text, round: trace.round(text, round, coupled=coupled, left_out=list(counted.failed))

    def _stats(self, counted: Counted, finished: Finished, *, busy: bool) -> SpeculationStats:
        rounds, notes = counted.rounds, []
        if busy:
            notes.append("the drafters were in use by another request, so this one took plain steps")
        if self.invariance is not None and not self.invariance.holds:
            notes.append(self.invariance.sentence())
        if counted.unfilled:
            notes.append(f"{counted.unfilled} steps at the end of the context were too short to round like the others")
        survival, costs = rounds.survival(), self._means.costs
        length = finished.prompt_tokens + finished.completion_tokens
        found = None
        if costs is not None and survival:
            found = hindsight(
                survival,
                {name: self.lengths_of(name) for name in survival},
                costs,
                context_length=length,
                emitted=sum(arm.emitted for arm in rounds.arms()),
                seconds=sum(sum(arm.seconds.values()) - arm.seconds["sampling"] for arm in rounds.arms()),
            )
        unused = {}
        for name in cascade.choices(self.drafters):
            if not busy and not rounds.proposed_by(name) and name not in counted.failed:
                unused[name] = why_unused(
                    name,
                    played=rounds.rounds_of(name),
                    rounds=rounds.rounds,
                    lengths=self.options.lengths,
                    costs=costs,
                    survival=survival.get(name),
                    context_length=length,
                )
        return SpeculationStats(
            mode=self.options.mode,
            verify=self.options.verify,
            invariant=None if self.invariance is None else self.invariance.holds,
            arms=rounds.arms(),
            switches=rounds.switches,
            decode_seconds=finished.seconds_decode,
            survival=survival,
            hindsight=found,
            relaxed=counted.relaxed,
            unused=unused,
            failed=counted.failed,
            notes=tuple(notes),
        )


def _selector_for(
    options: SpeculationOptions, lengths: Mapping[str, Sequence[int]], first_parts: Mapping[str, str]
) -> Selector:
    """Return the configured selector, over no draft and every drafter with each of its lengths."""
    return new_selector(
        options.selector,
        [NO_DRAFT, *(Arm(name, length) for name in lengths for length in lengths[name])],
        options.selector_options,
        common={
            "seed": options.seed,
            "discount": options.discount,
            "carry_over": options.carry_over,
            "hysteresis": options.hysteresis,
            "first_parts": first_parts,
        },
    )


def scoring_for(
    options: SpeculationOptions, drafters: Mapping[str, Drafter], depth: int, selector: Selector
) -> Scoring | None:
    """Return what scores ``drafters`` for ``selector``; ``None`` where nothing learns from it."""
    if not drafters or options.eval_budget == 0 or not hasattr(selector, "standing"):
        return None
    budget = EvaluationBudget(
        list(drafters),
        depth=depth,
        share=options.eval_budget,
        standing=selector.standing,
        changes=getattr(selector, "changes", int),
    )
    return Scoring(drafters, budget=budget, form=options.estimator, clock=time.perf_counter)


def lengths_for(drafter: Drafter, lengths: Sequence[int], granule: int) -> list[int]:
    """Return the lengths to choose from: a step is filled up anyway, so it may as well carry drafted tokens.

    Args:
        drafter: makes at most ``drafter.longest`` tokens.
        lengths: as configured.
        granule: rows that steps are filled up to a multiple of.
    """
    return sorted({min(filled(length + 1, granule) - 1, drafter.longest) for length in lengths})


def open_drafters(configured: Sequence[DrafterOptions], model: LocalModel) -> list[Drafter]:
    """Return the drafters, in their order; a cascade is made of those before it.

    Raises:
        ModelError: a drafter cannot be used with this model.
        RequestError: a kind or an option does not exist.
    """
    opened: dict[str, Drafter] = {}
    for chosen in configured:
        if chosen.kind == cascade.KIND:
            opened[chosen.name] = cascade.open_cascade(chosen.name, chosen.options, opened)
        else:
            opened[chosen.name] = drafter_factory(chosen.kind).open(chosen.name, chosen.options, model)
    return list(opened.values())


def default_drafters(model: LocalModel) -> list[DrafterOptions]:
    """Return what is used where nothing is configured.

    That is lookup, the trained drafters in the model's folder, and lookup with each of them behind it.
    """
    lookup = DrafterOptions(name="ngram", kind="ngram")
    trained, cascades = [], []
    folder = model.session.path.parent / DRAFTERS_FOLDER
    for path in sorted(folder.glob("*/drafter.json")):
        name = path.parent.name
        kind = json.loads(path.read_text("utf-8")).get("kind", "recurrent")
        trained.append(DrafterOptions(name=name, kind=kind, options={"path": str(path.parent)}))
        parts = cascade.SEPARATOR.join([lookup.name, name])
        cascades.append(DrafterOptions(name=parts, kind=cascade.KIND, options={"parts": parts}))
    return [lookup, *trained, *cascades]


def why_unused(
    name: str,
    *,
    played: int,
    rounds: int,
    lengths: Sequence[int],
    costs: CostModel | None,
    survival: SurvivalStats | None,
    context_length: int,
) -> str:
    """Return one line that says why a drafter proposed nothing in an answer.

    Args:
        played: rounds in which it was chosen.
        rounds: of the answer.
        lengths: drafts that could be asked for.
        costs: what a round takes.
        survival: how it would have done.
        context_length: tokens at the end of the answer.
    """
    if played:
        return f"it was asked in {played} rounds and found nothing to propose"
    if not rounds:
        return "the answer ended with its first token"
    if costs is None:
        return "the selector never chose it"
    plain = costs.seconds(NO_DRAFT, context_length)
    one = costs.seconds(Arm(name, 1), context_length)
    told = (
        f"a plain step takes {1e3 * plain:.1f} ms and one with a drafted token {1e3 * one:.1f} ms, so drafting pays "
        f"where more than {max(one / plain - 1, 0):.0%} of its first tokens are accepted"
    )
    if survival is None:
        return f"{told}; in this answer it was not scored yet"
    told += f"; here {survival.mean[0]:.0%} would have been"
    expected = {length: 1 + sum(survival.mean[:length]) for length in lengths if length <= len(survival.mean)}
    if expected:
        gain = max(
            tokens * plain / costs.seconds(Arm(name, length), context_length) for length, tokens in expected.items()
        )
        told += f", at best {gain:.2f}x plain decoding"
    return told
