"""What a confusion gate does to a model: how much confusion is left, what legitimate text it costs, what it takes.

Teacher-forced, on held-out texts whose true continuation is known (no long generations needed):

- confusion mass: probability that a step draws a token of a maskable family (CJ, Latin) that the true answer does
  not contain; the mean over positions, with intervals over texts.
- allowed gold: share of true next tokens whose family the gate would not ban, per family.
- permitted code switches: the same for Latin tokens of answers that mix Latin with another script.
- intervention rate, and perplexity of the true answers with and without the gate (untruncated, temperature 1) over
  the positions whose true token stays possible; how many do not is reported beside it.

Free generation: share of answers with at least one letter of a wrong family, on decoded text (a CJK character made
of single bytes is invisible to every rule on tokens), and share of answers that use Latin where the reference does.

Metrics as in Zhang et al., arXiv 2510.17555, with intervals, which they lack.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.confidence_intervals import Mean, Rate
from edgeduet_client.llm.distribution import sampling_distributions
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family, FamilyTable, text_families
from edgeduet_client.llm.gate import (
    MASKABLE,
    Gate,
    History,
    advance_history,
    banned_families,
)
from edgeduet_client.llm.gate_features import EncodedText, response_rows
from edgeduet_client.llm.gate_texts import GateText, part_test_texts
from edgeduet_client.llm.gate_training import GateOptions, ProgressCallback, choose_texts, encode_texts, families_of
from edgeduet_client.llm.generate import Finished, TextPiece
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.plan import SamplingPlan, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import initial_state

_UNTRUNCATED = {"sampler": "temperature", "temperature": 1.0}
_LEAD = 3  # tokens of the true answer that a base model is given to begin with


def wrong_families(text: GateText) -> frozenset[Family]:
    """Return the maskable families that the true answer does not contain: their letters are confusion."""
    return MASKABLE - text.families


@dataclass(frozen=True)
class Step:
    """One teacher-forced position of one text."""

    logits_V: NDArray[np.float32]
    hidden_H: NDArray[np.float32]
    generated: tuple[int, ...]
    last: History
    gold: int


def steps_of(local: LocalModel, text: EncodedText, families: FamilyTable) -> Iterator[Step]:
    """Yield the positions of an answer, with what was generated before them; arrays last until the next one."""
    generated: tuple[int, ...] = text.response[: len(text.response) - len(text.targets)]
    last = History.EMPTY
    for token in generated:
        last = advance_history(last, int(families[token]))
    for place, logits_RV, hidden_RH in response_rows(local.session, local.new_cache(), text):
        for row in range(len(logits_RV)):
            gold = text.targets[place + row]
            yield Step(logits_RV[row], hidden_RH[row], generated, last, gold)
            generated += (gold,)
            last = advance_history(last, int(families[gold]))


@dataclass(frozen=True)
class StepOutcome:
    """What a plan makes of a position.

    Attributes:
        mass_F: (4,) probability of each family.
        fired: whether the gate intervened.
        gold: probability of the true token.
        protected: whether a word of the answer came before; only then may a gate intervene.
    """

    mass_F: NDArray[np.float64]
    fired: bool
    gold: float
    protected: bool


def outcome_of(step: Step, plan: SamplingPlan, families: FamilyTable) -> StepOutcome:
    """Return what is drawn at a position, from the very function that decoding uses."""
    state = replace(initial_state(plan), length=len(step.generated), history=step.last)
    hidden_RH = step.hidden_H[None] if plan.needs_hidden else None
    found, _ = sampling_distributions(step.logits_V[None], hidden_RH, step.generated, [], plan, state)
    mass_F = np.zeros(len(Family))
    np.add.at(mass_F, families[found[0].ids], found[0].probabilities)
    protected = step.last not in (History.EMPTY, History.SYMBOLS_ONLY)
    return StepOutcome(mass_F, found[0].gate_fired, found[0].probability(step.gold), protected)


# --- teacher-forced measures ----------------------------------------------------------------------------


@dataclass
class TeacherForced:
    """Sums over positions for one plan; add texts with :meth:`add`, then read the measures.

    Attributes:
        confusion: per maskable family, the outcomes of each text in which the family is wrong.
    """

    confusion: dict[Family, list[list[StepOutcome]]] = field(default_factory=lambda: {f: [] for f in sorted(MASKABLE)})
    fired: int = 0
    positions: int = 0

    def add(self, text: GateText, outcomes: Sequence[StepOutcome]) -> None:
        """Take up the positions of one text."""
        for family in wrong_families(text):
            self.confusion[family].append(list(outcomes))
        self.fired += sum(outcome.fired for outcome in outcomes)
        self.positions += len(outcomes)

    def confusion_mass(self, family: Family, *, protected_only: bool = False) -> Mean:
        """Mean probability of drawing a token of ``family`` where it is wrong.

        Args:
            protected_only: only positions after the first word of the answer, which sets its language and which no
                gate touches.
        """
        return Mean.of_groups(
            [
                [float(o.mass_F[family]) for o in outcomes if o.protected or not protected_only]
                for outcomes in self.confusion[family]
            ]
        )

    @property
    def interventions(self) -> Rate:
        """Share of the positions at which the gate intervened."""
        return Rate(self.fired, self.positions)


@dataclass
class GoldAllowed:
    """How often the gate's prediction and the history leave the family of the true token alone."""

    allowed: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(Family, 0))
    seen: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(Family, 0))
    switches_allowed: int = 0
    switches: int = 0

    def add(self, text: GateText, steps: Iterable[tuple[History, Family]], predicted_RF: NDArray[np.bool_]) -> None:
        """Take up the positions of one text: history and true family of each, and the predictions."""
        switching = Family.LATIN in text.families and len(text.families) > 1
        for (last, gold), predicted in zip(steps, predicted_RF, strict=True):
            allowed = gold not in banned_families(predicted, last)
            self.seen[gold] += 1
            self.allowed[gold] += allowed
            if switching and gold is Family.LATIN:
                self.switches += 1
                self.switches_allowed += allowed

    def rate(self, family: Family) -> Rate:
        """Share of the true tokens of ``family`` that are not banned."""
        return Rate(self.allowed[family], self.seen[family])

    @property
    def code_switches(self) -> Rate:
        """The same for Latin tokens of answers that mix Latin with another script."""
        return Rate(self.switches_allowed, self.switches)


