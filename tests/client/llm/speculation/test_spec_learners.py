"""Learners from expert advice and the bandits they are compared with: bounds, growth with experts, delay."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.arms import NO_DRAFT, Arm, Round, Selector
from edgeduet_client.llm.speculation.costs import CostModel, DraftCost
from edgeduet_client.llm.speculation.selectors import SELECTORS, new_selector
from edgeduet_client.llm.speculation.selectors.adanormalhedge import AdaNormalHedge
from edgeduet_client.llm.speculation.selectors.delayed import Delayed
from edgeduet_client.llm.speculation.selectors.dinkelbach import dinkelbach_losses, length_losses
from edgeduet_client.llm.speculation.selectors.exp3spec import EXP3SpecSelector
from edgeduet_client.llm.speculation.selectors.follow_the_leader import FollowTheLeader
from edgeduet_client.llm.speculation.selectors.hedge import Hedge
from edgeduet_client.llm.speculation.selectors.hedging import Learner, awakened
from edgeduet_client.llm.speculation.selectors.normalhedge import NormalHedge, inverse_scale, normalhedge_weights
from edgeduet_client.llm.speculation.selectors.ucbspec import UCBSpecSelector

LEARNERS: dict[str, Callable[[int], Learner]] = {
    "normalhedge": NormalHedge,
    "adanormalhedge": AdaNormalHedge,
    "hedge": Hedge,
    "follow_the_leader": FollowTheLeader,
}
LossTable = arrays(np.float64, st.tuples(st.integers(1, 60), st.integers(1, 6)), elements=st.floats(0, 1))


def regret(learner: Learner, losses_TN: np.ndarray) -> float:
    suffered = 0.0
    for losses in losses_TN:
        suffered += float(learner.weights() @ losses)
        learner.update(losses)
    return suffered - float(losses_TN.sum(axis=0).min())


def lengths_accepted(count: int, rounds: int, rng: np.random.Generator, depth: int = 5) -> np.ndarray:
    """(T, N) tokens per round; expert 0 accepts .8 of its drafts, all others .65."""
    acceptance = np.full(count, 0.65)
    acceptance[0] = 0.8
    passed = rng.random((rounds, count, depth)) < acceptance[:, None]
    return 1 + np.cumprod(passed, axis=2).sum(axis=2)


@given(LossTable, st.floats(0.01, 3.0))
@settings(deadline=None)
def test_hedge_keeps_its_bound_on_any_losses(losses: np.ndarray, eta: float) -> None:
    rounds, experts = losses.shape
    assert regret(Hedge(experts, eta=eta), losses) <= math.log(experts) / eta + eta * rounds / 8 + 1e-9


@given(LossTable)
@settings(deadline=None)
def test_hedge_keeps_its_bound_with_and_without_a_known_horizon(losses: np.ndarray) -> None:
    rounds, experts = losses.shape
    log_n = math.log(experts)
    assert regret(Hedge(experts, horizon=rounds), losses) <= math.sqrt(rounds * log_n / 2) + 1e-9
    assert regret(Hedge(experts), losses) <= 2 * math.sqrt(rounds * log_n / 2) + math.sqrt(log_n / 8) + 1e-9


def test_against_an_adversary_the_leader_loses_half_and_hedge_does_not() -> None:
    rounds = 2000
    losses = np.zeros((rounds, 2))
    losses[0] = (0.5, 0)
    losses[1::2, 1] = 1
    losses[2::2, 0] = 1
    assert regret(FollowTheLeader(2), losses) > 0.45 * rounds
    bound = math.sqrt(rounds * math.log(2) / 2)
    for learner in (Hedge(2, horizon=rounds), NormalHedge(2), AdaNormalHedge(2)):
        assert regret(learner, losses) <= 2 * bound


@given(arrays(np.float64, st.integers(1, 64), elements=st.floats(-1e6, 1e6)))
@settings(deadline=None)
def test_normalhedge_solves_its_normaliser(regrets: np.ndarray) -> None:
    positive = np.maximum(regrets, 0)
    weights = normalhedge_weights(regrets)
    assert weights.sum() == pytest.approx(1) and np.isfinite(weights).all()
    if positive.max() <= 1e-12:
        np.testing.assert_allclose(weights, 1 / len(weights))
        return
    assert (weights[regrets <= 0] == 0).all()
    scaled = positive / positive.max()
    assert np.exp(inverse_scale(scaled) * scaled**2).mean() == pytest.approx(math.e, abs=1e-6)


@pytest.mark.parametrize("name", LEARNERS)
@given(losses=LossTable.map(lambda table: np.round(16 * table) / 16), added=st.integers(-8, 8).map(lambda n: n / 16))
@settings(max_examples=30, deadline=None)
def test_learners_start_unbiased_and_a_constant_on_all_losses_changes_nothing(
    name: str, losses: np.ndarray, added: float
) -> None:
    one, other = LEARNERS[name](losses.shape[1]), LEARNERS[name](losses.shape[1])
    if name != "follow_the_leader":
        np.testing.assert_allclose(one.weights(), 1 / losses.shape[1])
    for row in losses:
        one.update(row)
        other.update(row + added)
    if name != "follow_the_leader":
        np.testing.assert_allclose(one.weights(), other.weights(), atol=1e-6)


@pytest.mark.parametrize("name", ["normalhedge", "adanormalhedge", "hedge"])
def test_weights_stay_finite_after_a_million_rounds(name: str) -> None:
    learner = LEARNERS[name](4)
    losses = 1e4 * np.array([0.1, 0.5, 0.9, 1.0])
    for _ in range(100):
        # A hundred rounds of ten thousand times the losses move sums as far as a million rounds do.
        learner.update(losses)
    weights = learner.weights()
    assert np.isfinite(weights).all() and weights.sum() == pytest.approx(1)
    assert weights.argmax() == 0


def test_normalhedge_regret_grows_slower_than_rounds() -> None:
    horizons = (100, 400, 1600, 3200)
    means = [np.mean([regret(NormalHedge(8), losses_of(8, rounds, seed)) for seed in range(3)]) for rounds in horizons]
    slope = np.polyfit(np.log(horizons), np.log(np.maximum(means, 1e-3)), 1)[0]
    assert slope < 0.75


def losses_of(experts: int, rounds: int, seed: int) -> np.ndarray:
    return 1 - lengths_accepted(experts, rounds, np.random.default_rng([seed, experts])) / 6


@pytest.mark.parametrize("name", ["normalhedge", "hedge"])
def test_regret_grows_with_the_logarithm_of_the_experts(name: str) -> None:
    counts = (2, 4, 8, 16, 32, 64)
    means = [np.mean([regret(LEARNERS[name](n), losses_of(n, 600, seed)) for seed in range(8)]) for n in counts]
    assert means[-1] / means[0] < 8
    logs = np.log(counts)
    fitted = np.polyval(np.polyfit(logs, means, 1), logs)
    explained = 1 - np.sum((means - fitted) ** 2) / np.sum((means - np.mean(means)) ** 2)
    assert explained > 0.9


def bandit_regret(make: Callable[..., Selector], count: int, rounds: int, seed: int) -> float:
    """Expected tokens lost to always playing drafter 0, in units of the loss above."""
    arms = [Arm(f"d{number}", 5) for number in range(count)]
    tokens = lengths_accepted(count, rounds, np.random.default_rng([seed, count]))
    means = np.array([sum(rate**k for k in range(6)) for rate in (0.8, *(0.65,) * (count - 1))])
    bandit = make(arms, **({"seed": seed} if make is EXP3SpecSelector else {}))
    place = {arm: number for number, arm in enumerate(arms)}
    lost = 0.0
    for row in tokens:
        arm = bandit.choose(None, 10)
        emitted = 1 if arm == NO_DRAFT else int(row[place[arm]])
        mean = 1.0 if arm == NO_DRAFT else means[place[arm]]
        lost += (means[0] - mean) / 6
        bandit.played(Round(arm, arm.length, arm.length, emitted - 1, emitted, {}))
    return lost


@pytest.mark.parametrize("make", [UCBSpecSelector, EXP3SpecSelector])
def test_bandits_lose_far_more_than_full_information_with_many_drafters(make: Callable[..., Selector]) -> None:
    lost = np.mean([bandit_regret(make, 32, 1000, seed) for seed in range(2)])
    ours = np.mean([regret(NormalHedge(32), losses_of(32, 1000, seed)) for seed in range(2)])
    assert lost > 10 * ours


@pytest.mark.parametrize("delay", [0, 2, 5, 10])
def test_delayed_losses_cost_no_more_than_the_reduction_promises(delay: int) -> None:
    rounds, experts = 660, 4
    losses = np.random.default_rng(delay).random((rounds, experts)) * np.linspace(0.6, 1, experts)
    horizon = -(-rounds // (delay + 1))
    learner = Delayed(lambda: Hedge(experts, horizon=horizon))
    suffered = 0.0
    for now in range(rounds + delay):
        if now < rounds:
            suffered += float(learner.weights(now) @ losses[now])
        if now >= delay:
            learner.update(now - delay, losses[now - delay])
    assert learner.copies == delay + 1
    found = suffered - losses.sum(axis=0).min()
    assert found <= (delay + 1) * math.sqrt(horizon * math.log(experts) / 2)


def test_ucbspec_explores_by_the_pulls_of_each_arm_not_of_all() -> None:
    """The paper's radius, by hand, for 3 arms, L = 4, delta = .05 after 1, 5 and 2 pulls."""
    bandit = UCBSpecSelector([Arm("a", 4), Arm("b", 4)])
    bandit.pulls, bandit.rounds = np.array([1, 5, 2]), 8
    expected = [
        2 * math.sqrt((1 + n) / n**2 * (1 + 2 * math.log(3 * 9**2 * math.sqrt(1 + n) / 0.05))) for n in (1, 5, 2)
    ]
    np.testing.assert_allclose(bandit.radius(), expected)
    assert bandit.radius()[0] > bandit.radius()[2] > bandit.radius()[1]


