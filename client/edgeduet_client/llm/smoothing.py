"""Large numbers in single channels of the activations, moved into the weights behind them.

A row of activations that is rounded with one scale (:mod:`edgeduet_client.llm.integer_matrix`) loses most where a few
channels hold numbers far larger than the rest. Dividing every channel by a factor and multiplying the columns of the
weights behind by it leaves the model what it was, and spreads the difficulty (SmoothQuant, Xiao et al. 2023)::

    s[k] = max |x[:, k]|**a / max |W[:, k]|**(1 - a)            scaled so that the geometric mean is 1

Something in front has to take up the division: the gain of the norm before q, k, v and before gate and up, and the
rows of the up projection before down. The head gets one more multiplication, since what is in front of it is read by
others; the output projection of attention stays as it is, since it gained nothing (measured).

Largest magnitudes are read from the float32 graph on texts that Python ships, never on the text that perplexity is
measured on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_client.llm.block_matrix import BlockMatrix, DenseMatrix
from edgeduet_client.llm.integer_matrix import IntegerMatrix, round_outputs
from edgeduet_client.llm.tokenizer import Tokenizer

ALPHA = 0.5
"""How much of the difficulty goes into the weights; measured best of .35, .5, .65 on SmolLM2-135M."""

_TOPICS = ("for", "import", "operator-summary", "specialnames")
_LONGEST = 512
_LEAST = 1e-4
_CONSUMERS = {"attention_norm": ("q", "k", "v"), "mlp_norm": ("gate", "up"), "gated": ("down",)}
_INPUT_OF = {part: name for name, parts in _CONSUMERS.items() for part in parts}

Ranges = Mapping[str, np.ndarray]
"""Largest magnitude of every channel, float32 ``(K,)``, by ``blocks.L.`` and ``attention_norm``, ``mlp_norm`` or
``gated`` (what down multiplies); and ``hidden``."""


def calibration_texts(tokenizer: Tokenizer, beginning: Sequence[int], longest: int) -> list[list[int]]:
    """Return ids of texts to read ranges on, each of at most ``longest`` tokens: Python's own language reference."""
    from pydoc_data.topics import topics

    longest = min(longest, _LONGEST)
    return [[*beginning, *tokenizer.encode(topics[name])][:longest] for name in _TOPICS]


def input_ranges(graph: Path, texts: Sequence[Sequence[int]]) -> Ranges:
    """Return the largest magnitudes of what the products of a graph multiply.

    Args:
        graph: of float32, as :func:`~edgeduet_client.llm.graph.build_graph` wrote it; its weights lie beside it.
        texts: token ids.
    """
    import onnx
    import onnxruntime

    model = onnx.load(str(graph), load_external_data=False)
    produced = {output for node in model.graph.node for output in node.output}
    layers = sum(1 for value in model.graph.input if value.name.startswith("past_key."))
    watched = {
        f"blocks.{layer}.{name}": f"blocks.{layer}.{name}" + ("" if name == "gated" else ".out")
        for layer in range(layers)
        for name in _CONSUMERS
    }
    watched["hidden"] = "hidden"
    assert produced.issuperset(watched.values())
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(value, 1, None) for value in watched.values())
    shown = graph.with_name("watched.onnx")
    shown.write_bytes(model.SerializeToString())
    try:
        session = onnxruntime.InferenceSession(str(shown), providers=["CPUExecutionProvider"])
        largest: dict[str, np.ndarray] = {}
        for ids in texts:
            found = session.run(list(watched.values()), _feeds(session, ids))
            for name, values in zip(watched, found, strict=True):
                channels_K = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0)
                largest[name] = np.maximum(largest.get(name, 0), channels_K)
    finally:
        shown.unlink()
    return largest


def _feeds(session: Any, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the inputs for ``ids`` after nothing."""
    count = len(ids)
    stated: dict[str, np.ndarray] = {
        "input_ids": np.array([ids], np.int64),
        "rows": np.arange(count),
        "seqlens_k": np.array([count - 1], np.int32),
        "total_sequence_length": np.array(count, np.int32),
    }
    wanted = session.get_inputs()
    room = {value.name: (1, value.shape[1], count, value.shape[3]) for value in wanted if value.name not in stated}
    asked = {value.name for value in wanted}
    return {
        **{name: values for name, values in stated.items() if name in asked},
        **{name: np.zeros(shape, np.float32) for name, shape in room.items()},
    }


class SmoothedWeights:
    """The weights of a source with channels moved: every matrix dense but the head, which has factors.

    Args:
        source: where they come from.
        ranges: of :func:`input_ranges`.
        head: name of the matrix that makes logits.
        unit_offset: gains are stored less one (:attr:`Architecture.unit_offset_norms`).
    """

    def __init__(self, source: Any, ranges: Ranges, *, head: str, unit_offset: bool) -> None:
        self._source = source
        self._ranges = ranges
        self._head = head
        self._offset = np.float32(1 if unit_offset else 0)
        self._factors: dict[str, np.ndarray] = {}

    def matrix(self, name: str) -> DenseMatrix | BlockMatrix | IntegerMatrix:
        """Return a matrix, its columns multiplied, and the rows of an up projection divided."""
        matrix: DenseMatrix | BlockMatrix = self._source.matrix(name)
        if name == self._head:
            values = matrix.dense()
            return round_outputs(values, 1 / _factor(self._ranges["hidden"], np.abs(values).max(axis=0)))
        block, _, part = name.rpartition(".")
        if part not in _INPUT_OF:
            return matrix
        values_NK = matrix.dense() * self._factor(f"{block}.{_INPUT_OF[part]}")
        if part == "up":
            values_NK /= self._factor(f"{block}.gated")[:, None]
        return DenseMatrix(values_NK)

    def vector(self, name: str) -> np.ndarray | None:
        """Return a vector; gains and the bias of an up projection divided."""
        vector: np.ndarray | None = self._source.vector(name)
        block, _, part = name.rpartition(".")
        if vector is None:
            return None
        if name.endswith(".up.bias"):
            return vector / self._factor(name.removesuffix("up.bias") + "gated")
        if block and part in _CONSUMERS:
            return (vector + self._offset) / self._factor(name) - self._offset
        return vector

    def _factor(self, name: str) -> np.ndarray:
        """Return what the channels of ``blocks.L.`` and an input are divided by, ``(K,)``."""
        if name not in self._factors:
            block, _, given = name.rpartition(".")
            weights_K = np.max(
                [np.abs(self._source.matrix(f"{block}.{part}").dense()).max(axis=0) for part in _CONSUMERS[given]],
                axis=0,
            )
            self._factors[name] = _factor(self._ranges[name], weights_K)
        return self._factors[name]


def _factor(inputs_K: np.ndarray, weights_K: np.ndarray) -> np.ndarray:
    """Return what inputs are divided by, from the largest magnitudes of inputs and weights."""
    factor_K = np.maximum(inputs_K, _LEAST) ** ALPHA / np.maximum(weights_K, _LEAST) ** (1 - ALPHA)
    scaled: np.ndarray = (factor_K / np.exp(np.log(factor_K).mean())).astype(np.float32)
    return scaled
