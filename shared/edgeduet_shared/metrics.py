"""Every number we report, derived from accuracy matrices (fed-duet.md section 7).

T tasks (= stages), M clients, S seeds.

``R_TT[i, j]`` is the accuracy, in [0, 1], on the test images of task j after finishing stage i,
scored over the classes of tasks 0..max(i, j) (class-incremental; in a domain-incremental stream
every task has the same classes). Entries with j > i measure forward transfer. The zero-shot
reference ``b_T[j]`` is scored over the classes of tasks 0..j, so it is comparable with
``R_TT[j - 1, j]`` and with ``R_TT[j, j]``.

A value that does not exist is NaN, never 0: a task of which a client holds no test image, a stage
that has not run yet, forgetting of a stream with one task. Means are taken over what exists; a
mean over nothing is NaN. Callers print NaN as "n/a".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Kind = Literal["class-incremental", "domain-incremental"]


def accuracies(correct: npt.ArrayLike, totals: npt.ArrayLike) -> Values:
    """Return ``correct / totals`` elementwise, NaN where ``totals`` is 0 or ``correct`` is negative ("not held").

    Args:
        correct: numbers of correct predictions, any shape; -1 where the task was not evaluated.
        totals: numbers of test images, broadcast against ``correct``.

    Raises:
        ValueError: more correct predictions than images.
    """
    c, n = np.broadcast_arrays(np.asarray(correct, dtype=np.float64), np.asarray(totals, dtype=np.float64))
    exists = (n > 0) & (c >= 0)
    if bool(np.any(c[exists] > n[exists])):
        raise ValueError("more correct predictions than test images")
    result = np.full(c.shape, np.nan)
    result[exists] = c[exists] / n[exists]
    return result


def mean(values: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> float:
    """Return the (weighted) mean of the entries that exist; NaN when there is none or their weight is 0."""
    v = np.asarray(values, dtype=np.float64).ravel()
    w = np.ones_like(v) if weights is None else np.asarray(weights, dtype=np.float64).ravel()
    if w.shape != v.shape:
        raise ValueError(f"{v.size} values but {w.size} weights")
    exists = ~np.isnan(v) & (w > 0)
    if not exists.any():
        return math.nan
    return float(np.sum(v[exists] * w[exists]) / np.sum(w[exists]))


def stage_accuracies(matrix_TT: npt.ArrayLike, kind: Kind, counts: npt.ArrayLike | None = None) -> Values:
    """Return A_T: accuracy over all tasks seen so far, after each stage.

    Class-incremental: ``A_i = sum_{j<=i} n_j R[i, j] / sum_{j<=i} n_j`` (accuracy on the union of the
    test sets). Domain-incremental: the plain mean over ``j <= i``.

    Args:
        matrix_TT: accuracy matrix.
        kind: which of the two rules.
        counts: test images per task (T,), or per stage and task (T, T) where they change; needed for
            class-incremental.
    """
    r = _square(matrix_TT)
    weights: Values | None = None
    if kind == "class-incremental":
        if counts is None:
            raise ValueError("class-incremental stage accuracy needs the number of test images of each task")
        given = np.asarray(counts, dtype=np.float64)
        if given.shape not in ((len(r),), (len(r), len(r))):
            raise ValueError(f"{len(r)} tasks but {given.size} counts")
        weights = np.broadcast_to(given, (len(r), len(r)))
    seen = [slice(0, i + 1) for i in range(len(r))]
    return np.array([mean(r[i, s], None if weights is None else weights[i, s]) for i, s in enumerate(seen)])


def average_incremental_accuracy(stage_T: npt.ArrayLike) -> float:
    """Return Avg: the mean of the stage accuracies A_i."""
    return mean(stage_T)


def last_accuracy(stage_T: npt.ArrayLike) -> float:
    """Return Last: A_i of the final stage; NaN when that stage has not run."""
    values = np.asarray(stage_T, dtype=np.float64)
    return float(values[-1]) if values.size else math.nan


def average_final_accuracy(matrix_TT: npt.ArrayLike) -> float:
    """Return ACC = ``(1/T) sum_j R[T, j]``."""
    return mean(_square(matrix_TT)[-1])


def learning_accuracy(matrix_TT: npt.ArrayLike) -> float:
    """Return ``(1/T) sum_j R[j, j]``: how well each task is learnt when it is its turn (plasticity)."""
    return mean(np.diag(_square(matrix_TT)))


def forgetting_per_task(matrix_TT: npt.ArrayLike) -> Values:
    """Return ``max_{j<=l<T} R[l, j] - R[T, j]`` for each task but the last, shape (T-1,)."""
    r = _square(matrix_TT)
    result = np.full(len(r) - 1, np.nan)
    for j in range(len(r) - 1):
        before = r[j:-1, j]
        if not np.isnan(before).all():
            result[j] = np.nanmax(before) - r[-1, j]
    return result


def forgetting(matrix_TT: npt.ArrayLike) -> float:
    """Return ``(1/(T-1)) sum_{j<T} (max_{j<=l<T} R[l, j] - R[T, j])``; NaN for one task."""
    return mean(forgetting_per_task(matrix_TT))


def forgetting_over_stages(matrix_TT: npt.ArrayLike) -> Values:
    """Return the forgetting measured after each stage (as if the stream ended there), shape (T,); the first is NaN."""
    r = _square(matrix_TT)
    return np.array([forgetting(r[: i + 1, : i + 1]) for i in range(len(r))])


def backward_transfer(matrix_TT: npt.ArrayLike) -> float:
    """Return ``(1/(T-1)) sum_{j<T} (R[T, j] - R[j, j])``; negative means forgetting; NaN for one task."""
    r = _square(matrix_TT)
    return mean(r[-1, :-1] - np.diag(r)[:-1])


def forward_transfer(matrix_TT: npt.ArrayLike, zero_shot_T: npt.ArrayLike) -> float:
    """Return ``(1/(T-1)) sum_{j>1} (R[j-1, j] - b_j)``: gain on a task before it is trained; NaN for one task.

    Args:
        matrix_TT: accuracy matrix.
        zero_shot_T: zero-shot accuracy b_j of the frozen backbone, over the classes of tasks 0..j.
    """
    r, b = _square(matrix_TT), _vector(zero_shot_T, len(_square(matrix_TT)))
    return mean(np.diag(r, k=1) - b[1:])


def intransigence(matrix_TT: npt.ArrayLike, joint_TT: npt.ArrayLike) -> float:
    """Return the mean over j of ``J[j, j] - R[j, j]``: what training jointly would have given on each new task.

    Args:
        matrix_TT: accuracy matrix of the method.
        joint_TT: accuracy matrix of joint training (all data of tasks 0..i at stage i), same test sets.
    """
    r, joint = _square(matrix_TT), _square(joint_TT)
    if r.shape != joint.shape:
        raise ValueError(f"matrix has {len(r)} tasks but the joint reference has {len(joint)}")
    return mean(np.diag(joint) - np.diag(r))


def zero_shot_retention(after: float, before: float) -> float:
    """Return accuracy on held-out classes after the last stage minus before training (0 = nothing lost)."""
    return after - before


@dataclass(frozen=True)
class OverClients:
    """One accuracy over the clients that have it.

    Attributes:
        mean: plain mean over clients.
        weighted: mean weighted by each client's number of images n_c.
        worst: mean of the lowest ceil(0.1 M) values.
        worst_clients: how many clients ``worst`` averages; 1 means it is the minimum (always so for M <= 10).
        minimum: lowest value.
        std: standard deviation over clients (ddof=0: these are all the clients there are).
        clients: number of clients with a value (M).
    """

    mean: float
    weighted: float
    worst: float
    worst_clients: int
    minimum: float
    std: float
    clients: int


def over_clients(values_M: npt.ArrayLike, weights_M: npt.ArrayLike | None = None) -> OverClients:
    """Summarise one value per client; clients without a value (NaN) are left out and not counted.

    Args:
        values_M: one value per client.
        weights_M: images per client; unset = every client weighs the same.
    """
    v = np.asarray(values_M, dtype=np.float64).ravel()
    w = np.ones_like(v) if weights_M is None else np.asarray(weights_M, dtype=np.float64).ravel()
    weighted = mean(v, w)
    lowest = np.sort(v[~np.isnan(v)])
    if not lowest.size:
        return OverClients(math.nan, math.nan, math.nan, 0, math.nan, math.nan, 0)
    count = math.ceil(lowest.size / 10)
    return OverClients(
        mean=float(lowest.mean()),
        weighted=weighted,
        worst=float(lowest[:count].mean()),
        worst_clients=count,
        minimum=float(lowest[0]),
        std=float(lowest.std()),
        clients=int(lowest.size),
    )


def worst_label(worst_clients: int) -> str:
    """Name ``OverClients.worst`` honestly: with fewer than 10 clients it is simply the minimum."""
    return "worst client" if worst_clients <= 1 else f"worst 10 % ({worst_clients} clients)"


def personal_forgetting(matrices_MTT: npt.ArrayLike) -> tuple[float, float]:
    """Return (mean, worst) over clients of the forgetting on each client's own matrix; worst = largest."""
    per_client = np.array([forgetting(matrix) for matrix in np.asarray(matrices_MTT, dtype=np.float64)])
    if np.isnan(per_client).all():
        return math.nan, math.nan
    return mean(per_client), float(np.nanmax(per_client))


