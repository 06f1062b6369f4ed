"""Survival curves: unbiased by exact enumeration; what is biased is shown to be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.distribution import Distribution
from edgeduet_client.llm.speculation.draft import Redraft
from edgeduet_client.llm.speculation.estimators import (
    Form,
    accepted_mass,
    agreeing_mass,
    chances,
    proposed_tokens,
    survival,
)
from edgeduet_client.llm.speculation.text import CommittedText

FORMS: tuple[Form, ...] = ("ratio", "rao-blackwell")
Law = Callable[[tuple[int, ...]], Distribution]


def distribution(weights: np.ndarray) -> Distribution:
    ids = np.flatnonzero(weights > 0)
    return Distribution(ids, weights[ids] / weights[ids].sum())


def random_law(seed: int, size: int = 3, sparse: float = 0.0) -> Law:
    """A law for every prefix, always the same for the same prefix."""

    def law(prefix: tuple[int, ...]) -> Distribution:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        weights = rng.dirichlet(np.full(size, 0.7))
        weights[rng.random(size) < sparse] = 0
        return distribution(weights if weights.any() else np.eye(size)[rng.integers(size)])

    return law


def texts(target: Law, depth: int) -> Iterator[tuple[float, CommittedText]]:
    """Every continuation of a prompt of one token, with its probability."""

    def grow(tokens: tuple[int, ...], laws: list[Distribution], chance: float) -> Iterator[tuple[float, CommittedText]]:
        if len(tokens) == depth:
            text = CommittedText([0])
            text.extend(tokens, laws)
            yield chance, text
            return
        here = target(tokens)
        for token, probability in zip(here.ids.tolist(), here.probabilities.tolist(), strict=True):
            yield from grow((*tokens, token), [*laws, here], chance * probability)

    return grow((), [], 1.0)


def true_survival(target: Law, drafter: Law, depth: int, size: int = 3) -> np.ndarray:
    """S(k) = sum over x_1..x_k of the product of min(p, q)."""
    curve = np.zeros(depth)
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(size), repeat=length):
            curve[length - 1] += np.prod(
                [
                    min(target(tokens[:k]).probability(x), drafter(tokens[:k]).probability(x))
                    for k, x in enumerate(tokens)
                ]
            )
    return curve


def drawn(text: CommittedText, drafter: Law, depth: int) -> Redraft:
    tokens = tuple(text.tokens[1:])
    return Redraft(1, laws=tuple(drafter(tokens[:k]) for k in range(depth)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_over_all_texts_is_the_survival_of_a_drawn_draft(form: Form, depth: int, seed: int) -> None:
    target, drafter = random_law(seed, sparse=0.2), random_law(100 + seed, sparse=0.2)
    mean = sum(
        chance * survival(drawn(text, drafter, depth), text, depth, form) for chance, text in texts(target, depth)
    )
    np.testing.assert_allclose(mean, true_survival(target, drafter, depth), atol=1e-10, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_the_mean_over_all_texts_is_the_survival_of_a_certain_draft(form: Form, seed: int) -> None:
    depth, target = 4, random_law(seed)
    draft = tuple(np.random.default_rng(seed).integers(0, 3, depth - 1).tolist())
    truth = np.zeros(depth)
    truth[: len(draft)] = np.cumprod([target(draft[:k]).probability(x) for k, x in enumerate(draft)])
    mean = sum(chance * survival(Redraft(1, tokens=draft), text, depth, form) for chance, text in texts(target, depth))
    np.testing.assert_allclose(mean, truth, atol=1e-10, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_coupled_verification_accepts_where_independent_draws_agree(form: Form) -> None:
    depth, target, drafter = 3, random_law(5), random_law(6)
    truth = np.zeros(depth)
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(3), repeat=length):
            truth[length - 1] += np.prod(
                [target(tokens[:k]).probability(x) * drafter(tokens[:k]).probability(x) for k, x in enumerate(tokens)]
            )
    mean = sum(
        chance * survival(drawn(text, drafter, depth), text, depth, form, coupled=True)
        for chance, text in texts(target, depth)
    )
    np.testing.assert_allclose(mean, truth, atol=1e-10, rtol=0)


def test_the_product_of_accepted_masses_is_biased() -> None:
    """After token 0 the drafter is perfect, after token 1 always wrong: 2.00 tokens a round, not 1.75."""

    def target(prefix: tuple[int, ...]) -> Distribution:
        return distribution(np.array([0.5, 0.5, 0.0]))

    def drafter(prefix: tuple[int, ...]) -> Distribution:
        perfect, wrong = np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.0, 1.0])
        if not prefix:
            return distribution(np.array([1.0, 0.0, 0.0]))
        return distribution(perfect if prefix[0] == 0 else wrong)

    product = 1.0
    unbiased = dict.fromkeys(FORMS, 1.0)
    for chance, text in texts(target, 2):
        masses = [accepted_mass(text.target(1 + k), law) for k, law in enumerate(drawn(text, drafter, 2).laws or ())]
        product += chance * np.cumprod(masses).sum()
        for form in FORMS:
            unbiased[form] += chance * survival(drawn(text, drafter, 2), text, 2, form).sum()
    assert 1 + true_survival(target, drafter, 2).sum() == pytest.approx(2.0, abs=1e-12)
    assert unbiased == {form: pytest.approx(2.0, abs=1e-12) for form in FORMS}
    assert product == pytest.approx(1.75, abs=1e-12)


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(FORMS), st.booleans())
@settings(max_examples=60, deadline=None)
def test_tokens_per_round_lie_between_one_and_one_more_than_drafted(
    seed: int, depth: int, form: Form, coupled: bool
) -> None:
    target, drafter = random_law(seed, 5, 0.3), random_law(seed + 1, 5, 0.3)
    text = next(text for _, text in texts(target, depth))
    curve = survival(drawn(text, drafter, depth), text, depth, form, coupled=coupled)
    assert curve.shape == (depth,)
    assert ((curve >= 0) & (curve <= 1)).all()
    assert 1 <= 1 + curve.sum() <= depth + 1 + 1e-12


def test_with_a_greedy_target_and_certain_drafts_it_is_what_was_accepted() -> None:
    text = CommittedText([0])
    written = [3, 1, 4, 1, 5]
    text.extend(written, [distribution(np.eye(6)[token]) for token in written])
    for draft, accepted in (((3, 1, 4, 1, 5), 5), ((3, 1, 0, 1, 5), 2), ((2,), 0), ((3, 1), 2), ((), 0)):
        for form in FORMS:
            assert survival(Redraft(1, tokens=draft), text, 5, form).tolist() == [float(k < accepted) for k in range(5)]


def test_averaging_the_last_factor_out_lowers_the_variance_on_average() -> None:
    depth, ratio, averaged = 3, 0.0, 0.0
    for seed in range(30):
        target, drafter = random_law(seed), random_law(seed + 500)
        for form in FORMS:
            values = [(c, survival(drawn(t, drafter, depth), t, depth, form).sum()) for c, t in texts(target, depth)]
            mean = sum(c * v for c, v in values)
            variance = sum(c * (v - mean) ** 2 for c, v in values)
            if form == "ratio":
                ratio += variance
            else:
                averaged += variance
    assert averaged < ratio


@pytest.mark.parametrize("form", FORMS)
def test_a_drafter_equal_to_the_target_always_survives_and_one_that_never_agrees_never(form: Form) -> None:
    target = random_law(3)
    for _, text in texts(target, 3):
        np.testing.assert_allclose(survival(drawn(text, target, 3), text, 3, form), 1.0, atol=1e-12)
        apart = Redraft(1, laws=(distribution(np.array([0, 0, 0, 1.0])),) * 3)
        assert not survival(apart, text, 3, form).any()


@given(st.permutations(range(5)), st.integers(0, 1000), st.sampled_from(FORMS))
@settings(max_examples=40, deadline=None)
def test_renaming_the_tokens_changes_nothing(order: list[int], seed: int, form: Form) -> None:
    target, drafter = random_law(seed, 5, 0.3), random_law(seed + 1, 5, 0.3)
    text = next(text for _, text in texts(target, 3))

    def renamed(law: Distribution) -> Distribution:
        weights = np.zeros(5)
        weights[[order[token] for token in law.ids]] = law.probabilities
        return distribution(weights)

    other = CommittedText([0])
    other.extend([order[token] for token in text.tokens[1:]], [renamed(text.target(1 + k)) for k in range(3)])
    before = drawn(text, drafter, 3)
    after = Redraft(1, laws=tuple(renamed(law) for law in before.laws or ()))
    np.testing.assert_allclose(survival(before, text, 3, form), survival(after, other, 3, form), atol=1e-12)


def test_masses_are_those_of_full_vectors_whatever_the_supports() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p, q = (rng.dirichlet(np.ones(12)) * (rng.random(12) < 0.6) for _ in range(2))
        if not p.any() or not q.any():
            continue
        p, q = p / p.sum(), q / q.sum()
        assert accepted_mass(distribution(p), distribution(q)) == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
        assert agreeing_mass(distribution(p), distribution(q)) == pytest.approx(p @ q, abs=1e-12)


def test_chances_multiply_to_the_ratio_form() -> None:
    target, drafter = random_law(11), random_law(12)
    for _, text in texts(target, 4):
        redraft = drawn(text, drafter, 4)
        np.testing.assert_allclose(np.cumprod(chances(redraft, text, 4)), survival(redraft, text, 4, "ratio"))


def test_a_short_proposal_says_how_short_it_is() -> None:
    assert proposed_tokens(Redraft(1, tokens=(1, 2)), 4) == 2
    assert proposed_tokens(Redraft(1, tokens=()), 4) == 0
    assert proposed_tokens(Redraft(1, laws=(distribution(np.ones(2)),) * 6), 4) == 4


def markov(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.dirichlet(np.full(size, 0.4), size)


def play(p: np.ndarray, q: np.ndarray, tokens: int, depth: int, rng: np.random.Generator) -> list[int]:
    """Speculative sampling from a Markov target with a Markov drafter, as the verifier does it."""
    text = [0]
    while len(text) <= tokens:
        state = text[-1]
        for _ in range(depth):
            drafted = int(rng.choice(len(p), p=q[state]))
            if rng.random() >= p[state, drafted] / q[state, drafted]:
                rest = np.maximum(p[state] - q[state], 0)
                text.append(int(rng.choice(len(p), p=rest / rest.sum())))
                break
            text.append(drafted)
            state = drafted
        else:
            text.append(int(rng.choice(len(p), p=p[state])))
    return text[: tokens + 1]


def test_what_is_said_about_a_drafter_does_not_depend_on_which_was_in_use() -> None:
    rng = np.random.default_rng(42)
    size, depth, tokens = 6, 4, 6000
    p = markov(rng, size)
    drafters = [0.7 * p + 0.3 * markov(rng, size), 0.3 * p + 0.7 * markov(rng, size)]
    laws = [[distribution(row) for row in q] for q in (p, *drafters)]
    means, errors = np.zeros((2, 2)), np.zeros((2, 2))
    for used, q in enumerate(drafters):
        written = play(p, q, tokens, depth, rng)
        text = CommittedText(written[:1], window=tokens)
        text.extend(written[1:], [laws[0][before] for before in written[:-1]])
        for scored in range(2):
            values = np.array(
                [
                    survival(
                        Redraft(start, laws=tuple(laws[1 + scored][t] for t in written[start - 1 : start + depth - 1])),
                        text,
                        depth,
                    ).sum()
                    for start in range(1, tokens - depth, 2)
                ]
            )
            # Starts overlap, so errors come from the means of long batches.
            batches = values[: len(values) // 40 * 40].reshape(-1, 40).mean(axis=1)
            means[used, scored] = values.mean()
            errors[used, scored] = batches.std(ddof=1) / np.sqrt(len(batches))
    off = np.abs(means[0] - means[1]) / np.hypot(errors[0], errors[1])
    assert (off < 4).all()
    # And it can tell the two drafters apart.
    assert abs(means[0, 0] - means[0, 1]) > 20 * errors[0].max()
