"""Questions with checkable answers that a model of 135 million parameters gets right between a third and two thirds of
the time under greedy decoding, and openings for texts that go on freely.

Everything is generated here or comes from two small packages (``countryinfo``, ``num2words``); the same seed
gives the same questions. Questions are told by examples, not by instruction: that is what a small model follows.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SEED = 20261201
FEWEST_INHABITANTS = 20_000_000
"""Smaller countries are left out: knowing their capitals tests memory more than sampling."""

OPENINGS = (
    "The last train had already left when Marta found the letter on the bench.",
    "To keep a small garden alive through a dry summer, you should",
    "Nobody in the village could remember when the lighthouse had gone dark, but",
    "The most surprising thing about octopuses is that",
    "My grandfather kept three rules for fixing old radios. The first was",
    "On the morning of the election, the mayor opened the window and",
    "When the power went out across the city,",
    "A good cup of coffee begins long before",
    "The museum's newest exhibit is not a painting. It is",
    "Children learn to lie at about the age of four, and researchers think that",
    "The recipe looked simple enough: flour, water, salt, and",
    "At the bottom of the lake the divers saw",
)


@dataclass(frozen=True)
class Question:
    """A prompt, and what a right answer to it is."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class GradedTask:
    """Questions of one kind.

    Attributes:
        tuning: for choosing the settings of samplers; disjoint from ``questions``.
        read_answer: from the text the model wrote to the answer in it, or ``None``.
    """

    name: str
    tuning: tuple[Question, ...]
    questions: tuple[Question, ...]
    max_tokens: int
    read_answer: Callable[[str], str | None]

    def correct(self, question: Question, text: str) -> bool:
        """Say whether ``text`` answers ``question``."""
        return self.read_answer(text) == question.answer


def graded_tasks(tuning: int, questions: int) -> tuple[GradedTask, ...]:
    """Return the graded tasks, with so many questions each for tuning and for measuring."""
    return (
        _task("word problems", _word_problems, tuning, questions, max_tokens=30, read_answer=_number_after_has),
        _task("numbers in words", _numbers_in_words, tuning, questions, max_tokens=16, read_answer=_up_to_full_stop),
        _task("capitals", _capitals, tuning, questions, max_tokens=12, read_answer=_up_to_full_stop),
    )


def _task(
    name: str,
    make: Callable[[random.Random, int], tuple[Question, ...]],
    tuning: int,
    questions: int,
    *,
    max_tokens: int,
    read_answer: Callable[[str], str | None],
) -> GradedTask:
    made = make(random.Random(f"{SEED} {name}"), tuning + questions)
    return GradedTask(name, made[:tuning], made[tuning:], max_tokens, read_answer)


def _word_problems(rng: random.Random, count: int) -> tuple[Question, ...]:
    """Return one-step additions and subtractions in words; the answer states the sum before the result."""
    texts: dict[str, tuple[str, str]] = {}
    while len(texts) < count + 4:
        text, told, result = _word_problem(rng)
        texts[text] = told, result
    examples, asked = _split(list(texts.items()), 4)
    head = "".join(f"Q: {text}\nA: {told}\n\n" for text, (told, _) in examples)
    return tuple(Question(f"{head}Q: {text}\nA:", result) for text, (_, result) in asked)


def _word_problem(rng: random.Random) -> tuple[str, str, str]:
    first, second = rng.sample(("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry"), 2)
    thing = rng.choice(("apples", "books", "coins", "pencils", "stamps", "marbles"))
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        text = f"{first} has {a} {thing}. {second} gives {first} {b} more. How many {thing} does {first} have now?"
        sum_, result = f"{a} + {b}", a + b
    else:
        text = (
            f"{first} has {a + b} {thing} and gives {b} of them to {second}. How many {thing} does {first} have left?"
        )
        sum_, result = f"{a + b} - {b}", a
    return text, f"{sum_} = {result}, so {first} has {result} {thing}.", str(result)


def _numbers_in_words(rng: random.Random, count: int) -> tuple[Question, ...]:
    from num2words import num2words

    examples, asked = _split(rng.sample(range(101, 1000), count + 6), 6)
    head = "".join(f"{number} in words is {num2words(number)}.\n" for number in examples)
    return tuple(Question(f"{head}{number} in words is", num2words(number)) for number in asked)


def _capitals(rng: random.Random, count: int) -> tuple[Question, ...]:
    from countryinfo import all_countries

    known = []
    for country in all_countries():
        facts = country.info()
        if facts.get("capital") and (facts.get("population") or 0) >= FEWEST_INHABITANTS:
            known.append((country.name(), facts["capital"]))
    if len(known) < count + 5:
        raise SystemExit(f"capitals: {len(known) - 5} questions can be made, {count} were asked for; ask for fewer")
    examples, asked = _split(rng.sample(sorted(known), count + 5), 5)
    head = "".join(f"The capital of {country} is {capital}.\n" for country, capital in examples)
    return tuple(Question(f"{head}The capital of {country} is", capital) for country, capital in asked)


def _split(items: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    return items[:count], items[count:]


def _number_after_has(text: str) -> str | None:
    found = re.search(r", so \w+ has (\d+)\b", text)
    return found[1] if found else None


def _up_to_full_stop(text: str) -> str | None:
    return text.strip().split("\n")[0].split(".")[0] or None
