"""What training and evaluation of a gate found, as rows for people and as values for programs."""

from __future__ import annotations

from typing import Any

from edgeduet_client.llm.confidence_intervals import Mean, Rate
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import MASKABLE
from edgeduet_client.llm.gate_evaluation import GateEvaluation, Generated, TeacherForced
from edgeduet_client.llm.gate_training import TrainedGate

EVALUATION_HEAD = ("what", "without the gate", "with the gate")
_NAMES = {Family.CJ: "CJK and kana", Family.LATIN: "Latin", Family.SYMBOLS: "symbols", Family.LOW_RES: "other scripts"}
_KEYS = {Family.CJ: "cj", Family.LATIN: "latin", Family.SYMBOLS: "symbols", Family.LOW_RES: "low_res"}


def training_facts(trained: TrainedGate) -> list[tuple[str, str]]:
    """Return a training as rows."""
    record = trained.record
    facts = [
        ("stored in", str(trained.path)),
        ("texts", f"{record.samples} in {', '.join(record.languages)}; {record.positions} positions"),
        ("labels", f"norms: {record.norms}, top-k {record.top_k}, top-p {record.top_p}"),
        ("loss", f"{record.train_loss:.4f} trained, {record.validation_loss:.4f} held out, pass {record.best_epoch}"),
        ("time", f"{record.seconds_collecting:.0f} s for hidden states, {record.seconds_training:.0f} s to train"),
    ]
    for family in Family:
        score = trained.f1[family]
        share = f"{trained.prevalence[family]:.1%} of positions"
        facts.append((_NAMES[family], f"{share}, F1 {'-' if score is None else f'{score:.3f}'}"))
    return facts


def training_values(trained: TrainedGate) -> dict[str, Any]:
    """Return a training as values."""
    return {
        "path": str(trained.path),
        "record": trained.record.model_dump(mode="json"),
        "f1": {_KEYS[family]: score for family, score in trained.f1.items()},
        "prevalence": {_KEYS[family]: share for family, share in trained.prevalence.items()},
    }


def evaluation_rows(found: GateEvaluation) -> list[tuple[str, ...]]:
    """Return an evaluation as rows under :data:`EVALUATION_HEAD`."""
    forced = (found.without_gate, found.with_gate)
    free = (found.generated_without_gate, found.generated_with_gate)
    rows: list[tuple[str, ...]] = []
    for family in sorted(MASKABLE):
        name = _NAMES[family]
        rows.append((f"confused answers, {name}", *[str(side.confusion(family)) for side in free]))
        rows.append((f"confused mass a step, {name}", *[str(side.confusion_mass(family)) for side in forced]))
    rows += [
        ("answers that mix scripts as the reference", *[str(side.code_switch) for side in free]),
        ("interventions, true text", "", str(found.with_gate.interventions)),
        ("interventions, free answers", "", str(found.generated_with_gate.interventions)),
        ("allowed mixed-in Latin of the true text", "", str(found.gold.code_switches)),
    ]
    rows += [
        (f"allowed true tokens, {_NAMES[family]}", "", str(found.gold.rate(family))) for family in sorted(MASKABLE)
    ]
    perplexities = found.perplexities
    rows += [
        ("perplexity of the true text", _number(perplexities.plain), _number(perplexities.gated)),
        ("true tokens made impossible", "", str(perplexities.gold_removed)),
        ("sampling a token, us", *_microseconds(found)),
        ("share of a whole step", "", f"{found.overhead.share:.2%}"),
    ]
    return rows


def evaluation_values(found: GateEvaluation) -> dict[str, Any]:
    """Return an evaluation as values; intervals as [low, high]."""
    return {
        "texts": found.texts,
        "languages": list(found.languages),
        "request": found.request.model_dump(mode="json", exclude_defaults=True) | {"sampler": found.request.sampler},
        "without_gate": _forced(found.without_gate) | _free(found.generated_without_gate),
        "with_gate": _forced(found.with_gate)
        | _free(found.generated_with_gate)
        | {
            "interventions": _rate(found.with_gate.interventions),
            "free_interventions": _rate(found.generated_with_gate.interventions),
        },
        "allowed_true_tokens": {_KEYS[family]: _rate(found.gold.rate(family)) for family in Family},
        "allowed_code_switches": _rate(found.gold.code_switches),
        "perplexity": {
            "without_gate": found.perplexities.plain,
            "with_gate": found.perplexities.gated,
            "true_tokens_removed": _rate(found.perplexities.gold_removed),
        },
        "overhead": {
            "step_seconds": found.overhead.step,
            "sampling_seconds_without_gate": found.overhead.sampling_without_gate,
            "sampling_seconds_with_gate": found.overhead.sampling_with_gate,
            "share": found.overhead.share,
        },
    }


def _microseconds(found: GateEvaluation) -> tuple[str, str]:
    overhead = found.overhead
    return f"{overhead.sampling_without_gate * 1e6:.0f}", f"{overhead.sampling_with_gate * 1e6:.0f}"


def _forced(side: TeacherForced) -> dict[str, Any]:
    return {"confused_mass": {_KEYS[family]: _mean(side.confusion_mass(family)) for family in sorted(MASKABLE)}}


def _free(side: Generated) -> dict[str, Any]:
    return {
        "confused_answers": {_KEYS[family]: _rate(side.confusion(family)) for family in sorted(MASKABLE)},
        "code_switch": _rate(side.code_switch),
    }


def _rate(rate: Rate) -> dict[str, Any]:
    return {"value": rate.value, "interval": list(rate.interval), "trials": rate.trials}


def _mean(mean: Mean) -> dict[str, Any]:
    if mean.value is None:
        return {"value": None, "interval": None, "count": 0}
    return {"value": mean.value, "interval": [mean.low, mean.high], "count": mean.count}


def _number(value: float | None) -> str:
    return "none observed" if value is None else f"{value:.3f}"
