"""A GGUF file as a source of weights: metadata, vectors, and matrices under our names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_client.llm.architecture import Architecture, from_gguf
from edgeduet_client.llm.block_matrix import BlockMatrix, DenseMatrix
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gguf_blocks import REPACKABLE, repack

_BLOCK_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "post_attention_norm": "post_attention_norm",
    "post_mlp_norm": "post_ffw_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}
_TOP_NAMES = {"embedding": "token_embd", "head": "output", "final_norm": "output_norm"}


class GgufWeights:
    """The weights of one GGUF file.

    Raises:
        ModelError: not a GGUF file, or one that is cut short.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path}: not a whole GGUF file ({error}); fetch it again") from error
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        self._used: set[str] = set()
        self._check_length()
        if int(self.fields.get("split.count", 1)) > 1:
            raise ModelError(f"{path} is one of several parts; join them with llama.cpp's gguf-split --merge first")

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Metadata as plain values."""
        return {key: field.contents() for key, field in self._fields.items()}

    @cached_property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        table = self._tensor("token_embd.weight")
        divisors = self._tensors.get("rope_freqs.weight")
        self._used.add("rope_freqs.weight")
        return from_gguf(
            self.fields,
            vocab_width=int(table.shape[1]),
            has_head="output.weight" in self._tensors,
            rope_divisors=None if divisors is None else tuple(self._dense(divisors).reshape(-1).tolist()),
        )

    @property
    def kinds(self) -> dict[str, int]:
        """How many numbers the file stores in each tensor type."""
        counts: dict[str, int] = {}
        for tensor in self._tensors.values():
            counts[tensor.tensor_type.name] = counts.get(tensor.tensor_type.name, 0) + int(tensor.n_elements)
        return counts

    def unused(self) -> list[str]:
        """Names of tensors that nobody asked for."""
        return sorted(self._tensors.keys() - self._used)

    def vector(self, name: str) -> np.ndarray | None:
        """Return a vector as float32 or ``None`` (see :class:`edgeduet_client.llm.graph.Weights`)."""
        stored = _stored_name(name)
        tensor = self._tensors.get(stored)
        if tensor is None:
            return None
        self._used.add(stored)
        values = self._dense(tensor).reshape(-1)
        if self.architecture.interleaved_queries and name.endswith((".q.bias", ".k.bias")):
            values = values[self._half_split_order(len(values))]
        return values

    def matrix(self, name: str) -> DenseMatrix | BlockMatrix:
        """Return a matrix in the blocks of the file, or as float32 where the file has floats."""
        tensor = self._tensor(_stored_name(name))
        kind = tensor.tensor_type.name
        shape = (int(tensor.shape[1]), int(tensor.shape[0]))
        if kind in REPACKABLE:
            matrix: DenseMatrix | BlockMatrix = repack(tensor.data, kind, shape)
        else:
            matrix = DenseMatrix(self._dense(tensor).reshape(shape))
        if self.architecture.interleaved_queries and name.endswith((".q", ".k")):
            return matrix.take_rows(self._half_split_order(shape[0]))
        return matrix

    def _tensor(self, stored: str) -> Any:
        if stored not in self._tensors:
            raise ModelError(f"{self.path}: the tensor {stored} is missing; fetch the file again")
        self._used.add(stored)
        return self._tensors[stored]

    def _half_split_order(self, outputs: int) -> np.ndarray:
        """Rows of a head stored as rotary pairs, in the order of first halves, then second halves."""
        width = self.architecture.head_dim
        return np.arange(outputs).reshape(-1, width // 2, 2).swapaxes(1, 2).reshape(-1)

    def _dense(self, tensor: Any) -> np.ndarray:
        from gguf import dequantize

        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelError(
                f"{self.path}: tensor type {kind} of {tensor.name} is not supported; "
                f"use a file in {', '.join(sorted(REPACKABLE))}, F16 or BF16"
            ) from error

    def _check_length(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._tensors.values():
            if tensor.data_offset + tensor.n_bytes > size:
                raise ModelError(f"{self.path}: the file ends inside {tensor.name}; fetch it again")


def _stored_name(name: str) -> str:
    """Return the GGUF spelling of one of our names."""
    if name in _TOP_NAMES:
        return f"{_TOP_NAMES[name]}.weight"
    _, layer, part, *rest = name.split(".")
    return f"blk.{layer}.{_BLOCK_NAMES[part]}.{rest[0] if rest else 'weight'}"
