"""What the confusion gate does to a real model, and to one whose bias towards Latin letters is planted.

    python simulations/benchmarks/gate_bench.py --model gemma3-270m           # 7 minutes of one core
    python simulations/benchmarks/gate_bench.py --model gemma3-270m --quick   # small, to see that it runs

Zhang et al. (arXiv 2510.17555) trace confusion to rows of the output matrix with large norms. The rows of the
small models at hand are equally long, so the bias is planted: every Latin row of an untied copy of the output
matrix is made gamma times as long, which multiplies that row's logit by gamma. gamma 1 is the model as it is.

Per gamma, teacher-forced on held-out texts, after training on others:

- samplers without a gate: the paper's setting (temperature 0.7, top-k 20, top-p 0.8), p-less, greedy, and top-p
  tuned on training texts for the probability of the true token;
- the paper's setting (gate rule ``union``) and p-less (``retruncate``), each with three gates: unadjusted,
  adjusted by the median norm (our default), adjusted as in the paper. Three seeds (split, weights, order).

Reported: probability of drawing a Latin token where the true next token is of another script and the true answer
has no Latin letter, over all such positions and over those after the first word (the first word of an answer sets
its language, and no rule of the gate looks at it); the same for CJ; interventions; permitted code switches;
perplexity of the true answers. Then free answers, which go on from the first three tokens of the true one: the
share with a wrong letter. Means are over positions, intervals (95 %) over texts (bootstrap) of values averaged over
seeds, and over pairs for ratios to "none"; "seeds" is the range over the seeds. Texts: Django's catalogues and
chatterbot-corpus.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from edgeduet_client.llm.confidence_intervals import Mean, Rate
from edgeduet_client.llm.distribution import sampling_distributions
from edgeduet_client.llm.draw import draw
from edgeduet_client.llm.families import Family, FamilyTable
from edgeduet_client.llm.gate import Gate, History, ModelBinding, banned_families, history
from edgeduet_client.llm.gate_evaluation import (
    Generated,
    Perplexities,
    Step,
    StepOutcome,
    outcome_of,
    steps_of,
    wrong_families,
)
from edgeduet_client.llm.gate_features import EncodedText, FeatureStore, LabelRule, joined
from edgeduet_client.llm.gate_texts import (
    DEFAULT_LANGUAGES,
    GateText,
    package_texts,
    part_test_texts,
    split_by_source,
    with_latin,
    without_latin,
)
from edgeduet_client.llm.gate_training import (
    GateOptions,
    agreement,
    collect_texts,
    default_features_folder,
    encode_texts,
    families_of,
    fit_gate,
)
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.kv_cache import KVCache
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.plan import SamplingPlan, make_plan
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.sampler_state import advance, initial_state

GAMMAS = (1.0, 1.15, 1.3)
KINDS = ("unadjusted", "adjusted", "adjusted z/n")
NEW_LANGUAGES = ("uk", "hy", "ka", "bn")  # in no training text
TOP_P = (0.1, 0.3, 0.5, 0.7, 0.9)
WHOLE = "untruncated"
LEAD = 3  # tokens of the true answer that a free answer begins with

_FIXED: dict[str, dict[str, Any]] = {
    "paper's setting": {"sampler": "top-p", "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "p-less": {"sampler": "p-less"},
    "greedy": {"sampler": "greedy"},
    WHOLE: {"sampler": "temperature"},
}
SAMPLERS = _FIXED | {f"top-p {p:g}": {"sampler": "top-p", "top_p": p} for p in TOP_P}
RULES = {"paper's setting": "union", "p-less": "retruncate", WHOLE: "retruncate"}
FREE = tuple(name for name in RULES if name != WHOLE)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    per_language: int
    test_texts: int
    switching_texts: int
    answers: int
    answer_tokens: int
    seeds: int
    epochs: int

    @classmethod
    def of(cls, quick: bool) -> Sizes:
        """Return the sizes of the benchmark, or of a trial of it."""
        return cls(25, 1, 1, 3, 8, 2, 2) if quick else cls(100, 9, 4, 24, 16, 3, 10)


@dataclass(frozen=True)
class Bench:
    """What every part of the benchmark needs."""

    folder: ModelFolder
    local: LocalModel
    families: FamilyTable
    sizes: Sizes

    @property
    def norms(self) -> NDArray[np.float32]:
        """Norms of the rows of the output matrix, (V,)."""
        return cast(NDArray[np.float32], self.folder.head_row_norms())

    def bias(self, gamma: float) -> NDArray[np.float32]:
        """What planting ``gamma`` multiplies the logits with, (V,)."""
        return np.where(self.families == Family.LATIN, np.float32(gamma), np.float32(1))

    def encode(self, texts: Sequence[GateText]) -> list[EncodedText]:
        """Return the token ids of texts."""
        return encode_texts(
            self.local.tokenizer, texts, eos_ids=self.local.manifest.eos_ids, max_tokens=GateOptions().max_tokens
        )

    def plan(self, sampler: str, *, gated: bool) -> SamplingPlan:
        """Return the plan of a sampler; with a gate, whose prediction is put in later."""
        settings = SAMPLERS[sampler] | ({"gate": "on", "gate_rule": RULES[sampler]} if gated else {"gate": "off"})
        stand_in = cast(Gate, Predicted((False,) * 4)) if gated else None
        request = GenerationRequest(**settings)
        return make_plan(request, self.local.vocabulary, families=self.families if gated else None, gate=stand_in)


@dataclass(frozen=True)
class Predicted:
    """Stands in for a gate whose prediction is known: many gates agree, and their outcome is computed once."""

    families: tuple[bool, ...]

    def predict(self, hidden_RH: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return the known prediction for every row."""
        return np.tile(np.array(self.families), (len(hidden_RH), 1))


