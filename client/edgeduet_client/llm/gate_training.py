"""Train a model's confusion gate on the device itself: numpy only, from stored hidden states, in minutes.

The network and its loss are those of Zhang et al. (arXiv 2510.17555): two layers without offsets, mean binary
cross-entropy over positions and families, AdamW, warm-up of 100 steps and linear decay, gradients clipped at
norm 1. Theirs sees about 10^8 positions once at a learning rate of 2e-5; with the 10^4 of a device that underfits,
so the defaults here are 1e-3 and ten passes, and the pass with the lowest validation loss is kept. Validation
texts have other sources (``gate_texts.py``) than those trained on, and a fifth of the sources is left for
evaluations alone.

Axes: N positions, B batch, H hidden width, M inner width (= H), F = 4 families.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import platformdirs
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import RULES_VERSION, Family, FamilyTable, family_table
from edgeduet_client.llm.gate import (
    GATE_FILE,
    Gate,
    GateDescription,
    ModelBinding,
    TrainingRecord,
    predicted_families,
)
from edgeduet_client.llm.gate_features import (
    EncodedText,
    Features,
    FeatureStore,
    LabelRule,
    Norms,
    collect,
    joined,
)
from edgeduet_client.llm.gate_texts import (
    DEFAULT_LANGUAGES,
    GateText,
    folder_texts,
    package_texts,
    part_test_texts,
    split_by_source,
)
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import FAMILIES, TOKENIZER, ModelFolder
from edgeduet_client.llm.tokenizer import Tokenizer

ProgressCallback = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""

_WARM_UP = 100
_CLIP = 1.0
_ROWS = 4096  # positions evaluated at once


class GateOptions(BaseModel):
    """How to train a gate."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    norms: Norms = Field("median", description="labels from z·median(n)/n, the paper's z/n, or none: plain z")
    top_k: int = Field(20, ge=1, description="labels: top-k of the teacher's adjusted distribution")
    top_p: float = Field(0.95, gt=0, le=1, description="labels: and its top-p")
    per_language: int = Field(100, ge=1, description="texts of each language")
    max_tokens: int = Field(128, ge=8, description="tokens of request and answer; longer answers are cut")
    epochs: int = Field(10, ge=1, description="passes over the positions; the best one is kept")
    batch: int = Field(64, ge=1, description="positions per step")
    learning_rate: float = Field(1e-3, gt=0, description="peak learning rate of AdamW")
    weight_decay: float = Field(0.01, ge=0, description="weight decay of AdamW")
    validation: float = Field(0.15, gt=0, lt=1, description="share of the training sources that chooses the pass")
    seed: int = Field(0, ge=0, description="split, initial weights and order of the positions")


@dataclass(frozen=True)
class TrainedGate:
    """What a training returned.

    Attributes:
        path: where the gate was stored.
        record: settings and losses, as stored with it.
        f1: per family on the validation positions; ``None`` where a family never occurs there.
        prevalence: share of the validation positions whose label holds the family.
        features: the file of hidden states and labels; another training of the same model continues from it.
    """

    path: Path
    record: TrainingRecord
    f1: dict[Family, float | None]
    prevalence: dict[Family, float]
    features: Path