@dataclass
class Perplexities:
    """Perplexity of the true answers with and without the gate, over positions whose true token stays possible."""

    with_gate: float = 0.0
    without_gate: float = 0.0
    positions: int = 0
    removed: int = 0

    def add(self, gated: StepOutcome, plain: StepOutcome) -> None:
        """Take up one position, of untruncated distributions."""
        if gated.gold == 0 and plain.gold > 0:
            self.removed += 1
        elif plain.gold > 0:
            self.with_gate += math.log(gated.gold)
            self.without_gate += math.log(plain.gold)
            self.positions += 1

    @property
    def gated(self) -> float | None:
        """Perplexity with the gate."""
        return math.exp(-self.with_gate / self.positions) if self.positions else None

    @property
    def plain(self) -> float | None:
        """Perplexity without it, over the same positions."""
        return math.exp(-self.without_gate / self.positions) if self.positions else None

    @property
    def gold_removed(self) -> Rate:
        """Share of the true tokens that the gate made impossible."""
        return Rate(self.removed, self.positions + self.removed)


# --- free generation ------------------------------------------------------------------------------------


@dataclass
class Generated:
    """Counts over free answers."""

    confused: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(sorted(MASKABLE), 0))
    at_risk: dict[Family, int] = field(default_factory=lambda: dict.fromkeys(sorted(MASKABLE), 0))
    switched: int = 0
    switching_references: int = 0
    fired: int = 0
    tokens: int = 0

    def add(self, text: GateText, answer: str, finished: Finished) -> None:
        """Take up one answer."""
        found = text_families(answer)
        for family in wrong_families(text):
            self.at_risk[family] += 1
            self.confused[family] += family in found
        if Family.LATIN in text.families and len(text.families) > 1:
            self.switching_references += 1
            self.switched += Family.LATIN in found
        self.fired += finished.gate_interventions
        self.tokens += finished.completion_tokens

    def confusion(self, family: Family) -> Rate:
        """Share of answers with a letter of ``family`` among those whose reference has none."""
        return Rate(self.confused[family], self.at_risk[family])

    @property
    def code_switch(self) -> Rate:
        """Share of answers with a Latin letter among those whose reference mixes Latin with another script."""
        return Rate(self.switched, self.switching_references)

    @property
    def interventions(self) -> Rate:
        """Share of the tokens at which the gate intervened."""
        return Rate(self.fired, self.tokens)


