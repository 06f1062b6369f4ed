"""What is known before a run that trains drafters: texts, sizes, and the bytes to expect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgeduet_client.drafters.handlers import initial_parameters
from edgeduet_client.drafters.kinds import drafter_kind
from edgeduet_client.drafters.target_data import judged_answers, open_target, training_data, training_texts
from edgeduet_server.strategies.strategy import Strategy
from edgeduet_shared.config import Scenario
from edgeduet_shared.messages import Arrays, EvaluateRequest, TrainReply, TrainRequest, encode, serialised_bytes
from edgeduet_shared.plan import Group
from edgeduet_sim.budget import Budget


@dataclass(frozen=True)
class DrafterFacts:
    """What ``config.json`` says of such a run.

    Attributes:
        budget: parameters and bytes.
        target: name and fingerprint of the language model.
        split: identifies who holds which texts, and what drafters are judged on.
        tokens: training tokens of each client.
        places: tokens that drafters are judged on, by domain.
    """

    budget: Budget
    target: dict[str, str]
    split: str
    tokens: list[int]
    places: dict[str, int]

    def as_record(self) -> dict[str, Any]:
        """Return it for ``config.json``."""
        return {
            "backbone": self.target,
            "split": self.split,
            "data": {"source": "texts", "judged_tokens": self.places},
            "client_images": self.tokens,
            "parameters": self.budget.as_record(),
            "zero_shot": None,
        }


def drafter_facts(scenario: Scenario, strategy: Strategy, seed: int, tell: Callable[[str], None]) -> DrafterFacts:
    """Load or make what the target says on all texts, and count.

    Raises:
        ModelError: the language model cannot be used.
        DataError: a domain holds too little text.
    """
    config = scenario.drafter
    model, kind = open_target(config.target), drafter_kind(config.kind)
    tokens, texts = [], hashlib.sha256()
    for client in range(scenario.federation.clients):
        held = training_texts(scenario, client, seed)
        tokens.append(sum(map(len, held)))
        texts.update(json.dumps(held).encode())
        tell(f"client {client} trains on {len(held)} texts of {config.domain(client)}")
        training_data(scenario, client, seed, kind)
    places = {}
    for number, domain in enumerate(config.domain_names):
        answers = judged_answers(config, number)
        places[domain] = sum(len(answer.answer) for answer in answers)
        texts.update(json.dumps([[answer.prompt, answer.answer] for answer in answers]).encode())
    files = {name: file.sha256 for name, file in sorted(model.manifest.files.items())}
    fingerprint = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    return DrafterFacts(
        budget=drafter_budget(strategy, initial_parameters(scenario, seed, kind)),
        target={"name": model.manifest.name, "fingerprint": fingerprint},
        split=texts.hexdigest()[:16],
        tokens=tokens,
        places=places,
    )


def drafter_budget(strategy: Strategy, parameters: Arrays) -> Budget:
    """Count what ``strategy`` trains and sends, with every client taking part in every round.

    Bytes down are those of the rounds and of the hand-out after the last one.
    """
    federation = strategy.scenario.federation
    plans = [plan for round in range(federation.rounds) if (plan := strategy.plan(0, round)) is not None]
    count = sum(value.size for value in parameters.values())
    groups: dict[Group, int] = {"drafter": count}
    held: Arrays = {}
    down = up = 0
    for round, plan in enumerate(plans):
        down += serialised_bytes(encode(TrainRequest(0, round, plan, held)))
        update = parameters if plan.upload else {}
        up += serialised_bytes(encode(TrainReply(0, 0, round, 100, 0.123456789, 0.5, 10, 0.1, update=update)))
        if plan.upload and not plan.personal:
            held = parameters
    travelling = [client for client in range(1, federation.clients) if plans[-1].upload and plans[-1].personal]
    experts = {f"{client}/{name}": value for client in travelling for name, value in parameters.items()}
    down += serialised_bytes(encode(EvaluateRequest(0, plans[-1], True, held, experts=experts)))
    everybody = federation.clients * federation.participation
    return Budget(
        groups=groups,
        trainable=count,
        uploaded=count if any(plan.upload for plan in plans) else 0,
        personal=count if any(plan.personal for plan in plans) else 0,
        bytes_down=int(down * everybody + 0.5),
        bytes_up=int(up * everybody + 0.5),
    )
