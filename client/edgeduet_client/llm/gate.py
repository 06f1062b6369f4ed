"""The Language Confusion Gate at inference: which token families may come next, and what to do about it.

Zhang, Huang, Yuan, Lin, "Language Confusion Gate", arXiv 2510.17555. A two-layer network looks at the target's
last hidden state (after the final norm: the vector the output matrix multiplies) and predicts which of the four
families of ``families.py`` may come next:

    predicted = {i : sigmoid(a_i) >= 1/2}  union  {argmax a},      a = W2 relu(W1 h)

The rule (:func:`decide`), on logits z/T, sampling set S and the families of what was generated so far:

1. history: the family of the last generated token that is not Symbols; prompt tokens are not looked at. Nothing
   generated yet, or nothing but Symbols: never intervene (the first word of an answer sets the language).
2. ban = complement of (predicted + history), restricted to {CJ, Latin}.
3. H1 = top-k 5 and top-p 0.999, H2 = top-k 20 and top-p 0.95, both of softmax(z/T) over the whole vocabulary.
4. Intervene iff S holds a token of a banned family and H1 or H2 holds a token of a *predicted* family.

What is sampled after an intervention is up to the caller: ``union`` (the paper: (S + H1 + H2) minus the banned
families) or ``retruncate`` (ours, for p-less: the sampler's own truncation applied once to z/T restricted to
the families that are not banned). Step 4 leaves at least one candidate to either.

Differences from the released plug-in: H1 and H2 are really united (the release passes them in swapped order and
loses the tokens of H1 alone, which makes every probability NaN when a banned token has 95 % of the mass), and
ties at a border are all inside, so that the order of the vocabulary does not matter.

Axes: R rows (positions), H hidden width, M inner width, V width of the logits, F = 4 families.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import RULES_VERSION, Family, FamilyTable
from edgeduet_shared.atomic_files import atomic_write_bytes

if TYPE_CHECKING:
    from edgeduet_client.llm.model_folder import ModelFolder

GATE_FILE = "gate/gate.safetensors"

MASKABLE = frozenset({Family.CJ, Family.LATIN})
_NO_BAN: frozenset[Family] = frozenset()

# (k, p) of the two high-confidence sets.
_HIGH_CONFIDENCE = ((5, 0.999), (20, 0.95))
_BLOCK = 128


class History(IntEnum):
    """What the generated tokens say about the language of the answer.

    The first four values are those of :class:`Family`; in the place of Symbols stands "only symbols so far".
    """

    CJ = Family.CJ
    LATIN = Family.LATIN
    SYMBOLS_ONLY = Family.SYMBOLS
    LOW_RES = Family.LOW_RES
    EMPTY = 4


def advance_history(last: History, family: Family | int) -> History:
    """Return the history after one more generated token of ``family``."""
    if family != Family.SYMBOLS:
        return History(family)
    return History.SYMBOLS_ONLY if last is History.EMPTY else last


def history(families: FamilyTable, generated: Iterable[int]) -> History:
    """Return the history of the generated ids (without the prompt's); the reference of :func:`advance_history`."""
    last = History.EMPTY
    for token in generated:
        last = advance_history(last, int(families[token]))
    return last


@dataclass(frozen=True)
class Decision:
    """What the rule says about one position.

    Attributes:
        ban: families to mask, a subset of {CJ, Latin}; empty where the gate does not intervene.
        high_confidence: (V,) bool, the union of H1 and H2, for the ``union`` rule; ``None`` where ``ban`` is empty.
    """

    ban: frozenset[Family]
    high_confidence: NDArray[np.bool_] | None

    @property
    def intervenes(self) -> bool:
        """Whether anything is masked."""
        return bool(self.ban)


NO_INTERVENTION = Decision(_NO_BAN, None)


def banned_families(predicted: NDArray[np.bool_], last: History) -> frozenset[Family]:
    """Return the families that neither the prediction nor the history allows, restricted to CJ and Latin."""
    if last in (History.EMPTY, History.SYMBOLS_ONLY):
        return _NO_BAN
    return frozenset(family for family in MASKABLE if not predicted[family] and int(family) != int(last))


def decide(
    predicted: NDArray[np.bool_],
    last: History,
    scaled_logits: NDArray[np.floating],
    nominal_keep: NDArray[np.bool_],
    families: FamilyTable,
) -> Decision:
    """Apply the rule of the module's docstring to one position.

    Args:
        predicted: (4,) bool, a row of :meth:`Gate.predict`.
        last: history of the generated tokens, drafts before this position included.
        scaled_logits: (V,) z/T after every hard constraint (-inf = impossible, no NaN). At temperature 0, where
            z/T does not exist, pass z: the high-confidence sets are then those of temperature 1.
        nominal_keep: (V,) bool, the sampling set S.
        families: (V,) family of every id.

    Work proportional to V beyond finding the members of S is done only when S holds a banned token.
    """
    ban = banned_families(predicted, last)
    if not ban:
        return NO_INTERVENTION
    sampled = families[np.flatnonzero(nominal_keep)]
    if not any((sampled == family).any() for family in ban):
        return NO_INTERVENTION
    confident = high_confidence(scaled_logits)
    if not predicted[families[confident]].any():
        return NO_INTERVENTION
    mask = np.zeros(len(scaled_logits), dtype=np.bool_)
    mask[confident] = True
    return Decision(ban, mask)


def allowed_mask(ban: frozenset[Family], families: FamilyTable) -> NDArray[np.bool_]:
    """Return which ids no banned family holds, (V,) bool."""
    allowed = np.ones(len(families), dtype=np.bool_)
    for family in ban:
        allowed &= families != family
    return allowed


def high_confidence(scaled_logits: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return the ids of H1 union H2, ascending.

    A token is in top-k if fewer than k tokens are more probable, and in top-p if those that are more probable
    hold less than p of the whole softmax (not of the k). Ids at -inf are in no set.

    Raises:
        ValueError: no logit is finite.
    """
    top = float(scaled_logits.max())
    if not np.isfinite(top):
        raise ValueError("the high-confidence sets need a largest logit that is a finite number")
    total = float(np.exp(scaled_logits - top).sum(dtype=np.float64))
    ids, values = largest(scaled_logits, max(k for k, _ in _HIGH_CONFIDENCE))
    more_probable, mass_before = rank_and_mass_before(values, top, total)
    inside = np.zeros(len(ids), dtype=np.bool_)
    for k, p in _HIGH_CONFIDENCE:
        inside |= (more_probable < k) & (mass_before < p)
    return np.sort(ids[inside])


def largest(logits: NDArray[np.floating], k: int) -> tuple[NDArray[np.intp], NDArray[np.floating]]:
    """Return ids and values of the ``k`` largest logits in descending order, all ties with the k-th, none at -inf."""
    ids = np.flatnonzero(logits >= _at_most_kth(logits, k))
    values = logits[ids]
    if len(ids) > k:
        ids = ids[values >= np.partition(values, len(ids) - k)[len(ids) - k]]
    ids = ids[logits[ids] > -np.inf]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ids, logits[ids]


def _at_most_kth(logits: NDArray[np.floating], k: int) -> float:
    """Return a number not above the k-th largest logit and usually close below it.

    The k-th largest of the maxima of blocks, which are k different logits: two passes over the vocabulary instead
    of a partition (0.2 ms instead of 2 ms for 262,144).
    """
    blocks = len(logits) // _BLOCK
    if blocks < 2 * k:
        return -np.inf
    maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(maxima, blocks - k)[blocks - k])


def rank_and_mass_before(
    descending: NDArray[np.floating], top: float, total: float
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return, for each of ``descending`` logits, how many are larger and the probability those hold.

    Args:
        descending: (K,) the largest logits in descending order.
        top: the largest logit.
        total: sum over the whole vocabulary of exp(logit - top).
    """
    larger = np.searchsorted(-descending, -descending, side="left")
    mass = np.concatenate([[0.0], np.cumsum(np.exp(descending.astype(np.float64) - top))])
    return larger, mass[larger] / total


# --- the network and its artefact ----------------------------------------------------------------------


class TrainingRecord(BaseModel):
    """How a gate was trained: what ``llm show`` prints and what makes it reproducible."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    norms: Literal["median", "paper", "none"]
    top_k: int
    top_p: float
    samples: int
    positions: int
    languages: list[str]
    epochs: int
    best_epoch: int
    seed: int
    learning_rate: float
    weight_decay: float
    batch: int
    train_loss: float
    validation_loss: float
    seconds_collecting: float
    seconds_training: float
    texts: str


class GateDescription(BaseModel):
    """What a stored gate belongs to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    tokenizer_sha256: str
    weights_sha256: str
    hidden_width: int = Field(gt=0)
    rules_version: int
    training: TrainingRecord


@dataclass(frozen=True)
class ModelBinding:
    """What a gate must share with the model it is used on."""

    tokenizer_sha256: str
    weights_sha256: str
    hidden_width: int

    @classmethod
    def of(cls, folder: ModelFolder) -> ModelBinding:
        """Return the binding of a model folder, from its manifest."""
        manifest = folder.manifest
        return cls(
            tokenizer_sha256=manifest.tokenizer_sha256,
            weights_sha256=manifest.files["model.onnx.data"].sha256,
            hidden_width=manifest.hidden_width,
        )


@dataclass(frozen=True)
class Gate:
    """A trained gate.

    Attributes:
        first_MH: (M, H) float32; ``second_FM``: (4, M) float32. Neither layer has an offset.
    """

    first_MH: NDArray[np.float32]
    second_FM: NDArray[np.float32]
    description: GateDescription

    def logits(self, hidden_RH: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the four logits of each row, (R, 4) float32; for training and evaluation on many rows."""
        inner_RM = np.maximum(np.asarray(hidden_RH, dtype=np.float32) @ self.first_MH.T, 0.0)
        result: NDArray[np.float32] = inner_RM @ self.second_FM.T
        return result

    def predict(self, hidden_RH: NDArray[np.float32]) -> NDArray[np.bool_]:
        """Return which families may come next, (R, 4) bool, at least one a row.

        Rows are computed one by one: a row's result does not depend on how many others there are, so that a
        draft's verification decides exactly as a plain step does.

        Raises:
            ModelError: a hidden state has another width or is not finite.
        """
        if hidden_RH.ndim != 2 or hidden_RH.shape[1] != self.description.hidden_width:
            width = self.description.hidden_width
            raise ModelError(f"the gate takes hidden states of width {width}, got shape {hidden_RH.shape}")
        if not np.isfinite(hidden_RH).all():
            raise ModelError("the model's last hidden state is not finite; verify the model folder")
        rows = [self.logits(row[None])[0] for row in hidden_RH]
        return predicted_families(np.stack(rows)) if rows else np.zeros((0, len(Family)), dtype=np.bool_)

    def save(self, path: Path) -> None:
        """Store the gate in one file (weights, and the description in its header), in one step.

        Raises:
            EdgeDuetError: the file cannot be written.
        """
        tensors = {"first": np.ascontiguousarray(self.first_MH), "second": np.ascontiguousarray(self.second_FM)}
        atomic_write_bytes(path, save(tensors, metadata={"description": self.description.model_dump_json()}))

    @classmethod
    def load(cls, path: Path, binding: ModelBinding) -> Gate:
        """Return the gate stored at ``path`` for the model of ``binding``.

        Raises:
            ModelError: the file is missing, damaged, or belongs to another model or older family rules.
        """
        try:
            with safe_open(path, framework="numpy") as stored:
                description = GateDescription.model_validate_json((stored.metadata() or {})["description"])
                first, second = stored.get_tensor("first"), stored.get_tensor("second")
        except FileNotFoundError:
            raise ModelError(f"no gate at {path}; train one with: edgeduet-client llm gate train") from None
        except (OSError, SafetensorError, KeyError, ValidationError, json.JSONDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"the gate {path} is damaged ({reason}); train it again") from None
        _refuse_other_model(description, binding, path)
        if first.shape[1:] != (binding.hidden_width,) or second.shape != (len(Family), first.shape[0]):
            shapes = f"{first.shape} and {second.shape}"
            raise ModelError(f"the gate {path} is damaged (layers of shape {shapes}); train it again")
        return cls(first.astype(np.float32), second.astype(np.float32), description)

    @classmethod
    def of_model(cls, folder: ModelFolder) -> Gate | None:
        """Return the gate stored in a model folder, or ``None`` if it has none; raises as :meth:`load`."""
        path = folder.file(GATE_FILE)
        return cls.load(path, ModelBinding.of(folder)) if path.exists() else None


def predicted_families(logits_RF: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return {sigmoid >= 1/2} and {argmax} of each row, (R, 4) bool."""
    predicted: NDArray[np.bool_] = logits_RF >= 0
    predicted[np.arange(len(predicted)), logits_RF.argmax(axis=1)] = True
    return predicted


def _refuse_other_model(description: GateDescription, binding: ModelBinding, path: Path) -> None:
    differs = [
        what
        for what, ours, theirs in (
            ("hidden width", description.hidden_width, binding.hidden_width),
            ("tokenizer", description.tokenizer_sha256, binding.tokenizer_sha256),
            ("weights", description.weights_sha256, binding.weights_sha256),
        )
        if ours != theirs
    ]
    if differs:
        raise ModelError(f"the gate {path} belongs to another model (other {', '.join(differs)}); train it again")
    if description.rules_version != RULES_VERSION:
        raise ModelError(f"the gate {path} follows older rules for token families; train it again")
