"""The gate's training: gradients and optimiser against torch, and that it learns what it is shown."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate import Gate, ModelBinding
from edgeduet_client.llm.gate_features import EncodedText, Features, LabelRule, joined, text_features
from edgeduet_client.llm.gate_training import (
    AdamW,
    FittedGate,
    GateOptions,
    agreement,
    binary_cross_entropy,
    choose_texts,
    clipped,
    fit_gate,
    initial_weights,
    learning_rate_share,
    loss_and_gradients,
)
from toy_language_model import EOS, FAMILIES, HIDDEN, PER_FAMILY, ToyTarget

OPTIONS = GateOptions(epochs=30, batch=16, learning_rate=5e-3)


@pytest.fixture(scope="module")
def torch() -> Any:
    """The reference for gradients and optimiser."""
    return pytest.importorskip("torch")


def random_problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    targets = (rng.random((9, 4)) < 0.5).astype(np.float32)
    return inputs, targets, initial_weights(HIDDEN, rng)


def torch_loss(torch: Any, inputs: np.ndarray, targets: np.ndarray, first: Any, second: Any) -> Any:
    logits = torch.relu(torch.from_numpy(inputs) @ first.T) @ second.T
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(targets))


def torch_gradients(torch: Any, inputs: np.ndarray, targets: np.ndarray, layers: list[Any]) -> tuple[Any, Any]:
    """Loss and its gradients; not by ``backward``, after which this process could no longer fork trainers."""

    def loss(first: Any, second: Any) -> Any:
        return torch_loss(torch, inputs, targets, first, second)

    gradients, value = torch.func.grad_and_value(loss, argnums=(0, 1))(*(layer.detach() for layer in layers))
    return value, gradients


@given(st.integers(0, 2**32 - 1))
def test_loss_and_gradients_equal_autograd(torch: Any, seed: int) -> None:
    inputs, targets, weights = random_problem(seed)
    loss, gradients = loss_and_gradients(weights, inputs, targets)
    value, expected = torch_gradients(torch, inputs, targets, [torch.tensor(w) for w in weights])
    assert loss == pytest.approx(float(value), rel=1e-5)
    for gradient, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, theirs.numpy(), rtol=1e-4, atol=1e-6)


def test_ten_steps_with_clipping_equal_torch_adamw(torch: Any) -> None:
    inputs, targets, weights = random_problem()
    layers = [torch.nn.Parameter(torch.tensor(w)) for w in weights]
    reference = torch.optim.AdamW(layers, lr=1e-2, weight_decay=0.1)
    optimiser = AdamW.of(weights, 0.1)
    for _ in range(10):
        # a loss a hundred times as steep, so that the clipping has something to do
        _, gradients = loss_and_gradients(weights, inputs, targets)
        gradients = (gradients[0] * 100, gradients[1] * 100)
        weights, optimiser = optimiser.step(weights, clipped(gradients), 1e-2)
        for layer, gradient in zip(layers, torch_gradients(torch, inputs, targets, layers)[1], strict=True):
            layer.grad = 100 * gradient
        torch.nn.utils.clip_grad_norm_(layers, 1.0)
        reference.step()
    for weight, layer in zip(weights, layers, strict=True):
        np.testing.assert_allclose(weight, layer.detach().numpy(), rtol=1e-3, atol=1e-5)


@given(
    arrays(np.float32, (2, 3), elements=st.floats(-1e4, 1e4, width=32)),
    arrays(np.float32, (2, 3), elements=st.sampled_from([0.0, 1.0])),
)
def test_the_loss_is_finite_and_equals_torch_for_logits_of_any_size(
    torch: Any, logits: np.ndarray, targets: np.ndarray
) -> None:
    expected = torch.nn.functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(targets))
    assert binary_cross_entropy(logits, targets) == pytest.approx(float(expected), rel=1e-5, abs=1e-7)


@given(st.integers(1, 5000))
def test_the_learning_rate_rises_once_and_falls_to_nearly_nothing(steps: int) -> None:
    shares = [learning_rate_share(step, steps) for step in range(1, steps + 1)]
    assert all(0 < share <= 1 for share in shares)
    peak = shares.index(max(shares))
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert max(shares) == 1


# --- learning -------------------------------------------------------------------------------------------


def toy_features(seed: int, texts: int, target: ToyTarget | None = None, *, norms: str = "none") -> Features:
    """Positions of answers that switch between the scripts now and then."""
    target = target or ToyTarget()
    rng = np.random.default_rng(seed)
    rule = LabelRule.of_norms(norms, np.linalg.norm(target.head, axis=1))  # type: ignore[arg-type]
    cache, parts = target.new_cache(), []
    for _ in range(texts):
        spoken = rng.choice([Family.CJ, Family.LATIN, Family.LOW_RES], 2)
        words = [int(family * PER_FAMILY + rng.integers(PER_FAMILY)) for family in np.repeat(spoken, 6)]
        parts.append(text_features(target, cache, EncodedText((words[0],), (*words, EOS)), [rule], FAMILIES))
    return joined(parts)


def test_a_gate_learns_which_families_may_follow() -> None:
    train, validation = toy_features(0, 60), toy_features(1, 15)
    fitted = fit_gate(train, validation, OPTIONS)
    gate = gate_of(fitted)
    assert fitted.train_losses[-1] < 0.5 * fitted.train_losses[0]
    assert fitted.validation_losses[fitted.best_epoch - 1] == min(fitted.validation_losses)
    f1, prevalence = agreement(gate, validation)
    for family in (Family.CJ, Family.LATIN, Family.LOW_RES, Family.SYMBOLS):
        assert (f1[family] or 0) > 0.9
        assert 0 < prevalence[family] <= 1
    # the states themselves, at the size the model has them
    cj = ToyTarget.state([1, 2, 3]).astype(np.float32)
    assert gate.predict(cj[None])[0].tolist() == [True, False, True, False]


def test_the_size_of_the_states_does_not_matter() -> None:
    train, validation = toy_features(0, 20), toy_features(1, 5)
    small = fit_gate(train, validation, OPTIONS)
    times_64 = [Features(f.hidden_NH * np.float16(64), f.labels_NL, f.gold_N) for f in (train, validation)]
    large = fit_gate(times_64[0], times_64[1], OPTIONS)
    np.testing.assert_allclose(large.first_MH * 64, small.first_MH, rtol=1e-3, atol=1e-5)
    assert large.validation_losses == pytest.approx(small.validation_losses, rel=1e-4)


def test_the_same_seed_gives_the_same_gate_and_another_seed_another() -> None:
    train, validation = toy_features(0, 10), toy_features(1, 5)
    options = OPTIONS.model_copy(update={"epochs": 2})
    first, again = fit_gate(train, validation, options), fit_gate(train, validation, options)
    other = fit_gate(train, validation, options.model_copy(update={"seed": 1}))
    assert first.first_MH.tobytes() == again.first_MH.tobytes()
    assert first.first_MH.tobytes() != other.first_MH.tobytes()


def test_adjusted_training_bans_the_planted_language_where_unadjusted_training_lets_it_through() -> None:
    """The mechanism of the paper on the toy: rows of Latin tokens made longer, Latin banned in Low-Res answers."""
    biased = ToyTarget(np.where(FAMILIES == Family.LATIN, 4.0, 1.0))
    state = np.array([ToyTarget.state([50, 51, 52 + i]) for i in range(10)], dtype=np.float32)
    allowed = {}
    for norms in ("none", "median"):
        train, validation = (toy_features(seed, 60, biased, norms=norms) for seed in (0, 1))
        gate = gate_of(fit_gate(train, validation, OPTIONS))
        allowed[norms] = int(gate.predict(state)[:, Family.LATIN].sum())
    assert allowed["median"] <= 1
    assert allowed["none"] >= 5


def test_a_training_that_diverges_says_so() -> None:
    train = toy_features(0, 5)
    broken = Features(train.hidden_NH * np.float16(np.nan), train.labels_NL, train.gold_N)
    with pytest.raises(ModelError, match="diverged in pass 1"):
        fit_gate(train, broken, OPTIONS)


def test_without_positions_there_is_nothing_to_train() -> None:
    train = toy_features(0, 2)
    nothing = Features(train.hidden_NH[:0], train.labels_NL[:0], train.gold_N[:0])
    with pytest.raises(ModelError, match="no position"):
        fit_gate(train, nothing, OPTIONS)


def test_a_folder_and_languages_exclude_each_other() -> None:
    with pytest.raises(ModelError, match="--texts or --languages"):
        choose_texts("somewhere", ["ar"], per_language=1)


def gate_of(fitted: FittedGate) -> Gate:
    record = fitted.record(OPTIONS, [], positions=1, texts="toy", seconds_collecting=0.0, seconds_training=0.0)
    return fitted.gate(ModelBinding("t", "w", HIDDEN), record)
