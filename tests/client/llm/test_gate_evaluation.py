"""What is measured about a gate, and the whole way: train on a tiny real model, store, evaluate."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import GATE_FILE, Gate, History, ModelBinding
from edgeduet_client.llm.gate_evaluation import (
    Generated,
    GoldAllowed,
    Perplexities,
    StepOutcome,
    TeacherForced,
    evaluate_gate,
    free_prompt,
    plans_of,
    steps_of,
    wrong_families,
)
from edgeduet_client.llm.gate_features import EncodedText
from edgeduet_client.llm.gate_texts import GateText
from edgeduet_client.llm.gate_training import GateOptions, encode_texts, families_of, train_gate
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import HEAD_NORMS, ModelFolder
from edgeduet_client.llm.request import GenerationRequest
from tiny_llm import TINY, RandomWeights, write_model
from toy_language_model import EOS, FAMILIES, ToyTarget

RUSSIAN = GateText("p", "кот сидит", "ru", "s1")
MIXED = GateText("p", "кот и URL", "ru", "s2")
JAPANESE = GateText("p", "日本語", "ja", "s3")


def outcome(
    cj: float = 0.0, latin: float = 0.0, *, fired: bool = False, gold: float = 0.5, protected: bool = True
) -> StepOutcome:
    return StepOutcome(np.array([cj, latin, 0.0, 1.0 - cj - latin]), fired, gold, protected)


def test_what_the_reference_does_not_contain_is_wrong() -> None:
    assert wrong_families(RUSSIAN) == {Family.CJ, Family.LATIN}
    assert wrong_families(MIXED) == {Family.CJ}
    assert wrong_families(JAPANESE) == {Family.LATIN}


def test_confusion_mass_counts_positions_of_texts_where_the_family_is_wrong() -> None:
    measured = TeacherForced()
    measured.add(RUSSIAN, [outcome(latin=0.2), outcome(latin=0.4, fired=True)])
    measured.add(MIXED, [outcome(latin=1.0, cj=0.0)])
    measured.add(JAPANESE, [outcome(cj=1.0, latin=0.0)])
    assert measured.confusion_mass(Family.LATIN).value == pytest.approx((0.2 + 0.4 + 0.0) / 3)
    assert measured.confusion_mass(Family.CJ).value == 0.0
    assert measured.interventions.value == pytest.approx(1 / 4)


def test_the_first_word_can_be_left_out() -> None:
    measured = TeacherForced()
    measured.add(RUSSIAN, [outcome(latin=0.9, protected=False), outcome(latin=0.1), outcome(latin=0.3)])
    assert measured.confusion_mass(Family.LATIN).value == pytest.approx(1.3 / 3)
    assert measured.confusion_mass(Family.LATIN, protected_only=True).value == pytest.approx(0.2)


def test_allowed_gold_counts_bans_and_history_and_code_switches() -> None:
    gold = GoldAllowed()
    low_res_only = np.array([False, False, False, True])
    steps = [
        (History.EMPTY, Family.LATIN),  # before the first word nothing is banned
        (History.LOW_RES, Family.LATIN),  # banned
        (History.LATIN, Family.LATIN),  # allowed by the history
        (History.LOW_RES, Family.LOW_RES),
    ]
    gold.add(MIXED, steps, np.tile(low_res_only, (4, 1)))
    gold.add(GateText("p", "only Latin", "en", "s4"), [(History.LATIN, Family.LATIN)], low_res_only[None])
    assert (gold.rate(Family.LATIN).events, gold.rate(Family.LATIN).trials) == (3, 4)
    assert (gold.code_switches.events, gold.code_switches.trials) == (2, 3)
    assert gold.rate(Family.CJ).value is None


def test_perplexities_compare_the_same_positions_and_count_what_was_removed() -> None:
    found = Perplexities()
    found.add(outcome(gold=0.5), outcome(gold=0.25))
    found.add(outcome(gold=0.125), outcome(gold=0.125))
    found.add(outcome(gold=0.0), outcome(gold=0.9))
    assert found.gated == pytest.approx(math.sqrt(2 * 8))
    assert found.plain == pytest.approx(math.sqrt(4 * 8))
    assert (found.gold_removed.events, found.gold_removed.trials) == (1, 3)


def test_free_answers_are_judged_on_their_letters() -> None:
    finished = Finished(
        "stop", 1, completion_tokens=5, cached_tokens=0, gate_interventions=1, seconds_prefill=0, seconds_decode=0
    )
    counts = Generated()
    counts.add(RUSSIAN, "кот 42!", finished)
    counts.add(RUSSIAN, "кот 日", finished)
    counts.add(MIXED, "кот и API", finished)
    assert (counts.confusion(Family.CJ).events, counts.confusion(Family.CJ).trials) == (1, 3)
    assert (counts.confusion(Family.LATIN).events, counts.confusion(Family.LATIN).trials) == (0, 2)
    assert (counts.code_switch.events, counts.code_switch.trials) == (1, 1)
    assert counts.interventions.value == pytest.approx(3 / 15)


# --- with a real session, tokenizer and pipeline ----------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    found = write_model(tmp_path / "tiny")
    head = RandomWeights(TINY, 0).matrix("head").dense()
    np.save(found.file(HEAD_NORMS), np.linalg.norm(head, axis=1).astype(np.float32))
    return found


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Sixty-four short requests with answers in Russian, with now and then a Latin word."""
    words = ["мир", "кот", "дом", "сад", "лес", "день", "ночь", "путь"]
    rows = [
        {"prompt": f"say {a} {b}", "response": f"{b} и {a}" + (" ok" if place % 7 == 0 else ""), "language": "ru"}
        for place, (a, b) in enumerate(itertools.product(words, words))
    ]
    (tmp_path / "texts").mkdir()
    lines = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "texts" / "mine.jsonl").write_text(lines, encoding="utf-8")
    return tmp_path / "texts"