def test_exp3spec_charges_only_the_arm_that_was_drawn_by_its_probability() -> None:
    bandit = EXP3SpecSelector([Arm("a", 4), Arm("b", 4)], seed=3)
    arm = bandit.choose(None, 1)
    bandit.played(Round(arm, arm.length, 1, 1, 2, {}))
    place = bandit.arms.index(arm)
    assert bandit.sums[place] == pytest.approx((5 - 2) / (4 / 3))
    assert np.count_nonzero(bandit.sums) == 1
    assert bandit.probabilities()[place] < 1 / 3


def test_metasd_is_rewarded_by_the_drafter_in_use_only() -> None:
    selector = new_selector("metasd", [Arm("a", 4), Arm("b", 4)])
    for _ in range(200):
        selector.choose(None, 1)
        selector.learn({"a": np.full(4, 0.9), "b": np.full(4, 0.2)})
    assert [selector.choose(None, 1).drafter for _ in range(3)] == ["a"] * 3


def test_losses_of_the_best_arm_are_zero_on_average_at_the_best_rate() -> None:
    tokens, seconds = np.array([1.0, 2.0, 2.5]), np.array([1.0, 1.2, 2.0])
    rate = float((tokens / seconds).max())
    lengths = np.array([0, 2, 4])
    losses = dinkelbach_losses(tokens, seconds, lengths, rate)
    assert ((losses >= 0) & (losses <= 1)).all()
    assert losses.argmin() == 1
    low = (rate * seconds - lengths - 1).min()
    spread = (rate * seconds - 1).max() - low
    assert losses[1] * spread + low == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(length_losses(np.array([1.0, 5.0]), 4), [0.8, 0.0])


