"""Which matrix gets how many bits.

==========  =====================================================================================
``none``    every matrix in float32
``int8``    8-bit blocks of 128, for the down projection 64; an 8-bit GGUF file's own blocks, unchanged
``w8a8``    8 bits with one scale per output, and products in integers whose rows do not depend on
            each other (:mod:`edgeduet_client.llm.integer_matrix`)
``int4``    a GGUF file with 4-bit matrices: the file's own blocks, unchanged, and 8 bits for what
            the file holds in floats or in a type whose codes stand for no even steps (IQ4, Q3_K).
            Otherwise 4-bit blocks of 32, and 8 bits for the matrices that suffer most: the
            embedding, the head, and the value and down projections
==========  =====================================================================================

Rounding to 4 bits without looking at data costs much on small models (20-80 % of perplexity measured on
SmolLM2-135M and Gemma-3-270M with every matrix at 4 bits), so what an import costs is measured, printed
and stored, and refused where it is too much (:mod:`edgeduet_client.llm.import_checks`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import numpy as np

from edgeduet_client.llm.block_matrix import BlockMatrix, DenseMatrix, quantise
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.graph import AnyMatrix, Weights
from edgeduet_client.llm.integer_matrix import IntegerMatrix, round_outputs
from edgeduet_client.llm.model_folder import Dtype

Quantisation = Literal["none", "int8", "w8a8", "int4"]
DTYPES: Mapping[Quantisation, Dtype] = {"none": "fp32", "int8": "int8", "w8a8": "w8a8", "int4": "int4"}

_FOUR_BIT_KINDS = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_SENSITIVE = (".v", ".down")
_FAST_BLOCK = 128
"""ONNX Runtime's 8-bit product is 1.2 times faster at this block than at 32 (1.32, AVX512-VNNI)."""
_UNEVEN_INPUTS = (".down",)
_UNEVEN_BLOCK = 64
"""Inputs with single very large numbers. Rounded in blocks of 128 they take 2 % of SmolLM2's perplexity, in blocks of
64 half a percent (and in blocks of 32 nothing, but a step takes 3 % longer)."""


class _Source(Weights, Protocol):
    """Weights that may say in which types a file stores them."""


def has_own_four_bits(kinds: Mapping[str, int]) -> bool:
    """Whether a GGUF file of these tensor types (numbers stored in each) is a 4-bit file."""
    return any(kind in _FOUR_BIT_KINDS for kind in kinds)


class QuantisedWeights:
    """Weights of a source at the bits asked for; counts what it hands out.

    Args:
        keep_blocks: hand the source's own blocks on (what a file of these bits wants, and nothing else does).
    """

    def __init__(self, source: _Source, quantisation: Quantisation, *, keep_blocks: bool) -> None:
        self._source = source
        self._quantisation = quantisation
        self._keep_blocks = keep_blocks
        self._sizes: dict[str, tuple[int, int]] = {}
        # Wanted twice, for the graph and for the norms of its rows, and slow to convert.
        self._tables: dict[str, AnyMatrix] = {}

    @property
    def bits_per_weight(self) -> float:
        """Mean bits per number over the matrices handed out, scales and offsets included."""
        bits = sum(size for size, _ in self._sizes.values())
        return bits / max(1, sum(count for _, count in self._sizes.values()))

    def vector(self, name: str) -> np.ndarray | None:
        """Return a vector unchanged."""
        return self._source.vector(name)

    def matrix(self, name: str) -> AnyMatrix:
        """Return a matrix at its bits."""
        if name in self._tables:
            return self._tables[name]
        matrix = self._converted(name, self._source.matrix(name))
        self._sizes[name] = _bits(matrix)
        if name in ("embedding", "head"):
            self._tables[name] = matrix
        return matrix

    def _converted(self, name: str, matrix: AnyMatrix) -> AnyMatrix:
        if self._quantisation == "none":
            return DenseMatrix(matrix.dense())
        if isinstance(matrix, IntegerMatrix):
            return matrix
        if self._quantisation == "w8a8":
            return round_outputs(matrix.dense())
        if isinstance(matrix, BlockMatrix):
            fits = self._quantisation == "int4" or (matrix.bits == 8 and matrix.offsets_NB is None)
            if self._keep_blocks and fits:
                return matrix
        bits = 8
        rounds_to_4 = self._quantisation == "int4" and not self._keep_blocks
        if rounds_to_4 and name not in ("embedding", "head") and not name.endswith(_SENSITIVE):
            bits = 4
        values = matrix.dense()
        if bits == 8 and not name.endswith(_UNEVEN_INPUTS):
            return quantise(values, bits=8, block=_FAST_BLOCK)
        sizes = (_UNEVEN_BLOCK, 32, 16) if self._quantisation == "int8" else (32, 16)
        block = next((size for size in sizes if values.shape[1] % size == 0), None)
        if block is None:
            raise ModelError(f"{name} has {values.shape[1]} inputs, no multiple of 16; import with --quantize none")
        return quantise(values, bits=bits, block=block)


def _bits(matrix: AnyMatrix) -> tuple[int, int]:
    """Bits stored and numbers stood for."""
    if isinstance(matrix, DenseMatrix):
        return 32 * matrix.values_NK.size, matrix.values_NK.size
    if isinstance(matrix, IntegerMatrix):
        return 8 * matrix.codes_NK.size + 32 * matrix.steps_N.size, matrix.codes_NK.size
    extras = matrix.scales_NB.size + (0 if matrix.offsets_NB is None else matrix.offsets_NB.size)
    return matrix.bits * matrix.codes_NK.size + 32 * extras, matrix.codes_NK.size
