"""Losslessness, exactly: the law of what the real loop writes is the law of plain decoding, to 1e-12.

No sampling: every outcome of every random decision (drafter, verifier, residual, selector) is tried with its
probability, on a target of at most four tokens. The law of the answer's first tokens covers a whole block and the
seam to the next, so a history that is wrong inside a block shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.cascade import CascadeDrafter
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from table_model import (
    ScriptedSelector,
    TableDrafter,
    TableTarget,
    draw_every_outcome,
    plain_law,
    shortened,
    speculative_law,
    table_plan,
    total_variation,
)

EXACT = 1e-12


@pytest.fixture(autouse=True)
def every_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_every_outcome(monkeypatch)


def one_drafter(**settings: Any) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"table": TableDrafter(**settings)}


def cascade_of(second: TableDrafter) -> Mapping[str, Any]:
    lookup = NgramDrafter("lookup", least=2, most=2, eos_ids=[0])
    return {"lookup": lookup, "second": second, "table": CascadeDrafter("table", [lookup, second])}


KINDS: dict[str, Callable[[int], Callable[[], Mapping[str, Any]]]] = {
    "sampled": lambda size: one_drafter(size=size),
    "sampled, nearly certain": lambda size: one_drafter(size=size, sharpness=8.0),
    "sampled, early stop": lambda size: one_drafter(size=size, stop_below=0.55),
    "greedy": lambda size: one_drafter(size=size, certain=True),
    "n-gram": lambda size: lambda: {"table": NgramDrafter("table", least=1, most=2, eos_ids=[0])},
    "lookup, else sampled": lambda size: lambda: cascade_of(TableDrafter(size, stop_below=0.4)),
    "lookup, else greedy": lambda size: lambda: cascade_of(TableDrafter(size, certain=True)),
}


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_tokens_have_the_targets_law(kind: str, length: int) -> None:
    size = 3
    target, plan = TableTarget(size), table_plan(size)
    found = speculative_law(target, plan, 6, KINDS[kind](size), [Arm("table", length)], enough=3)
    wanted = plain_law(target, plan, 3)
    for tokens in (1, 2, 3):
        assert total_variation(shortened(found, tokens), shortened(wanted, tokens)) < EXACT
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kind", ["sampled", "greedy", "n-gram"])
def test_four_tokens_of_vocabulary_and_a_whole_answer(kind: str) -> None:
    """Up to the budget: the last rounds are cut short, and the answer's end has to be exact as well."""
    target, plan = TableTarget(4, seed=3), table_plan(4)
    found = speculative_law(target, plan, 4, KINDS[kind](4), [Arm("table", 2)])
    assert total_variation(found, plain_law(target, plan, 4)) < EXACT


SETTINGS: dict[str, dict[str, Any]] = {
    "p-less": {"sampler": "p-less"},
    "p-less, hot": {"sampler": "p-less", "temperature": 2.5},
    "top-k": {"sampler": "top-k", "top_k": 2},
    "top-p, cold": {"sampler": "top-p", "top_p": 0.8, "temperature": 0.6},
    "min-p": {"sampler": "min-p", "min_p": 0.3},
    "mirostat": {"sampler": "mirostat", "mirostat_tau": 1.2, "mirostat_eta": 0.7},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.9},
    "min tokens": {"min_tokens": 3},
    "bias": {"logit_bias": {1: 1.5}},
    "bad words": {"bad_words": ("aa", "日a")},
    "greedy": {"sampler": "greedy"},
}


