"""One ONNX Runtime session per model, and the step everything else is made of: new tokens in, rows of logits out.

Python must not slow the model down. A step of a small model takes about 10 ms; naming 60 cache tensors anew costs
0.7 ms of it. So each cache keeps one binding per form of step (new tokens, rows wanted): inputs and outputs are
fixed memory, the cache is bound in place as past and as present, and a step only writes a few numbers.

Shapes: S new tokens, R rows asked for, V width of the logits, H hidden width.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.kv_cache import CacheShape, KVCache

OLDEST_ONNXRUNTIME = (1, 23)
"""The first release whose embedding lookup takes blocks of 8 bits; the graphs use it."""

PREFILL_CHUNK = 64
"""New tokens per step while reading a prompt: large enough for matrix products, small enough for little memory."""

_MOST_THREADS = 4
_KEPT_BINDINGS = 16
"""Drafts of up to eight tokens and no draft are nine forms of step; the rest is for prompts."""


@dataclass(frozen=True)
class Forward:
    """What a step returned.

    The arrays are the session's own memory: the next step of the same form on the same cache overwrites them.

    Attributes:
        logits: (R, V) float32, raw.
        hidden: (R, H) float32, what the head multiplied, or ``None`` where it was not asked for.
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32] | None


@dataclass
class _Step:
    """A form of step on one cache: its binding, and the memory the binding points to.

    Between two steps the model has pushed everything else out of the processor's caches, and whatever Python touches
    there costs a hundred times what it costs in a loop of its own: so this touches little.
    """

    binding: Any
    ids: NDArray[np.int64]
    rows: NDArray[np.int64]
    last_position: NDArray[np.int32]
    total: NDArray[np.int32]
    outcome: Forward
    asked: tuple[int, ...] = ()

    def enter(self, ids: Sequence[int], rows: tuple[int, ...], start: int) -> None:
        """Write the inputs of a step behind ``start`` positions."""
        count = len(ids)
        if count == 1:
            self.ids[0, 0] = ids[0]
        else:
            self.ids[0] = ids
        if rows != self.asked:
            self.rows[:] = rows
            self.asked = rows
        self.last_position[0] = start + count - 1
        self.total[()] = start + count


