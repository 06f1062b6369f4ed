"""Weight matrices as ONNX Runtime's block-quantised product reads them.

A weight of ``N`` outputs and ``K`` inputs is cut along ``K`` into blocks of 16, 32 or 128; each block has one
scale and codes of 4 or 8 bits, and the last may be cut short by the end of the row::

    w[n, k] = scale[n, b] * (code[n, k] - 2**(bits - 1)) + offset[n, b]        b = k // block

``com.microsoft.MatMulNBits`` computes the first term with integer arithmetic. It knows offsets only as
zero points, which are integers in the fast kernel and leave it otherwise (measured: 40-170 times slower
in ONNX Runtime 1.32). So an offset is a second, small product, ``sum of x over the block @ offset.T``,
which costs ``1 / block`` of a dense one and keeps GGUF blocks that have a minimum (Q4_1, Q4_K) exact.

Shapes: N outputs, K inputs, B blocks of a row (``K / block``, rounded up).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# Large tables are worked on in pieces, so that what comes in between stays small.
_ROWS_AT_ONCE = 4096
_NUMBERS_AT_ONCE = 1 << 20


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
        values_NBk = self._whole_blocks().astype(np.float32)
        # In place: a table of 262 144 tokens is 0.7 GB per copy.
        values_NBk -= float(1 << (self.bits - 1))
        values_NBk *= self.scales_NB[..., None]
        if self.offsets_NB is not None:
            values_NBk += self.offsets_NB[..., None]
        return values_NBk.reshape(outputs, -1)[:, :inputs]

    def packed(self) -> np.ndarray:
        """Return the codes as ``MatMulNBits`` stores them: uint8 ``(N, B, block * bits / 8)``, low half first."""
        codes_NBk = self._whole_blocks()
        if self.bits == 8:
            return codes_NBk
        return codes_NBk[..., 0::2] | (codes_NBk[..., 1::2] << 4)

    def _whole_blocks(self) -> np.ndarray:
        """Return the codes as ``(N, B, block)``, a last block that is cut short filled up with the code of zero."""
        outputs, inputs = self.codes_NK.shape
        missing = -inputs % self.block
        codes_NK = self.codes_NK
        if missing:
            codes_NK = np.pad(codes_NK, ((0, 0), (0, missing)), constant_values=1 << (self.bits - 1))
        return codes_NK.reshape(outputs, -1, self.block)

    def take_rows(self, order: np.ndarray) -> BlockMatrix:
        """Return the matrix with its outputs in ``order``."""
        offsets = None if self.offsets_NB is None else self.offsets_NB[order]
        return BlockMatrix(self.bits, self.block, self.codes_NK[order], self.scales_NB[order], offsets)

    @property
    def layout(self) -> tuple[int, int, bool]:
        """Two matrices of one layout over the same input can be stacked into one product."""
        return self.bits, self.block, self.offsets_NB is not None


class _Rows(Protocol):
    """A matrix whose rows can be taken."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def take_rows(self, order: np.ndarray) -> _Rows: ...

    def dense(self) -> np.ndarray: ...


def row_norms(matrix: _Rows, *, rows: int = _ROWS_AT_ONCE) -> np.ndarray:
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
    """Round a dense weight to blocks (the formulas: :func:`_quantise_8`, :func:`_quantise_4`).

    Args:
        values_NK: float32 ``(N, K)``; at 4 bits, ``K`` is a multiple of ``block``.
        bits: 4 or 8.
    """
    outputs, inputs = values_NK.shape
    rows = max(1, _NUMBERS_AT_ONCE // inputs)
    pieces = []
    for at in range(0, outputs, rows):
        # Zeros behind a row change neither the scale of its last block nor the codes before them.
        padded_NK = np.pad(values_NK[at : at + rows], ((0, 0), (0, -inputs % block)))
        values_NBk = padded_NK.reshape(len(padded_NK), -1, block).astype(np.float32)
        pieces.append(_quantise_8(values_NBk) if bits == 8 else _quantise_4(values_NBk))
    codes, scales, offsets = zip(*pieces, strict=True)
    return BlockMatrix(
        bits,
        block,
        np.concatenate(codes).reshape(outputs, -1)[:, :inputs],
        np.concatenate(scales),
        None if bits == 8 else np.concatenate(offsets),
    )


def _quantise_8(values_NBk: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    """Return codes and scales: the largest magnitude of a block lies on code 127, as in GGUF's Q8_0."""
    scales_NB = np.abs(values_NBk).max(axis=-1) / np.float32(127)
    steps = np.rint(values_NBk * _inverse(scales_NB)[..., None])
    return (np.clip(steps, -128, 127) + 128).astype(np.uint8), scales_NB, None


def _quantise_4(values_NBk: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales and offsets: 16 even steps, placed by least squares.

    The steps first span the block from least to greatest. Then, for a few spans a little wider or narrower,
    values are rounded to the nearest step, and scale and offset fitted to the codes (a straight line through the
    points ``(code, value)``); per block the best of all is kept. The search is that of ggml's
    ``make_qkx2_quants``, without its weights.
    """
    least_NB, greatest_NB = values_NBk.min(axis=-1), values_NBk.max(axis=-1)
    span_NB = greatest_NB - least_NB
    codes = _steps(values_NBk, least_NB, span_NB / np.float32(15))
    scales_NB, starts_NB = span_NB / np.float32(15), least_NB
    error_NB = _squared_error(values_NBk, codes, scales_NB, starts_NB)
    for steps in (13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0, 16.5, 17.0):
        tried = _steps(values_NBk, least_NB, span_NB / np.float32(steps))
        line = _fitted_line(values_NBk, tried)
        tried_error_NB = _squared_error(values_NBk, tried, *line)
        better_NB = tried_error_NB < error_NB
        codes[better_NB] = tried[better_NB]
        scales_NB, starts_NB = np.where(better_NB, line, (scales_NB, starts_NB))
        error_NB = np.where(better_NB, tried_error_NB, error_NB)
    return codes.astype(np.uint8), scales_NB, starts_NB + 8 * scales_NB


def _steps(values_NBk: np.ndarray, starts_NB: np.ndarray, scales_NB: np.ndarray) -> np.ndarray:
    """Return the nearest of the steps 0..15 from ``starts_NB`` on, float32."""
    return np.clip(np.rint((values_NBk - starts_NB[..., None]) * _inverse(scales_NB)[..., None]), 0, 15)


def _fitted_line(values_NBk: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return slope and start of the line of least squares through (code, value) of every block."""
    mean_code_NB, mean_value_NB = codes.mean(axis=-1), values_NBk.mean(axis=-1)
    from_mean = codes - mean_code_NB[..., None]
    spread_NB = np.square(from_mean).sum(axis=-1)
    slope_NB = (from_mean * values_NBk).sum(axis=-1) / np.maximum(spread_NB, np.float32(1e-6))
    return slope_NB, mean_value_NB - slope_NB * mean_code_NB


def _inverse(scales_NB: np.ndarray) -> np.ndarray:
    """Return ``1 / scale``, and 0 for a block without extent (or one too small for float32)."""
    return np.divide(1.0, scales_NB, out=np.zeros_like(scales_NB), where=scales_NB > np.float32(1e-30))


def _squared_error(
    values_NBk: np.ndarray, codes: np.ndarray, scales_NB: np.ndarray, starts_NB: np.ndarray
) -> np.ndarray:
    return np.square(codes * scales_NB[..., None] + starts_NB[..., None] - values_NBk).sum(axis=-1)
