"""Weight matrices as ONNX Runtime's block-quantised product reads them.

A weight of ``N`` outputs and ``K`` inputs is cut along ``K`` into blocks of 16 or 32; each block has one
scale and codes of 4 or 8 bits::

    w[n, k] = scale[n, b] * (code[n, k] - 2**(bits - 1)) + offset[n, b]        b = k // block

``com.microsoft.MatMulNBits`` computes the first term with integer arithmetic. It knows offsets only as
zero points, which are integers in the fast kernel and leave it otherwise (measured: 40-170 times slower
in ONNX Runtime 1.32). So an offset is a second, small product, ``sum of x over the block @ offset.T``,
which costs ``1 / block`` of a dense one and keeps GGUF blocks that have a minimum (Q4_1, Q4_K) exact.

Shapes: N outputs, K inputs, B blocks of a row (``K / block``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Large tables are worked on in pieces, so that what comes in between stays small.
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class DenseMatrix:
    """A weight as float32 ``(N, K)``."""

    values_NK: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.values_NK.shape
        return outputs, inputs

    def dense(self) -> np.ndarray:
        """Return float32 ``(N, K)``."""
        return self.values_NK

    def take_rows(self, order: np.ndarray) -> DenseMatrix:
        """Return the matrix with its outputs in ``order``."""
        return DenseMatrix(self.values_NK[order])


@dataclass(frozen=True)
class BlockMatrix:
    """A block-quantised weight.

    Attributes:
        codes_NK: uint8 ``(N, K)``, one code each, below ``2**bits``.
        scales_NB: float32 ``(N, B)``.
        offsets_NB: float32 ``(N, B)``, or ``None`` where all are zero.
    """

    bits: int
    block: int
    codes_NK: np.ndarray
    scales_NB: np.ndarray
    offsets_NB: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes_NK.shape
        return outputs, inputs

    def dense(self) -> np.ndarray:
        """Return the weight that the codes stand for, float32 ``(N, K)``."""
        outputs, inputs = self.codes_NK.shape
        values_NBk = self.codes_NK.reshape(outputs, -1, self.block).astype(np.float32)
        # In place: a table of 262 144 tokens is 0.7 GB per copy.
        values_NBk -= float(1 << (self.bits - 1))
        values_NBk *= self.scales_NB[..., None]
        if self.offsets_NB is not None:
            values_NBk += self.offsets_NB[..., None]
        return values_NBk.reshape(outputs, inputs)

    def packed(self) -> np.ndarray:
        """Return the codes as ``MatMulNBits`` stores them: uint8 ``(N, B, block * bits / 8)``, low half first."""
        codes_NBk = self.codes_NK.reshape(self.codes_NK.shape[0], -1, self.block)
        if self.bits == 8:
            return codes_NBk
        return codes_NBk[..., 0::2] | (codes_NBk[..., 1::2] << 4)

    def take_rows(self, order: np.ndarray) -> BlockMatrix:
        """Return the matrix with its outputs in ``order``."""
        offsets = None if self.offsets_NB is None else self.offsets_NB[order]
        return BlockMatrix(self.bits, self.block, self.codes_NK[order], self.scales_NB[order], offsets)

    @property
    def layout(self) -> tuple[int, int, bool]:
        """Two matrices of one layout over the same input can be stacked into one product."""
        return self.bits, self.block, self.offsets_NB is not None


def row_norms(matrix: DenseMatrix | BlockMatrix, *, rows: int = _ROWS_AT_ONCE) -> np.ndarray:
    """Return the Euclidean norm of every row, float32 ``(N,)``, reading ``rows`` of them at a time."""
    outputs, _ = matrix.shape
    pieces = [matrix.take_rows(np.arange(at, min(at + rows, outputs))) for at in range(0, outputs, rows)]
    return np.concatenate([np.linalg.norm(piece.dense(), axis=1) for piece in pieces]).astype(np.float32)


def stack(parts: Sequence[DenseMatrix | BlockMatrix]) -> DenseMatrix | BlockMatrix | None:
    """Put matrices over the same input on top of each other; ``None`` where their layouts differ."""
    if all(isinstance(part, DenseMatrix) for part in parts):
        return DenseMatrix(np.concatenate([part.dense() for part in parts]))
    blocks = [part for part in parts if isinstance(part, BlockMatrix)]
    if len(blocks) < len(parts) or len({part.layout for part in blocks}) > 1:
        return None
    first = blocks[0]
    offsets = [part.offsets_NB for part in blocks if part.offsets_NB is not None]
    return BlockMatrix(
        first.bits,
        first.block,
        np.concatenate([part.codes_NK for part in blocks]),
        np.concatenate([part.scales_NB for part in blocks]),
        np.concatenate(offsets) if offsets else None,
    )


def quantise(values_NK: np.ndarray, *, bits: int, block: int = 32) -> BlockMatrix:
    """Round a dense weight to symmetric blocks (the formulas: :func:`_quantise_rows`).

    Args:
        values_NK: float32 ``(N, K)``; ``K`` is a multiple of ``block``.
        bits: 4 or 8.
    """
    outputs, inputs = values_NK.shape
    codes_NK = np.empty((outputs, inputs), np.uint8)
    scales_NB = np.empty((outputs, inputs // block), np.float32)
    for at in range(0, outputs, _ROWS_AT_ONCE):
        here = slice(at, at + _ROWS_AT_ONCE)
        codes_NK[here], scales_NB[here] = _quantise_rows(values_NK[here], bits, block)
    return BlockMatrix(bits, block, codes_NK, scales_NB)


def _quantise_rows(values_NK: np.ndarray, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes ``(N, K)`` and scales ``(N, B)``.

    8 bits: the scale puts the largest magnitude of the block on code 127, as GGUF's Q8_0 does. 4 bits: the
    signed extreme goes to code -8 (one more level than +7), as Q4_0 does, and of a few shrunken scales the
    one with the least squared error is kept.
    """
    outputs, inputs = values_NK.shape
    values_NBk = values_NK.reshape(outputs, inputs // block, block).astype(np.float32)
    largest_NB = np.abs(values_NBk).max(axis=-1)
    if bits == 8:
        scales_NB = largest_NB / 127.0
        codes = _codes(values_NBk, scales_NB, bits)
    else:
        at_NB = np.abs(values_NBk).argmax(axis=-1)
        extreme_NB = np.take_along_axis(values_NBk, at_NB[..., None], axis=-1)[..., 0]
        scales_NB = extreme_NB / -8.0
        codes = _codes(values_NBk, scales_NB, bits)
        error_NB = _squared_error(values_NBk, codes, scales_NB)
        for shrink in (0.95, 0.9, 0.85, 0.8):
            tried_NB = extreme_NB / -8.0 * np.float32(shrink)
            tried = _codes(values_NBk, tried_NB, bits)
            tried_error_NB = _squared_error(values_NBk, tried, tried_NB)
            better_NB = tried_error_NB < error_NB
            codes[better_NB] = tried[better_NB]
            scales_NB = np.where(better_NB, tried_NB, scales_NB)
            error_NB = np.minimum(tried_error_NB, error_NB)
    return codes.reshape(outputs, inputs), scales_NB


def _codes(values_NBk: np.ndarray, scales_NB: np.ndarray, bits: int) -> np.ndarray:
    middle = 1 << (bits - 1)
    inverse_NB = np.divide(1.0, scales_NB, out=np.zeros_like(scales_NB), where=scales_NB != 0)
    rounded = np.rint(values_NBk * inverse_NB[..., None])
    return (np.clip(rounded, -middle, middle - 1) + middle).astype(np.uint8)


def _squared_error(values_NBk: np.ndarray, codes: np.ndarray, scales_NB: np.ndarray) -> np.ndarray:
    return np.square((codes.astype(np.float32) - 8.0) * scales_NB[..., None] - values_NBk).sum(axis=-1)