def harmonic_mean(personal: float, general: float) -> float:
    """Return ``2 P G / (P + G)``; 0 when both are 0, NaN when either does not exist."""
    if math.isnan(personal) or math.isnan(general):
        return math.nan
    total = personal + general
    return 2 * personal * general / total if total > 0 else 0.0


def bytes_to_reach(target: float, stage_T: npt.ArrayLike, bytes_T: npt.ArrayLike) -> float:
    """Return the cumulative bytes after the first stage whose accuracy is at least ``target``; NaN if none is.

    Args:
        target: accuracy in [0, 1].
        stage_T: accuracy after each stage.
        bytes_T: bytes moved during each stage (not cumulative).
    """
    stage, moved = np.asarray(stage_T, dtype=np.float64), np.cumsum(np.asarray(bytes_T, dtype=np.float64))
    reached = np.flatnonzero(stage >= target)
    return float(moved[reached[0]]) if reached.size else math.nan


@dataclass(frozen=True)
class MeanStd:
    """Mean and sample standard deviation (ddof=1) of a number over seeds; ``std`` is NaN for one seed."""

    mean: float
    std: float
    count: int


def over_seeds(values_S: Sequence[float] | npt.ArrayLike) -> MeanStd:
    """Return mean and standard deviation (ddof=1) over the seeds for which the value exists."""
    v = np.asarray(values_S, dtype=np.float64).ravel()
    v = v[~np.isnan(v)]
    if not v.size:
        return MeanStd(math.nan, math.nan, 0)
    return MeanStd(float(v.mean()), float(v.std(ddof=1)) if v.size > 1 else math.nan, int(v.size))