def train_gate(
    model: str | Path | ModelFolder,
    *,
    texts: Path | str | None = None,
    languages: Sequence[str] | None = None,
    options: GateOptions | None = None,
    root: Path | None = None,
    threads: int | None = None,
    features: Path | None = None,
    progress: ProgressCallback | None = None,
) -> TrainedGate:
    """Train the gate of a model and store it in the model's folder.

    Interrupted at any time it leaves the model as it was, and a second call goes on where the first stopped.

    Args:
        model: an imported model's name, a path, or an open folder.
        texts: folder of texts (see :func:`~edgeduet_client.llm.gate_texts.folder_texts`); or
        languages: codes of languages whose texts come from installed packages; default a mix of 14.
        options: settings.
        root: where models lie.
        threads: cores the model may use.
        features: folder for hidden states and labels; default in the user's cache folder.
        progress: told about every text and every pass.

    Raises:
        ModelError: the model, the texts or both cannot be used; one line.
        EdgeDuetError: a file cannot be written.
    """
    options = options or GateOptions()
    folder = model if isinstance(model, ModelFolder) else ModelFolder.open(model, root)
    _remove_unusable_gate(folder)
    chosen = choose_texts(texts, languages, per_language=options.per_language)
    for_training, _ = part_test_texts(chosen)
    train_texts, validation_texts = split_by_source(for_training, held_out=options.validation, seed=options.seed)
    if not train_texts or not validation_texts:
        raise ModelError(
            f"{len({t.source for t in chosen})} different requests are too few to hold some out; add texts"
        )

    local = LocalModel.open(folder, threads=threads)
    rule = LabelRule.of_norms(options.norms, folder.head_row_norms(), top_k=options.top_k, top_p=options.top_p)
    binding = ModelBinding.of(folder)
    store = FeatureStore.of(features or default_features_folder(), binding, [rule])
    start = time.monotonic()
    found = collect_texts(local, folder, [*train_texts, *validation_texts], [rule], store, options, progress=progress)
    collected = time.monotonic()
    train, validation = joined(found[: len(train_texts)]), joined(found[len(train_texts) :])
    fitted = fit_gate(train, validation, options, progress=progress)
    record = fitted.record(
        options,
        [*train_texts, *validation_texts],
        positions=len(train) + len(validation),
        texts="packages" if texts is None else str(texts),
        seconds_collecting=round(collected - start, 1),
        seconds_training=round(time.monotonic() - collected, 1),
    )
    gate = fitted.gate(binding, record)
    gate.save(folder.file(GATE_FILE))
    f1, prevalence = agreement(gate, validation)
    return TrainedGate(folder.file(GATE_FILE), record, f1, prevalence, store.path)


def choose_texts(texts: Path | str | None, languages: Sequence[str] | None, *, per_language: int) -> list[GateText]:
    """Return the texts of a folder, or of installed packages; raises ModelError for both, or for what is missing."""
    if texts is not None and languages is not None:
        raise ModelError("texts of a folder have languages of their own; give --texts or --languages")
    if texts is not None:
        return folder_texts(texts, per_language=per_language)
    return package_texts(languages or DEFAULT_LANGUAGES, per_language=per_language)


def default_features_folder() -> Path:
    """Return where hidden states and labels are kept between trainings."""
    return Path(platformdirs.user_cache_dir("edgeduet")) / "gate"


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[GateText], *, eos_ids: Sequence[int], max_tokens: int
) -> list[EncodedText]:
    """Return the token ids of texts as the model will meet them: a chat where it has a template, else plain text.

    Answers are cut to fit ``max_tokens``; a request that leaves no room for two tokens of answer loses its beginning.
    """
    encoded = []
    for text in texts:
        if tokenizer.template is not None and text.prompt:
            prompt = tokenizer.encode_chat([{"role": "user", "content": text.prompt}])
            response = tokenizer.encode(text.response)
        else:
            prompt = tokenizer.encode_prompt(text.prompt)
            response = tokenizer.encode(_joint(text.prompt) + text.response)
        prompt = prompt[-(max_tokens - 2) :]
        encoded.append(EncodedText(tuple(prompt), tuple([*response, *eos_ids[:1]][: max_tokens - len(prompt)])))
    return encoded


def _joint(prompt: str) -> str:
    """Return what stands between a plain request and its answer."""
    if not prompt:
        return ""
    return " " if prompt.endswith(":") else "\n"


def collect_texts(
    local: LocalModel,
    folder: ModelFolder,
    texts: Sequence[GateText],
    rules: Sequence[LabelRule],
    store: FeatureStore,
    options: GateOptions,
    *,
    progress: ProgressCallback | None = None,
) -> list[Features]:
    """Return the features of every text, in order; see :func:`~edgeduet_client.llm.gate_features.collect`."""
    encoded = encode_texts(local.tokenizer, texts, eos_ids=local.manifest.eos_ids, max_tokens=options.max_tokens)
    families = families_of(folder)[: local.vocabulary.used]
    what = "reading texts"
    told = None if progress is None else lambda done, total: progress(what, done, total)
    return collect(local.session, encoded, rules, families, store, progress=told)


def families_of(folder: ModelFolder) -> FamilyTable:
    """Return the family table of a model folder, (V,)."""
    return family_table(folder.file(TOKENIZER), folder.manifest.vocab_width, cache=folder.file(FAMILIES))


def _remove_unusable_gate(folder: ModelFolder) -> None:
    """Remove a gate that is damaged or belongs to other weights: the model would not open with it."""
    try:
        Gate.of_model(folder)
    except ModelError:
        folder.file(GATE_FILE).unlink()


