"""Several drafters as one: who is heard, and what a past place would have got."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.cascade import CascadeDrafter, choices, first_parts, open_cascade
from edgeduet_client.llm.speculation.evidence import Evidence
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.speculator import default_drafters
from edgeduet_client.llm.speculation.text import CommittedText
from table_model import TableDrafter

SIZE = 4


def parts(**settings: Any) -> tuple[NgramDrafter, TableDrafter]:
    return NgramDrafter("lookup", least=2, most=3), TableDrafter(SIZE, certain=True, name="table", **settings)


def begun(tokens: list[int], lookup: NgramDrafter) -> CommittedText:
    text = CommittedText(tokens)
    lookup.start(text)
    return text


@given(tokens=st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=30), length=st.integers(1, 6))
def test_the_first_part_that_says_anything_is_heard_alone(tokens: list[int], length: int) -> None:
    lookup, table = parts()
    text = begun(tokens, lookup)
    rng = np.random.default_rng(0)
    heard = CascadeDrafter("both", [lookup, table]).draft(text, length, rng)
    assert heard == (
        lookup.draft(text, length, rng) if lookup.draft(text, length, rng) else table.draft(text, length, rng)
    )
    assert len(heard)


@given(tokens=st.lists(st.integers(0, SIZE - 1), min_size=4, max_size=30), depth=st.integers(1, 5), data=st.data())
def test_a_past_place_gets_what_it_got_when_it_was_the_end(tokens: list[int], depth: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(tokens) - 1), min_size=1, max_size=4, unique=True).map(sorted))
    then = []
    for cut in cuts:
        lookup, table = parts()
        text = begun(tokens[:cut], lookup)
        then.append(CascadeDrafter("both", [lookup, table]).draft(text, depth, np.random.default_rng(0)).tokens)
    lookup, table = parts()
    text = begun(tokens[:1], lookup)
    text.extend(tokens[1:], [Distribution(np.array([token]), CERTAIN) for token in tokens[1:]])
    redrafts = CascadeDrafter("both", [lookup, table]).redraft(text, cuts, depth)
    assert [redraft.start for redraft in redrafts] == cuts
    assert [redraft.tokens for redraft in redrafts] == then


def test_where_nobody_says_anything_there_is_no_draft() -> None:
    lookup, table = parts(stop_below=1.1)
    text = begun([0, 1, 2, 3], lookup)
    both = CascadeDrafter("both", [lookup, table])
    assert not len(both.draft(text, 3, np.random.default_rng(0)))


def test_a_part_is_not_asked_for_more_than_it_can_make() -> None:
    lookup, table = parts(longest=2)
    text = begun([0, 1, 2, 3], lookup)
    both = CascadeDrafter("both", [lookup, table])
    assert both.longest == lookup.longest
    assert len(both.draft(text, 8, np.random.default_rng(0))) == 2


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("lookup+tabel", "no drafter before it is called 'tabel'; did you mean 'table'?"),
        ("lookup", "name two or more different parts"),
        ("lookup+lookup", "name two or more different parts"),
    ],
)
def test_parts_that_do_not_exist_or_are_alone_are_refused(named: str, said: str) -> None:
    lookup, table = parts()
    with pytest.raises(RequestError, match="drafter both: ") as refused:
        open_cascade("both", {"parts": named}, {"lookup": lookup, "table": table})
    assert said in str(refused.value)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(RequestError, match="drafter both: order"):
        open_cascade("both", {"parts": "a+b", "order": 1}, {})


def test_every_trained_drafter_comes_with_lookup_before_it(tmp_path: Path) -> None:
    for name in ("own", "recurrent"):
        (tmp_path / "drafters" / name).mkdir(parents=True)
        (tmp_path / "drafters" / name / "drafter.json").write_text(json.dumps({"kind": "recurrent"}))
    model = SimpleNamespace(session=SimpleNamespace(path=tmp_path / "model.onnx"))
    found = default_drafters(model)  # type: ignore[arg-type]
    assert [(one.name, one.kind) for one in found] == [
        ("ngram", "ngram"),
        ("own", "recurrent"),
        ("recurrent", "recurrent"),
        ("ngram+own", "cascade"),
        ("ngram+recurrent", "cascade"),
    ]
    assert found[-1].options == {"parts": "ngram+recurrent"}


# -- what a selector knows of a cascade ----------------------------------------------------------------

CURVES = st.lists(st.floats(0, 1), min_size=3, max_size=3).map(lambda values: np.array(sorted(values, reverse=True)))
STARTS = st.lists(st.tuples(st.integers(0, 3), CURVES, CURVES), min_size=2, max_size=20)


def known(starts: list[tuple[int, np.ndarray, np.ndarray]]) -> Evidence:
    """Evidence of a lookup and a cascade behind it: (tokens the lookup proposes, its curve, the second part's)."""
    evidence = Evidence(["lookup", "both"], 3, discount=1.0, carry_over=0.0, first_parts={"both": "lookup"})
    for proposed, first, second in starts:
        alive = first * (np.arange(3) < proposed)
        curves = {"lookup": alive, "both": alive if proposed else second}
        evidence.add(curves, {"lookup": proposed, "both": proposed or 3})
    return evidence


@given(starts=STARTS)
def test_a_cascades_curve_put_together_is_the_mean_over_all_starts(
    starts: list[tuple[int, np.ndarray, np.ndarray]],
) -> None:
    evidence = known(starts)
    silent = [second for proposed, _, second in starts if not proposed]
    if not silent:
        return
    whole = [second if not proposed else first * (np.arange(3) < proposed) for proposed, first, second in starts]
    np.testing.assert_allclose(evidence.survival()[1], np.mean(whole, axis=0), atol=1e-12)
    reach = [np.arange(3) < (proposed or 3) for proposed, _, _ in starts]
    np.testing.assert_allclose(evidence.reach()[1], np.mean(reach, axis=0), atol=1e-12)


@given(starts=STARTS)
def test_a_cascade_is_never_thought_worse_than_its_first_part(
    starts: list[tuple[int, np.ndarray, np.ndarray]],
) -> None:
    survival = known(starts).survival()
    assert (survival[1] >= survival[0] - 1e-12).all()


def test_more_evidence_about_the_first_part_moves_both() -> None:
    evidence = known([(3, np.ones(3), np.zeros(3)), (0, np.zeros(3), np.zeros(3))])
    before = evidence.survival().copy()
    evidence.add({"lookup": np.ones(3)}, {"lookup": 3})
    moved = evidence.survival() - before
    assert (moved > 0).all()
    np.testing.assert_allclose(moved[0], moved[1])


def test_a_round_of_a_cascade_is_evidence_about_the_part_that_spoke() -> None:
    evidence = known([(3, np.ones(3), np.zeros(3)), (0, np.zeros(3), np.zeros(3))])
    assert (evidence.weight("lookup"), evidence.weight("both")) == (2, 1)
    evidence.add_round("both", 3, 3, 3, spoke="lookup")
    assert (evidence.weight("lookup"), evidence.weight("both")) == (3, 1)
    evidence.add_round("both", 3, 3, 3, spoke="second")
    # The lookup was silent there.
    assert (evidence.weight("lookup"), evidence.weight("both")) == (4, 2)
    np.testing.assert_allclose(evidence.survival()[0], 2 / 4)
    np.testing.assert_allclose(evidence.survival()[1], 2 / 4 + 2 / 4 * 1 / 2)


def test_a_selector_is_offered_the_cascade_and_its_first_part_only() -> None:
    lookup, table = parts()
    drafters = {"lookup": lookup, "table": table, "both": CascadeDrafter("both", [lookup, table])}
    assert list(choices(drafters)) == ["lookup", "both"]
    assert first_parts(drafters) == {"both": "lookup"}
    alone = drafters | {"both": CascadeDrafter("both", [lookup, table], alone=True)}
    assert list(choices(alone)) == ["lookup", "table", "both"]
    # Without its first part among the choices a cascade is a drafter like any other.
    backwards = drafters | {"both": CascadeDrafter("both", [table, lookup])}
    assert list(choices(backwards)) == ["table", "both"]
    assert first_parts({"both": drafters["both"]}) == {}


def test_a_draft_says_which_part_spoke() -> None:
    lookup, table = parts()
    both = CascadeDrafter("both", [lookup, table])
    rng = np.random.default_rng(0)
    assert both.draft(begun([0, 1, 2, 3], lookup), 2, rng).part == "table"
    assert both.draft(begun([0, 1, 2, 0, 1], lookup), 2, rng).part == "lookup"
