"""Ten ways to get speculative decoding wrong (methods E.2, a to j): each must show in the exact enumeration.

Every mutant is a small change to the real loop, or to a drafter's honesty. The enumeration that accepts the real
code (``test_spec_enumeration.py``) has to reject each by a wide margin; otherwise it would not be worth much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.sampler_state import advance
from edgeduet_client.llm.session import Forward
from edgeduet_client.llm.speculation import decode as decoding
from edgeduet_client.llm.speculation import verify as verifying
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.positions import Emission, Positions
from edgeduet_client.llm.speculation.text import CommittedText
from edgeduet_client.llm.speculation.verify import Verdict, decide, verify
from table_model import (
    TableDrafter,
    TableTarget,
    draw_every_outcome,
    enumerated_draw,
    plain_law,
    shortened,
    speculative_law,
    table_plan,
    total_variation,
)

SIZE = 4
VISIBLE = 1e-3
EXACT = 1e-12


@pytest.fixture(autouse=True)
def every_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_every_outcome(monkeypatch)


def error(drafter: Callable[[], Any] = lambda: TableDrafter(SIZE), *, length: int = 2, tokens: int = 3) -> float:
    """How far the law of the first tokens is from plain decoding's."""
    target, plan = TableTarget(SIZE, seed=8), table_plan(SIZE)
    drafters: Callable[[], Mapping[str, Any]] = lambda: {"table": drafter()}  # noqa: E731
    found = speculative_law(target, plan, 5, drafters, [Arm("table", length)], enough=tokens)
    return total_variation(shortened(found, tokens), plain_law(target, plan, tokens))


def test_the_real_code_is_exact_in_this_very_setting() -> None:
    assert error() < EXACT
    assert error(lambda: TableDrafter(SIZE, certain=True)) < EXACT


def test_a_resampling_from_the_target_instead_of_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "residual", lambda target, law: target)
    assert error() > VISIBLE


class SoftArgmax(TableDrafter):
    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        tokens, last = [], text.tokens[-1]
        laws = []
        for _ in range(length):
            law = self.law(last)
            last = int(law.ids[law.probabilities.argmax()])
            tokens.append(last)
            laws.append(law)
        return Draft(tuple(tokens), tuple(laws))


def test_b_an_argmax_that_claims_to_be_drawn() -> None:
    assert error(lambda: SoftArgmax(SIZE)) > VISIBLE


@dataclass
class DrawsFromAnother(TableDrafter):
    """Draws from a change of its law, and reports the law unchanged."""

    changed: Callable[[Distribution], Distribution] = lambda law: law

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        tokens, laws, last = [], [], text.tokens[-1]
        for _ in range(length):
            laws.append(self.law(last))
            last = enumerated_draw(self.changed(laws[-1]), rng)
            tokens.append(last)
        return Draft(tuple(tokens), tuple(laws))


def best(law: Distribution, count: int) -> Distribution:
    kept = np.sort(law.probabilities.argsort()[-count:])
    return Distribution(law.ids[kept], law.probabilities[kept] / law.probabilities[kept].sum())


def tempered(law: Distribution, temperature: float) -> Distribution:
    weights = law.probabilities ** (1 / temperature)
    return Distribution(law.ids, weights / weights.sum())


def test_c_a_truncated_draw_with_the_law_before_truncation() -> None:
    assert error(lambda: DrawsFromAnother(SIZE, changed=lambda law: best(law, 3))) > VISIBLE


def test_d_a_cold_draw_with_the_law_at_temperature_one() -> None:
    assert error(lambda: DrawsFromAnother(SIZE, changed=lambda law: tempered(law, 0.7))) > VISIBLE


class DropsTheUnlikely(TableDrafter):
    """Looks at the token it drew, and takes it back if it was unlikely: the length depends on the token."""

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        drawn = super().draft(text, length, rng)
        for place, (token, law) in enumerate(zip(drawn.tokens, drawn.laws, strict=True)):
            if law is not None and law.probability(token) < 0.3:
                return drawn.first(place)
        return drawn