# --- the network ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FittedGate:
    """The best pass of a training, and the losses of all (mean BCE per position and family)."""

    first_MH: NDArray[np.float32]
    second_FM: NDArray[np.float32]
    best_epoch: int
    train_losses: list[float]
    validation_losses: list[float]

    def record(
        self,
        options: GateOptions,
        chosen: Sequence[GateText],
        *,
        positions: int,
        texts: str,
        seconds_collecting: float,
        seconds_training: float,
    ) -> TrainingRecord:
        """Return what is stored with the gate about its training."""
        return TrainingRecord(
            **options.model_dump(exclude={"per_language", "max_tokens", "validation"}),
            samples=len(chosen),
            positions=positions,
            languages=sorted({text.language for text in chosen}),
            best_epoch=self.best_epoch,
            train_loss=self.train_losses[self.best_epoch - 1],
            validation_loss=self.validation_losses[self.best_epoch - 1],
            seconds_collecting=seconds_collecting,
            seconds_training=seconds_training,
            texts=texts,
        )

    def gate(self, binding: ModelBinding, record: TrainingRecord) -> Gate:
        """Return the gate for a model."""
        description = GateDescription(
            tokenizer_sha256=binding.tokenizer_sha256,
            weights_sha256=binding.weights_sha256,
            hidden_width=binding.hidden_width,
            rules_version=RULES_VERSION,
            training=record,
        )
        return Gate(self.first_MH, self.second_FM, description)