OPTIONS = GateOptions(epochs=2, batch=16)


def test_a_gate_is_trained_stored_used_and_evaluated(folder: ModelFolder, texts: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    trained = train_gate(
        folder,
        texts=texts,
        options=OPTIONS,
        threads=1,
        features=tmp_path / "features",
        progress=lambda *args: told.append(args),
    )
    assert trained.path == folder.file(GATE_FILE)
    assert trained.record.languages == ["ru"]
    assert 0 < trained.record.samples < 64
    assert trained.record.positions > trained.record.samples
    assert told[-1] == ("training the gate", 2, 2)
    assert LocalModel.open(folder, threads=1).gate is not None
    assert (tmp_path / "features" / trained.features.name).exists()

    found = evaluate_gate(folder, texts=texts, options=OPTIONS, answers=3, answer_tokens=4, threads=1)
    assert found.texts + trained.record.samples == 64
    assert found.with_gate.positions == found.without_gate.positions > 0
    assert found.without_gate.fired == 0
    assert found.generated_with_gate.at_risk[Family.CJ] == 3
    assert found.overhead.step > 0
    latin = Family.LATIN
    with_gate, without = (side.confusion_mass(latin) for side in (found.with_gate, found.without_gate))
    assert with_gate.count == without.count > 0


def test_training_again_goes_on_from_the_stored_features(folder: ModelFolder, texts: Path, tmp_path: Path) -> None:
    first = train_gate(folder, texts=texts, options=OPTIONS, threads=1, features=tmp_path)
    size = first.features.stat().st_size
    again = train_gate(folder, texts=texts, options=OPTIONS, threads=1, features=tmp_path)
    assert again.features == first.features
    assert again.features.stat().st_size == size
    assert again.record.validation_loss == first.record.validation_loss


def test_a_gate_of_other_weights_does_not_stand_in_the_way_of_training(
    folder: ModelFolder, texts: Path, tmp_path: Path
) -> None:
    trained = train_gate(folder, texts=texts, options=OPTIONS, threads=1, features=tmp_path)
    binding = ModelBinding.of(folder)
    gate = Gate.load(trained.path, binding)
    replace(gate, description=gate.description.model_copy(update={"weights_sha256": "other"})).save(trained.path)
    with pytest.raises(ModelError, match="another model"):
        LocalModel.open(folder, threads=1)
    train_gate(folder, texts=texts, options=OPTIONS, threads=1, features=tmp_path)
    assert Gate.load(trained.path, binding).description == gate.description.model_copy(
        update={"training": Gate.load(trained.path, binding).description.training}
    )


def test_a_model_without_a_gate_cannot_be_evaluated(folder: ModelFolder, texts: Path) -> None:
    with pytest.raises(ModelError, match="has no gate"):
        evaluate_gate(folder, texts=texts)


def test_too_few_texts_are_refused_before_the_model_runs(folder: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.txt").write_text("a single text\n")
    with pytest.raises(ModelError, match="too few"):
        train_gate(folder, texts=tmp_path / "one", features=tmp_path)


def test_requests_are_rendered_as_the_model_will_meet_them(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    in_chat, plain = encode_texts(
        local.tokenizer,
        [GateText("hi", "the cat", "en", "hi"), GateText("", "the dog", "en", "d")],
        eos_ids=local.manifest.eos_ids,
        max_tokens=64,
    )
    names = "".join(local.tokenizer.token_name(token) for token in in_chat.prompt)
    assert names == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert local.tokenizer.decode(in_chat.response) == "the cat"
    assert in_chat.response[-1] == local.manifest.eos_ids[0]
    assert plain.prompt == ()
    assert free_prompt(local, GateText("hi", "the cat", "en", "hi"), in_chat) == in_chat.prompt
    assert free_prompt(local, GateText("", "the dog", "en", "d"), plain) == plain.response[:3]
    (long,) = encode_texts(local.tokenizer, [GateText("hi " * 90, "the cat", "en", "x")], eos_ids=[1], max_tokens=20)
    assert len(long.prompt) + len(long.response) <= 20
    assert len(long.response) >= 2


def test_steps_know_what_was_generated_and_what_follows(folder: ModelFolder) -> None:
    local = replace(LocalModel.open(folder, threads=1), session=ToyTarget())  # type: ignore[arg-type]
    text = EncodedText((1, 2), (17, EOS, 50, EOS))
    seen = [(step.generated, step.last, step.gold) for step in steps_of(local, text, FAMILIES)]
    assert seen == [
        ((), History.EMPTY, 17),
        ((17,), History.LATIN, EOS),
        ((17, EOS), History.LATIN, 50),
        ((17, EOS, 50), History.LOW_RES, EOS),
    ]
    bare = [(step.generated, step.gold) for step in steps_of(local, EncodedText((), (17, 18)), FAMILIES)]
    assert bare == [((17,), 18)]


def test_without_a_gate_the_plan_of_a_request_is_the_plain_one(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    request = GenerationRequest(gate_rule="union", gate="on")
    plan = plans_of(local, families_of(folder), request, None)
    assert plan.gate is None
    assert plan.request.sampler == request.sampler