# --- training -------------------------------------------------------------------------------------------


def label_rules(bench: Bench) -> dict[tuple[float, str], LabelRule]:
    """Return how each gate's teacher labels: from logits and norms of the biased copy."""
    rules = {}
    for gamma in GAMMAS:
        bias, norms = bench.bias(gamma), bench.norms * bench.bias(gamma)
        rules[gamma, "unadjusted"] = LabelRule(f"unadjusted, gamma {gamma:g}", bias)
        factors = LabelRule.of_norms("median", norms).factors
        rules[gamma, "adjusted"] = LabelRule(f"adjusted, gamma {gamma:g}", bias if factors is None else bias * factors)
    # z/n is the same whatever the lengths of the rows: one gate for every gamma.
    rules[1.0, "adjusted z/n"] = LabelRule("adjusted z/n", LabelRule.of_norms("paper", bench.norms).factors)
    return rules


def train(bench: Bench, texts: list[GateText], features: Path, note: Callable[..., None]) -> tuple[Any, dict[str, Any]]:
    """Return the gates {(gamma, kind): [one per seed]}, and what is worth reporting about their training."""
    rules = label_rules(bench)
    binding = ModelBinding.of(bench.folder)
    store = FeatureStore.of(features, binding, list(rules.values()))
    begin, cpu = time.monotonic(), time.process_time()
    found = collect_texts(bench.local, bench.folder, texts, list(rules.values()), store, GateOptions(), progress=note)
    by_text = dict(zip(texts, found, strict=True))
    report: dict[str, Any] = {
        "texts": len(texts),
        "positions": sum(map(len, found)),
        "collecting": {"wall_s": time.monotonic() - begin, "cpu_s": time.process_time() - cpu},
        "labels_latin": {},
        "f1": {},
    }
    gates: dict[tuple[float, str], list[Gate]] = defaultdict(list)
    begin, cpu = time.monotonic(), time.process_time()
    for place, (key, rule) in enumerate(rules.items()):
        for seed in range(bench.sizes.seeds):
            options = GateOptions(
                seed=seed,
                epochs=bench.sizes.epochs,
                norms={"unadjusted": "none", "adjusted": "median"}.get(key[1], "paper"),
            )
            learn, validate = split_by_source(texts, held_out=options.validation, seed=seed)
            parts = [joined([by_text[text] for text in side]) for side in (learn, validate)]
            fitted = fit_gate(parts[0], parts[1], options, rule=place)
            record = fitted.record(
                options, learn, positions=len(parts[0]), texts="packages", seconds_collecting=0, seconds_training=0
            )
            gates[key].append(fitted.gate(binding, record))
            note("training gates", place * bench.sizes.seeds + seed + 1, len(rules) * bench.sizes.seeds)
        f1, prevalence = agreement(gates[key][0], parts[1], rule=place)
        report["labels_latin"][rule.name] = prevalence[Family.LATIN]
        report["f1"][rule.name] = {family.name: value for family, value in f1.items()}
    for gamma in GAMMAS[1:]:
        gates[gamma, "adjusted z/n"] = gates[1.0, "adjusted z/n"]
    report["training"] = {
        "gates": len(rules) * bench.sizes.seeds,
        "wall_s": time.monotonic() - begin,
        "cpu_s": time.process_time() - cpu,
    }
    return gates, report