def usable_cores() -> int:
    """Return how many processor cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class TargetSession:
    """A model that is loaded and ready; any number of threads may step it, each with a cache of its own.

    Args:
        graph: the ONNX file, with its weights beside it.
        context_length: the longest context in tokens.
        threads: cores a step may use; default: those this process may run on, at most four (more do not make a
            small model faster).
        weights: folder of the weights that the graph names; default: its own.

    Raises:
        ModelError: onnxruntime is missing or too old, or the file is missing, damaged or no such model.
    """

    def __init__(
        self, graph: Path | str, *, context_length: int, threads: int | None = None, weights: Path | None = None
    ) -> None:
        self.path = Path(graph)
        self._weights = weights
        self.threads = threads if threads is not None else min(usable_cores(), _MOST_THREADS)
        if self.threads < 1:
            raise ModelError(f"threads={threads} is not possible; give 1 or more, or leave it out")
        self._onnxruntime = _import_onnxruntime()
        self._session = self._load()
        self.cache_shape = self._cache_shape(context_length)
        outputs = {output.name: output.shape for output in self._session.get_outputs()}
        self.vocab_width = int(outputs["logits"][1])
        self.hidden_width = int(outputs["hidden"][1])

    def new_cache(self) -> KVCache:
        """Return an empty cache for one sequence."""
        return KVCache(self.cache_shape)

    def forward(
        self, ids: Sequence[int], cache: KVCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Forward:
        """Run ``ids`` behind what ``cache`` holds, append them to it, and return the rows asked for.

        Args:
            ids: S >= 1 new tokens.
            cache: made by :meth:`new_cache` of this session.
            rows: which of the S positions to return, 0 being the first new token; default: the last only.
                None of them at all (``()``) is the cheapest: the head is not computed.
            hidden: also return the hidden rows.

        Raises:
            RequestError: the context is full.
            ModelError: ONNX Runtime failed; the cache is as it was before.
        """
        start, count = len(cache.tokens), len(ids)
        if start + count > cache.capacity:
            cache.reserve(start + count)
        wanted = (count - 1,) if rows is None else tuple(rows)
        form = (count, len(wanted), hidden)
        step = cache.prepared.get(form) or self._prepare(cache, form)
        step.enter(ids, wanted, start)
        try:
            self._session.run_with_iobinding(step.binding)
        except RuntimeError as error:
            raise ModelError(f"{self.path} failed on tokens {start} to {start + count - 1}: {_first(error)}") from error
        cache.append(ids)
        return step.outcome

    def prefill(
        self, ids: Sequence[int], cache: KVCache, *, rows: Sequence[int] | None = None, hidden: bool = False
    ) -> Forward:
        """As :meth:`forward`, in chunks of ``PREFILL_CHUNK`` tokens, for prompts of any length.

        ``rows`` (ascending) count over all of ``ids``; the arrays returned are the caller's own.
        """
        wanted = np.asarray([len(ids) - 1] if rows is None else rows, np.int64)
        cache.reserve(cache.length + len(ids))
        logits, states = [], []
        for start, chunk in prefill_chunks(ids):
            inside = wanted[(wanted >= start) & (wanted < start + len(chunk))] - start
            outcome = self.forward(chunk, cache, rows=inside.tolist(), hidden=hidden)
            logits.append(outcome.logits.copy())
            if outcome.hidden is not None:
                states.append(outcome.hidden.copy())
        return Forward(np.concatenate(logits), np.concatenate(states) if states else None)

    def _load(self) -> Any:
        if not self.path.is_file():
            raise ModelError(f"{self.path} does not exist; import the model again")
        options = self._onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.execution_mode = self._onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        # A step is some 300 small products. A worker that slept between them would wake up too late for each (two
        # threads were 1.1x one; 1.4x with workers that wait actively, for less processor time), so workers spin while
        # a step runs, and sleep as soon as none does: an idle model costs nothing.
        options.add_session_config_entry("session.intra_op.allow_spinning", "1")
        options.add_session_config_entry("session.force_spinning_stop", "1")
        # The arena keeps the memory of a step for the next one. Without it the C library gives pages back and takes
        # them again at every step, 5 % of one; and steps are small (64 tokens at most), so it keeps little.
        options.enable_cpu_mem_arena = True
        # Patterns pay where shapes repeat; every prompt ends in a chunk of another length.
        options.enable_mem_pattern = False
        # What goes wrong is raised, as one line; the library's own log would come on top of it.
        options.log_severity_level = 4
        graph: str | bytes = str(self.path)
        if self._weights is not None:
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(self._weights))
            graph = self.path.read_bytes()
        try:
            return self._onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common base class
            raise ModelError(
                f"ONNX Runtime {self._onnxruntime.__version__} cannot load {self.path}: {_first(error)}; "
                "import the model again, or update onnxruntime"
            ) from error

    def _cache_shape(self, context_length: int) -> CacheShape:
        """Read the cache's shape from the graph's own inputs."""
        past = [entry for entry in self._session.get_inputs() if entry.name.startswith("past_key.")]
        outputs = {entry.name for entry in self._session.get_outputs()}
        if not past or not {"logits", "hidden", "present_key.0", "present_value.0"} <= outputs:
            raise ModelError(f"{self.path} is no graph that `llm import` wrote; import the model again")
        _, kv_heads, _, head_dim = past[0].shape
        return CacheShape(layers=len(past), kv_heads=int(kv_heads), head_dim=int(head_dim), limit=context_length)

    def _prepare(self, cache: KVCache, form: tuple[int, int, bool]) -> _Step:
        """Bind a form of step to the buffers of ``cache``, and keep the binding with the cache."""
        count, row_count, hidden = form
        tensor = self._onnxruntime.OrtValue.ortvalue_from_numpy
        step = _Step(
            binding=self._session.io_binding(),
            ids=np.zeros((1, count), np.int64),
            rows=np.zeros(row_count, np.int64),
            last_position=np.zeros(1, np.int32),
            total=np.zeros((), np.int32),
            outcome=Forward(
                np.zeros((row_count, self.vocab_width), np.float32),
                np.zeros((row_count, self.hidden_width), np.float32) if hidden else None,
            ),
        )
        inputs = {
            "input_ids": step.ids,
            "rows": step.rows,
            "seqlens_k": step.last_position,
            "total_sequence_length": step.total,
        }
        for name, array in inputs.items():
            step.binding.bind_ortvalue_input(name, tensor(array))
        step.binding.bind_ortvalue_output("logits", tensor(step.outcome.logits))
        if step.outcome.hidden is not None:
            step.binding.bind_ortvalue_output("hidden", tensor(step.outcome.hidden))
        for place, buffer in enumerate(cache.buffers):
            name, layer = ("key", "value")[place % 2], place // 2
            shared = tensor(buffer)
            step.binding.bind_ortvalue_input(f"past_{name}.{layer}", shared)
            step.binding.bind_ortvalue_output(f"present_{name}.{layer}", shared)
        # Prompts end in chunks of every length: the oldest form makes room, so that forms do not pile up.
        while len(cache.prepared) >= _KEPT_BINDINGS:
            del cache.prepared[next(iter(cache.prepared))]
        cache.prepared[form] = step
        return step


def prefill_chunks(ids: Sequence[int], size: int = PREFILL_CHUNK) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield (place of the first token, tokens) of every chunk of ``ids``."""
    for start in range(0, len(ids), size):
        yield start, ids[start : start + size]


def _import_onnxruntime() -> Any:
    remedy = "pip install 'edgeduet[llm]'"
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ModelError(f"the local language model needs onnxruntime ({_first(error)}); {remedy}") from error
    version = tuple(int(number) for number in re.findall(r"\d+", onnxruntime.__version__)[:2])
    if version < OLDEST_ONNXRUNTIME:
        needed = ".".join(map(str, OLDEST_ONNXRUNTIME))
        raise ModelError(f"onnxruntime {onnxruntime.__version__} is too old, {needed} or newer is needed; {remedy}")
    return onnxruntime


def _first(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
