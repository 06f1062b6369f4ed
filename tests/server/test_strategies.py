"""Every method's server half, played against replies of the right shape on real models of a tiny scenario."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_server.reply_checks import rejection
from edgeduet_server.strategies.catalogue import STRATEGIES, make_strategy
from edgeduet_server.strategies.fed_duet import FedDuet
from edgeduet_server.strategies.strategy import ServerState, Strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.experiment import Experiment
from edgeduet_shared.messages import TrainReply, TrainRequest
from edgeduet_shared.seeds import derive_seed

METHODS = tuple(name for name, strategy in STRATEGIES.items() if strategy.learns == "classifier")
AVERAGING = ("promptfl", "fedclip", "fedavg-adapter", "fedavg-lora", "fedprox", "fed-ewc", "fed-lwf")
ONE_CLIENT = ("centralised", "joint")
PHASED = ("fed-duet", "fed-duet-released")
CLIENTS = (0, 1, 2)
ROUNDS = 4
POOL, DISPATCHED = 6, 2


def scenario(rounds: int = ROUNDS, placement: str = "embedding") -> Scenario:
    return Scenario.model_validate(
        {
            "name": "tiny",
            "data": {"max_per_class": 6, "domains": ["photo", "sketch"]},
            "model": {
                "adapter": {"experts": 2, "bottleneck": 4, "shared_bottleneck": 8, "placement": placement},
                "pool": {"size": POOL, "dispatched": DISPATCHED},
            },
            "federation": {"clients": len(CLIENTS), "rounds": rounds},
        }
    )


@functools.cache
def experiment() -> Experiment:
    """The generated world and the shipped small backbone, loaded once."""
    return Experiment(scenario(), 0)


def strategy(method: str, rounds: int = ROUNDS, **options: Any) -> Strategy:
    return make_strategy(method, options, scenario(rounds), experiment())


def started(method: Strategy) -> ServerState:
    return method.begin_stage(method.initial_state(0), 0)


def groups(method: Strategy, names: Sequence[str]) -> set[str]:
    return {method.model.group_of(name) for name in names}


def answer(method: Strategy, state: ServerState, client: int, request: TrainRequest) -> TrainReply:
    """A reply as a client would send it: shapes from ``expect``, values from the seed of its place."""
    rng = np.random.default_rng(derive_seed("answer", client, request.stage, request.round))
    expected = method.expect(state, request)
    digest = {}
    if expected.digest is not None:
        vector = rng.normal(size=expected.digest)
        digest["digest"] = (vector / np.linalg.norm(vector)).astype(np.float32)
    return TrainReply(
        client=client,
        stage=request.stage,
        round=request.round,
        examples=5 + 10 * client,
        loss=1.0 + client,
        accuracy=0.5,
        steps=1,
        seconds=0.0,
        usage={index: float(rng.uniform(0.01, 0.2)) for index in request.contexts} if request.plan.usage else {},
        update={name: rng.normal(size=shape).astype(np.float32) for name, shape in expected.update.items()},
        digest=digest,
    )


def play(
    method: Strategy, state: ServerState, stage: int, round: int, clients: Sequence[int] = CLIENTS
) -> tuple[ServerState, dict[int, TrainRequest], list[TrainReply]]:
    """One round in which all of ``clients`` that were asked reply."""
    requests = method.configure(state, clients, stage, round)
    replies = [answer(method, state, client, request) for client, request in sorted(requests.items())]
    return method.aggregate(state, replies, stage, round), requests, replies


def copied(state: ServerState) -> ServerState:
    return ServerState(
        {name: value.copy() for name, value in state.shared.items()},
        {name: value.copy() for name, value in state.extra.items()},
        json.loads(json.dumps(state.notes)),
    )


def assert_same(one: ServerState, two: ServerState) -> None:
    for left, right in ((one.shared, two.shared), (one.extra, two.extra)):
        assert left.keys() == right.keys()
        for name in left:
            assert np.array_equal(left[name], right[name]), name
    assert one.notes == two.notes


every_method = pytest.mark.parametrize("name", METHODS)


# -- all methods -------------------------------------------------------------------------------------


@every_method
def test_the_server_holds_exactly_the_groups_it_owns_in_the_shapes_of_the_model(name: str):
    method = strategy(name)
    state = method.initial_state(0)
    shapes = {key: tuple(value.shape) for key, value in method.model.named_parameters()}

    assert {key: value.shape for key, value in state.shared.items()} == {
        key: shape for key, shape in shapes.items() if method.model.group_of(key) in method.owns
    }
    assert groups(method, list(state.shared)) == set(method.owns)
    assert method.has_global_model or not state.shared


@every_method
def test_the_same_seed_starts_from_the_same_state(name: str):
    assert_same(strategy(name).initial_state(0), strategy(name).initial_state(0))


@every_method
def test_a_plan_trains_groups_that_exist_and_uploads_only_what_it_trains_and_the_server_owns(name: str):
    method = strategy(name)
    existing = groups(method, [key for key, _ in method.model.named_parameters()])
    for stage in range(2):
        for round in range(ROUNDS):
            plan = method.plan(stage, round)
            if plan is None:
                continue
            assert plan.parts == method.parts
            assert set(plan.train) <= existing and plan.train
            assert set(plan.upload) <= set(plan.train) & set(method.owns)
            assert set(plan.personal) <= existing
            assert not set(plan.personal) & set(plan.remember)
            assert plan.last_round or round < ROUNDS - 1
            assert plan.optimiser == method.scenario.train and plan.privacy == method.scenario.privacy


@every_method
def test_what_is_asked_is_what_is_expected_and_a_reply_to_it_passes_the_checks(name: str):
    method = strategy(name)
    state = started(method)
    for round in range(ROUNDS):
        after, requests, replies = play(method, state, 0, round)
        assert set(requests) <= set(CLIENTS)
        for client, request in requests.items():
            expected = method.expect(state, request)
            asked = {
                key for key, _ in method.model.named_parameters() if method.model.group_of(key) in request.plan.upload
            }
            assert set(expected.update) == asked
            assert (request.stage, request.round) == (0, round)
            assert request.plan == method.plan(0, round)
            assert request.shared.keys() <= state.shared.keys()
            for key, value in request.shared.items():
                assert np.array_equal(value, state.shared[key])
            (own,) = [reply for reply in replies if reply.client == client]
            assert rejection(own, client, request, expected) is None
        state = after


@every_method
def test_aggregation_is_the_mean_weighted_by_examples_and_leaves_the_rest_alone(name: str):
    method = strategy(name)
    state = started(method)
    for round in range(ROUNDS):
        after, _, replies = play(method, state, 0, round)
        uploaded = set().union(*(reply.update for reply in replies))
        assert after.shared.keys() == state.shared.keys()
        for key, value in after.shared.items():
            if key not in uploaded:
                assert np.array_equal(value, state.shared[key])
                continue
            expected = np.average(
                [reply.update[key].astype(np.float64) for reply in replies],
                axis=0,
                weights=[reply.examples for reply in replies],
            )
            assert value.dtype == np.float32
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-7)
        state = after


@every_method
def test_state_and_replies_go_in_unchanged_and_the_same_in_gives_the_same_out(name: str):
    method = strategy(name)
    state = started(method)
    for round in range(ROUNDS):
        before = copied(state)
        after, _, replies = play(method, state, 0, round)
        kept = [{key: value.copy() for key, value in reply.update.items()} for reply in replies]
        again = strategy(name).aggregate(before, replies, 0, round)
        method.configure_evaluate(state, CLIENTS, 0)
        method.end_stage(method.begin_stage(state, 1), 1)

        assert_same(state, before)
        assert_same(after, again)
        for reply, update in zip(replies, kept, strict=True):
            assert all(np.array_equal(reply.update[key], value) for key, value in update.items())
        state = after


@every_method
def test_the_order_of_clients_and_replies_does_not_matter(name: str):
    method = strategy(name)
    state = started(method)
    for round in range(ROUNDS):
        after, requests, replies = play(method, state, 0, round)
        if name not in ONE_CLIENT:
            turned = method.configure(state, CLIENTS[::-1], 0, round)
            assert turned.keys() == requests.keys()
            for client, request in requests.items():
                assert turned[client].shared.keys() == request.shared.keys()
                assert turned[client].contexts.keys() == request.contexts.keys()
        other = method.aggregate(state, replies[::-1], 0, round)
        assert other.notes == after.notes
        for key, value in after.shared.items():
            np.testing.assert_allclose(other.shared[key], value, rtol=1e-6, atol=1e-7)
        state = after


@every_method
def test_notes_survive_json(name: str):
    method = strategy(name)
    state = started(method)
    for stage in range(2):
        state = method.begin_stage(state, stage)
        for round in range(ROUNDS):
            state, _, _ = play(method, state, stage, round)
            assert json.loads(json.dumps(state.notes)) == state.notes


@every_method
def test_evaluation_asks_every_client_and_sends_the_global_model(name: str):
    method = strategy(name)
    state = started(method)

    requests = method.configure_evaluate(state, CLIENTS, 1)

    assert set(requests) == set(CLIENTS)
    for request in requests.values():
        assert request.stage == 1 and request.plan.parts == method.parts
        assert request.shared.keys() == state.shared.keys()
        assert request.plan.evaluate_fused == (name in ("fed-duet", "pfedmoap"))
    assert set(method.global_params(state)) == {key for key, _ in method.model.named_parameters()}


# -- names and options -------------------------------------------------------------------------------


def test_an_unknown_method_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown method 'fedduet'; did you mean 'fed-duet'\?"):
        strategy("fedduet")


@every_method
def test_an_unknown_option_is_refused_by_name(name: str):
    with pytest.raises(ConfigError, match=f"method '{name}': unknown key 'no_such_option'"):
        strategy(name, no_such_option=1)


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown key 'dispach'; did you mean 'dispatch'"):
        strategy("fed-duet", dispach="random")
    with pytest.raises(ConfigError, match="unknown key 'pryor'; did you mean 'prior'"):
        strategy("fedavg-adapter", pryor=1.0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fed-duet", {"parametric_share": 0.0}),
        ("fed-duet", {"parametric_share": 1.0}),
        ("fed-duet", {"pool_ema": 1.0}),
        ("fed-duet", {"dispatch": "nearest"}),
        ("fed-duet", {"generic": -1}),
        ("fedprox", {"mu": -0.1}),
        ("fed-lwf", {"temperature": 0}),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(name: str, options: dict[str, Any]):
    (key,) = options
    with pytest.raises(ConfigError, match=f"method '{name}': {key}"):
        strategy(name, **options)


@pytest.mark.parametrize(
    ("name", "option", "field"),
    [
        ("fedprox", "mu", "proximal"),
        ("fed-ewc", "weight", "ewc"),
        ("fed-lwf", "weight", "distill"),
        ("fed-lwf", "temperature", "distill_temperature"),
        ("fedavg-adapter", "prior", "prior"),
        ("fedprox", "prior", "prior"),
    ],
)
def test_a_baselines_option_reaches_the_plan_and_is_all_that_sets_it_apart_from_fedavg(name, option, field):
    plan = strategy(name, **{option: 0.75}).plan(0, 0)
    plain = strategy("fedavg-adapter").plan(0, 0)

    assert getattr(plan, field) == 0.75
    loss_terms = {"proximal", "ewc", "distill", "distill_temperature", "prior"}
    assert plan.model_dump(exclude=loss_terms) == plain.model_dump(exclude=loss_terms)


# -- references and controls -------------------------------------------------------------------------


def test_zero_shot_asks_nobody():
    method = strategy("zero-shot")
    state = started(method)
    assert all(method.configure(state, CLIENTS, 0, round) == {} for round in range(ROUNDS))
    assert not state.shared and not list(method.model.named_parameters())


def test_local_sends_and_receives_no_parameters():
    method = strategy("local")
    state = started(method)
    for round in range(ROUNDS):
        after, requests, replies = play(method, state, 0, round)
        assert all(not request.shared and not request.contexts for request in requests.values())
        assert all(not reply.update and not reply.digest for reply in replies)
        assert set(requests[0].plan.personal) == set(requests[0].plan.train)
        state = after
    assert not method.has_global_model and not state.shared


@pytest.mark.parametrize(("name", "data"), [("centralised", "pooled"), ("joint", "pooled-seen")])
def test_upper_references_ask_one_client_only_and_train_on_everybodys_images(name: str, data: str):
    method = strategy(name)
    requests = method.configure(started(method), (1, 2), 0, 0)
    assert list(requests) == [1]
    assert requests[1].plan.data == data


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*ONE_CLIENT, "zero-shot")])
def test_no_federated_method_sees_pooled_images(name: str):
    method = strategy(name)
    assert {request.plan.data for request in method.configure(started(method), CLIENTS, 0, 0).values()} == {"own"}


@pytest.mark.parametrize("name", AVERAGING)
def test_averaging_methods_send_everybody_everything_and_keep_nothing_personal(name: str):
    method = strategy(name)
    state = started(method)
    for request in method.configure(state, CLIENTS, 0, 1).values():
        assert request.shared.keys() == state.shared.keys()
        assert request.plan.personal == () and request.contexts == {}
        assert set(request.plan.train) == set(request.plan.upload) == set(method.owns)


# -- pfedmoap ----------------------------------------------------------------------------------------


def test_pfedmoap_sends_the_nearest_prompts_of_others_and_never_the_clients_own():
    method = strategy("pfedmoap")
    state = started(method)
    clients = (0, 1, 2, 3)
    shape = state.shared["prompt.context"].shape
    requests = method.configure(state, clients, 0, 0)
    assert all(request.contexts == {} for request in requests.values())
    # On a line: 0 at 0, 1 at 1, 2 at 5, 3 at 7.
    places = {0: 0.0, 1: 1.0, 2: 5.0, 3: 7.0}
    replies = [
        TrainReply(client, 0, 0, 1, 1.0, 0.5, 1, 0.0, update={"prompt.context": np.full(shape, place, np.float32)})
        for client, place in places.items()
    ]
    state = method.aggregate(state, replies, 0, 0)

    sent = {client: request.contexts for client, request in method.configure(state, clients, 0, 1).items()}

    assert {client: set(some) for client, some in sent.items()} == {
        0: {"1", "2"},
        1: {"0", "2"},
        2: {"3", "1"},
        3: {"2", "1"},
    }
    for some in sent.values():
        assert all(np.all(context == places[int(other)]) for other, context in some.items())


def test_pfedmoap_sends_the_mean_prompt_only_to_clients_that_have_none():
    method = strategy("pfedmoap")
    state, requests, _ = play(method, started(method), 0, 0, (0, 1))
    assert all(set(request.shared) == {"prompt.context"} for request in requests.values())

    later = method.configure(state, CLIENTS, 0, 1)

    assert [sorted(later[client].shared) for client in CLIENTS] == [[], [], ["prompt.context"]]
    assert set(later[2].contexts) == {"0", "1"}


# -- fed-duet ----------------------------------------------------------------------------------------


def phases(method: Strategy, rounds: int) -> list[bool]:
    assert isinstance(method, FedDuet)
    return [method.is_parametric(round) for round in range(rounds)]


@given(st.integers(2, 60), st.floats(0.001, 0.999))
def test_a_stage_is_parametric_first_then_semantic_with_at_least_one_round_each(rounds: int, share: float):
    found = phases(strategy("fed-duet", rounds, parametric_share=share), rounds)

    parametric = sum(found)
    assert found == [True] * parametric + [False] * (rounds - parametric)
    assert 1 <= parametric <= rounds - 1
    assert abs(parametric - rounds * share) <= 1


def test_by_default_five_of_six_rounds_are_parametric_and_half_of_them_in_the_released_code():
    assert phases(strategy("fed-duet", 6), 6) == [True] * 5 + [False]
    assert phases(strategy("fed-duet-released", 6), 6) == [True] * 3 + [False] * 3


@pytest.mark.parametrize("name", PHASED)
def test_two_phases_need_two_rounds(name: str):
    with pytest.raises(ConfigError, match=r"federation\.rounds.*at least 2"):
        strategy(name, rounds=1)


@pytest.mark.parametrize("ablated", ["semantic", "parametric"])
def test_one_phase_alone_needs_one_round(ablated: str):
    assert phases(strategy("fed-duet", 1, **{ablated: False}), 1) == [ablated == "semantic"]


def test_what_each_phase_trains_and_uploads():
    method = strategy("fed-duet", parametric_share=0.5)
    plans = [method.plan(0, round) for round in range(ROUNDS)]

    assert [plan.train for plan in plans] == [("shared_adapter", "router", "routed_adapters")] * 2 + [
        ("prompt", "fusion")
    ] * 2
    assert [plan.upload for plan in plans] == [("shared_adapter", "router")] * 2 + [("prompt",), ("prompt", "fusion")]
    assert [plan.logits for plan in plans] == ["local"] * 2 + ["fused"] * 2
    assert [plan.usage for plan in plans] == [False, False, True, True]
    # Statistics of a phase close in its last round.
    assert [plan.last_round for plan in plans] == [False, True, False, True]
    for plan in plans:
        assert plan.personal == ("routed_adapters", "prompt", "fusion")
        assert plan.digest and plan.evaluate_fused


def test_semantic_rounds_send_adapters_only_to_clients_that_do_not_hold_the_newest():
    method = strategy("fed-duet", parametric_share=0.5)
    state = started(method)

    def with_adapters(stage: int, round: int) -> set[int]:
        requests = method.configure(state, CLIENTS, stage, round)
        return {c for c, request in requests.items() if {"shared_adapter", "router"} <= groups(method, request.shared)}

    for round in range(2):
        assert with_adapters(0, round) == set(CLIENTS)
        state, _, _ = play(method, state, 0, round)
    assert with_adapters(0, 2) == {0, 1, 2}
    state, _, _ = play(method, state, 0, 2, (0, 1))
    assert with_adapters(0, 3) == {2}
    state, _, _ = play(method, state, 0, 3, (0, 1))

    for round in range(2):
        assert with_adapters(1, round) == set(CLIENTS)
        state, _, _ = play(method, state, 1, round)
    assert with_adapters(1, 2) == {0, 1, 2}


def test_prompt_and_fusion_go_only_to_clients_that_have_none_of_their_own():
    method = strategy("fed-duet", parametric_share=0.5)
    state = started(method)

    def seeded(stage: int, round: int) -> set[int]:
        requests = method.configure(state, CLIENTS, stage, round)
        return {client for client, request in requests.items() if {"prompt", "fusion"} & groups(method, request.shared)}

    for round in range(3):
        assert seeded(0, round) == set(CLIENTS)
        state, _, _ = play(method, state, 0, round, (0, 1))
    assert seeded(0, 3) == {2}
    state, _, _ = play(method, state, 0, 3, (0, 1))
    assert seeded(1, 0) == {2}


def test_routed_adapters_never_leave_the_client_and_are_never_sent():
    method = strategy("fed-duet")
    state = started(method)
    for round in range(ROUNDS):
        state, requests, replies = play(method, state, 0, round)
        for arrays in (*(r.shared for r in requests.values()), *(r.update for r in replies), state.shared):
            assert "routed_adapters" not in groups(method, arrays)


def test_prompts_are_dispatched_in_semantic_rounds_as_they_stand_in_the_pool():
    method = strategy("fed-duet", parametric_share=0.5)
    state = started(method)
    for round in range(ROUNDS):
        after, requests, _ = play(method, state, 0, round)
        for request in requests.values():
            assert len(request.contexts) == (0 if round < 2 else DISPATCHED)
            for index, context in request.contexts.items():
                assert np.array_equal(context, state.extra["pool"][int(index)])
        state = after
    assert len(state.extra["records/weight"]) == 2 * len(CLIENTS)
    assert {f"digest/{client}" for client in CLIENTS} <= state.extra.keys()


def test_pool_gate_and_digests_persist_over_tasks():
    method = strategy("fed-duet")
    state = started(method)
    for round in range(ROUNDS):
        state, _, _ = play(method, state, 0, round)
    assert_same(method.begin_stage(method.end_stage(state, 0), 1), state)


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"semantic": False}, {"prompt", "fusion"}),
        ({"parametric": False}, {"shared_adapter", "router", "routed_adapters"}),
        ({"fusion": False}, {"fusion"}),
        ({"dispatch": "random"}, set()),
        ({"generic": 0}, set()),
        ({"consistency": 0}, set()),
    ],
)
def test_an_ablation_takes_exactly_its_groups_out_of_the_model(options: dict[str, Any], gone: set[str]):
    method = strategy("fed-duet", **options)
    existing = groups(method, [key for key, _ in method.model.named_parameters()])
    assert existing == {"shared_adapter", "router", "routed_adapters", "prompt", "fusion"} - gone

    state = started(method)
    for round in range(ROUNDS):
        state, requests, replies = play(method, state, 0, round)
        for arrays in (*(r.shared for r in requests.values()), *(r.update for r in replies)):
            assert not groups(method, arrays) & gone


@pytest.mark.parametrize("ablated", ["semantic", "fusion"])
def test_without_fusion_nothing_is_dispatched_and_predictions_are_local(ablated: str):
    method = strategy("fed-duet", **{ablated: False})
    state = started(method)
    for round in range(ROUNDS):
        state, requests, _ = play(method, state, 0, round)
        for request in requests.values():
            assert request.contexts == {} and not request.plan.usage
            assert request.plan.logits == "local" and not request.plan.evaluate_fused
    assert state.extra == {}


@pytest.mark.parametrize("option", ["balance", "consistency", "stability", "generic", "generic_prior", "rehearsal"])
def test_a_loss_weight_of_0_switches_the_term_off_and_nothing_else(option: str):
    whole, ablated = strategy("fed-duet").plan(0, 0), strategy("fed-duet", **{option: 0}).plan(0, 0)
    assert getattr(whole, option) > 0 and getattr(ablated, option) == 0
    assert whole.model_dump(exclude={option}) == ablated.model_dump(exclude={option})


def test_what_a_client_met_before_is_rehearsed_unasked_where_a_cached_feature_is_one_vector_and_never_as_pixels() -> (
    None
):
    def rehearsal(method: str, placement: str, **options: Any) -> float:
        plan = make_strategy(method, options, scenario(placement=placement), experiment()).plan(1, 0)
        assert plan is not None
        return plan.rehearsal

    assert [rehearsal("fed-duet", placement) for placement in ("embedding", "stages")] == [1.0, 0.0]
    assert rehearsal("fed-duet", "embedding", rehearsal=0.5) == 0.5
    assert rehearsal("fed-duet", "stages", rehearsal=0) == 0.0
    assert [rehearsal(name, "embedding") for name in ("fedavg-adapter", "fed-lwf", "fed-duet-released")] == [0.0] * 3
    assert rehearsal("fedavg-adapter", "embedding", rehearsal=1.0) == 1.0
    for name in ("fed-duet", "fedavg-adapter"):
        assert rehearsal(name, "stages", rehearsal=1.0) == 1.0
        with pytest.raises(ConfigError, match=r"rehearsal keeps means of cached features.*'embedding' or 'stages'"):
            rehearsal(name, "blocks", rehearsal=1.0)


def test_both_paths_taken_away_leave_nothing_to_train():
    with pytest.raises(ConfigError, match="nothing to train"):
        strategy("fed-duet", semantic=False, parametric=False)


def test_mode_cosine_compares_with_unit_text_features_of_the_pool():
    state = started(strategy("fed-duet", dispatch="cosine"))
    text = state.extra["pool/text"]
    assert text.shape == (POOL, experiment().backbone.embed_dim)
    np.testing.assert_allclose(np.linalg.norm(text, axis=1), 1, rtol=1e-5)
    assert "pool/text" not in started(strategy("fed-duet")).extra


# -- fed-duet as released ----------------------------------------------------------------------------


def test_released_keeps_nothing_personal_and_collects_prompts_in_the_last_round_only():
    method = strategy("fed-duet-released")
    plans = [method.plan(0, round) for round in range(ROUNDS)]

    assert [plan.upload for plan in plans] == [("shared_adapter", "router")] * 2 + [(), ("prompt", "fusion")]
    for plan in plans:
        assert plan.personal == ()
        assert plan.logits == "fused" and not plan.evaluate_fused and not plan.usage
        assert plan.balance == plan.consistency == plan.stability == plan.generic == plan.generic_prior == 0


def test_released_sends_everything_to_everybody_in_every_round():
    method = strategy("fed-duet-released")
    state = started(method)
    for round in range(ROUNDS):
        after, requests, _ = play(method, state, 0, round)
        for request in requests.values():
            assert request.shared.keys() == state.shared.keys()
            assert len(request.contexts) == DISPATCHED
        assert np.array_equal(after.extra["pool"], state.extra["pool"])
        state = after


def test_released_builds_pool_gate_and_digests_anew_for_every_task():
    method = strategy("fed-duet-released")
    first = state = started(method)
    for round in range(ROUNDS):
        state, _, _ = play(method, state, 0, round)
    assert len(state.extra["records/weight"]) == ROUNDS * len(CLIENTS)
    assert not np.array_equal(state.extra["gate/w2"], first.extra["gate/w2"])

    second = method.begin_stage(state, 1)

    assert second.extra.keys() == first.extra.keys()
    assert len(second.extra["records/weight"]) == 0 and int(second.extra["gate/steps"]) == 0
    assert np.array_equal(second.extra["pool"], first.extra["pool"])
    for key, value in state.shared.items():
        assert np.array_equal(second.shared[key], value)