def test_a_drafter_that_was_not_scored_keeps_its_regret() -> None:
    losses = awakened(np.array([0.2, np.nan, 0.6]), np.array([0.25, 0.5, 0.25]))
    np.testing.assert_allclose(losses, [0.2, 0.4, 0.6])
    learner = NormalHedge(3)
    learner.update(awakened(np.array([0.1, np.nan, 0.9]), learner.weights()))
    assert learner.regrets[1] == pytest.approx(0)


def play(selector: Selector, rounds: int = 120, *, scale: float = 1.0) -> list[Arm]:
    """A run in which drafter good is worth it and drafter poor is not; what is learnt has noise of its own."""
    costs = CostModel(
        {0: [scale * (1 + 0.1 * row) for row in range(7)]},
        {"good": DraftCost(0, 0.02 * scale), "poor": DraftCost(0, 0.3 * scale)},
    )
    rng = np.random.default_rng(5)
    selector.start_request()
    played = []
    for turn in range(rounds):
        arm = selector.choose(costs, 10 + turn)
        played.append(arm)
        accepted = int((rng.random(arm.length) < 0.7).cumprod().sum())
        seconds = {"verify": costs.step_seconds(arm.length + 1, 10)}
        selector.played(Round(arm, arm.length, arm.length, accepted, accepted + 1, seconds))
        curves = {
            name: np.cumprod(rng.random(6) < rate).astype(float) for name, rate in (("good", 0.8), ("poor", 0.75))
        }
        selector.learn(curves, None, 10 + turn)
    return played