@pytest.mark.parametrize("kind", ["sampled", "greedy", "n-gram", "lookup, else sampled"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_sampling_setting_holds_at_every_position(name: str, kind: str) -> None:
    size = 3
    target, plan = TableTarget(size, seed=5), table_plan(size, **SETTINGS[name])
    found = speculative_law(target, plan, 5, KINDS[kind](size), [Arm("table", 2)], enough=3)
    assert total_variation(found, plain_law(target, plan, 3)) < EXACT


@pytest.mark.parametrize("rule", ["retruncate", "union"])
@pytest.mark.parametrize("sampler", ["temperature", "p-less", "greedy"])
@pytest.mark.parametrize("kind", ["sampled", "greedy", "n-gram"])
def test_the_gate_fires_inside_a_block_as_in_plain_decoding(kind: str, sampler: str, rule: str) -> None:
    """Whether it fires at the second draft depends on the first: CJ or Latin before it bans the other."""
    target = TableTarget(4, seed=11)
    plan = table_plan(4, gated=True, sampler=sampler, gate="on", gate_rule=rule)
    found = speculative_law(target, plan, 5, KINDS[kind](4), [Arm("table", 2)], enough=3)
    wanted = plain_law(target, plan, 3)
    assert total_variation(found, wanted) < EXACT
    if sampler == "temperature":
        # The case is real: behind a symbol the first draft may be CJ (1) or Latin (2), and then the other is banned.
        following = {first: {key[2] for key in wanted if key[:2] == (3, first)} for first in (1, 2)}
        assert following == {1: {0, 1, 3}, 2: {0, 2, 3}}


@pytest.mark.parametrize("drawn_arms", [False, True])
def test_switching_arms_between_rounds_changes_nothing(drawn_arms: bool) -> None:
    size = 3
    target, plan = TableTarget(size, seed=2), table_plan(size, sampler="p-less", temperature=1.5)

    def drafters() -> dict[str, Any]:
        return {
            "sampled": TableDrafter(size, seed=1),
            "greedy": TableDrafter(size, seed=2, certain=True),
            "lookup": NgramDrafter("lookup", least=1, most=2),
        }

    arms = [Arm("sampled", 2), Arm(None, 0), Arm("lookup", 2), Arm("greedy", 1), Arm("sampled", 1)]
    selector = (lambda chance: ScriptedSelector(arms, chance)) if drawn_arms else arms
    found = speculative_law(target, plan, 4, drafters, selector)
    assert total_variation(found, plain_law(target, plan, 4)) < EXACT


class LengthFollowsTheText(ScriptedSelector):
    """An adaptive length that depends on what was committed: legal, since it is settled before anything is drawn."""

    def choose(self, costs: Any, context_length: int) -> Arm:
        last = self.played_rounds[-1] if self.played_rounds else None
        return Arm("table", 1 if last is None or last.accepted < last.proposed else min(last.proposed + 1, 3))


def test_an_adaptive_length_changes_nothing() -> None:
    size = 3
    target, plan = TableTarget(size, seed=4), table_plan(size)
    drafters = KINDS["sampled, nearly certain"](size)
    found = speculative_law(target, plan, 5, drafters, lambda _: LengthFollowsTheText([]))
    assert total_variation(found, plain_law(target, plan, 5)) < EXACT


@pytest.mark.parametrize("granule", [2, 3])
def test_filled_up_steps_change_nothing(granule: int) -> None:
    target, plan = TableTarget(3), table_plan(3)
    found = speculative_law(target, plan, 4, KINDS["greedy"](3), [Arm("table", 2), Arm(None, 0)], granule=granule)
    assert total_variation(found, plain_law(target, plan, 4)) < EXACT


def test_an_end_of_text_inside_a_block_ends_the_answer_there() -> None:
    """A target that likes to end, a drafter that goes on behind the end."""
    size = 3
    target, plan = TableTarget(size, seed=6), table_plan(size, logit_bias={0: 1.0})
    drafters = one_drafter(size=size, sharpness=3.0, seed=3)
    found = speculative_law(target, plan, 5, drafters, [Arm("table", 3)], enough=4)
    wanted = plain_law(target, plan, 4)
    assert total_variation(found, wanted) < EXACT
    ended = sum(probability for key, probability in found.items() if key[-1] == 0)
    assert ended > 0.5
    assert all(0 not in key[:-1] for key in found)


@pytest.mark.parametrize("seed", range(6))
def test_random_pairs_of_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target = TableTarget(3, seed=100 + seed, spread=float(rng.uniform(0.3, 3)))
    plan = table_plan(3, temperature=float(rng.uniform(0.5, 2)))
    drafters = one_drafter(size=3, seed=200 + seed, sharpness=float(rng.uniform(0.5, 4)))
    found = speculative_law(target, plan, 4, drafters, [Arm("table", 2)])
    assert total_variation(found, plain_law(target, plan, 4)) < EXACT