@dataclass(frozen=True)
class Evaluations:
    """The counts of one run, from which :func:`summarise` derives every number.

    Rows of stages that have not run are -1 in the arrays of correct predictions. Numbers of images are kept per stage:
    where images lie on the devices, some may come and some devices may be away.

    Attributes:
        kind: stream kind.
        correct_TT: plain global model, correct predictions on the common test set of each task.
        totals_TT: common test images of each task, after each stage.
        personal_MTT: personal model of each client on its own test slice of each task.
        shared_MTT: plain global model on the same slices ("global on client").
        client_totals_MTT: images in those slices, after each stage.
        common_MTT: personal models on the common test sets ("client on global"), -1 where not measured.
        client_images_M: training images of each client over the whole stream (n_c).
        held_out_T: global model on the held-out classes after each stage, accuracy; NaN without held-out classes.
        zero_shot_T: zero-shot accuracy b_j; NaN when no zero-shot reference is known.
        zero_shot_held_out: zero-shot accuracy on the held-out classes.
    """

    kind: Kind
    correct_TT: npt.NDArray[np.int64]
    totals_TT: npt.NDArray[np.int64]
    personal_MTT: npt.NDArray[np.int64]
    shared_MTT: npt.NDArray[np.int64]
    client_totals_MTT: npt.NDArray[np.int64]
    common_MTT: npt.NDArray[np.int64]
    client_images_M: npt.NDArray[np.int64]
    held_out_T: Values
    zero_shot_T: Values
    zero_shot_held_out: float

    @property
    def matrix_TT(self) -> Values:
        """Accuracy matrix of the plain global model."""
        return accuracies(self.correct_TT, self.totals_TT)

    @property
    def personal_matrices_MTT(self) -> Values:
        """Accuracy matrix of each client's personal model on its own slices."""
        return accuracies(self.personal_MTT, self.client_totals_MTT)

    def personal_stages_MT(self) -> Values:
        """Stage accuracies A_i of each client's personal model on its own slices, shape (M, T)."""
        return self._client_stages(self.personal_matrices_MTT, self.client_totals_MTT)

    def shared_stages_MT(self) -> Values:
        """Stage accuracies of the plain global model on each client's slices, shape (M, T)."""
        return self._client_stages(accuracies(self.shared_MTT, self.client_totals_MTT), self.client_totals_MTT)

    def common_stages_MT(self) -> Values:
        """Stage accuracies of each personal model on the common test sets, shape (M, T)."""
        matrices = accuracies(self.common_MTT, self.totals_TT)
        return self._client_stages(matrices, np.broadcast_to(self.totals_TT, self.client_totals_MTT.shape))

    def _client_stages(self, matrices_MTT: Values, counts_MTT: npt.NDArray[np.int64]) -> Values:
        rows = [stage_accuracies(r, self.kind, n) for r, n in zip(matrices_MTT, counts_MTT, strict=True)]
        return np.array(rows).reshape(len(rows), len(self.totals_TT))


