"""The prompt pool and the gate that dispatches from it.

K pool size, M dispatched, D joint width, L context length, W text width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeduet_server.orchestrator import DispatchMode, Orchestrator, Store, gate_loss
from edgeduet_shared.messages import TrainReply

K, M, D, L, W = 6, 2, 5, 2, 3
GATE = ("gate/w1", "gate/b1", "gate/w2", "gate/b2")
MODES: tuple[DispatchMode, ...] = ("credit", "paper", "cosine", "random")
SEEDS = st.integers(0, 2**32 - 1)


def orchestrator(mode: DispatchMode = "credit", dispatched: int = M, pool_ema: float = 0.1, seed: int = 0):
    return Orchestrator(dispatched, mode, pool_ema, seed)


def unit(seed: int, width: int = D) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=width)
    return (vector / np.linalg.norm(vector)).astype(np.float32)


def pool(size: int = K, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(size, L, W)).astype(np.float32)


def fresh(size: int = K, digests: Mapping[int, np.ndarray] | None = None, seed: int = 0) -> Store:
    known = {f"digest/{client}": digest for client, digest in (digests or {}).items()}
    return {**orchestrator(seed=seed).initial(pool(size), D), **known}


def reply(client: int, usage: Mapping[int, float] | None = None, **values: Any) -> TrainReply:
    """A reply with digest and prompt; ``usage`` by pool index."""
    rng = np.random.default_rng(client)
    defaults: dict[str, Any] = {
        "examples": 10,
        "loss": 0.5,
        "usage": {str(index): mass for index, mass in (usage or {}).items()},
        "update": {"prompt.context": rng.normal(size=(L, W)).astype(np.float32)},
        "digest": {"digest": unit(client)},
    }
    return TrainReply(
        **{"client": client, "stage": 0, "round": 0, "accuracy": 0.5, "steps": 1, "seconds": 0.0, **defaults, **values}
    )


def copied(store: Store) -> Store:
    return {name: value.copy() for name, value in store.items()}


def assert_same(one: Store, two: Store) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert np.array_equal(one[name], two[name]), name


# -- dispatch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@given(size=st.integers(1, 12), dispatched=st.integers(1, 12), round=st.integers(0, 50), done=st.floats(0, 1))
@settings(max_examples=15)
def test_each_client_gets_m_distinct_prompts_sorted_and_never_more_than_there_are(mode, size, dispatched, round, done):
    store = {**fresh(size, {0: unit(0)}), "pool/text": np.stack([unit(index) for index in range(size)])}

    sent = orchestrator(mode, dispatched).dispatch(store, [0, 1], 1, round, done)

    assert sent.keys() == {0, 1}
    for indices in sent.values():
        assert len(set(indices)) == len(indices) == min(dispatched, size)
        assert indices == sorted(indices) and set(indices) <= set(range(size))


@pytest.mark.parametrize("mode", MODES)
def test_dispatch_is_repeatable_and_does_not_depend_on_who_else_is_asked(mode: DispatchMode):
    store = fresh(digests={0: unit(0), 2: unit(2)})
    one, two = orchestrator(mode), orchestrator(mode)

    together = one.dispatch(store, [0, 1, 2], 0, 3, 0.5)

    assert together == two.dispatch(copied(store), [2, 1, 0], 0, 3, 0.5)
    assert together[2] == two.dispatch(store, [2], 0, 3, 0.5)[2]


def test_a_client_without_a_digest_gets_random_prompts_that_cover_the_pool_evenly():
    rounds, size = 600, 8
    store = fresh(size)
    counts = Counter(
        index for round in range(rounds) for index in orchestrator().dispatch(store, [0], 0, round, 0.0)[0]
    )

    assert counts.keys() == set(range(size))
    # Binomial: 600 draws of 2 out of 8; five standard deviations are 53.
    assert all(abs(count - rounds * M / size) < 53 for count in counts.values())


def test_mode_random_does_not_look_at_digests():
    chooser = orchestrator("random")
    for round in range(20):
        without = chooser.dispatch(fresh(), [0, 1], 0, round, 0.3)
        assert without == chooser.dispatch(fresh(digests={0: unit(5), 1: unit(6)}), [0, 1], 0, round, 0.3)


def test_modes_with_a_score_do_look_at_digests():
    store = {**fresh(), "pool/text": np.eye(K, D, dtype=np.float32)}
    for mode in ("credit", "cosine"):
        sent = {
            tuple(orchestrator(mode).dispatch({**store, "digest/0": unit(seed)}, [0], 0, 0, 1.0)[0])
            for seed in range(20)
        }
        assert len(sent) > 1, mode


def test_mode_cosine_sends_the_prompts_nearest_to_the_digest_unless_it_explores():
    text = np.stack([unit(10 + index) for index in range(K)])
    digest = unit(1)
    nearest = sorted(np.argsort(-(text @ digest))[:M].tolist())
    store = {**fresh(digests={0: digest}), "pool/text": text}

    sent = Counter(tuple(orchestrator("cosine").dispatch(store, [0], 0, round, 1.0)[0]) for round in range(200))

    # Both slots stay with probability 0.95 ^ 2 = 0.90.
    assert sent.most_common(1)[0][0] == tuple(nearest)
    assert 160 <= sent[tuple(nearest)] < 200


def test_mode_cosine_without_text_features_is_random():
    store = fresh(digests={0: unit(0)})
    assert orchestrator("cosine").dispatch(store, [0], 0, 0, 0.0) == orchestrator("random").dispatch(
        store, [0], 0, 0, 0.0
    )


@pytest.mark.parametrize(("done", "share"), [(0.0, 0.2), (0.5, 0.125), (1.0, 0.05)])
def test_the_share_of_explored_slots_decays_from_20_to_5_percent(done: float, share: float):
    size, dispatched, rounds = 64, 8, 400
    text = np.stack([unit(index) for index in range(size)])
    store = {**fresh(size, {0: unit(99)}), "pool/text": text}
    best = set(np.argsort(-(text @ store["digest/0"]), kind="stable")[:dispatched].tolist())
    chooser = orchestrator("cosine", dispatched)

    explored = sum(len(set(chooser.dispatch(store, [0], 0, round, done)[0]) - best) for round in range(rounds))

    # Five standard deviations of a binomial share over 3,200 slots.
    assert explored / (rounds * dispatched) == pytest.approx(share, abs=5 * (share * (1 - share) / 3200) ** 0.5)


# -- the gate's loss ---------------------------------------------------------------------------------


def slow_gate_loss(store: Store, gate: Sequence[np.ndarray]) -> float:
    """The formula in loops: weighted mean over records of the mean BCE over the prompts known."""
    w1, b1, w2, b2 = (value.astype(np.float64) for value in gate)
    weights = store["records/weight"].astype(np.float64)
    total = 0.0
    for digest, target, known, weight in zip(
        store["records/digest"], store["records/target"], store["records/known"], weights, strict=True
    ):
        logits = w2 @ np.maximum(w1 @ digest + b1, 0) + b2
        losses = [
            target[k] * np.logaddexp(0, -logits[k]) + (1 - target[k]) * np.logaddexp(0, logits[k])
            for k in range(len(target))
            if known[k]
        ]
        total += weight / weights.mean() * (sum(losses) / len(losses))
    return total / len(weights)


@given(SEEDS, st.integers(1, 9))
def test_the_gates_loss_is_the_weighted_bce_over_what_is_known(seed: int, records: int):
    rng = np.random.default_rng(seed)
    store = fresh(seed=seed)
    known = (rng.random((records, K)) < 0.5).astype(np.float32)
    known[np.arange(records), rng.integers(K, size=records)] = 1
    store |= {
        "records/digest": rng.normal(size=(records, D)).astype(np.float32),
        "records/target": rng.random((records, K)).astype(np.float32),
        "records/known": known,
        "records/weight": rng.uniform(0.1, 10, records).astype(np.float32),
    }
    gate = [store[name] + 0.1 * rng.normal(size=store[name].shape).astype(np.float32) for name in GATE]

    assert gate_loss(store, [torch.from_numpy(value) for value in gate]).item() == pytest.approx(
        slow_gate_loss(store, gate), rel=1e-4
    )


# -- records -----------------------------------------------------------------------------------------


def test_a_credit_record_holds_the_mass_of_dispatched_prompts_over_its_maximum_and_nothing_of_others():
    store = orchestrator().learn(fresh(), [reply(0, {1: 0.1, 4: 0.4}, loss=0.25)], {0: [1, 4]})

    np.testing.assert_allclose(store["records/target"], [[0, 0.25, 0, 0, 1, 0]], rtol=1e-6)
    assert store["records/known"].tolist() == [[0, 1, 0, 0, 1, 0]]
    assert store["records/weight"] == pytest.approx([1 / (0.25 + 1e-6)])
    assert np.array_equal(store["records/digest"][0], store["digest/0"])


def test_a_paper_record_is_the_gates_own_choice_against_all_prompts():
    store = orchestrator("paper").learn(fresh(), [reply(0, loss=0.5)], {0: [1, 4]})

    assert store["records/target"].tolist() == [[0, 1, 0, 0, 1, 0]]
    assert store["records/known"].tolist() == [[1] * K]


def test_only_a_reply_with_digest_usage_and_dispatched_prompts_makes_a_credit_record():
    replies = [
        reply(0, {0: 0.5, 1: 0.5}),
        reply(1),
        reply(2, {0: 0.5, 1: 0.5}, digest={}),
        reply(3),
    ]
    store = orchestrator().learn(fresh(), replies, {0: [0, 1], 1: [2, 3], 2: [0, 1]})

    assert len(store["records/weight"]) == 1
    assert {name for name in store if name.startswith("digest/")} == {"digest/0", "digest/1", "digest/3"}


def test_the_newest_200_records_are_kept():
    replies = [reply(client, {0: 0.5, 1: 0.5}) for client in range(250)]
    store = orchestrator().learn(fresh(), replies, {client: [0, 1] for client in range(250)})

    for name in ("digest", "target", "known", "weight"):
        assert len(store[f"records/{name}"]) == 200
    assert np.array_equal(store["records/digest"][0], unit(50))
    assert np.array_equal(store["records/digest"][-1], unit(249))

    later = orchestrator().learn(store, [reply(7, {0: 0.5, 1: 0.5})], {7: [0, 1]})
    assert len(later["records/weight"]) == 200
    assert np.array_equal(later["records/digest"][-1], unit(7))


# -- learning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["credit", "paper"])
@given(seed=SEEDS)
@settings(max_examples=8)
def test_learning_lowers_the_loss_on_the_records(mode: DispatchMode, seed: int):
    before = fresh(seed=seed)
    replies = [reply(client, {client: 0.5, client + 1: 0.1}) for client in range(4)]
    after = orchestrator(mode).learn(before, replies, {client: [client, client + 1] for client in range(4)})

    start, end = (
        gate_loss(after, [torch.from_numpy(np.array(gate[name])) for name in GATE]).item() for gate in (before, after)
    )

    assert end < start
    assert int(after["gate/steps"]) == 20


@pytest.mark.parametrize("mode", ["cosine", "random"])
def test_modes_without_a_gate_leave_it_alone(mode: DispatchMode):
    before = fresh()
    after = orchestrator(mode).learn(before, [reply(0, {0: 0.5, 1: 0.5})], {0: [0, 1]})
    for name in GATE:
        assert np.array_equal(before[name], after[name])


def test_the_gate_learns_which_prompts_each_kind_of_client_values():
    """Two kinds of clients, each with a digest of its own, value one half of the pool each."""
    size, dispatched, rounds = 12, 4, 30
    chooser = orchestrator("credit", dispatched, pool_ema=0.0)
    kinds = {client: client % 2 for client in range(4)}
    digests = {client: unit(100 + kind) for client, kind in kinds.items()}
    valued = {0: set(range(6)), 1: set(range(6, 12))}
    store = chooser.initial(pool(size), D)

    def right(sent: Mapping[int, Sequence[int]]) -> float:
        return float(np.mean([index in valued[kinds[client]] for client, some in sent.items() for index in some]))

    cold = [right(chooser.dispatch(store, list(kinds), 0, round, 0.0)) for round in range(rounds)]
    for round in range(rounds):
        sent = chooser.dispatch(store, list(kinds), 0, round, round / rounds)
        replies = [
            reply(
                client,
                {index: 0.2 if index in valued[kinds[client]] else 0.02 for index in some},
                digest={"digest": digests[client]},
            )
            for client, some in sent.items()
        ]
        store = chooser.learn(store, replies, sent)
    learnt = [right(chooser.dispatch(store, list(kinds), 1, round, 1.0)) for round in range(rounds)]

    assert 0.4 < np.mean(cold) < 0.6
    assert np.mean(learnt) > 0.85


@pytest.mark.parametrize("mode", MODES)
def test_what_goes_in_is_not_changed(mode: DispatchMode):
    chooser = orchestrator(mode)
    replies = [reply(0, {0: 0.5, 1: 0.2}), reply(1, {0: 0.1, 1: 0.2})]
    sent = {0: [0, 1], 1: [0, 1]}
    store = chooser.learn(fresh(), replies, sent)
    before = copied(store)
    contexts = [one.update["prompt.context"].copy() for one in replies]

    first = chooser.learn(store, replies, sent)
    chooser.dispatch(store, [0, 1], 0, 1, 0.5)
    second = chooser.learn(store, replies, sent)

    assert_same(store, before)
    assert_same(first, second)
    for one, context in zip(replies, contexts, strict=True):
        assert np.array_equal(one.update["prompt.context"], context)


def test_learning_goes_on_from_a_saved_state_as_if_it_had_never_stopped():
    first, second = [reply(0, {0: 0.5, 1: 0.2})], [reply(1, {2: 0.1, 3: 0.2})]
    middle = orchestrator().learn(fresh(), first, {0: [0, 1]})

    assert_same(
        orchestrator().learn(middle, second, {1: [2, 3]}), orchestrator().learn(copied(middle), second, {1: [2, 3]})
    )
    assert any(middle[f"m/{name}"].any() for name in GATE)


# -- pool --------------------------------------------------------------------------------------------

USAGES = st.lists(st.dictionaries(st.integers(0, K - 1), st.floats(0, 1, width=32), max_size=M), min_size=1, max_size=4)


@example([{0: 1.401298464324817e-45}], 0.5)  # the least of all float32 masses
@given(USAGES, st.floats(0.01, 0.99))
def test_the_pool_moves_to_the_attention_weighted_mean_of_the_clients_prompts(usages, pool_ema: float):
    before = fresh()
    replies = [reply(client, usage) for client, usage in enumerate(usages)]

    after = orchestrator("random", pool_ema=pool_ema).learn(before, replies, {})["pool"]

    for k in range(K):
        masses = [usage.get(k, 0.0) for usage in usages]
        if sum(masses) == 0:
            assert np.array_equal(after[k], before["pool"][k])
            continue
        mean = sum(m * r.update["prompt.context"].astype(np.float64) for m, r in zip(masses, replies, strict=True))
        expected = (1 - pool_ema) * before["pool"][k] + pool_ema * mean / sum(masses)
        np.testing.assert_allclose(after[k], expected, rtol=1e-5, atol=1e-6)


def test_with_pool_ema_0_the_pool_stays_bit_for_bit():
    before = fresh()
    after = orchestrator(pool_ema=0.0).learn(before, [reply(0, {0: 0.5, 1: 0.5})], {0: [0, 1]})
    assert np.array_equal(before["pool"], after["pool"])


def test_rounds_that_upload_no_prompt_leave_the_pool_alone():
    before = fresh()
    after = orchestrator().learn(before, [reply(0, {0: 0.5, 1: 0.5}, update={})], {0: [0, 1]})
    assert np.array_equal(before["pool"], after["pool"])
