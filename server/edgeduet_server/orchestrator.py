"""The server's knowledge orchestrator: a pool of semantic prompts and a gate that dispatches them.

Fed-Duet (fed-duet.md 1.3), with what its published code lacks: pool, gate and client digests persist
over tasks; the gate learns from replayed records; dispatch explores; and in mode ``credit`` the gate
learns from what a prompt was worth to a client (attention mass), not from its own last choice (U10, U11).

* Dispatch: the m prompts with the highest gate logits for the client's last digest. Each slot is
  replaced by a random prompt with probability epsilon (0.2, decaying to 0.05). A client without a
  digest gets m random prompts.
* Gate: MLP D -> H -> K, ReLU; Adam; 20 steps per round on the last 200 records,
  ``sum_c w_c BCE(g(digest_c), y_c)`` with ``w_c = 1 / (loss_c + 1e-6)`` divided by its mean. ``y_c`` is the
  attention mass per prompt divided by its maximum (``credit``) or 1 for every dispatched prompt (``paper``).
  Only dispatched prompts enter a record's loss in ``credit``: nothing is known of the others.
* Pool: ``p_k <- (1 - b) p_k + b * sum_c a_ck ctx_c / sum_c a_ck`` for prompts with attention mass (U4).

All state is in a dict of arrays, so that it is saved and resumed with the server state; all functions
are pure. Modes ``cosine`` (digest against the prompt's mean text feature) and ``random`` need no gate.

Shape suffixes: K pool size, M dispatched, D joint width, H hidden, L context length, W text width, R records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from edgeduet_shared.messages import TrainReply
from edgeduet_shared.seeds import derive_seed

DispatchMode = Literal["credit", "paper", "cosine", "random"]
Store = dict[str, npt.NDArray[Any]]

_HIDDEN = 512
_RATE = 1e-3
_STEPS = 20
_RECORDS = 200
_EPSILON = (0.2, 0.05)
_GATE = ("gate/w1", "gate/b1", "gate/w2", "gate/b2")


@dataclass(frozen=True)
class Orchestrator:
    """Dispatches prompts and learns from replies; all state is passed in and returned.

    Args:
        dispatched: prompts per client and round (m).
        mode: how prompts are chosen.
        pool_ema: b of the pool update; 0 leaves the pool as it is, like the published code.
        seed: of all random choices.
    """

    dispatched: int
    mode: DispatchMode
    pool_ema: float
    seed: int

    def initial(self, pool_KLW: npt.NDArray[np.float32], width: int) -> Store:
        """State with a fresh gate over ``pool_KLW`` for digests of ``width`` numbers."""
        size = len(pool_KLW)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "gate"))

        def uniform(rows: int, columns: int) -> npt.NDArray[np.float32]:
            bound = columns**-0.5
            values: npt.NDArray[np.float32] = ((torch.rand(rows, columns, generator=generator) * 2 - 1) * bound).numpy()
            return values

        gate = {
            "gate/w1": uniform(_HIDDEN, width),
            "gate/b1": np.zeros(_HIDDEN, np.float32),
            "gate/w2": uniform(size, _HIDDEN),
            "gate/b2": np.zeros(size, np.float32),
        }
        moments = {f"{kind}/{name}": np.zeros_like(value) for name, value in gate.items() for kind in ("m", "v")}
        return {
            "pool": pool_KLW.astype(np.float32),
            **gate,
            **moments,
            "gate/steps": np.array(0),
            "records/digest": np.zeros((0, width), np.float32),
            "records/target": np.zeros((0, size), np.float32),
            "records/known": np.zeros((0, size), np.float32),
            "records/weight": np.zeros(0, np.float32),
        }

    # -- dispatch --------------------------------------------------------------------------------------

    def dispatch(
        self, store: Store, clients: Sequence[int], stage: int, round: int, done: float
    ) -> dict[int, list[int]]:
        """Return the pool indices for each client, sorted.

        Args:
            store: state.
            clients: who is asked.
            stage, round: for the seeds.
            done: share of the run that is over, 0 to 1; exploration decays with it.
        """
        epsilon = _EPSILON[0] + (_EPSILON[1] - _EPSILON[0]) * done
        size = len(store["pool"])
        count = min(self.dispatched, size)
        chosen = {}
        for client in clients:
            rng = np.random.default_rng(derive_seed(self.seed, "dispatch", client, stage, round))
            shuffled = [int(index) for index in rng.permutation(size)]
            scores_K = self._scores(store, client)
            if scores_K is None:
                chosen[client] = sorted(shuffled[:count])
                continue
            picked = [int(index) for index in np.argsort(-scores_K, kind="stable")[:count]]
            rest = [index for index in shuffled if index not in picked]
            for slot in range(count):
                if rest and rng.random() < epsilon:
                    picked[slot] = rest.pop()
            chosen[client] = sorted(picked)
        return chosen

    def _scores(self, store: Store, client: int) -> npt.NDArray[np.float32] | None:
        digest = store.get(f"digest/{client}")
        if digest is None or self.mode == "random":
            return None
        if self.mode == "cosine":
            if "pool/text" not in store:
                return None
            scores: npt.NDArray[np.float32] = store["pool/text"] @ digest
            return scores
        with torch.no_grad():
            return _gate(_tensors(store, _GATE), torch.from_numpy(digest).unsqueeze(0))[0].numpy()

    # -- learning --------------------------------------------------------------------------------------

    def learn(self, store: Store, replies: Sequence[TrainReply], sent: Mapping[int, Sequence[int]]) -> Store:
        """Return the state after the replies of a round: digests, records, gate, pool.

        Args:
            store: state.
            replies: sorted by client.
            sent: pool indices that were dispatched to each client.
        """
        store = dict(store)
        for reply in replies:
            if "digest" in reply.digest:
                store[f"digest/{reply.client}"] = reply.digest["digest"]
        store = self._add_records(store, replies, sent)
        if self.mode in ("credit", "paper") and len(store["records/weight"]):
            store = _train_gate(store)
        return self._move_pool(store, replies)

    def _add_records(self, store: Store, replies: Sequence[TrainReply], sent: Mapping[int, Sequence[int]]) -> Store:
        size = len(store["pool"])
        rows = []
        for reply in replies:
            if "digest" not in reply.digest or not sent.get(reply.client):
                continue
            target, known = np.zeros(size, np.float32), np.ones(size, np.float32)
            if self.mode == "credit":
                # Mass of prompts that were not sent is unknown, not zero.
                if not reply.usage:
                    continue
                masses = np.array([reply.usage[str(index)] for index in sent[reply.client]], np.float32)
                known[:] = 0
                known[list(sent[reply.client])] = 1
                target[list(sent[reply.client])] = masses / max(float(masses.max()), 1e-12)
            else:
                target[list(sent[reply.client])] = 1
            rows.append((reply.digest["digest"], target, known, np.float32(1 / (reply.loss + 1e-6))))
        if not rows:
            return store
        for column, name in enumerate(("digest", "target", "known", "weight")):
            new = np.stack([np.asarray(row[column], np.float32) for row in rows])
            store[f"records/{name}"] = np.concatenate([store[f"records/{name}"], new])[-_RECORDS:]
        return store

    def _move_pool(self, store: Store, replies: Sequence[TrainReply]) -> Store:
        if self.pool_ema == 0:
            return store
        pool_KLW = store["pool"].astype(np.float64)
        pull, mass = np.zeros_like(pool_KLW), np.zeros(len(pool_KLW))
        for reply in replies:
            context = reply.update.get("prompt.context")
            if context is None:
                continue
            for index, attention in reply.usage.items():
                # In float64: a tiny mass would vanish from this product but not from its divisor.
                pull[int(index)] += attention * context.astype(np.float64)
                mass[int(index)] += attention
        moved = mass > 0
        if moved.any():
            mean = pull[moved] / mass[moved, None, None]
            pool_KLW[moved] = (1 - self.pool_ema) * pool_KLW[moved] + self.pool_ema * mean
            store["pool"] = pool_KLW.astype(np.float32)
        return store


def _gate(gate: Sequence[torch.Tensor], digest_RD: torch.Tensor) -> torch.Tensor:
    w1, b1, w2, b2 = gate
    return functional.linear(torch.relu(functional.linear(digest_RD, w1, b1)), w2, b2)


def _tensors(store: Store, names: Sequence[str]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.array(store[name], np.float32)) for name in names]


def gate_loss(store: Store, gate: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weighted BCE of the gate on all records (see the module's formula)."""
    digest_RD, target_RK, known_RK, weight_R = _tensors(
        store, ("records/digest", "records/target", "records/known", "records/weight")
    )
    each_RK = functional.binary_cross_entropy_with_logits(_gate(gate, digest_RD), target_RK, reduction="none")
    each_R = (each_RK * known_RK).sum(1) / known_RK.sum(1).clamp(min=1.0)
    return (weight_R / weight_R.mean() * each_R).mean()


def _train_gate(store: Store) -> Store:
    gate = [value.requires_grad_(True) for value in _tensors(store, _GATE)]
    optimiser = torch.optim.Adam(gate, lr=_RATE)
    steps = int(store["gate/steps"])
    for value, name in zip(gate, _GATE, strict=True):
        # Adam goes on where the last round left it.
        optimiser.state[value] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": torch.from_numpy(np.array(store[f"m/{name}"])),
            "exp_avg_sq": torch.from_numpy(np.array(store[f"v/{name}"])),
        }
    for _ in range(_STEPS):
        optimiser.zero_grad()
        gate_loss(store, gate).backward()
        optimiser.step()
    result = dict(store)
    for value, name in zip(gate, _GATE, strict=True):
        result[name] = value.detach().numpy()
        result[f"m/{name}"] = optimiser.state[value]["exp_avg"].numpy()
        result[f"v/{name}"] = optimiser.state[value]["exp_avg_sq"].numpy()
    result["gate/steps"] = np.array(steps + _STEPS)
    return result
