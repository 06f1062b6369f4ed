"""Train a recurrent drafter: distil what the target says at every position into a network 1/50 of its size.

The network (:mod:`.recurrent`) continues the target's last hidden state s with the token e that was drawn:

    x = [rms(e) * g_e ; rms(s) * g_s]                      (2H)
    s' = rms(x A + (silu(x G) * (x U)) D) * g_out          (H)
    q = softmax(s' W)                                      W: rows of the target's own head, not learned

Loss: cross-entropy of q against the target's distribution restricted to the drafter's vocabulary, along the text,
``rollout`` tokens deep from every start, each step from the state of the step before (the target's hidden state is
known at the start only). AdamW with warm-up and cosine decay, gradients clipped at norm 1. After a few thousand
steps it guesses about half of a small model's greedy tokens.

Parameters are plain arrays by name, so that they can be averaged, sent and stored by whoever trains: alone
(:mod:`.drafter_making`) or in a federation.

Axes: B starts of a batch, H hidden width, M inner width, N vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.speculation.drafter_dataset import DrafterDataset, Positions

Parameters = dict[str, NDArray[np.float32]]
"""``embedding_norm`` (H,), ``state_norm`` (H,), ``output_norm`` (H,), ``joint`` (2H, H + 2M): A, G and U side by
side, ``down`` (M, H): D."""

NORM_EPSILON = 1e-6
_CLIP = 1.0
_DEPTH_WEIGHT = 0.8  # of a step, relative to the one before: it is reached less often


class DrafterConfig(BaseModel):
    """Shape and training of a recurrent drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_width: int = Field(ge=1, description="H of the target")
    inner_width: int = Field(768, ge=1, description="M, width of the gated layer")
    output_scale: float = Field(1.0, gt=0, description="size of a state at the start: DrafterDataset.hidden_scale()")
    rollout: int = Field(3, ge=1, le=16, description="tokens of a draft that are trained")
    steps: int = Field(1500, ge=1, description="updates")
    batch: int = Field(384, ge=1, description="starts per update")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of the matrices")
    warm_up: int = Field(50, ge=0, description="updates until the learning rate is at its peak")
    proximal: float = Field(
        0.0, ge=0, description="weight of half the squared distance to where training began (FedProx)"
    )
    seed: int = Field(0, ge=0, description="initial parameters and order of the starts")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter."""
        width, inner = self.hidden_width, self.inner_width
        return {
            "embedding_norm": (width,),
            "state_norm": (width,),
            "output_norm": (width,),
            "joint": (2 * width, width + 2 * inner),
            "down": (inner, width),
        }


def initial_parameters(config: DrafterConfig) -> Parameters:
    """Return the parameters training starts from; the same seed gives the same.

    The state passes through unchanged at first, so that the first guess is what the target said one token earlier.
    """
    rng = np.random.default_rng([config.seed, 0])
    width, inner = config.hidden_width, config.inner_width
    joint = rng.standard_normal((2 * width, width + 2 * inner)) / math.sqrt(2 * width)
    joint[:, :width] *= 0.1
    joint[width:, :width] += np.eye(width)
    down = 0.1 * rng.standard_normal((inner, width)) / math.sqrt(inner)
    return {
        "embedding_norm": np.ones(width, np.float32),
        "state_norm": np.ones(width, np.float32),
        "output_norm": np.full(width, config.output_scale, np.float32),
        "joint": joint.astype(np.float32),
        "down": down.astype(np.float32),
    }


@dataclass
class TrainingState:
    """Everything an interrupted training goes on from.

    Attributes:
        parameters: after ``step`` updates.
        first, second: AdamW's running means of gradients and of their squares.
        losses: mean loss of every hundred updates.
    """

    parameters: Parameters
    first: Parameters
    second: Parameters
    step: int = 0
    losses: tuple[float, ...] = ()

    @classmethod
    def new(cls, parameters: Parameters) -> TrainingState:
        """Return the state before the first update."""
        zeros = {name: np.zeros_like(values) for name, values in parameters.items()}
        return cls(dict(parameters), zeros, {name: values.copy() for name, values in zeros.items()})


def train(
    parameters: Parameters,
    dataset: DrafterDataset,
    config: DrafterConfig,
    *,
    state: TrainingState | None = None,
    save: Callable[[TrainingState], None] | None = None,
    save_every: int = 100,
    deadline: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Parameters, dict[str, float]]:
    """Train; the same data, settings and number of threads give the same parameters, interrupted or not.

    Args:
        parameters: from :func:`initial_parameters`, an earlier training or an average of several; not changed.
        dataset: what to learn.
        config: settings; those of the shape must be the parameters'.
        state: of an interrupted training of the same data and settings, instead of ``parameters``.
        save: called with the state every ``save_every`` updates, and at the end.
        deadline: on ``clock``; no update begins after it, and the learning rate has then not come down.
        clock: seconds.
        progress: called with (updates done, updates in all).

    Returns:
        New parameters, and ``loss`` (nats, of the last hundred updates), ``steps``, ``positions``, ``starts``,
        ``seconds`` (processor time of this call).

    Raises:
        ModelError: parameters of another shape, texts that are too short, or a loss that is not finite.
    """
    check_parameters(parameters, config)
    began = time.process_time()
    state = state or TrainingState.new(parameters)
    data = Positions.of(dataset, config.rollout)
    trainer = _Trainer(state, data, dataset.tables.head_NH, config, parameters)
    losses: list[float] = []
    while trainer.step < config.steps and (deadline is None or clock() < deadline):
        losses.append(trainer.update())
        if not math.isfinite(losses[-1]):
            raise ModelError(f"training diverged at update {trainer.step}; choose a smaller learning rate")
        if save is not None and trainer.step % save_every == 0:
            save(trainer.state())
        progress(trainer.step, config.steps)
    end = trainer.state()
    if save is not None and losses:
        save(end)
    metrics = {
        "loss": float(np.mean(losses[-100:])) if losses else math.nan,
        "steps": float(end.step),
        "positions": float(dataset.positions),
        "starts": float(len(data.starts)),
        "seconds": time.process_time() - began,
    }
    return end.parameters, metrics


def acceptance(
    parameters: Parameters, dataset: DrafterDataset, config: DrafterConfig, depth: int = 3
) -> list[float | None]:
    """Return how often the k-th token of a greedy draft is the target's, given that those before it were.

    Measured inside answers the target wrote greedily, where its choice is the text itself.

    Returns:
        A share for k = 1 to ``depth``; ``None`` where no draft got that far.

    Raises:
        ModelError: no such answer is long enough.
    """
    import torch

    greedy = [text for text in dataset.texts if text.greedy]
    if not greedy:
        raise ModelError("no answer here was written greedily, so drafts cannot be scored on them")
    # One further: the last drafted token is compared with the one that follows it in the same text.
    data = Positions.of(DrafterDataset(greedy, dataset.tables), depth + 1, answers_only=True)
    tensors = {name: torch.from_numpy(values) for name, values in parameters.items()}
    head = torch.from_numpy(dataset.tables.head_NH)
    tried, right = np.zeros(depth), np.zeros(depth)
    with torch.no_grad():
        for begin in range(0, len(data.starts), config.batch):
            starts = data.starts[begin : begin + config.batch]
            alive = np.ones(len(starts), bool)
            states = torch.from_numpy(data.hidden_PH[starts].astype(np.float32))
            for k in range(1, depth + 1):
                states = next_states(tensors, states, torch.from_numpy(data.embedding_UH[data.tokens_P[starts + k]]))
                guess = (states @ head.T).argmax(dim=1).numpy()
                tried[k - 1] += alive.sum()
                alive &= guess == data.truth_P[starts + k]
                right[k - 1] += alive.sum()
    return shares(right, tried)


def shares(right: NDArray[np.float64], tried: NDArray[np.float64]) -> list[float | None]:
    """Return right / tried, ``None`` where nothing was tried."""
    return [float(hits / count) if count else None for hits, count in zip(right, tried, strict=True)]


def check_parameters(parameters: Parameters, config: DrafterConfig) -> None:
    """Raise ModelError where the parameters are not those of a drafter of this shape."""
    found = {name: values.shape for name, values in parameters.items()}
    if found != config.shapes:
        wrong = sorted(name for name in {*found, *config.shapes} if found.get(name) != config.shapes.get(name))
        raise ModelError(
            f"these are no parameters of a drafter of width {config.hidden_width} and inner width "
            f"{config.inner_width}: {', '.join(wrong)} differ"
        )


def next_states(
    parameters: dict[str, Any],
    states_BH: Any,
    embedded_BH: Any,
    *,
    seen: Callable[[str, Any], None] = lambda product, inputs: None,
) -> Any:
    """Return the states (B, H) behind one more token; torch tensors in, torch tensors out.

    ``seen`` is shown what goes into the products ``joint`` and ``down``.
    """
    import torch

    def normed(x: Any, gain: str) -> Any:
        size = torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + NORM_EPSILON)
        return x.float() * size * parameters[gain]

    x = torch.cat([normed(embedded_BH, "embedding_norm"), normed(states_BH, "state_norm")], dim=-1)
    width = states_BH.shape[-1]
    inner = parameters["down"].shape[0]
    seen("joint", x)
    passed, gate, up = (x @ parameters["joint"]).split([width, inner, inner], dim=-1)
    gated = torch.nn.functional.silu(gate) * up
    seen("down", gated)
    return normed(passed + gated @ parameters["down"], "output_norm")


class _Trainer:
    """One training at work: torch tensors, AdamW's moments, and the order of the starts.

    Which starts an update sees depends on the seed and its number alone, so that a training goes on anywhere.
    """

    def __init__(
        self,
        state: TrainingState,
        data: Positions,
        head_NH: NDArray[np.float32],
        config: DrafterConfig,
        anchor: Parameters,
    ) -> None:
        import torch

        self._torch = torch
        self._config, self._data = config, data
        self._head = torch.from_numpy(head_NH).T.contiguous()
        self._tensors = {
            name: torch.from_numpy(values.copy()).requires_grad_() for name, values in state.parameters.items()
        }
        self._first = {name: torch.from_numpy(values.copy()) for name, values in state.first.items()}
        self._second = {name: torch.from_numpy(values.copy()) for name, values in state.second.items()}
        self._anchor = {name: torch.from_numpy(values.copy()) for name, values in anchor.items()}
        self._losses = list(state.losses)
        self._recent: list[float] = []
        self._embedding = torch.from_numpy(data.embedding_UH)
        self.step = state.step

    def state(self) -> TrainingState:
        """Return a copy of where the training is."""
        parameters, first, second = (
            {name: values.detach().numpy().copy() for name, values in group.items()}
            for group in (self._tensors, self._first, self._second)
        )
        return TrainingState(parameters, first, second, self.step, tuple(self._losses))

    def update(self) -> float:
        """Do one update; return its loss."""
        loss = self._loss(self._starts())
        loss.backward()
        self._adamw()
        self.step += 1
        self._recent.append(float(loss.detach()))
        if self.step % 100 == 0:
            self._losses.append(float(np.mean(self._recent)))
            self._recent.clear()
        return float(loss.detach())

    def _starts(self) -> NDArray[np.int64]:
        """Return the starts of the next update: passes over all of them, each in a new order."""
        starts, batch = self._data.starts, min(self._config.batch, len(self._data.starts))
        per_pass = len(starts) // batch
        turn, place = divmod(self.step, per_pass)
        order = np.random.default_rng([self._config.seed, 1, turn]).permutation(len(starts))
        chosen: NDArray[np.int64] = starts[order[place * batch : (place + 1) * batch]]
        return chosen

    def _loss(self, starts_B: NDArray[np.int64]) -> Any:
        torch, data = self._torch, self._data
        states = torch.from_numpy(data.hidden_PH[starts_B].astype(np.float32))
        total: Any = 0.0
        weights = 0.0
        # bfloat16 products are three times as fast where the processor has them; sums stay in float32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=_has_bfloat16(torch)):
            for depth in range(1, self._config.rollout + 1):
                places = starts_B + depth
                embedded = self._embedding[torch.from_numpy(data.tokens_P[places])]
                states = next_states(self._tensors, states, embedded)
                logits = (states @ self._head).float()
                masses = torch.from_numpy(data.masses_PL[places])
                wanted = logits.gather(1, torch.from_numpy(data.labels_PL[places]))
                losses = masses.sum(dim=1) * logits.logsumexp(dim=1) - (masses * wanted).sum(dim=1)
                weight = _DEPTH_WEIGHT ** (depth - 1)
                total, weights = total + weight * losses.mean(), weights + weight
        return total / weights

    def _adamw(self) -> None:
        """AdamW (Loshchilov and Hutter, 2019), betas 0.9 and 0.95."""
        torch, config = self._torch, self._config
        tensors: dict[str, Any] = self._tensors
        with torch.no_grad():
            gradients = {
                name: values.grad + config.proximal * (values - self._anchor[name]) if config.proximal else values.grad
                for name, values in tensors.items()
            }
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            shrink = min(1.0, _CLIP / max(norm, 1e-12))
            rate, number = learning_rate(config, self.step), self.step + 1
            for name, values in tensors.items():
                gradient = gradients[name] * shrink
                self._first[name].lerp_(gradient, 0.1)
                self._second[name].lerp_(gradient.square(), 0.05)
                mean = self._first[name] / (1 - 0.9**number)
                spread = (self._second[name] / (1 - 0.95**number)).sqrt_().add_(1e-8)
                if values.ndim > 1:
                    values.mul_(1 - rate * config.weight_decay)
                values.addcdiv_(mean, spread, value=-rate)
                values.grad = None


def learning_rate(config: DrafterConfig, step: int) -> float:
    """Return the learning rate of update ``step`` (0 is the first): warm-up, then half a cosine down to a tenth."""
    if step < config.warm_up:
        return config.learning_rate * (step + 1) / config.warm_up
    share = (step - config.warm_up) / max(1, config.steps - config.warm_up)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(share, 1.0))))


def _has_bfloat16(torch: Any) -> bool:
    """Whether the processor multiplies bfloat16 itself; emulated it is slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
