"""Clients that train drafters of a language model: what the ClientApp does where the scenario has a target.

Beside :mod:`edgeduet_client.handlers`, which trains classifiers, behind the same messages, plans, personal stores
and privacy.

Personal state of a client: ``params/NAME``, the values of its own drafter where the plan keeps one.
"""

from __future__ import annotations

import time

import numpy as np
from flwr.app import Context, Message

from edgeduet_client.device.training_rules import device_rules
from edgeduet_client.drafters.installing import install_pool
from edgeduet_client.drafters.judging import Judged, figures_of, judge
from edgeduet_client.drafters.kind import DrafterKind, Parameters, Trained, Training
from edgeduet_client.drafters.kinds import drafter_kind
from edgeduet_client.drafters.target_data import judged_answers, open_target, training_data
from edgeduet_client.handlers import Client, client_of
from edgeduet_client.personal_store import AFTER_STAGE
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.messages import EvaluateReply, EvaluateRequest, TrainReply, TrainRequest, decode, encode
from edgeduet_shared.plan import LocalPlan
from edgeduet_shared.privacy import privatise_update
from edgeduet_shared.seeds import derive_seed

OWN, AVERAGE = "own", "average"


def handle_train(message: Message, context: Context) -> Message:
    """Train the client's drafter for one round."""
    started = time.perf_counter()
    client, request = client_of(context), decode(message.content, TrainRequest)
    scenario, plan = client.experiment.scenario, request.plan
    rules = device_rules()
    if rules is not None:
        rules.check_training(plan)
    check_sharing(scenario, plan)
    kind = drafter_kind(scenario.drafter.kind)
    at = (request.stage, request.round)
    state = dict(client.store.load(client.run, client.partition, at) or {})
    start = initial_parameters(scenario, client.seed, kind) | request.shared | _own(state)
    data = training_data(scenario, client.partition, client.seed, kind)
    how = Training(plan.optimiser, plan.proximal, derive_seed(client.seed, "batches", client.partition, *at))
    trained = kind.train(start, data, scenario.drafter, how)
    if "drafter" in plan.personal:
        state.update({f"params/{name}": value for name, value in trained.parameters.items()})
    client.store.save(client.run, client.partition, at, state)
    reply = TrainReply(
        client=client.partition,
        stage=request.stage,
        round=request.round,
        examples=trained.examples,
        loss=trained.loss,
        accuracy=trained.accuracy,
        steps=trained.steps,
        seconds=time.perf_counter() - started,
        update=_update(client, request, start, trained),
    )
    return Message(encode(reply), reply_to=message)


def check_sharing(scenario: Scenario, plan: LocalPlan) -> None:
    """Refuse to let a client's own drafter leave where the scenario does not say that it may.

    Raises:
        ConfigError: it would leave.
    """
    if "drafter" in plan.upload and "drafter" in plan.personal and not scenario.drafter.share_experts:
        raise ConfigError("a client's own drafter may not leave it: drafter.share_experts is off in this scenario")


def initial_parameters(scenario: Scenario, seed: int, kind: DrafterKind) -> Parameters:
    """Return what every client of a run begins with."""
    config = scenario.drafter
    return kind.initial_parameters(open_target(config.target), config, derive_seed(seed, "drafter"))


def _own(state: dict[str, np.ndarray]) -> Parameters:
    return {name.removeprefix("params/"): value for name, value in state.items() if name.startswith("params/")}


def _update(client: Client, request: TrainRequest, start: Parameters, trained: Trained) -> Parameters:
    plan, privacy = request.plan, request.plan.privacy
    if "drafter" not in plan.upload:
        return {}
    if privacy.update_clip == 0:
        return trained.parameters
    seed = derive_seed(client.seed, "update", client.partition, request.stage, request.round)
    # Noise that the server could draw again from the run's seed would hide nothing from it.
    rng = np.random.default_rng(None if privacy.noise_seed == "secret" else seed)
    return privatise_update(trained.parameters, start, privacy.update_clip, privacy.update_noise, rng)


# --- evaluation ---------------------------------------------------------------------------------------


def handle_evaluate(message: Message, context: Context) -> Message:
    """Judge the drafters this client holds on the target's own text of every domain."""
    started = time.perf_counter()
    client, request = client_of(context), decode(message.content, EvaluateRequest)
    rules = device_rules()
    if rules is not None:
        rules.check_evaluation()
    scenario = client.experiment.scenario
    config = scenario.drafter
    state = client.store.load(client.run, client.partition, (request.stage, AFTER_STAGE)) or {}
    pool = held_drafters(request, state, client.partition, scenario)
    model, kind = open_target(config.target), drafter_kind(config.kind)
    drafters = {name: kind.open(name, values, model, config) for name, values in pool.items()}
    own = client.partition % len(config.domains)
    # A device holds texts of its own domain only.
    domains = range(len(config.domains)) if request.common and rules is None else [own]
    judged: dict[str, Judged] = {
        config.domain_names[domain]: judge(drafters, judged_answers(config, domain), config.depth) for domain in domains
    }
    right = judged[config.domain_names[own]]
    reply = EvaluateReply(
        client=client.partition,
        stage=request.stage,
        personal=(right.first_tokens(OWN if OWN in pool else AVERAGE),),
        shared=(right.first_tokens(AVERAGE) if AVERAGE in pool else -1,),
        totals=(right.starts,),
        personal_common=(-1,),
        common_totals=(0,),
        figures=figures_of(judged, config),
        seconds=time.perf_counter() - started,
    )
    if rules is not None:
        install_pool(pool, training_data(scenario, client.partition, client.seed, kind), kind, config)
    return Message(encode(reply), reply_to=message)


def held_drafters(
    request: EvaluateRequest, state: dict[str, np.ndarray], client: int, scenario: Scenario
) -> dict[str, Parameters]:
    """Return the drafters a client holds after a run: its own, the average, and those handed out to it, by name."""
    pool: dict[str, Parameters] = {}
    own = _own(state) if "drafter" in request.plan.personal else {}
    if own:
        pool[OWN] = own
    if request.shared:
        pool[AVERAGE] = dict(request.shared)
    for key, value in request.experts.items():
        other, _, name = key.partition("/")
        pool.setdefault(f"expert-{other}", {})[name] = value
    if not pool:
        raise ConfigError(f"client {client} holds no drafter: it took part in no round of '{scenario.name}'")
    return pool