ARMS = [NO_DRAFT, *(Arm(name, length) for name in ("good", "poor") for length in (1, 2, 4, 6))]


@pytest.mark.parametrize("name", SELECTORS)
def test_the_same_seed_gives_the_same_choices(name: str) -> None:
    common = {"seed": 11}
    first = play(new_selector(name, ARMS, common=common))
    assert play(new_selector(name, ARMS, common=common)) == first
    assert set(first) <= set(ARMS)


@pytest.mark.parametrize("name", ["ratio", "normalhedge", "adanormalhedge", "hedge", "follow_the_leader"])
def test_selectors_that_know_everything_come_to_the_drafter_that_is_worth_it(name: str) -> None:
    played = play(new_selector(name, ARMS, common={"seed": 1}), 400)
    late = played[200:]
    share = sum(arm.drafter == "good" for arm in late) / len(late)
    assert share > 0.8


@pytest.mark.parametrize("name", ["ratio", "normalhedge", "adanormalhedge", "hedge", "follow_the_leader"])
def test_a_machine_ten_times_as_slow_changes_no_choice(name: str) -> None:
    assert play(new_selector(name, ARMS)) == play(new_selector(name, ARMS), scale=10.0)


def test_the_accept_length_selector_does_not_look_at_costs() -> None:
    selector = new_selector("accept_length", ARMS)
    played = play(selector, 100)
    assert {arm.length for arm in played[20:]} == {6}


def test_unknown_selectors_and_options_are_refused_with_what_there_is() -> None:
    with pytest.raises(RequestError, match=r"no selector 'rato'.*ratio"):
        new_selector("rato", ARMS)
    with pytest.raises(RequestError, match=r"has no option 'patence'.*patience"):
        new_selector("ratio", ARMS, {"patence": 3})
    with pytest.raises(RequestError, match="play=dice is not one of sample, leader"):
        new_selector("normalhedge", ARMS, {"play": "dice"})
    with pytest.raises(RequestError, match="reward=luck"):
        new_selector("ucbspec", ARMS, {"reward": "luck"})
    with pytest.raises(RequestError, match="delta=2"):
        new_selector("ucbspec", ARMS, {"delta": 2})
    with pytest.raises(RequestError, match="drafter=bad"):
        new_selector("fixed", ARMS, {"drafter": "bad"})


def test_the_fixed_selector_plays_what_it_was_told() -> None:
    assert new_selector("fixed", ARMS).choose(None, 1) == Arm("good", 6)
    assert new_selector("fixed", ARMS, {"drafter": "poor", "length": 2}).choose(None, 1) == Arm("poor", 2)
    assert new_selector("fixed", ARMS, {"drafter": "none"}).choose(None, 1) == NO_DRAFT
    assert new_selector("fixed", [NO_DRAFT]).choose(None, 1) == NO_DRAFT
