"""Labels of the gate's training, and the store that survives being killed."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import ModelBinding
from edgeduet_client.llm.gate_features import (
    EncodedText,
    FeatureStore,
    LabelRule,
    collect,
    joined,
    response_rows,
    text_features,
)
from toy_language_model import EOS, FAMILIES, HIDDEN, VOCABULARY, ToyTarget

BINDING = ModelBinding("tokenizer", "weights", HIDDEN)
RAW = LabelRule("none", None)
TEXTS = [EncodedText((1, 17, 40), tuple(range(first, first + 6)) + (EOS,)) for first in (0, 16, 48)]


def reference_label(z: np.ndarray, families: np.ndarray, k: int, p: float) -> int:
    """Sort, cumulate, keep while the mass before is below p, at most k: the released definition, without ties."""
    order = np.argsort(-z, kind="stable")
    probabilities = np.exp((z - z.max()).astype(np.float64))
    probabilities /= probabilities.sum()
    label, before = 0, 0.0
    for place, token in enumerate(order):
        if place >= k or before >= p:
            break
        label |= 1 << int(families[token])
        before += probabilities[token]
    return label


@given(arrays(np.float32, VOCABULARY, elements=st.floats(-8, 8, width=32), unique=True))
def test_a_label_holds_the_families_of_top_k_and_top_p(z: np.ndarray) -> None:
    assert RAW.label(z, FAMILIES) == reference_label(z, FAMILIES, 20, 0.95)
    assert LabelRule("none", None, top_k=3, top_p=0.5).label(z, FAMILIES) == reference_label(z, FAMILIES, 3, 0.5)


@given(
    arrays(np.float64, (VOCABULARY, 4), elements=st.floats(-3, 3)),
    arrays(np.float64, 4, elements=st.floats(-3, 3)),
    arrays(np.float64, VOCABULARY, elements=st.floats(0.1, 10)),
    st.sampled_from(["paper", "median"]),
)
def test_adjusted_labels_do_not_depend_on_the_lengths_of_rows(
    head: np.ndarray, h: np.ndarray, scale: np.ndarray, norms: str
) -> None:
    """Any positive rescaling of rows leaves the paper's labels, and the median's once the medians agree."""
    head[np.linalg.norm(head, axis=1) < 1e-3] = 1.0
    plain, scaled = np.linalg.norm(head, axis=1), np.linalg.norm(head * scale[:, None], axis=1)
    rule = LabelRule.of_norms(norms, plain)  # type: ignore[arg-type]
    other = LabelRule.of_norms(norms, scaled)  # type: ignore[arg-type]
    assert rule.factors is not None
    assert other.factors is not None
    adjusted, rescaled = (head @ h) * rule.factors, (head @ h) * scale * other.factors
    ratio = np.median(scaled) / np.median(plain) if norms == "median" else 1.0
    np.testing.assert_allclose(rescaled, adjusted * ratio, rtol=1e-4, atol=1e-4)


def test_a_planted_bias_shows_in_unadjusted_labels_and_not_in_adjusted_ones() -> None:
    scale = np.where(FAMILIES == Family.LATIN, 4.0, 1.0)
    plain, biased = ToyTarget(), ToyTarget(scale)
    counts = {}
    for name, target in (("plain", plain), ("biased", biased)):
        norms = np.linalg.norm(target.head, axis=1)
        rules = [RAW, LabelRule.of_norms("paper", norms)]
        parts = [text_features(target, target.new_cache(), text, rules, FAMILIES) for text in TEXTS]
        labels = joined(parts).labels_NL
        counts[name] = ((labels >> Family.LATIN) & 1).sum(axis=0).tolist()
        counts[name, "adjusted"] = labels[:, 1].tolist()
    assert counts["biased"][0] > counts["plain"][0]
    assert counts["biased", "adjusted"] == counts["plain", "adjusted"]


def test_the_median_keeps_the_scale_of_the_logits() -> None:
    norms = np.array([1.0, 3.0, 6.0])
    median, paper = LabelRule.of_norms("median", norms), LabelRule.of_norms("paper", norms)
    assert median.factors is not None
    assert paper.factors is not None
    assert median.factors.tolist() == pytest.approx([3.0, 1.0, 0.5])
    assert paper.factors.tolist() == pytest.approx([1.0, 1 / 3, 1 / 6])
    assert LabelRule.of_norms("none", norms).factors is None


def test_rows_of_padding_are_left_alone_and_broken_norms_refused() -> None:
    factors = LabelRule.of_norms("median", np.array([2.0, 2.0, 0.0])).factors
    assert factors is not None
    assert factors.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ModelError, match="not finite"):
        LabelRule.of_norms("median", np.array([1.0, np.nan]))


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ModelError, match="not finite"):
        RAW.label(np.full(VOCABULARY, np.nan, dtype=np.float32), FAMILIES)


# --- positions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [0, 1, 3, 31, 32, 33, 70])
@pytest.mark.parametrize("response", [2, 5, 40])
def test_only_positions_of_the_answer_are_used_and_each_once(prompt: int, response: int) -> None:
    target = ToyTarget()
    text = EncodedText(tuple(np.arange(prompt) % 16), tuple(np.arange(response) % 16 + 48))
    everything = [*text.prompt, *text.response]
    seen = []
    for place, logits, hidden in response_rows(target, target.new_cache(), text):
        assert place == len(seen)
        seen += list(zip(logits.copy(), hidden.copy(), strict=True))
    assert len(seen) == len(text.targets) == (response if prompt else response - 1)
    for offset, (logits, hidden) in enumerate(seen):
        before = everything[: len(everything) - len(text.targets) + offset]
        np.testing.assert_array_equal(hidden, target.state(before).astype(np.float32))
        np.testing.assert_allclose(logits, target.head @ hidden, rtol=1e-5, atol=1e-5)


def test_features_hold_states_labels_and_what_followed() -> None:
    target = ToyTarget()
    features = text_features(target, target.new_cache(), TEXTS[0], [RAW], FAMILIES)
    assert features.hidden_NH.dtype == np.float16
    assert features.hidden_NH.shape == (7, HIDDEN)
    assert features.gold_N.tolist() == [Family.CJ] * 6 + [Family.SYMBOLS]
    assert features.targets().shape == (7, 4)
    assert features.targets()[1].tolist() == [1.0, 0.0, 1.0, 0.0]


def test_padding_of_the_logits_is_never_in_a_label() -> None:
    z = np.zeros(VOCABULARY + 8, dtype=np.float32)
    z[VOCABULARY:] = 50.0
    target = ToyTarget()
    target.head = np.concatenate([target.head, 100 * np.ones((8, HIDDEN), dtype=np.float32)])
    clean = text_features(ToyTarget(), ToyTarget().new_cache(), TEXTS[0], [RAW], FAMILIES)
    padded = text_features(target, target.new_cache(), TEXTS[0], [RAW], FAMILIES)
    assert padded.labels_NL.tolist() == clean.labels_NL.tolist()


# --- the store -----------------------------------------------------------------------------------------


def stored(folder: Path, target: ToyTarget, texts: list[EncodedText] = TEXTS) -> list:
    return collect(target, texts, [RAW], FAMILIES, FeatureStore.of(folder, BINDING, [RAW]))


def test_what_is_stored_is_not_computed_again_and_is_the_same(tmp_path: Path) -> None:
    first_target, second_target = ToyTarget(), ToyTarget()
    first, second = stored(tmp_path, first_target), stored(tmp_path, second_target)
    assert (first_target.steps, second_target.steps) == (3, 0)
    for a, b in zip(first, second, strict=True):
        assert a.hidden_NH.tobytes() == b.hidden_NH.tobytes()
        assert a.labels_NL.tolist() == b.labels_NL.tolist()
        assert a.gold_N.tolist() == b.gold_N.tolist()


@pytest.mark.parametrize("cut", [1, 20, 150])
def test_a_record_cut_short_is_computed_again_and_those_before_it_are_kept(cut: int, tmp_path: Path) -> None:
    whole = stored(tmp_path, ToyTarget())
    path = FeatureStore.of(tmp_path, BINDING, [RAW]).path
    path.write_bytes(path.read_bytes()[:-cut])
    target = ToyTarget()
    again = stored(tmp_path, target)
    assert target.steps == 1
    assert [f.hidden_NH.tobytes() for f in again] == [f.hidden_NH.tobytes() for f in whole]
    third = ToyTarget()
    assert stored(tmp_path, third)[2].labels_NL.tolist() == whole[2].labels_NL.tolist()
    assert third.steps == 0  # what was left half written does not hide what was written after it


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    stored(tmp_path, ToyTarget())
    path = FeatureStore.of(tmp_path, BINDING, [RAW]).path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    target = ToyTarget()
    stored(tmp_path, target)
    assert target.steps == 2  # the damaged record and those behind it


def test_another_model_or_rule_has_another_store(tmp_path: Path) -> None:
    paths = {
        FeatureStore.of(tmp_path, binding, rules).path
        for binding in (BINDING, ModelBinding("tokenizer", "other weights", HIDDEN))
        for rules in ([RAW], [LabelRule("none", None, top_k=5)], [LabelRule("paper", np.ones(3, np.float32))])
    }
    assert len(paths) == 6


class _KilledAt(ToyTarget):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.last = step

    def forward(self, *args: object, **options: object) -> object:  # type: ignore[override]
        if self.steps == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(*args, **options)  # type: ignore[arg-type]


def _collect_until_killed(folder: Path) -> None:
    stored(folder, _KilledAt(2))


def test_kill_9_loses_one_text(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_collect_until_killed, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    target = ToyTarget()
    resumed = stored(tmp_path, target)
    assert target.steps == 1
    fresh = stored(tmp_path / "other", ToyTarget())
    assert [f.hidden_NH.tobytes() for f in resumed] == [f.hidden_NH.tobytes() for f in fresh]


def test_two_collections_into_one_store_are_refused(tmp_path: Path) -> None:
    store = FeatureStore.of(tmp_path, BINDING, [RAW])
    with store.writing(), pytest.raises(ModelError, match="another process"):
        stored(tmp_path, ToyTarget())


def test_progress_counts_every_text(tmp_path: Path) -> None:
    calls = []
    store = FeatureStore.of(tmp_path, BINDING, [RAW])
    collect(ToyTarget(), TEXTS, [RAW], FAMILIES, store, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]