def answer_to(local: LocalModel, prompt: Sequence[int], request: GenerationRequest) -> tuple[str, Finished]:
    """Return a free answer and how it ended."""
    pieces = list(local.generate(prompt, request))
    finished = pieces[-1]
    if not isinstance(finished, Finished):
        raise ModelError("a generation ended without saying why")
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)), finished


# --- the evaluation of one gate ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Overhead:
    """Time of the parts of a step in seconds, the least of many: what other work adds is no part of it."""

    step: float
    sampling_without_gate: float
    sampling_with_gate: float

    @property
    def share(self) -> float:
        """What the gate adds to a whole step."""
        return (self.sampling_with_gate - self.sampling_without_gate) / (self.step + self.sampling_without_gate)


@dataclass(frozen=True)
class GateEvaluation:
    """What :func:`evaluate_gate` returns.

    Attributes:
        texts, languages: what was evaluated on; sources that no training looks at.
        without_gate, with_gate: teacher-forced measures under the request's sampler.
        generated_without_gate, generated_with_gate: free answers, same seeds.
    """

    texts: int
    languages: tuple[str, ...]
    request: GenerationRequest
    without_gate: TeacherForced
    with_gate: TeacherForced
    gold: GoldAllowed
    perplexities: Perplexities
    generated_without_gate: Generated
    generated_with_gate: Generated
    overhead: Overhead


