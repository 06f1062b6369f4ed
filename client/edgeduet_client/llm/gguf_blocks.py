"""Take the blocks of a GGUF file over as they are.

Each function reads the bytes of one tensor type and returns the same numbers as a
:class:`~edgeduet_client.llm.block_matrix.BlockMatrix`: nothing is rounded again, which is what costs
20-200 % of perplexity when a 4-bit file is dequantised and quantised a second time.

Layouts (https://github.com/ggml-org/ggml, ``ggml-common.h``): blocks of 32 have a half-precision scale
``d`` (and minimum ``m``); super-blocks of 256 have half-precision ``d`` (and ``dmin``) over small integer
scales of their sub-blocks. In our terms::

    Q4_0  d (q - 8)              4 bits, block 32
    Q4_1  d q + m                4 bits, block 32, offset m + 8 d
    Q5_0  d (q - 16)             8 bits, block 32
    Q5_1  d q + m                8 bits, block 32, offset m + 128 d
    Q8_0  d q                    8 bits, block 32
    Q4_K  d s q - dmin t         4 bits, block 32, offset 8 d s - dmin t
    Q5_K  d s q - dmin t         8 bits, block 32, offset 128 d s - dmin t
    Q6_K  d s (q - 32)           8 bits, block 16

Products of a half and a small integer are exact in float32, so only the offsets of types with a minimum
can be rounded, by one unit in the last place of a float32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgeduet_client.llm.block_matrix import BlockMatrix

_SUPER = 256


def _halves(raw_RB: np.ndarray, at: int) -> np.ndarray:
    """Return the half-precision number at byte ``at`` of every block as float32."""
    return np.ascontiguousarray(raw_RB[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Low halves of all bytes, then high halves."""
    return np.concatenate([bytes_ & 0x0F, bytes_ >> 4], axis=-1)


def _fifth_bits(raw_RB: np.ndarray, at: int) -> np.ndarray:
    """The 32 high bits stored at bytes ``at .. at + 3`` of every block, one uint8 each."""
    return np.unpackbits(np.ascontiguousarray(raw_RB[..., at : at + 4]), axis=-1, bitorder="little")


def _matrix(bits: int, block: int, codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None) -> BlockMatrix:
    rows = codes.shape[0]
    return BlockMatrix(
        bits,
        block,
        np.ascontiguousarray(codes.reshape(rows, -1)),
        np.ascontiguousarray(scales.reshape(rows, -1)),
        None if offsets is None else np.ascontiguousarray(offsets.reshape(rows, -1)),
    )


def _q4_0(raw: np.ndarray) -> BlockMatrix:
    return _matrix(4, 32, _nibbles(raw[..., 2:]), _halves(raw, 0), None)


def _q4_1(raw: np.ndarray) -> BlockMatrix:
    scale = _halves(raw, 0)
    return _matrix(4, 32, _nibbles(raw[..., 4:]), scale, _halves(raw, 2) + 8 * scale)


def _q5_0(raw: np.ndarray) -> BlockMatrix:
    codes = _nibbles(raw[..., 6:]) | (_fifth_bits(raw, 2) << 4)
    return _matrix(8, 32, codes + 112, _halves(raw, 0), None)  # q - 16 = (q + 112) - 128


def _q5_1(raw: np.ndarray) -> BlockMatrix:
    codes = _nibbles(raw[..., 8:]) | (_fifth_bits(raw, 4) << 4)
    scale = _halves(raw, 0)
    return _matrix(8, 32, codes, scale, _halves(raw, 2) + 128 * scale)


def _q8_0(raw: np.ndarray) -> BlockMatrix:
    return _matrix(8, 32, raw[..., 2:] ^ 0x80, _halves(raw, 0), None)  # two's complement to excess 128


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unpack the 8 scales and 8 minima of 6 bits each from the 12 bytes of Q4_K and Q5_K."""
    first, second, third = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([first & 63, (third & 0x0F) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _sub_block_nibbles(bytes_: np.ndarray) -> np.ndarray:
    """Q4_K and Q5_K: 32 bytes hold one sub-block in their low halves and the next in their high halves."""
    groups = bytes_.reshape(*bytes_.shape[:-1], 4, 1, 32)
    return np.concatenate([groups & 0x0F, groups >> 4], axis=-2).reshape(*bytes_.shape[:-1], 8, 32)


def _q4_k(raw: np.ndarray) -> BlockMatrix:
    scales, minima = _k_scales(raw[..., 4:16])
    scale = _halves(raw, 0)[..., None] * scales
    minimum = _halves(raw, 2)[..., None] * minima
    return _matrix(4, 32, _sub_block_nibbles(raw[..., 16:]), scale, 8 * scale - minimum)


def _q5_k(raw: np.ndarray) -> BlockMatrix:
    scales, minima = _k_scales(raw[..., 4:16])
    scale = _halves(raw, 0)[..., None] * scales
    minimum = _halves(raw, 2)[..., None] * minima
    # Bit i of the 32 high bytes belongs to sub-block i.
    high = (raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _sub_block_nibbles(raw[..., 48:]) | (high << 4)
    return _matrix(8, 32, codes, scale, 128 * scale - minimum)


def _q6_k(raw: np.ndarray) -> BlockMatrix:
    low, high = raw[..., :128], raw[..., 128:192]
    scales = np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32)
    # Each half of 128 codes: 64 bytes of low nibbles, 32 bytes of high bit pairs.
    low = low.reshape(*low.shape[:-1], 2, 1, 64)
    nibbles = np.concatenate([low & 0x0F, low >> 4], axis=-2).reshape(*raw.shape[:-1], 2, 4, 32)
    pairs = high.reshape(*high.shape[:-1], 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = nibbles | (pairs << 4)
    return _matrix(8, 16, codes + 96, _halves(raw, 208)[..., None] * scales, None)  # q - 32 = (q + 96) - 128


# name: (numbers in a block, bytes of a block, reader)
_READERS: dict[str, tuple[int, int, Callable[[np.ndarray], BlockMatrix]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (_SUPER, 144, _q4_k),
    "Q5_K": (_SUPER, 176, _q5_k),
    "Q6_K": (_SUPER, 210, _q6_k),
}

REPACKABLE = frozenset(_READERS)


def repack(raw: np.ndarray, kind: str, shape_NK: tuple[int, int]) -> BlockMatrix:
    """Read the bytes of a quantised GGUF tensor.

    Args:
        raw: the tensor's bytes, uint8, any shape.
        kind: GGUF type, one of :data:`REPACKABLE`.
        shape_NK: outputs and inputs.
    """
    numbers, size, reader = _READERS[kind]
    outputs, inputs = shape_NK
    return reader(np.ascontiguousarray(raw).reshape(outputs, inputs // numbers, size))