def test_e_a_drawn_token_taken_back() -> None:
    assert error(lambda: DropsTheUnlikely(SIZE)) > VISIBLE


def test_f_a_target_row_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneBehind(Positions):
        def __init__(self, forward: Forward, generated: Any, draft: Draft) -> None:
            rows = np.maximum(np.arange(len(forward.logits)) - 1, 0)
            super().__init__(Forward(forward.logits[rows], None), generated, draft)

    monkeypatch.setattr(decoding, "Positions", OneBehind)
    assert error() > VISIBLE


class PicksAfterSeeing(TableDrafter):
    """Two drafters draw; the one whose token is the more likely under its own law is used."""

    def draft(self, text: CommittedText, length: int, rng: Any) -> Draft:
        both = [super().draft(text, 1, rng), TableDrafter(SIZE, seed=17).draft(text, 1, rng)]
        return max(both, key=lambda draft: draft.laws[0].probability(draft.tokens[0]))  # type: ignore[union-attr]


def test_g_a_choice_between_drafters_after_their_tokens_are_seen() -> None:
    assert error(lambda: PicksAfterSeeing(SIZE)) > VISIBLE


def test_h_accepting_if_either_of_two_samples_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    def either(target: Distribution, proposed: int, law: Any, rng: Any) -> Verdict:
        first, second = enumerated_draw(target, rng), enumerated_draw(target, rng)
        return Verdict(proposed, True) if proposed in (first, second) else Verdict(first, False)

    monkeypatch.setattr(verifying, "decide", either)
    assert error(lambda: TableDrafter(SIZE, certain=True)) > VISIBLE


def test_i_the_bonus_token_from_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_their_bonus(positions: Any, draft: Draft, plan: Any, state: Any, rng: Any) -> Iterator[Emission]:
        for emission in verify(positions, draft, plan, state, rng):
            if draft.tokens and emission.row == len(draft):
                token = enumerated_draw(TableDrafter(SIZE).law(draft.tokens[-1]), rng)
                yield Emission(
                    token, emission.row, emission.target, advance(state, plan, token, emission.target), False
                )
                return
            state = emission.state
            yield emission

    monkeypatch.setattr(decoding, "verify", with_their_bonus)
    assert error(length=1) > VISIBLE


def test_j_one_uniform_number_for_two_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token alone has the right law; only the joint of two tokens of one block shows it."""
    kept: dict[int, Any] = {}

    class SameNumber:
        """Hands out the first number of a run again and again, for verdicts only."""

        def __init__(self, source: Any) -> None:
            self.source = source

        def random(self) -> Any:
            if id(self.source) not in kept:
                kept.clear()
                kept[id(self.source)] = self.source.random()
            return kept[id(self.source)]

        def choose(self, probabilities: Any) -> int:
            return int(self.source.choose(probabilities))

    def reusing(target: Distribution, proposed: int, law: Distribution, rng: Any) -> Verdict:
        if SameNumber(rng).random() < target.probability(proposed) / law.probability(proposed):
            return Verdict(proposed, True)
        return Verdict(enumerated_draw(verifying.residual(target, law), rng), False)

    monkeypatch.setattr(verifying, "decide", reusing)
    assert error(tokens=3) > VISIBLE
    assert error(tokens=2) < EXACT


def test_an_early_stop_that_looks_at_the_law_only_is_no_mutant() -> None:
    """The legal form of e: decided before the token is drawn."""
    assert error(lambda: TableDrafter(SIZE, stop_below=0.45)) < EXACT


def test_a_dishonest_law_is_not_even_believed_where_it_is_impossible() -> None:
    law = Distribution(np.array([0, 1]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="token 2 has probability 0 in the law"):
        decide(law, 2, law, np.random.default_rng(0))
