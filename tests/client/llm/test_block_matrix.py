"""Block-quantised weights: error bounds, and the layout that ONNX Runtime's own kernel reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgeduet_client.llm.block_matrix import BlockMatrix, DenseMatrix, quantise, row_norms, stack

_SEEDS = st.integers(0, 2**32 - 1)


def _values(seed: int, shape: tuple[int, int]) -> np.ndarray:
    """Weights of all sizes, with a block of zeros and an outlier."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, (shape[0], 1))
    values[0, :32] = 0
    values[-1, 3] *= 100
    return values.astype(np.float32)


def _random_matrix(bits: int, block: int, *, offsets: bool, seed: int = 0, shape: tuple[int, int] = (24, 96)):
    rng = np.random.default_rng(seed)
    outputs, inputs = shape
    blocks = -(-inputs // block)  # the end of a row may cut the last one short
    return BlockMatrix(
        bits,
        block,
        rng.integers(0, 2**bits, shape, dtype=np.uint8),
        rng.uniform(0.01, 0.1, (outputs, blocks)).astype(np.float32),
        rng.standard_normal((outputs, blocks)).astype(np.float32) if offsets else None,
    )


@settings(max_examples=50, deadline=None)
@given(seed=_SEEDS, rows=st.integers(1, 9), width=st.integers(4, 300), block=st.sampled_from([16, 32, 128]))
def test_eight_bits_err_by_half_a_step_at_most(seed: int, rows: int, width: int, block: int):
    values = _values(seed, (rows, width))
    matrix = quantise(values, bits=8, block=block)
    step_NK = np.repeat(np.abs(matrix.scales_NB), block, axis=1)[:, :width]
    assert (np.abs(matrix.dense() - values) <= 0.5 * step_NK * (1 + 1e-4)).all()
    # The scale is the least that reaches the block's extreme; the last block ends with the row.
    edges = range(0, width, block)
    largest_NB = np.stack([np.abs(values[:, at : at + block]).max(axis=1) for at in edges], axis=1)
    np.testing.assert_allclose(matrix.scales_NB, largest_NB / 127, rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(seed=_SEEDS, rows=st.integers(1, 9), blocks=st.integers(1, 4), block=st.sampled_from([16, 32]))
def test_four_bits_err_no_more_in_total_than_plain_rounding(seed: int, rows: int, blocks: int, block: int):
    values = _values(seed, (rows, 32 * blocks))
    matrix = quantise(values, bits=4, block=block)
    assert int(matrix.codes_NK.max()) < 16
    values_NBk = values.reshape(rows, -1, block).astype(np.float64)
    least_NB1 = values_NBk.min(axis=-1, keepdims=True)
    step_NB1 = (values_NBk.max(axis=-1, keepdims=True) - least_NB1) / 15
    with np.errstate(invalid="ignore"):
        plain = np.where(step_NB1 > 0, np.rint((values_NBk - least_NB1) / step_NB1) * step_NB1, 0) + least_NB1
    ours = np.square(matrix.dense().reshape(values_NBk.shape) - values_NBk).sum(axis=-1)
    theirs = np.square(plain - values_NBk).sum(axis=-1)
    # Zeros, and what float32 rounds in an offset, are allowed on top.
    assert (ours <= theirs * (1 + 1e-3) + block * (2.0**-21 * np.abs(values_NBk).max(axis=-1)) ** 2).all()


def test_four_bits_err_less_than_steps_from_end_to_end():
    """On bell-shaped weights, which is what the search over spans is for."""
    values = np.random.default_rng(0).standard_normal((200, 320)).astype(np.float32)
    blocks = values.reshape(-1, 32)
    step = np.ptp(blocks, axis=1, keepdims=True) / 15
    least = blocks.min(axis=1, keepdims=True)
    plain = np.square(np.rint((blocks - least) / step) * step + least - blocks).mean()
    ours = np.square(quantise(values, bits=4).dense() - values).mean()
    assert ours < 0.85 * plain


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-10, 1.0, 1e15])
@pytest.mark.parametrize("bits", [4, 8])
def test_no_size_of_weights_makes_codes_that_mean_nothing(bits: int, size: float):
    values = (size * np.random.default_rng(0).standard_normal((4, 64))).astype(np.float32)
    values[1] = size  # a block without extent
    values[2] = -0.0
    error = np.abs(quantise(values, bits=bits).dense() - values)
    assert (error <= max(0.2 * size, 1e-28)).all()


def test_four_bits_keep_what_four_bits_can_hold():
    """Sixteen even steps from any start come back as they were: no needless rounding."""
    codes = np.random.default_rng(0).integers(0, 16, (5, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    values = (codes * 0.25 - 1.5).astype(np.float32)
    np.testing.assert_allclose(quantise(values, bits=4).dense(), values, atol=1e-6)


def test_tables_larger_than_a_piece_are_quantised_alike():
    values = _values(3, (9000, 32))
    whole = quantise(values, bits=8)
    np.testing.assert_array_equal(whole.dense()[5000:5010], quantise(values[5000:5010], bits=8).dense())
    np.testing.assert_allclose(row_norms(whole), np.linalg.norm(whole.dense(), axis=1), rtol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("block", "width"), [(16, 96), (32, 96), (128, 256), (128, 144)])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_packing_is_what_the_kernel_reads(bits: int, block: int, width: int, rows: int, tmp_path: Path):
    matrix = _random_matrix(bits, block, offsets=False, shape=(24, width))
    outputs, inputs = matrix.shape
    x = np.random.default_rng(1).standard_normal((rows, inputs)).astype(np.float32)
    tensors = {"codes": matrix.packed(), "scales": matrix.scales_NB}
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=inputs,
        N=outputs,
        bits=bits,
        block_size=block,
        accuracy_level=1,  # float32 arithmetic: the layout alone is in question
    )
    graph = helper.make_graph(
        [node],
        "one product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, outputs])],
        [
            helper.make_tensor(
                name,
                TensorProto.UINT8 if values.dtype == np.uint8 else TensorProto.FLOAT,
                values.shape,
                values.tobytes(),
                raw=True,
            )
            for name, values in tensors.items()
        ],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    np.testing.assert_allclose(y, x @ matrix.dense().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("offsets", [False, True])
def test_stacking_puts_outputs_below_each_other(offsets: bool):
    first = _random_matrix(4, 32, offsets=offsets, seed=1)
    second = _random_matrix(4, 32, offsets=offsets, seed=2, shape=(8, 96))
    stacked = stack([first, second])
    assert stacked is not None
    np.testing.assert_array_equal(stacked.dense(), np.concatenate([first.dense(), second.dense()]))
    dense = stack([DenseMatrix(first.dense()), DenseMatrix(second.dense())])
    assert dense is not None
    np.testing.assert_array_equal(dense.dense(), stacked.dense())


@pytest.mark.parametrize(
    ("other_bits", "other_block", "other_offsets"), [(8, 32, False), (4, 16, False), (4, 32, True)]
)
def test_different_layouts_are_not_stacked(other_bits: int, other_block: int, other_offsets: bool):
    first = _random_matrix(4, 32, offsets=False)
    other = _random_matrix(other_bits, other_block, offsets=other_offsets)
    assert stack([first, other]) is None
    assert stack([first, DenseMatrix(first.dense())]) is None


def test_rows_in_another_order_are_the_same_rows():
    order = np.random.default_rng(0).permutation(24)
    for matrix in (_random_matrix(4, 16, offsets=True), DenseMatrix(_values(0, (24, 96)))):
        np.testing.assert_array_equal(matrix.take_rows(order).dense(), matrix.dense()[order])