def tuned_top_p(bench: Bench, texts: Sequence[GateText], gamma: float) -> str:
    """Return the top-p sampler that draws the true token most often on ``texts``."""
    names = [f"top-p {p:g}" for p in TOP_P]
    plans = {name: bench.plan(name, gated=False) for name in names}
    gold: dict[str, float] = dict.fromkeys(names, 0.0)
    for encoded in bench.encode(texts):
        for step in biased_steps(bench, encoded, gamma):
            for name, plan in plans.items():
                gold[name] += outcome_of(step, plan, bench.families).gold
    return max(names, key=lambda name: gold[name])


def biased_steps(bench: Bench, text: EncodedText, gamma: float) -> Iterator[Step]:
    """Yield the positions of a text with the bias planted."""
    bias = bench.bias(gamma)
    for step in steps_of(bench.local, text, bench.families):
        yield replace(step, logits_V=step.logits_V * bias)


# --- teacher-forced -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """One position of a text under one condition and seed."""

    outcome: StepOutcome
    gold: Family
    last: History
    predicted: tuple[bool, ...] | None


def measure_text(
    bench: Bench, text: EncodedText, gamma: float, gates: dict[str, list[Gate]], samplers: Sequence[str]
) -> dict[tuple[str, str, int], list[Position]]:
    """Return the positions of a text for every (sampler, gate or "none", seed)."""
    positions: dict[tuple[str, str, int], list[Position]] = defaultdict(list)
    plain = {name: bench.plan(name, gated=False) for name in samplers}
    gated = {name: bench.plan(name, gated=True) for name in RULES}
    for step in biased_steps(bench, text, gamma):
        gold = Family(bench.families[step.gold])
        for name, plan in plain.items():
            outcome = outcome_of(step, plan, bench.families)
            positions[name, "none", 0].append(Position(outcome, gold, step.last, None))
        known: dict[tuple[str, tuple[bool, ...]], StepOutcome] = {}
        for kind, seeds in gates.items():
            for seed, gate in enumerate(seeds):
                predicted = tuple(map(bool, gate.predict(step.hidden_H[None])[0]))
                for name, plan in gated.items():
                    if (name, predicted) not in known:
                        with_it = replace(plan, gate=cast(Gate, Predicted(predicted)))
                        known[name, predicted] = outcome_of(step, with_it, bench.families)
                    positions[name, kind, seed].append(Position(known[name, predicted], gold, step.last, predicted))
    return positions


