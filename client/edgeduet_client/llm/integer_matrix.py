"""Weight matrices for products in integers, whose rows do not depend on how many there are.

A weight of ``N`` outputs and ``K`` inputs has 8-bit codes and one scale per output, and a row of activations has one
scale::

    w[n, k] = step[n] * code[n, k]                    step[n] = max |w[n, :]| / 127
    x[m, k] = scale[m] * (q[m, k] - 128)              scale[m] = max |x[m, :]| / 127,  q rounded half to even
    y[m, n] = scale[m] * step[n] * sum_k (q[m, k] - 128) * code[n, k]

A row of zeros has codes of no meaning (zero by zero) and scale 0, so its products are 0.

The sum is one of integers, so it is exact in whatever order a kernel adds, and row ``m`` is the same bits in a step of
any size. Activations are unsigned: ONNX Runtime has fast kernels for unsigned by signed codes (signed by signed took
11 times as long), and their contributed products with float activations (``DynamicQuantizeMatMul``) take one scale for
all rows, which lets rows depend on each other.

The price is accuracy: one scale per row instead of one per block. :mod:`edgeduet_client.llm.smoothing` wins it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edgeduet_client.llm.graph import _GraphWriter

_REACH = 127
_MIDDLE = 128
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class IntegerMatrix:
    """A weight with one scale per output.

    Attributes:
        codes_NK: int8 ``(N, K)``, -127 to 127.
        steps_N: float32 ``(N,)``.
        factors_K: what inputs are multiplied with before they are rounded, float32 ``(K,)``, part of the weight that
            the matrix stands for; ``None``: one.
    """

    codes_NK: np.ndarray
    steps_N: np.ndarray
    factors_K: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes_NK.shape
        return outputs, inputs

    def dense(self) -> np.ndarray:
        """Return the weight that the codes stand for, float32 ``(N, K)``."""
        values: np.ndarray = self.codes_NK.astype(np.float32) * self.steps_N[:, None]
        return values if self.factors_K is None else values * self.factors_K

    def take_rows(self, order: np.ndarray) -> IntegerMatrix:
        """Return the matrix with its outputs in ``order``."""
        return IntegerMatrix(self.codes_NK[order], self.steps_N[order], self.factors_K)


def round_outputs(values_NK: np.ndarray, factors_K: np.ndarray | None = None) -> IntegerMatrix:
    """Round a dense weight, float32 ``(N, K)``: the largest magnitude of an output lies on code 127.

    Args:
        factors_K: of :attr:`IntegerMatrix.factors_K`, divided out of the weight.
    """
    if factors_K is not None:
        values_NK = values_NK / factors_K
    steps_N = (np.abs(values_NK).max(axis=1) / np.float32(_REACH)).astype(np.float32)
    inverse_N = np.divide(1.0, steps_N, out=np.zeros_like(steps_N), where=steps_N > np.float32(1e-30))
    codes_NK = np.clip(np.rint(values_NK * inverse_N[:, None]), -_REACH, _REACH).astype(np.int8)
    return IntegerMatrix(codes_NK, steps_N, factors_K)


def stack_outputs(parts: Sequence[IntegerMatrix]) -> IntegerMatrix:
    """Put matrices over the same input, without factors, on top of each other."""
    codes = np.concatenate([part.codes_NK for part in parts])
    return IntegerMatrix(codes, np.concatenate([part.steps_N for part in parts]))


def integer_product(
    writer: _GraphWriter, matrix: IntegerMatrix, x: str, name: str, *, bias: np.ndarray | None, output: str
) -> str:
    """Write ``x @ matrix.T + bias`` for ``x`` of shape ``(rows, K)``; return ``output``."""
    if matrix.factors_K is not None:
        x = writer.node("Mul", [x, writer.weight(f"{name}.factors", matrix.factors_K)], f"{name}.in")
    codes, scales = _rounded_rows(writer, x, asked=output == "logits")
    inputs = [
        codes,
        writer.weight(f"{name}.integers", matrix.codes_NK.T),
        writer.constant("one", np.array(1, np.float32)),
        writer.weight(f"{name}.steps", matrix.steps_N),
        writer.constant("middle", np.array(_MIDDLE, np.uint8)),
    ]
    sums = writer.node("MatMulIntegerToFloat", inputs, f"{name}.sums", domain=_MICROSOFT)
    if bias is None:
        return writer.node("Mul", [sums, scales], output)
    scaled = writer.node("Mul", [sums, scales], f"{name}.scaled")
    return writer.node("Add", [scaled, writer.weight(f"{name}.bias", bias)], output)


def _rounded_rows(writer: _GraphWriter, x: str, *, asked: bool) -> tuple[str, str]:
    """Write the rounding of ``x``, once for all products that share it: codes ``(rows, K)``, scales ``(rows, 1)``."""
    codes, scales = f"{x}.rounded", f"{x}.scales"
    if writer.computes(codes):
        return codes, scales
    last = writer.constant("axis.last", np.array([-1]))
    largest = writer.node("ReduceMax", [writer.node("Abs", [x], f"{x}.abs"), last], f"{x}.largest", keepdims=0)
    steps = writer.node("Mul", [largest, writer.constant("reach", np.array(1 / _REACH, np.float32))], f"{x}.steps")
    writer.node("QuantizeLinear", [x, steps, _middles(writer, x, asked=asked)], codes, axis=0)
    writer.node("Unsqueeze", [steps, last], scales)
    return codes, scales


def _middles(writer: _GraphWriter, x: str, *, asked: bool) -> str:
    """Write one zero point per row; all rows of a step have the same, and so have those asked for."""
    output = "middle.asked" if asked else "middle.new"
    if not writer.computes(output):
        shape = writer.node("Shape", [x], f"{output}.shape", start=0, end=1)
        writer.node("Expand", [writer.constant("middle", np.array(_MIDDLE, np.uint8)), shape], output)
    return output


def integer_lookup(writer: _GraphWriter, table: IntegerMatrix, ids: str) -> str:
    """Write the lookup of ``ids`` ``(S,)`` in a table; return ``(S, K)``.

    The codes lie in the file a second time if the table is the head too: a lookup wants rows side by side, a product
    columns. They are unsigned, in the form of 8-bit blocks that are as long as a row.
    """
    stored = writer.weight("embedding.codes", (table.codes_NK.view(np.uint8) ^ np.uint8(_MIDDLE)))
    codes = writer.node("Gather", [stored, ids], "embedded.codes", axis=0)
    numbers = writer.node("Cast", [codes], "embedded.numbers", to=1)
    centred = writer.node(
        "Sub", [numbers, writer.constant("middle.float", np.array(_MIDDLE, np.float32))], "embedded.from"
    )
    steps = writer.weight("embedding.scales", table.steps_N[:, None])
    scale = writer.node("Gather", [steps, ids], "embedded.steps", axis=0)
    if table.factors_K is None:
        return writer.node("Mul", [centred, scale], "embedded")
    scaled = writer.node("Mul", [centred, scale], "embedded.scaled.rows")
    return writer.node("Mul", [scaled, writer.weight("embedding.factors", table.factors_K)], "embedded")