def summarise(evaluations: Evaluations) -> dict[str, float]:
    """Return every accuracy number of one run by name; accuracies in [0, 1], NaN where a value does not exist."""
    e = evaluations
    matrix = e.matrix_TT
    stages = stage_accuracies(matrix, e.kind, e.totals_TT)
    personal_stages = e.personal_stages_MT()
    personal = over_clients(personal_stages[:, -1], e.client_images_M)
    shared = over_clients(e.shared_stages_MT()[:, -1], e.client_images_M)
    common = over_clients(e.common_stages_MT()[:, -1], e.client_images_M)
    personal_forgot, personal_forgot_worst = personal_forgetting(e.personal_matrices_MTT)
    last = last_accuracy(stages)
    return {
        "avg": average_incremental_accuracy(stages),
        "last": last,
        "acc": average_final_accuracy(matrix),
        "learning": learning_accuracy(matrix),
        "forgetting": forgetting(matrix),
        "bwt": backward_transfer(matrix),
        "fwt": forward_transfer(matrix, e.zero_shot_T),
        "held_out": float(e.held_out_T[-1]),
        "zero_shot_retention": zero_shot_retention(float(e.held_out_T[-1]), e.zero_shot_held_out),
        "personal": personal.mean,
        "personal_avg": mean([mean(stage) for stage in personal_stages.T]),
        "personal_weighted": personal.weighted,
        "personal_worst": personal.worst,
        "personal_worst_clients": float(personal.worst_clients),
        "personal_std": personal.std,
        "personal_forgetting": personal_forgot,
        "personal_forgetting_worst": personal_forgot_worst,
        "global_on_client": shared.mean,
        "client_on_global": common.mean,
        "harmonic": harmonic_mean(personal.mean, last),
    }


@dataclass(frozen=True)
class MetricInfo:
    """How a number of :func:`summarise` is shown.

    Attributes:
        title: short column heading.
        meaning: one line.
        better: +1 when higher is better, -1 when lower is, 0 when neither.
        unit: "%" (stored in [0, 1]), "points" (difference of accuracies), "bytes", "tokens", "x", "s" or "".
    """

    title: str
    meaning: str
    better: int
    unit: str