@dataclass
class Measured:
    """All positions of one condition: per text, per seed."""

    texts: list[GateText]
    by_seed: list[list[list[Position]]]

    def masses(self, family: Family, where: Callable[[Position], bool]) -> list[list[list[float]]]:
        """Return per seed and text the probability of ``family`` at the positions ``where``, if it is wrong there."""
        kept = [place for place, text in enumerate(self.texts) if family in wrong_families(text)]
        return [
            [[float(p.outcome.mass_F[family]) for p in texts[place] if where(p)] for place in kept]
            for texts in self.by_seed
        ]

    def rates(self) -> dict[str, Rate]:
        """Interventions, allowed true tokens per family and permitted code switches, over all seeds."""
        fired = total = switches = switches_allowed = 0
        allowed: dict[Family, int] = dict.fromkeys(Family, 0)
        seen: dict[Family, int] = dict.fromkeys(Family, 0)
        for texts in self.by_seed:
            for text, positions in zip(self.texts, texts, strict=True):
                switching = Family.LATIN in text.families and len(text.families) > 1
                for p in positions:
                    fired, total = fired + p.outcome.fired, total + 1
                    if p.predicted is None:
                        continue
                    free = p.gold not in banned_families(np.array(p.predicted), p.last)
                    seen[p.gold] += 1
                    allowed[p.gold] += free
                    if switching and p.gold is Family.LATIN:
                        switches, switches_allowed = switches + 1, switches_allowed + free
        rates = {"interventions": Rate(fired, total), "code_switches_permitted": Rate(switches_allowed, switches)}
        return rates | {f"gold_allowed_{family.name}": Rate(allowed[family], seen[family]) for family in Family}

    def gold(self) -> Mean:
        """Mean probability of drawing the true token."""
        seeds = [[[p.outcome.gold for p in positions] for positions in texts] for texts in self.by_seed]
        return Mean.of_groups([np.mean(columns, axis=0).tolist() for columns in zip(*seeds, strict=True)])


def perplexities(plain: Measured, gated: Measured) -> Perplexities:
    """Return the perplexity of the true answers, untruncated, with and without the gate (first seed)."""
    result = Perplexities()
    for with_gate, without in zip(gated.by_seed[0], plain.by_seed[0], strict=True):
        for a, b in zip(with_gate, without, strict=True):
            result.add(a.outcome, b.outcome)
    return result


def measure(
    bench: Bench,
    texts: list[GateText],
    gamma: float,
    gates: dict[str, list[Gate]],
    tuned: str,
    note: Callable[..., None],
) -> dict[tuple[str, str], Measured]:
    """Return the positions of all texts under every (sampler, gate)."""
    samplers = [*RULES, "greedy", tuned]
    collected: dict[tuple[str, str], dict[int, list[list[Position]]]] = defaultdict(lambda: defaultdict(list))
    for done, encoded in enumerate(bench.encode(texts), start=1):
        for (name, kind, seed), positions in measure_text(bench, encoded, gamma, gates, samplers).items():
            collected[name, kind][seed].append(positions)
        note(f"gamma {gamma:g}: measuring", done, len(texts))
    return {key: Measured(texts, [by_seed[s] for s in sorted(by_seed)]) for key, by_seed in collected.items()}


# --- free answers ---------------------------------------------------------------------------------------


def free(
    bench: Bench, texts: list[GateText], gamma: float, gates: dict[str, list[Gate]], note: Callable[..., None]
) -> dict[tuple[str, str], Generated]:
    """Return counts over free answers for every (sampler, gate), all seeds together."""
    counts: dict[tuple[str, str], Generated] = defaultdict(Generated)
    cache = bench.local.new_cache()
    for done, (text, ids) in enumerate(zip(texts, bench.encode(texts), strict=True), start=1):
        lead = ids.response[:LEAD]
        cache.crop(0)
        bench.local.session.prefill((ids.prompt + lead)[:-1], cache, rows=())
        for seed in range(bench.sizes.seeds):
            for name in FREE:
                for kind in ("none", *KINDS[:2]):
                    plan = bench.plan(name, gated=kind != "none")
                    if kind != "none":
                        plan = replace(plan, gate=gates[kind][seed])
                    rng = np.random.default_rng([seed, done])
                    counts[name, kind].add(text, *written_on(bench, cache, lead, plan, bench.bias(gamma), rng))
        note(f"gamma {gamma:g}: answering", done, len(texts))
    return counts


