"""The p-less benchmark: its measures, its log, its questions, and steps that are computed once."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "simulations" / "benchmarks"))

from pless_quality_bench import Log
from pless_quality_measures import bootstrap_draws, difference, distinct, estimate, overlap, repetition
from pless_quality_tasks import graded_tasks
from pless_quality_trials import Size, Trial, measured_trials
from remembered_steps import RememberedSteps

from tiny_llm import write_model

TEXTS = st.lists(st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join), min_size=2, max_size=4)
ANSWERS = st.integers(2, 6).flatmap(
    lambda questions: st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=questions, max_size=questions)
)


@given(TEXTS)
def test_measures_of_texts_are_shares(texts: list[str]) -> None:
    assert 0 <= distinct(texts) <= 1
    assert 0 <= overlap(texts) <= 1
    assert all(0 <= repetition(text) < 1 for text in texts)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=12).map(" ".join), st.integers(2, 4))
def test_copies_overlap_fully_and_add_no_distinct_bigrams(text: str, copies: int) -> None:
    assert overlap([text] * copies) == 1
    assert distinct([text] * copies) == pytest.approx(distinct([text]) / copies)


def test_texts_without_common_bigrams_do_not_overlap() -> None:
    assert overlap(["a b c", "c b a"]) == 0
    assert distinct(["a b c", "c b a"]) == 1


def test_a_loop_is_repetition() -> None:
    assert repetition("a b c d e") == 0
    assert repetition("a b a b a b") == 0.5


@given(ANSWERS)
@settings(deadline=None, max_examples=25)
def test_intervals_hold_the_mean_and_are_nought_against_oneself(answers: list[list[bool]]) -> None:
    values = {"task": np.array(answers, float)}
    found = estimate(values)
    assert found.low - 1e-12 <= found.mean <= found.high + 1e-12
    assert found.mean == pytest.approx(np.mean(answers))
    itself = difference(values, values)
    assert (itself.mean, itself.low, itself.high) == (0, 0, 0)


@given(ANSWERS, st.integers(0, 2**16))
@settings(deadline=None, max_examples=25)
def test_differences_are_paired_and_change_sign_with_their_sides(answers: list[list[bool]], seed: int) -> None:
    left = {"task": np.array(answers, float)}
    right = {"task": np.random.default_rng(seed).permutation(left["task"].ravel()).reshape(left["task"].shape)}
    there, back = difference(left, right), difference(right, left)
    assert there.mean == pytest.approx(-back.mean)
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))
    # A constant gap has no spread: only paired resamples know that.
    constant = difference({"task": left["task"] + 1}, left)
    assert (constant.low, constant.high) == pytest.approx((1, 1))


def test_questions_are_resampled_with_all_their_seeds() -> None:
    alike = {"task": np.repeat(np.array([[0.0], [1.0]]), 50, axis=1)}
    assert set(np.unique(bootstrap_draws(alike))) == {0.0, 0.5, 1.0}


def test_log_goes_on_after_a_cut_off_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = Log(path, {"model": "a"})
    log.add("first", text="é")
    log.add("second", text="b")
    path.write_bytes(path.read_bytes()[:-4])
    again = Log(path, {"model": "a"})
    assert again.records == {"first": {"key": "first", "text": "é"}}
    again.add("second", text="c")
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("key") for line in lines] == [None, "first", "second"]


def test_log_of_another_setting_is_refused(tmp_path: Path) -> None:
    Log(tmp_path / "log.jsonl", {"model": "a"})
    with pytest.raises(SystemExit, match="was made with"):
        Log(tmp_path / "log.jsonl", {"model": "b"})


def test_samplers_share_seeds_and_questions_do_not() -> None:
    trial = Trial("measured", "capitals", 3, {"sampler": "p-less"}, 1.0, 0)
    other = replace(trial, settings={"sampler": "top-k", "top_k": 40}, temperature=2.0)
    assert trial.request_seed == other.request_seed
    assert trial.key != other.key
    assert len({replace(trial, item=item, seed=seed).request_seed for item in range(9) for seed in range(3)}) == 27


def test_tuning_never_sees_a_measured_question() -> None:
    pytest.importorskip("countryinfo")
    pytest.importorskip("num2words")
    for task in graded_tasks(tuning=5, questions=20):
        assert len({question.prompt for question in (*task.tuning, *task.questions)}) == 25


def test_answers_told_in_the_examples_are_read_as_right_ones() -> None:
    pytest.importorskip("countryinfo")
    pytest.importorskip("num2words")
    problems, numbers, capitals = graded_tasks(tuning=1, questions=3)
    for question in problems.questions:
        assert problems.correct(question, f" 1 + 1 = 2, so Anna has {question.answer} coins.")
        assert not problems.correct(question, f" 1 + 1 = 2, so Anna has {question.answer}1 coins.")
    for task in (numbers, capitals):
        for question in task.questions:
            assert task.correct(question, f" {question.answer}.\n")
            assert not task.correct(question, f" {question.answer} and more.")


def test_every_prefix_of_the_trials_holds_whole_questions_of_all_samplers() -> None:
    pytest.importorskip("countryinfo")
    pytest.importorskip("num2words")
    size = Size(tuning=1, questions=3, openings=1, seeds=2)
    trials = list(measured_trials(graded_tasks(1, 3), size, [{"sampler": "top-p", "top_p": 0.3}]))
    order = [(trial.task, trial.item) for trial in trials]
    first_seen = list(dict.fromkeys(order))
    assert order == sorted(order, key=first_seen.index)  # one question after the other
    assert len({trial.key for trial in trials}) == len(trials)


def test_remembered_steps_draw_what_plain_steps_draw(tmp_path: Path) -> None:
    from edgeduet_client.llm.generate import TextPiece
    from edgeduet_client.llm.local_model import LocalModel
    from edgeduet_client.llm.request import GenerationRequest

    model = LocalModel.open(write_model(tmp_path), threads=1)
    steps = RememberedSteps(model.session)
    remembering = replace(model, session=steps)  # type: ignore[arg-type]
    cache = remembering.new_cache()
    prompts = [model.tokenizer.encode(text) for text in ("one two three", "one two four", "one two three")]
    for prompt in prompts:
        for seed in range(3):
            request = GenerationRequest(sampler="top-k", top_k=3, seed=seed, min_tokens=12, max_tokens=12)
            ids = [
                [token for event in events if isinstance(event, TextPiece) for token in event.ids]
                for events in (model.generate(prompt, request), remembering.generate(prompt, request, cache=cache))
            ]
            assert ids[0] == ids[1]
    assert steps.computed < steps.asked