METRICS: Mapping[str, MetricInfo] = {
    "avg": MetricInfo("Avg", "mean over stages of the global model's accuracy on all tasks seen so far", 1, "%"),
    "last": MetricInfo("Last", "global model's accuracy on all tasks after the final stage", 1, "%"),
    "acc": MetricInfo("ACC", "plain mean over tasks of the final accuracy", 1, "%"),
    "learning": MetricInfo("Learning", "mean accuracy on each task right after training on it (plasticity)", 1, "%"),
    "forgetting": MetricInfo("Forgetting", "best earlier minus final accuracy, mean over old tasks", -1, "points"),
    "bwt": MetricInfo("BWT", "final accuracy minus accuracy right after training, mean over old tasks", 1, "points"),
    "fwt": MetricInfo("FWT", "accuracy on a task before its training minus zero-shot accuracy", 1, "points"),
    "intransigence": MetricInfo("Intransigence", "joint training's accuracy on each new task minus ours", -1, "points"),
    "held_out": MetricInfo("Held-out", "global model's accuracy on classes kept out of the stream", 1, "%"),
    "zero_shot_retention": MetricInfo(
        "Retention", "accuracy on held-out classes after the stream minus before", 1, "points"
    ),
    "personal": MetricInfo("Personal", "mean over clients: own model on own test slice, after the final stage", 1, "%"),
    "personal_avg": MetricInfo("Personal Avg", "the same, averaged over all stages", 1, "%"),
    "personal_weighted": MetricInfo("Personal (by n)", "personal accuracy weighted by training images", 1, "%"),
    "personal_worst": MetricInfo(
        "Worst 10 %", "mean personal accuracy of the lowest tenth of clients (10 clients or fewer: the minimum)", 1, "%"
    ),
    "personal_std": MetricInfo("Client std", "standard deviation of personal accuracy over clients", -1, "points"),
    "personal_forgetting": MetricInfo(
        "Personal forgetting", "forgetting on each client's own matrix, mean", -1, "points"
    ),
    "personal_forgetting_worst": MetricInfo("Worst forgetting", "largest forgetting of any client", -1, "points"),
    "global_on_client": MetricInfo("Global on client", "global model on each client's test slice, mean", 1, "%"),
    "client_on_global": MetricInfo("Client on global", "personal models on the common test set, mean", 1, "%"),
    "harmonic": MetricInfo("Harmonic", "harmonic mean of Personal and Last", 1, "%"),
    "bytes_up": MetricInfo("Up", "bytes sent by all clients, measured on serialised messages", -1, "bytes"),
    "bytes_down": MetricInfo("Down", "bytes sent to all clients, measured on serialised messages", -1, "bytes"),
    "trainable": MetricInfo("Trainable", "parameters trained on a client", -1, ""),
    "uploaded": MetricInfo("Uploaded", "distinct parameters a client ever uploads", -1, ""),
    "drafted_own": MetricInfo(
        "Own domain",
        "tokens per pass of the target with the longest draft, the client's own domain",
        1,
        "tokens",
    ),
    "drafted_others": MetricInfo("Other domains", "the same on texts of the other domains", 1, "tokens"),
    "drafted_mixed": MetricInfo("Mixed", "the same where the domain changes with every text", 1, "tokens"),
    "accepted_own": MetricInfo("First token", "first drafted token accepted, own domain", 1, "%"),
    "accepted_mixed": MetricInfo("First token, mixed", "first drafted token accepted, mixed domains", 1, "%"),
    "pass_mixed": MetricInfo(
        "Per pass, mixed",
        "tokens per pass where the selector chooses lengths too, mixed domains",
        1,
        "tokens",
    ),
    "speed_own": MetricInfo(
        "Speed", "tokens per time against plain decoding at the scenario's stated costs, own domain", 1, "x"
    ),
    "speed_mixed": MetricInfo("Speed, mixed", "the same, mixed domains", 1, "x"),
    "seconds": MetricInfo("Seconds", "wall-clock seconds of rounds and evaluations, on this machine", 0, "s"),
}


def format_value(name: str, value: float) -> str:
    """Return ``value`` of metric ``name`` for people; NaN becomes "n/a"."""
    if value is None or math.isnan(value):
        return "n/a"
    unit = METRICS[name].unit if name in METRICS else ""
    if unit == "%":
        return f"{100 * value:.1f}"
    if unit == "points":
        points = round(100 * value, 1) + 0.0  # no "-0.0"
        return f"{points:+.1f}" if METRICS[name].better > 0 else f"{points:.1f}"
    if unit == "bytes":
        return format_bytes(value)
    if unit in ("tokens", "x"):
        return f"{value:.2f}"
    if unit == "s":
        return f"{value:.0f}"
    return f"{value:,.0f}"


def format_bytes(count: float) -> str:
    """Return a byte count with a decimal unit (1 MB = 1,000,000 bytes)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def _square(matrix_TT: npt.ArrayLike) -> Values:
    r = np.asarray(matrix_TT, dtype=np.float64)
    if r.ndim != 2 or r.shape[0] != r.shape[1] or r.shape[0] == 0:
        raise ValueError(f"an accuracy matrix is square and not empty, got shape {r.shape}")
    return r


def _vector(values_T: npt.ArrayLike, length: int) -> Values:
    v: Any = np.asarray(values_T, dtype=np.float64)
    if v.shape != (length,):
        raise ValueError(f"{length} tasks but values of shape {v.shape}")
    return np.asarray(v, dtype=np.float64)