def written_on(
    bench: Bench,
    cache: KVCache,
    lead: tuple[int, ...],
    plan: SamplingPlan,
    bias_V: NDArray[np.float32],
    rng: np.random.Generator,
) -> tuple[str, Finished]:
    """Return how an answer that begins with ``lead`` goes on, and how it ended.

    A base model does not know in which language to answer, so the beginning is given; it counts as a part of the
    answer, as in the teacher-forced measures.

    Args:
        cache: holds the request and all of ``lead`` but its last token, and does so again afterwards.
    """
    start, ends = cache.length, bench.local.vocabulary.eos_ids
    answer, fired, last = list(lead), 0, history(bench.families, lead)
    state = replace(initial_state(plan), length=len(lead), history=last)
    while len(answer) < len(lead) + bench.sizes.answer_tokens:
        outcome = bench.local.session.forward([answer[-1]], cache, hidden=True)
        hidden_RH = outcome.hidden if plan.needs_hidden else None
        (found, *_), _ = sampling_distributions(outcome.logits * bias_V, hidden_RH, answer, [], plan, state)
        token = draw(found, rng)
        fired += found.gate_fired
        answer.append(token)
        state = advance(state, plan, token, found)
        if token in ends or b"\n" in bench.local.tokenizer.token_bytes(token):
            break
    cache.crop(start)
    written = answer[len(lead) :]
    text = bench.local.tokenizer.decode(written, starts_text=False)
    return text, Finished("length", start, len(written), 0, fired, 0.0, 0.0)


# --- report ---------------------------------------------------------------------------------------------


def low_res_follows(position: Position) -> bool:
    """Say whether the true next token is of a script that is neither CJ nor Latin."""
    return position.gold is Family.LOW_RES


def protected(position: Position) -> bool:
    """Say whether that is so, and a word of the answer came before: the gate may act."""
    return low_res_follows(position) and position.last not in (History.EMPTY, History.SYMBOLS_ONLY)


def mass_fields(mine: Measured, none: Measured, family: Family, where: Callable[[Position], bool]) -> dict[str, Any]:
    """Return the probability of a wrong family for JSON: mean over seeds, each seed, and ratio to no gate."""
    seeds = mine.masses(family, where)
    averaged = [np.mean(columns, axis=0).tolist() for columns in zip(*seeds, strict=True)]
    ratio = Mean.ratio(averaged, none.masses(family, where)[0])
    each = [Mean.of_groups(groups).value for groups in seeds]
    return mean_fields(Mean.of_groups(averaged)) | {"seeds": each, "ratio_to_none": mean_fields(ratio)}


def mean_fields(mean: Mean) -> dict[str, Any]:
    """Return a mean for JSON."""
    if mean.value is None:
        return {"mean": None, "positions": 0}
    return {"mean": mean.value, "low": mean.low, "high": mean.high, "positions": mean.count}


def rate_fields(rate: Rate) -> dict[str, Any]:
    """Return a rate for JSON."""
    return {
        "rate": rate.value,
        "low": rate.interval[0],
        "high": rate.interval[1],
        "events": rate.events,
        "of": rate.trials,
    }


