"""The gate's rule against an independent reference, its history, its network and its artefact."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import (
    Gate,
    GateDescription,
    History,
    ModelBinding,
    TrainingRecord,
    advance_history,
    allowed_mask,
    banned_families,
    decide,
    high_confidence,
    history,
    largest,
    predicted_families,
)

CJ, LATIN, SYMBOLS, LOW_RES = Family
ALL_FAMILIES = list(Family)
NOWHERE = frozenset[Family]()


def bits(*allowed: Family) -> np.ndarray:
    return np.array([family in allowed for family in Family])


# --- an independent reference: plain Python over sorted pairs, written from the paper's words -------------


def reference_high_confidence(z: list[float]) -> set[int]:
    finite = [v for v in z if v > -np.inf]
    weights = [np.exp(np.float64(v) - max(finite)) for v in z]
    probabilities = [w / sum(weights) for w in weights]
    found = set()
    for k, p in ((5, 0.999), (20, 0.95)):
        for token, probability in enumerate(probabilities):
            above = [q for q in probabilities if q > probability]
            if probability > 0 and len(above) < k and sum(above) < p:
                found.add(token)
    return found


def reference_ban(
    predicted: set[Family],
    generated: list[Family],
    z: list[float],
    sampling_set: set[int],
    families: list[Family],
) -> set[Family]:
    spoken = [family for family in generated if family != SYMBOLS]
    if not spoken:
        return set()
    banned = {CJ, LATIN} - predicted - {spoken[-1]}
    could_be_sampled = any(families[token] in banned for token in sampling_set)
    right_one_is_near = any(families[token] in predicted for token in reference_high_confidence(z))
    return banned if could_be_sampled and right_one_is_near else set()


@pytest.mark.parametrize("shape", ["peaked: H1 holds more than H2", "flat: H2 holds more than H1"])
def test_the_rule_table_equals_the_reference_in_every_combination(shape: str) -> None:
    """16 predictions x 6 histories x 15 contents of H1 or H2 x 16 contents of the sampling set."""
    histories = [[], [SYMBOLS], [CJ], [LATIN, SYMBOLS], [CJ, LOW_RES, SYMBOLS, SYMBOLS], [LOW_RES, LATIN]]
    subsets = [frozenset(s) for n in range(5) for s in itertools.combinations(ALL_FAMILIES, n)]
    intervened = 0
    for near in subsets[1:]:
        z, families = logits_with(near, peaked=shape.startswith("peaked"))
        table = np.array(families, dtype=np.uint8)
        confident = reference_high_confidence(z)
        assert {families[token] for token in confident} == near
        assert set(high_confidence(np.array(z)).tolist()) == confident
        for inside in subsets:
            keep = np.array([family in inside for family in families])
            for allowed, generated in itertools.product(subsets, histories):
                last = history(table, [families.index(family) for family in generated])
                decision = decide(bits(*allowed), last, np.array(z), keep, table)
                expected = reference_ban(set(allowed), generated, z, set(np.flatnonzero(keep).tolist()), families)
                assert decision.ban == expected
                if expected:
                    intervened += 1
                    assert decision.high_confidence is not None
                    assert set(np.flatnonzero(decision.high_confidence).tolist()) == confident
                    # what makes both ways of sampling afterwards safe
                    assert (decision.high_confidence & allowed_mask(decision.ban, table)).any()
                else:
                    assert decision.high_confidence is None
    assert intervened > 100


def logits_with(near: frozenset[Family], *, peaked: bool) -> tuple[list[float], list[Family]]:
    """Return logits whose high-confidence sets hold tokens of exactly the families ``near``, and the families.

    Peaked: one token has 96 %, so H2 is that token and H1 the first five. Flat: 20 near ones, so H1 is a part of H2.
    """
    inside = sorted(near)
    if peaked:
        probabilities = [0.96, 0.02, 0.01, 0.005, 0.0045]
    else:
        probabilities = [0.0499 + 0.0001 * (i / 20) for i in range(20)]
    families = [inside[i % len(inside)] for i in range(len(probabilities))]
    for family in Family:
        probabilities.append(1e-9)
        families.append(family)
    # shuffled, so that no place in the vocabulary means anything
    order = np.random.default_rng(len(near)).permutation(len(families))
    return [float(np.log(probabilities[i])) for i in order], [families[i] for i in order]


@given(
    z=arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-np.inf, -30, -5, -2, -1, 0, 0.5, 1, 3, 9])),
    allowed=st.sets(st.sampled_from(ALL_FAMILIES)),
    generated=st.lists(st.sampled_from(ALL_FAMILIES), max_size=3),
    data=st.data(),
)
def test_the_rule_equals_the_reference_on_random_logits_with_ties(
    z: np.ndarray, allowed: set[Family], generated: list[Family], data: st.DataObject
) -> None:
    if not (z > -np.inf).any():
        z[0] = 0.0
    families = data.draw(st.lists(st.sampled_from(ALL_FAMILIES), min_size=len(z), max_size=len(z)))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(z), max_size=len(z)))) & (z > -np.inf)
    last = History.EMPTY
    for family in generated:
        last = advance_history(last, family)
    decision = decide(bits(*allowed), last, z, keep, np.array(families, dtype=np.uint8))
    expected = reference_ban(allowed, generated, z.tolist(), set(np.flatnonzero(keep).tolist()), families)
    assert decision.ban == expected
    assert set(high_confidence(z).tolist()) == reference_high_confidence(z.tolist())


def test_the_case_that_makes_the_released_code_all_nan_has_a_candidate() -> None:
    """p = (0.96 CJ, 0.03 Low-Res, 0.005, 0.003, 0.002), gate allows Low-Res: the right token is in H1 alone."""
    z = np.log(np.array([0.96, 0.03, 0.005, 0.003, 0.002], dtype=np.float32))
    families = np.array([CJ, LOW_RES, CJ, CJ, CJ], dtype=np.uint8)
    nominal = np.array([True, False, False, False, False])
    decision = decide(bits(LOW_RES), History.LOW_RES, z, nominal, families)
    assert decision.ban == {CJ, LATIN}
    assert decision.high_confidence is not None
    assert decision.high_confidence.all()
    candidates = (nominal | decision.high_confidence) & allowed_mask(decision.ban, families)
    assert candidates.tolist() == [False, True, False, False, False]
    assert (allowed_mask(decision.ban, families) & np.isfinite(z)).tolist() == candidates.tolist()


@given(st.sets(st.sampled_from(ALL_FAMILIES)), st.sampled_from(list(History)))
def test_symbols_and_low_res_are_never_banned_nor_is_the_last_family(allowed: set[Family], last: History) -> None:
    ban = banned_families(bits(*allowed), last)
    assert ban <= {CJ, LATIN}
    assert last not in ban
    assert not ban & allowed


@pytest.mark.parametrize("last", [History.EMPTY, History.SYMBOLS_ONLY])
def test_before_the_first_word_nothing_is_banned(last: History) -> None:
    assert banned_families(bits(LOW_RES), last) == NOWHERE


def test_a_token_near_the_top_counts_only_if_the_gate_itself_predicts_its_family() -> None:
    """Persistence keeps the last family from being banned; it is no reason to intervene."""
    z = np.log(np.array([0.6, 0.3, 0.1]))
    families = np.array([CJ, LATIN, SYMBOLS], dtype=np.uint8)
    keep = np.array([True, True, True])
    assert decide(bits(LOW_RES), History.LATIN, z, keep, families).ban == NOWHERE
    assert decide(bits(SYMBOLS), History.LATIN, z, keep, families).ban == {CJ}


def test_at_one_token_the_high_confidence_set_is_that_token() -> None:
    assert high_confidence(np.array([-np.inf, 2.0, -np.inf])).tolist() == [1]


def test_ties_are_all_inside() -> None:
    assert high_confidence(np.zeros(50)).tolist() == list(range(50))
    assert high_confidence(np.array([0.0] * 4 + [-1.0] * 40)).tolist() == list(range(44))


@given(st.integers(1, 25), st.sampled_from([1, 30, 129, 6400, 10_000]), st.integers(1, 400), st.integers(0, 2**32 - 1))
def test_the_k_largest_are_those_of_a_sort_with_all_ties(k: int, width: int, distinct: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z = rng.integers(0, distinct, width).astype(np.float32)
    z[rng.random(width) < 0.2] = -np.inf
    ids, values = largest(z, k)
    border = sorted(z.tolist(), reverse=True)[min(k, width) - 1]
    assert set(ids.tolist()) == {i for i, v in enumerate(z.tolist()) if v >= border and v > -np.inf}
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert values.tolist() == z[ids].tolist()


def test_without_a_finite_logit_there_is_no_high_confidence_set() -> None:
    with pytest.raises(ValueError, match="finite"):
        high_confidence(np.full(3, -np.inf))


@given(arrays(np.float32, 30, elements=st.floats(-20, 20, width=32)), st.randoms(use_true_random=False))
def test_the_high_confidence_set_does_not_depend_on_the_order_of_the_vocabulary(z: np.ndarray, random: object) -> None:
    order = np.random.default_rng(random.randrange(2**32)).permutation(len(z))  # type: ignore[attr-defined]
    # which of two values that differ in the last bit is first is not at stake, sums in another order are
    z = np.round(z, 2)
    assert set(order[high_confidence(z[order])].tolist()) == set(high_confidence(z).tolist())


# --- history --------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(ALL_FAMILIES)))
def test_the_history_is_the_last_family_that_is_not_symbols(generated: list[Family]) -> None:
    last = History.EMPTY
    for family in generated:
        last = advance_history(last, family)
    spoken = [family for family in generated if family != SYMBOLS]
    if spoken:
        assert last == spoken[-1]
    else:
        assert last is (History.SYMBOLS_ONLY if generated else History.EMPTY)
    table = np.arange(4, dtype=np.uint8)
    assert history(table, [int(family) for family in generated]) is last


# --- network and artefact -------------------------------------------------------------------------------

RECORD = TrainingRecord(
    norms="median",
    top_k=20,
    top_p=0.95,
    samples=1,
    positions=1,
    languages=["ar"],
    epochs=1,
    best_epoch=1,
    seed=0,
    learning_rate=1e-3,
    weight_decay=0.01,
    batch=64,
    train_loss=0.1,
    validation_loss=0.1,
    seconds_collecting=0.0,
    seconds_training=0.0,
    texts="django",
)
BINDING = ModelBinding(tokenizer_sha256="t", weights_sha256="w", hidden_width=6)


def small_gate(seed: int = 0) -> Gate:
    rng = np.random.default_rng(seed)
    return Gate(
        first_MH=rng.standard_normal((5, 6), dtype=np.float32),
        second_FM=rng.standard_normal((4, 5), dtype=np.float32),
        description=GateDescription(
            tokenizer_sha256="t", weights_sha256="w", hidden_width=6, rules_version=1, training=RECORD
        ),
    )


def test_the_network_is_two_layers_without_offsets() -> None:
    gate = small_gate()
    h = np.arange(6, dtype=np.float32)
    inner = [max(0.0, sum(float(w) * float(x) for w, x in zip(row, h, strict=True))) for row in gate.first_MH]
    outer = [sum(float(w) * x for w, x in zip(row, inner, strict=True)) for row in gate.second_FM]
    assert gate.logits(h[None])[0] == pytest.approx(outer, rel=1e-5)


@given(arrays(np.float32, (3, 4), elements=st.integers(-300, 300).map(lambda n: n / 100)))
def test_a_family_is_predicted_from_one_half_and_never_none(logits: np.ndarray) -> None:
    predicted = predicted_families(logits)
    for row, answer in zip(logits, predicted, strict=True):
        sigmoid = 1 / (1 + np.exp(-row.astype(np.float64)))
        assert answer.any()
        assert answer[row.argmax()]
        assert [bool(a) for a in answer] == [
            bool(s >= 0.5) or i == row.argmax() for i, s in enumerate(sigmoid.tolist())
        ]


def test_a_row_is_predicted_alike_alone_and_among_others() -> None:
    gate = small_gate()
    hidden = np.random.default_rng(1).standard_normal((7, 6), dtype=np.float32)
    together = gate.predict(hidden)
    assert together.shape == (7, 4)
    for place, row in enumerate(hidden):
        assert gate.predict(row[None])[0].tolist() == together[place].tolist()
    assert gate.predict(hidden[:0]).shape == (0, 4)


def test_a_hidden_state_of_another_width_or_not_finite_is_refused() -> None:
    with pytest.raises(ModelError, match="width 6"):
        small_gate().predict(np.zeros((1, 7), dtype=np.float32))
    with pytest.raises(ModelError, match="not finite"):
        small_gate().predict(np.full((1, 6), np.nan, dtype=np.float32))


def test_a_stored_gate_comes_back_bit_for_bit(tmp_path: Path) -> None:
    gate, path = small_gate(), tmp_path / "gate" / "gate.safetensors"
    gate.save(path)
    again = Gate.load(path, BINDING)
    assert again.description == gate.description
    assert again.first_MH.tobytes() == gate.first_MH.tobytes()
    assert again.second_FM.tobytes() == gate.second_FM.tobytes()
    assert [p.name for p in path.parent.iterdir()] == ["gate.safetensors"]


@pytest.mark.parametrize(
    ("binding", "says"),
    [
        (replace(BINDING, tokenizer_sha256="other"), "another model .other tokenizer"),
        (replace(BINDING, weights_sha256="other"), "another model .other weights"),
        (replace(BINDING, hidden_width=7), "another model .other hidden width"),
    ],
)
def test_the_gate_of_another_model_is_refused_in_one_line(binding: ModelBinding, says: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    small_gate().save(path)
    with pytest.raises(ModelError, match=says) as refused:
        Gate.load(path, binding)
    assert "\n" not in str(refused.value)


def test_a_gate_of_older_family_rules_is_refused(tmp_path: Path) -> None:
    gate = small_gate()
    path = tmp_path / "gate.safetensors"
    replace(gate, description=gate.description.model_copy(update={"rules_version": 0})).save(path)
    with pytest.raises(ModelError, match="older rules"):
        Gate.load(path, BINDING)


@pytest.mark.parametrize("cut", [0, 4, 200, -8])
def test_a_damaged_gate_is_refused_in_one_line(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "gate.safetensors"
    small_gate().save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match="damaged") as refused:
        Gate.load(path, BINDING)
    assert "\n" not in str(refused.value)


def test_a_missing_gate_says_how_to_train_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="gate train"):
        Gate.load(tmp_path / "gate.safetensors", BINDING)