def evaluate_gate(
    model: str | Path | ModelFolder,
    *,
    texts: Path | str | None = None,
    languages: Sequence[str] | None = None,
    request: GenerationRequest | None = None,
    options: GateOptions | None = None,
    answers: int = 40,
    answer_tokens: int = 24,
    root: Path | None = None,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> GateEvaluation:
    """Evaluate the gate that is stored with a model.

    Args:
        model: an imported model's name, a path, or an open folder.
        texts, languages: as for :func:`~edgeduet_client.llm.gate_training.train_gate`; only the fifth of the
            sources is used that no training looks at.
        request: sampler and gate rule; default p-less at temperature 1 with re-truncation.
        options: ``per_language`` and ``max_tokens``, as for the training.
        answers: free answers, each with and without the gate.
        answer_tokens: most tokens of a free answer; it also ends at a line break.
        root: where models lie.
        threads: cores the model may use.
        progress: told about every text and every answer.

    Raises:
        ModelError: the model has no gate, or model or texts cannot be used.
    """
    folder = model if isinstance(model, ModelFolder) else ModelFolder.open(model, root)
    local = LocalModel.open(folder, threads=threads)
    gate = local.gate
    if gate is None:
        raise ModelError(f"{folder.name} has no gate; train one with: edgeduet-client llm gate train {folder.name}")
    options = options or GateOptions()
    request = request or GenerationRequest()
    chosen = choose_texts(texts, languages, per_language=options.per_language)
    _, held_out = part_test_texts(chosen)
    if not held_out:
        raise ModelError(f"of {len(chosen)} texts none is set aside for evaluation; add texts")
    forced = teacher_forced(local, folder, gate, held_out, request, options, progress=progress)
    plain, gated = free_answers(
        local,
        held_out[:: max(len(held_out) // max(answers, 1), 1)][:answers],
        request,
        options,
        answer_tokens,
        progress,
    )
    return GateEvaluation(
        texts=len(held_out),
        languages=tuple(sorted({text.language for text in held_out})),
        request=request,
        without_gate=forced[0],
        with_gate=forced[1],
        gold=forced[2],
        perplexities=forced[3],
        generated_without_gate=plain,
        generated_with_gate=gated,
        overhead=measure_overhead(local, folder, held_out[0], request, options),
    )


def plans_of(local: LocalModel, families: FamilyTable, request: GenerationRequest, gate: Gate | None) -> SamplingPlan:
    """Return the plan of a request with the given gate, or without one."""
    settings = request.model_dump(exclude_unset=True)
    if gate is None:
        settings.pop("gate_rule", None)
        settings.pop("gate_confidence", None)
        settings["gate"] = "off"
    return make_plan(GenerationRequest(**settings), local.vocabulary, families=families, gate=gate)


def teacher_forced(
    local: LocalModel,
    folder: ModelFolder,
    gate: Gate,
    texts: Sequence[GateText],
    request: GenerationRequest,
    options: GateOptions,
    *,
    progress: ProgressCallback | None = None,
) -> tuple[TeacherForced, TeacherForced, GoldAllowed, Perplexities]:
    """Return the measures without and with the gate, of the gate's predictions, and of the true answers."""
    families = families_of(folder)
    plain, gated = (plans_of(local, families, request, g) for g in (None, gate))
    rule = {} if "gate_rule" not in request.model_fields_set else {"gate_rule": request.gate_rule}
    whole = GenerationRequest(**_UNTRUNCATED, **rule)
    whole_plain, whole_gated = (plans_of(local, families, whole, g) for g in (None, gate))
    without, with_gate, gold, perplexities = TeacherForced(), TeacherForced(), GoldAllowed(), Perplexities()
    encoded = encode_texts(local.tokenizer, texts, eos_ids=local.manifest.eos_ids, max_tokens=options.max_tokens)
    for done, (text, ids) in enumerate(zip(texts, encoded, strict=True), start=1):
        outcomes: tuple[list[StepOutcome], list[StepOutcome]] = ([], [])
        truth, predicted = [], []
        for step in steps_of(local, ids, families):
            outcomes[0].append(outcome_of(step, plain, families))
            outcomes[1].append(outcome_of(step, gated, families))
            perplexities.add(outcome_of(step, whole_gated, families), outcome_of(step, whole_plain, families))
            truth.append((step.last, Family(families[step.gold])))
            predicted.append(gate.predict(step.hidden_H[None])[0])
        without.add(text, outcomes[0])
        with_gate.add(text, outcomes[1])
        gold.add(text, truth, np.array(predicted).reshape(-1, len(Family)))
        if progress is not None:
            progress("measuring on texts", done, len(texts))
    return without, with_gate, gold, perplexities


def free_answers(
    local: LocalModel,
    texts: Sequence[GateText],
    request: GenerationRequest,
    options: GateOptions,
    answer_tokens: int,
    progress: ProgressCallback | None = None,
) -> tuple[Generated, Generated]:
    """Return counts over free answers to the requests of ``texts``, without and with the gate, same seeds.

    A base model does not know in which language to answer: it is given the first tokens of the true answer.
    """
    plain, gated = Generated(), Generated()
    bare = replace(local, gate=None, families=None)
    prompts = encode_texts(local.tokenizer, texts, eos_ids=(), max_tokens=options.max_tokens)
    settings = request.model_dump(exclude_unset=True) | {"max_tokens": answer_tokens, "stop": ("\n",)}
    for done, (text, ids) in enumerate(zip(texts, prompts, strict=True), start=1):
        prompt = free_prompt(local, text, ids)
        with_gate = GenerationRequest(**settings | {"seed": done})
        gated.add(text, *answer_to(local, prompt, with_gate))
        without = {name: value for name, value in settings.items() if not name.startswith("gate")}
        plain.add(text, *answer_to(bare, prompt, GenerationRequest(**without | {"seed": done})))
        if progress is not None:
            progress("answering", done, len(texts))
    return plain, gated


def free_prompt(local: LocalModel, text: GateText, ids: EncodedText) -> tuple[int, ...]:
    """Return what a free answer goes on from."""
    in_chat = local.tokenizer.template is not None and text.prompt
    return ids.prompt if in_chat else ids.prompt + ids.response[:_LEAD]


def measure_overhead(
    local: LocalModel, folder: ModelFolder, text: GateText, request: GenerationRequest, options: GateOptions
) -> Overhead:
    """Return times over the positions of one text, each part measured in turn (interleaved)."""
    families = families_of(folder)
    encoded = encode_texts(local.tokenizer, [text], eos_ids=local.manifest.eos_ids, max_tokens=options.max_tokens)
    plain, gated = (plans_of(local, families, request, g) for g in (None, local.gate))
    times: dict[str, list[float]] = {"step": [], "plain": [], "gated": []}
    for step in steps_of(local, encoded[0], families):
        for name, plan in (("plain", plain), ("gated", gated)):
            begin = time.perf_counter()
            outcome_of(step, plan, families)
            times[name].append(time.perf_counter() - begin)
    cache = local.new_cache()
    for token in (encoded[0].prompt + encoded[0].response)[:24]:
        begin = time.perf_counter()
        local.session.forward([token], cache, hidden=True)
        times["step"].append(time.perf_counter() - begin)
    return Overhead(min(times["step"]), min(times["plain"]), min(times["gated"]))