def forced_report(measured: dict[tuple[str, str], Measured]) -> list[dict[str, Any]]:
    """Return one row per condition."""
    rows = []
    for (sampler, kind), positions in measured.items():
        none = measured[sampler, "none"]
        row = {
            "sampler": sampler,
            "gate": kind,
            "latin_mass": mass_fields(positions, none, Family.LATIN, low_res_follows),
            "latin_mass_after_first_word": mass_fields(positions, none, Family.LATIN, protected),
            "cj_mass": mass_fields(positions, none, Family.CJ, lambda position: True),
            "gold_probability": mean_fields(positions.gold()),
            "rates": {name: rate_fields(rate) for name, rate in positions.rates().items() if rate.trials},
        }
        if sampler == WHOLE and kind != "none":
            found = perplexities(measured[WHOLE, "none"], positions)
            row["perplexity"] = {
                "with_gate": found.gated,
                "without_gate": found.plain,
                "gold_removed": rate_fields(found.gold_removed),
            }
        rows.append(row)
    return rows


def print_forced(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print what a gate does, a line per condition."""
    columns = ("sampler", "gate", "Latin mass", "after first word", "seeds", "x none", "CJ mass", "fires")
    table = Table(*columns, "switches ok", "p(true)", title=title)
    for row in rows:
        rates, gated = row["rates"], row["gate"] != "none"
        if row["sampler"] == WHOLE:
            continue
        after = row["latin_mass_after_first_word"]
        seeds = [value for value in after["seeds"] if value is not None]
        table.add_row(
            row["sampler"],
            row["gate"],
            shown(row["latin_mass"], interval=False),
            shown(after),
            f"{min(seeds):.4f}-{max(seeds):.4f}" if len(seeds) > 1 else "",
            shown(after["ratio_to_none"], digits=2) if gated else "",
            shown(row["cj_mass"], digits=5, interval=False),
            f"{rates['interventions']['rate']:.2%}" if gated else "",
            f"{rates['code_switches_permitted']['rate']:.1%}" if "code_switches_permitted" in rates else "",
            f"{row['gold_probability']['mean']:.3f}",
        )
    console.print(table)
    for row in rows:
        if "perplexity" in row:
            found, removed = row["perplexity"], row["perplexity"]["gold_removed"]
            console.print(
                f"  perplexity of the true answers, {row['gate']}: {found['without_gate']:.3f} without, "
                f"{found['with_gate']:.3f} with; true tokens removed {removed['events']} of {removed['of']}"
            )


def shown(fields: dict[str, Any], *, digits: int = 4, interval: bool = True) -> str:
    """Return a mean for the table."""
    if fields["mean"] is None:
        return "-"
    ends = f" [{fields['low']:.{digits}f}, {fields['high']:.{digits}f}]" if interval else ""
    return f"{fields['mean']:.{digits}f}{ends}"


def print_free(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    """Print the confusion of free answers, a line per condition."""
    table = Table("sampler", "gate", "Latin [95 %]", "CJ [95 %]", "Latin where right", "fires", title=title)
    for row in rows:
        cells = [
            f"{r['rate']:.1%} [{r['low']:.1%}, {r['high']:.1%}]" if r["of"] else "-"
            for r in (row["latin"], row["cj"], row["code_switch"])
        ]
        table.add_row(row["sampler"], row["gate"], *cells, f"{row['interventions']['rate']:.2%}")
    console.print(table)


def free_report(counts: dict[tuple[str, str], Generated]) -> list[dict[str, Any]]:
    """Return one row per condition."""
    return [
        {
            "sampler": sampler,
            "gate": kind,
            "latin": rate_fields(found.confusion(Family.LATIN)),
            "cj": rate_fields(found.confusion(Family.CJ)),
            "code_switch": rate_fields(found.code_switch),
            "interventions": rate_fields(found.interventions),
        }
        for (sampler, kind), found in counts.items()
    ]


# --- the whole --------------------------------------------------------------------------------------------


def test_sets(pool: list[GateText], sizes: Sizes) -> dict[str, list[GateText]]:
    """Return the texts measured on: trained languages, new languages, and answers that switch scripts."""
    new = package_texts(NEW_LANGUAGES, per_language=sizes.per_language)
    _, new = part_test_texts(new)
    return {
        "languages trained on": each_language(without_latin(pool), sizes.test_texts),
        "languages never seen": each_language(without_latin(new), sizes.test_texts),
        "answers that switch": each_language(with_latin(pool), sizes.switching_texts),
    }


def each_language(texts: Sequence[GateText], count: int) -> list[GateText]:
    """Return the first ``count`` texts of each language."""
    languages = dict.fromkeys(text.language for text in texts)
    return [t for language in languages for t in [t for t in texts if t.language == language][:count]]


def run(bench: Bench, features: Path, console: Console, gammas: Sequence[float]) -> dict[str, Any]:
    """Run all parts and return the report."""
    note = notes(console)
    start, cpu = time.monotonic(), time.process_time()
    texts = package_texts(DEFAULT_LANGUAGES, per_language=bench.sizes.per_language)
    training, pool = part_test_texts(texts)
    gates, report = train(bench, training, features, note)
    result: dict[str, Any] = {
        "model": bench.folder.name,
        "source_sha256": bench.folder.manifest.source_sha256,
        "sizes": bench.sizes.__dict__,
        "training": report,
        "teacher_forced": [],
        "free_answers": [],
    }
    sets = test_sets(pool, bench.sizes)
    for gamma in gammas:
        mine = {kind: gates[gamma, kind] for kind in KINDS}
        tuned = tuned_top_p(bench, each_language(without_latin(training), 1), gamma)
        for name, members in sets.items():
            if name == "languages never seen" and gamma != 1:
                continue
            rows = forced_report(measure(bench, members, gamma, mine, tuned, note))
            result["teacher_forced"].append({"gamma": gamma, "texts": name, "count": len(members), "rows": rows})
            print_forced(console, f"gamma {gamma:g}, {name} ({len(members)} texts)", rows)
    # Answers in a script of their own: in them a Latin or CJ letter is confusion.
    asked = [t for t in sets["languages trained on"] if not t.families & {Family.LATIN, Family.CJ}]
    asked = asked[:: max(len(asked) // bench.sizes.answers, 1)][: bench.sizes.answers]
    asked += each_language(sets["answers that switch"], 1)
    for gamma in (gammas[0], gammas[-1]):
        rows = free_report(free(bench, asked, gamma, {kind: gates[gamma, kind] for kind in KINDS}, note))
        result["free_answers"].append({"gamma": gamma, "rows": rows})
        print_free(console, f"gamma {gamma:g}, free answers to {len(asked)} requests x {bench.sizes.seeds} seeds", rows)
    result["seconds"] = {"wall": time.monotonic() - start, "cpu": time.process_time() - cpu}
    return result


def notes(console: Console) -> Callable[..., None]:
    """Return a progress callback that prints a line every half minute."""
    last = [time.monotonic()]

    def note(what: str, done: int, total: int) -> None:
        if time.monotonic() - last[0] > 30:
            last[0] = time.monotonic()
            console.print(f"{what}: {done} of {total}", style="dim")

    return note


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gemma3-270m", help="an imported multilingual model")
    parser.add_argument("--root", type=Path, help="where models lie")
    parser.add_argument("--quick", action="store_true", help="a few texts, 2 seeds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--features", type=Path, default=default_features_folder(), help="hidden states and labels")
    parser.add_argument("--out", type=Path, default=Path("gate_bench.json"), help="results as JSON")
    options = parser.parse_args()
    folder = ModelFolder.open(options.model, options.root)
    local = replace(LocalModel.open(folder, threads=options.threads), gate=None)
    families = families_of(folder)[: local.vocabulary.used]
    console = Console(width=170)
    result = run(Bench(folder, local, families, Sizes.of(options.quick)), options.features, console, GAMMAS)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    seconds = result["seconds"]
    console.print(f"{seconds['wall']:.0f} s ({seconds['cpu']:.0f} s of CPU); written to {options.out}")


if __name__ == "__main__":
    main()
