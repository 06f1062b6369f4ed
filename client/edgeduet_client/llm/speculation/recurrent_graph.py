"""Write a recurrent drafter as one ONNX graph that makes a whole greedy draft in one call.

The loop over tokens is inside the graph, with the stop rule as its condition: Python and the runtime are entered
once per draft. The table of tokens is not stored again: the graph names the target's own file, whose pages both
share.

Products are 8 bits on both sides. Weights have one scale per output. Activations have one fixed scale per input,
found on real states: each product's input comes out of a norm or a product, into whose gain or columns the scale
is folded, so that quantising is one node. Integer sums are exact and nothing looks across rows: a row comes out the
same alone and among others, so what a drafter would have proposed is what it did propose.

Interface (B drafts at once)::

    in   token int64 (B,)       the last committed token
         state float32 (B, H)   the target's last hidden state at the position that predicted it
         steps int64 ()         tokens to draft
         threshold float32 ()   end before a token whose probability is smaller in every row; 0 = never
    out  tokens int64 (K, B), confidences float32 (K, B)    K <= steps; the last may be below the threshold
         next_state (B, H), logits (B, N)                   of the last step
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.drafter_training import NORM_EPSILON, Parameters
from edgeduet_client.llm.speculation.target_graph import IR_VERSION, MICROSOFT, OPSET, embedding_nodes

if TYPE_CHECKING:
    from edgeduet_client.llm.model_folder import ModelFolder

_MIDDLE = 128
_REACH = 127.0


class QuantisedProduct:
    """``x @ weight`` with 8-bit codes on both sides.

    Attributes:
        codes_KN: int8.
        scales_N: float32, one per output; the input's step of 1/127 included.
        divisors_K: float32, what the input must be divided by beforehand: then it lies within -1 and 1.
    """

    def __init__(self, weight_KN: NDArray[np.float32], reach_K: NDArray[np.float32]) -> None:
        # Inputs with large values would leave few steps to the others, weights to rows with large ones: the
        # difficulty is shared evenly (SmoothQuant, arXiv 2211.10438, alpha = 1/2).
        weights_K = np.maximum(np.abs(weight_KN).max(axis=1), 1e-8)
        smooth_K = np.sqrt(np.maximum(reach_K, 1e-8) * weights_K) / weights_K
        smooth_K *= float(np.max(reach_K / smooth_K)) or 1.0
        self.divisors_K = smooth_K.astype(np.float32)
        spread_KN = weight_KN * smooth_K[:, None]
        top_N = np.maximum(np.abs(spread_KN).max(axis=0), 1e-12)
        self.codes_KN = np.rint(spread_KN * (_REACH / top_N)).astype(np.int8)
        self.scales_N = (top_N / (_REACH * _REACH)).astype(np.float32)


def quantised_products(
    parameters: Parameters, head_NH: NDArray[np.float32], reach: dict[str, NDArray[np.float32]]
) -> dict[str, QuantisedProduct]:
    """Return the products ``joint``, ``down`` and ``head``.

    Args:
        parameters: float32.
        head_NH: rows of the target's output matrix.
        reach: of the input of each product, the largest magnitude of every number on real texts.
    """
    weights = {"joint": parameters["joint"], "down": parameters["down"], "head": head_NH.T}
    return {name: QuantisedProduct(weight, reach[name]) for name, weight in weights.items()}


def write_recurrent_graph(
    path: Path,
    folder: ModelFolder,
    parameters: Parameters,
    vocabulary_N: NDArray[np.integer],
    products: dict[str, QuantisedProduct],
) -> None:
    """Write the graph for the target in ``folder``; it is loaded with that folder as the place of its weights."""
    from onnx import TensorProto, helper

    width, count = parameters["down"].shape[1], len(vocabulary_N)
    writer = _Writer()
    body = _body(writer, folder, parameters, np.asarray(vocabulary_N, np.int64), products)
    nodes: list[Any] = []
    drafts = writer.add(nodes, "Shape", ["token"], "drafts.count")
    shape = [drafts, writer.constant("vocabulary.size", np.array([count], np.int64))]
    nothing = writer.add(nodes, "ConstantOfShape", [writer.add(nodes, "Concat", shape, "logits.shape", axis=0)], "none")
    outputs = ["last_token", "next_state", "logits", "tokens", "confidences"]
    on = writer.constant("on", np.array(True))
    nodes.append(helper.make_node("Loop", ["steps", on, "token", "state", nothing], outputs, body=body))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "recurrent_drafter",
        [
            value("token", TensorProto.INT64, ["drafts"]),
            value("state", TensorProto.FLOAT, ["drafts", width]),
            value("steps", TensorProto.INT64, []),
            value("threshold", TensorProto.FLOAT, []),
        ],
        [
            value("tokens", TensorProto.INT64, ["made", "drafts"]),
            value("confidences", TensorProto.FLOAT, ["made", "drafts"]),
            value("next_state", TensorProto.FLOAT, ["drafts", width]),
            value("logits", TensorProto.FLOAT, ["drafts", count]),
        ],
        writer.initialisers,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edgeduet")
    path.write_bytes(model.SerializeToString())


def _body(
    writer: _Writer,
    folder: ModelFolder,
    parameters: Parameters,
    vocabulary_N: NDArray[np.int64],
    products: dict[str, QuantisedProduct],
) -> Any:
    """Return the graph of one token: (token, state) to (token, state, logits), and whether to go on."""
    from onnx import TensorProto, helper

    inner, width = parameters["down"].shape
    nodes: list[Any] = []
    constant = writer.constant
    x = _joint_input(writer, nodes, folder, parameters, products["joint"])
    # The gated product's divisors go into the columns it is made of.
    columns = np.concatenate([np.ones(width + inner, np.float32), 1 / products["down"].divisors_K])
    whole = _product(writer, nodes, x, products["joint"], "joint", columns)
    sizes = constant("joint.sizes", np.array([width, inner, inner], np.int64))
    nodes.append(helper.make_node("Split", [whole, sizes], ["passed", "gate", "up"], axis=-1))
    active = writer.add(nodes, "QuickGelu", ["gate"], "active", domain=MICROSOFT, alpha=1.0)
    gated = writer.add(nodes, "Mul", [active, "up"], "gated")
    mixed = _product(writer, nodes, gated, products["down"], "down")
    summed = writer.add(nodes, "Add", ["passed", mixed], "summed")
    _norm(writer, nodes, summed, "output", parameters["output_norm"], "state.out")
    divisors = constant("head.divisors", 1 / products["head"].divisors_K)
    _product(writer, nodes, writer.add(nodes, "Mul", ["state.out", divisors], "head.in"), products["head"], "head")
    place = writer.add(nodes, "ArgMax", ["head.out"], "place", axis=-1, keepdims=0)
    writer.add(nodes, "Gather", [constant("vocabulary", vocabulary_N), place], "token.out", axis=0)
    last = constant("axis.last", np.array([-1], np.int64))
    shares = writer.add(nodes, "Softmax", ["head.out"], "shares", axis=-1)
    writer.add(nodes, "ReduceMax", [shares, last], "confidence", keepdims=0)
    surest = writer.add(nodes, "ReduceMax", ["confidence"], "surest", keepdims=0)
    writer.add(nodes, "GreaterOrEqual", [surest, "threshold"], "on.out")
    writer.add(nodes, "Identity", ["token.out"], "token.kept")
    value, count = helper.make_tensor_value_info, len(vocabulary_N)
    inputs = [
        value("number", TensorProto.INT64, []),
        value("on.in", TensorProto.BOOL, []),
        value("token.in", TensorProto.INT64, ["drafts"]),
        value("state.in", TensorProto.FLOAT, ["drafts", width]),
        value("logits.in", TensorProto.FLOAT, ["drafts", count]),
    ]
    outputs = [
        value("on.out", TensorProto.BOOL, []),
        value("token.out", TensorProto.INT64, ["drafts"]),
        value("state.out", TensorProto.FLOAT, ["drafts", width]),
        value("head.out", TensorProto.FLOAT, ["drafts", count]),
        value("token.kept", TensorProto.INT64, ["drafts"]),
        value("confidence", TensorProto.FLOAT, ["drafts"]),
    ]
    return helper.make_graph(nodes, "one_token", inputs, outputs)


def _joint_input(
    writer: _Writer, nodes: list[Any], folder: ModelFolder, parameters: Parameters, joint: QuantisedProduct
) -> str:
    """Add both norms, with the divisors of the product behind them in their gains."""
    width = parameters["state_norm"].shape[0]
    shared = embedding_nodes(folder.graph)
    writer.initialisers += shared.initialisers
    first = writer.constant("axis.first", np.array([0], np.int64))
    writer.add(nodes, "Unsqueeze", ["token.in", first], "input_ids")
    nodes += shared.nodes
    flat = writer.constant("embedding.shape", np.array([-1, width], np.int64))
    embedded = writer.add(nodes, "Reshape", [shared.output, flat], "drafter.embedded")
    gains = joint.divisors_K
    read = _norm(writer, nodes, embedded, "embedding", parameters["embedding_norm"] / gains[:width], "x.embedding")
    kept = _norm(writer, nodes, "state.in", "state", parameters["state_norm"] / gains[width:], "x.state")
    return writer.add(nodes, "Concat", [read, kept], "x", axis=-1)


def _norm(writer: _Writer, nodes: list[Any], x: str, name: str, gain: NDArray[np.float32], output: str) -> str:
    stored = writer.constant(f"gain.{name}", gain.astype(np.float32))
    kind = "SimplifiedLayerNormalization"
    return writer.add(nodes, kind, [x, stored], output, axis=-1, epsilon=NORM_EPSILON, stash_type=1)


def _product(
    writer: _Writer,
    nodes: list[Any],
    x: str,
    product: QuantisedProduct,
    name: str,
    columns: NDArray[np.float32] | None = None,
) -> str:
    """Multiply ``x``, which lies within -1 and 1; ``columns``: what the outputs are multiplied with besides."""
    step = writer.constant("step", np.array(1 / _REACH, np.float32))
    middle = writer.constant("middle", np.array(_MIDDLE, np.uint8))
    codes = writer.add(nodes, "QuantizeLinear", [x, step, middle], f"{name}.in.codes")
    weights = writer.constant(f"{name}.codes", product.codes_KN)
    sums = writer.add(nodes, "MatMulInteger", [codes, weights, middle], f"{name}.sums")
    scales = product.scales_N if columns is None else product.scales_N * columns
    numbers = writer.add(nodes, "Cast", [sums], f"{name}.numbers", to=1)
    return writer.add(nodes, "Mul", [numbers, writer.constant(f"{name}.scales", scales)], f"{name}.out")


class _Writer:
    """Collects initialisers, and makes nodes."""

    def __init__(self) -> None:
        self.initialisers: list[Any] = []
        self._known: set[str] = set()

    def add(
        self, nodes: list[Any], kind: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any
    ) -> str:
        """Append a node to ``nodes``; return its output."""
        from onnx import helper

        nodes.append(helper.make_node(kind, list(inputs), [output], domain=domain, **attributes))
        return output

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Store an array; the same name twice is the same constant."""
        from onnx import numpy_helper

        name = f"drafter.{name}"
        if name not in self._known:
            self._known.add(name)
            self.initialisers.append(numpy_helper.from_array(np.array(values, order="C"), name))
        return name