def fit_gate(
    train: Features,
    validation: Features,
    options: GateOptions,
    *,
    rule: int = 0,
    progress: ProgressCallback | None = None,
) -> FittedGate:
    """Train a gate on features; the same seed gives the same gate.

    Args:
        rule: which column of the labels.

    Raises:
        ModelError: there are no positions to train or validate on, or the loss is not finite.
    """
    if not len(train) or not len(validation):
        raise ModelError("no position to train or to validate on; give more texts")
    rng = np.random.default_rng([options.seed, rule])
    # The states of a model may be of any size: the network sees them at size 1, and its first layer is rescaled
    # at the end, which is exact since ReLU commutes with positive factors.
    scale = np.float32(1.0 / max(float(np.sqrt(np.mean(np.square(train.hidden_NH, dtype=np.float32)))), 1e-12))
    inputs_NH, targets_NF = train.hidden_NH, train.targets(rule)
    weights = initial_weights(inputs_NH.shape[1], rng)
    optimiser = AdamW.of(weights, options.weight_decay)
    steps = options.epochs * -(-len(train) // options.batch)
    best, best_epoch, losses, validation_losses = weights, 0, [], []
    step = 0
    for epoch in range(1, options.epochs + 1):
        total = 0.0
        order = rng.permutation(len(train))
        for begin in range(0, len(order), options.batch):
            rows = order[begin : begin + options.batch]
            batch_BH = inputs_NH[rows].astype(np.float32) * scale
            loss, gradients = loss_and_gradients(weights, batch_BH, targets_NF[rows])
            step += 1
            rate = options.learning_rate * learning_rate_share(step, steps)
            weights, optimiser = optimiser.step(weights, clipped(gradients), rate)
            total += loss * len(rows)
        losses.append(total / len(train))
        validation_losses.append(_loss(weights, validation, rule, scale))
        if not np.isfinite(validation_losses[-1]):
            raise ModelError(f"training diverged in pass {epoch}; choose a smaller learning rate")
        if validation_losses[-1] == min(validation_losses):
            best, best_epoch = weights, epoch
        if progress is not None:
            progress("training the gate", epoch, options.epochs)
    return FittedGate(best[0] * scale, best[1], best_epoch, losses, validation_losses)


Weights = tuple[NDArray[np.float32], NDArray[np.float32]]


def initial_weights(width: int, rng: np.random.Generator) -> Weights:
    """Return both layers, uniform within one over the square root of their inputs (as torch's linear layers)."""
    bound = 1.0 / np.sqrt(width)
    first = rng.uniform(-bound, bound, (width, width)).astype(np.float32)
    return first, rng.uniform(-bound, bound, (len(Family), width)).astype(np.float32)


def loss_and_gradients(
    weights: Weights, inputs_BH: NDArray[np.float32], targets_BF: NDArray[np.float32]
) -> tuple[float, Weights]:
    """Return the mean binary cross-entropy over positions and families, and its gradients."""
    first_MH, second_FM = weights
    before_BM = inputs_BH @ first_MH.T
    inner_BM = np.maximum(before_BM, 0.0)
    logits_BF = inner_BM @ second_FM.T
    with np.errstate(over="ignore"):
        slope_BF = (1.0 / (1.0 + np.exp(-logits_BF)) - targets_BF) / np.float32(targets_BF.size)
    inner_slope_BM = (slope_BF @ second_FM) * (before_BM > 0)
    return binary_cross_entropy(logits_BF, targets_BF), (inner_slope_BM.T @ inputs_BH, slope_BF.T @ inner_BM)


def binary_cross_entropy(logits: NDArray[np.float32], targets: NDArray[np.float32]) -> float:
    """Return mean over all entries of -y log sigmoid(a) - (1 - y) log(1 - sigmoid(a)), stable for any a."""
    terms = np.maximum(logits, 0.0) - logits * targets + np.log1p(np.exp(-np.abs(logits)))
    return float(terms.mean(dtype=np.float64))


def learning_rate_share(step: int, steps: int) -> float:
    """Return the share of the peak rate at ``step`` of 1..steps: warm-up, then linear down to zero."""
    warm_up = min(_WARM_UP, max(steps // 10, 1))
    if step <= warm_up:
        return step / warm_up
    return (steps - step + 1) / (steps - warm_up + 1)


def clipped(gradients: Weights) -> Weights:
    """Return the gradients scaled down to norm 1 if they are longer."""
    norm = float(np.sqrt(sum(float(np.vdot(g, g)) for g in gradients)))
    if norm <= _CLIP:
        return gradients
    share = np.float32(_CLIP / norm)
    return gradients[0] * share, gradients[1] * share


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov, Hutter, arXiv 1711.05101); the defaults of torch.

    Attributes:
        means, squares: running means of gradients and of their squares.
    """

    weight_decay: float
    means: Weights
    squares: Weights
    steps: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8

    @classmethod
    def of(cls, weights: Weights, weight_decay: float) -> Self:
        """Return the state before the first step."""
        zeros = (np.zeros_like(weights[0]), np.zeros_like(weights[1]))
        return cls(weight_decay, zeros, (zeros[0].copy(), zeros[1].copy()))

    def step(self, weights: Weights, gradients: Weights, rate: float) -> tuple[Weights, AdamW]:
        """Return the weights and the state after one step."""
        first, second = self.betas
        steps = self.steps + 1
        means = _pair(lambda m, g: first * m + (1 - first) * g, self.means, gradients)
        squares = _pair(lambda s, g: second * s + (1 - second) * g * g, self.squares, gradients)
        size = np.float32(rate / (1 - first**steps))
        root = np.float32(1 / np.sqrt(1 - second**steps))
        kept = np.float32(1 - rate * self.weight_decay)
        moves = _pair(lambda m, s: m / (np.sqrt(s) * root + np.float32(self.epsilon)), means, squares)
        updated = _pair(lambda w, move: kept * w - size * move, weights, moves)
        return updated, AdamW(self.weight_decay, means, squares, steps, self.betas, self.epsilon)


def _pair(
    act: Callable[[NDArray[np.float32], NDArray[np.float32]], NDArray[np.float32]], left: Weights, right: Weights
) -> Weights:
    """Apply ``act`` to both layers."""
    return act(left[0], right[0]), act(left[1], right[1])


def _loss(weights: Weights, features: Features, rule: int, scale: np.float32) -> float:
    targets, total = features.targets(rule), 0.0
    for begin in range(0, len(features), _ROWS):
        rows = slice(begin, begin + _ROWS)
        inner = np.maximum(features.hidden_NH[rows].astype(np.float32) * scale @ weights[0].T, 0.0)
        total += binary_cross_entropy(inner @ weights[1].T, targets[rows]) * len(targets[rows])
    return total / len(features)


def agreement(
    gate: Gate, features: Features, *, rule: int = 0
) -> tuple[dict[Family, float | None], dict[Family, float]]:
    """Return F1 of the gate's predictions against the labels, and how common the labels are, per family."""
    blocks = [
        predicted_families(gate.logits(features.hidden_NH[begin : begin + _ROWS].astype(np.float32)))
        for begin in range(0, len(features), _ROWS)
    ]
    predicted, wanted = np.concatenate(blocks), features.targets(rule) > 0
    f1: dict[Family, float | None] = {}
    for family in Family:
        said, true = predicted[:, family], wanted[:, family]
        either = int(said.sum()) + int(true.sum())
        f1[family] = 2 * int((said & true).sum()) / either if either else None
    return f1, {family: float(wanted[:, family].mean()) for family in Family}
