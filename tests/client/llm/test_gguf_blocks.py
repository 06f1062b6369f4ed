"""Blocks of a GGUF file taken over: the same numbers as ggml's own reading of the bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.gguf_blocks import REPACKABLE, repack

gguf = pytest.importorskip("gguf")

# Where the halves of a block lie; everything else is free.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
_ROWS = 3


def _random_tensor(kind: str, blocks: int, seed: int) -> tuple[np.ndarray, tuple[int, int]]:
    """Bytes of ``_ROWS`` rows of ``blocks`` blocks, and the shape of the matrix: random but for finite halves."""
    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (_ROWS, blocks, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        halves = (rng.standard_normal((_ROWS, blocks)) * 10.0 ** rng.integers(-4, 2)).astype(np.float16)
        halves[0, 0] = 0
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return raw.reshape(_ROWS, blocks * size), (_ROWS, blocks * numbers)


def test_every_type_said_to_be_repackable_is_tested():
    assert set(_HALVES) == REPACKABLE


@pytest.mark.parametrize("kind", sorted(REPACKABLE))
@settings(max_examples=25, deadline=None)
@given(blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_repacked_blocks_are_the_numbers_ggml_reads(kind: str, blocks: int, seed: int):
    raw, shape = _random_tensor(kind, blocks, seed)

    matrix = repack(raw, kind, shape)
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(shape)

    assert matrix.shape == shape
    assert int(matrix.codes_NK.max()) < 2**matrix.bits
    ours = matrix.dense()
    if matrix.offsets_NB is None:
        np.testing.assert_array_equal(ours, theirs)
    else:
        # The offset is rounded once, to a float32 of the size of what cancels in it.
        largest_NB = np.abs(matrix.scales_NB) * 2 ** (matrix.bits - 1) + np.abs(matrix.offsets_NB)
        allowed = np.repeat(largest_NB, matrix.block, axis=1) * 2.0**-22
        assert (np.abs(ours - theirs) <= allowed).all()


def test_every_bit_of_a_block_matters():
    """A reader that skipped a field would return the same numbers for other bytes."""
    for kind in sorted(REPACKABLE):
        raw, shape = _random_tensor(kind, 1, seed=5)
        before = repack(raw, kind, shape).dense()
        changed = raw.copy()
        changed[1] ^= 0x11
        for at in _HALVES[kind]:
            changed[1, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
        after = repack(changed, kind, shape).dense()
        assert (before[[0, 2]] == after[[0, 2]]).all()
        assert (before[1] != after[1]).mean() > 0.7, kind
