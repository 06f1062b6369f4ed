"""Write a decoder-only model as one ONNX graph for ONNX Runtime's CPU kernels, without torch.

The graph is written node by node, since what it must do decides its form:

- logits and hidden states only for the rows asked for: the residual stream is gathered before the final
  norm, so a prefill of 512 tokens never makes 512 rows of logits;
- keys and values in place: ``GroupQueryAttention`` writes into the buffer it reads, when the caller binds
  one buffer as past and present;
- several new tokens after a past, which verification of drafts needs;
- weights as the file quantised them (:mod:`edgeduet_client.llm.block_matrix`), or as integer products want them
  (:mod:`edgeduet_client.llm.integer_matrix`).

Interface (batch of one; S new tokens, R rows asked for, P positions the key-value buffer has room for)::

    in   input_ids int64 (1, S)                 rows int64 (R,)         which of the S positions
         seqlens_k int32 (1,) = past + S - 1    total_sequence_length int32 () = past + S
         past_key.l, past_value.l float32 (1, kv_heads, P, head_dim)
    out  logits float32 (R, V)                  hidden float32 (R, H)   after the final norm
         present_key.l, present_value.l

Weights lie beside the graph in one file that ONNX Runtime maps into memory. They are written as they are
read, one matrix at a time, so that an import needs little more memory than its largest matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgeduet_client.llm.architecture import Architecture, Rope
from edgeduet_client.llm.block_matrix import BlockMatrix, DenseMatrix, stack
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.integer_matrix import IntegerMatrix, integer_lookup, integer_product, stack_outputs

GRAPH_FILE = "model.onnx"
WEIGHTS_FILE = "model.onnx.data"

_OPSET = 21
_IR_VERSION = 10
_MICROSOFT = "com.microsoft"
# Mapped files begin on a page.
_PAGE = 4096
# Integer arithmetic on 8-bit activations; the fast kernel.
_ACCURACY_LEVEL = 4
_TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.int8): TensorProto.INT8,
}

AnyMatrix = DenseMatrix | BlockMatrix | IntegerMatrix


class Weights(Protocol):
    """Where a graph takes its numbers from.

    Names: ``embedding``, ``head``, ``final_norm``, and per block ``blocks.L.`` with ``q k v o gate up down``
    (matrices), ``q.bias`` and the like, ``attention_norm mlp_norm post_attention_norm post_mlp_norm q_norm
    k_norm`` (vectors).
    """

    def matrix(self, name: str) -> AnyMatrix:
        """Return one weight matrix."""

    def vector(self, name: str) -> np.ndarray | None:
        """Return one float32 vector, or ``None`` where the model has none of that name."""


class _GraphWriter:
    """Collects nodes; sends large initialisers to the weights file at once.

    Attributes:
        flat: rows of activations are ``(S, K)``, as ``Gemm`` needs them, instead of ``(1, S, K)``, as attention does.
            Each change between the two is one more node, and 60 of them take 2 % of a small model's step: a graph
            is flat if its products are ``Gemm``, or in integers.
    """

    def __init__(self, weights_file: Path, *, flat: bool) -> None:
        self.flat = flat
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: list[onnx.TensorProto] = []
        self._known: set[str] = set()
        self._outputs: set[str] = set()
        self._weights_file = weights_file
        self._data = weights_file.open("wb")

    def close(self) -> None:
        self._data.close()

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str,
        outputs: Sequence[str] = (),
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node; return its first output (``name`` unless ``outputs`` says otherwise)."""
        outputs = list(outputs) or [name]
        self._outputs.update(outputs)
        self.nodes.append(helper.make_node(kind, list(inputs), outputs, name=name, domain=domain, **attributes))
        return outputs[0]

    def computes(self, output: str) -> bool:
        """Whether a node has this output already."""
        return output in self._outputs

    def stores(self, name: str) -> bool:
        """Whether there is an initialiser of this name already."""
        return name in self._known

    def constant(self, name: str, values: np.ndarray) -> str:
        """Add a small initialiser inside the graph; the same name twice is the same constant."""
        if name not in self._known:
            self._known.add(name)
            self.initialisers.append(onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def weight(self, name: str, values: np.ndarray) -> str:
        """Add an initialiser to the weights file."""
        if name in self._known:
            return name
        values = np.ascontiguousarray(values)
        padding = -self._data.tell() % _PAGE
        self._data.write(bytes(padding))
        place = self._data.tell()
        self._data.write(values.data)
        return self._external(name, values.dtype, values.shape, place, values.nbytes)

    def reshaped(self, name: str, of: str, shape: Sequence[int]) -> str:
        """Add an initialiser that is another one's bytes under another shape; nothing is stored twice."""
        if name in self._known:
            return name
        source = next(tensor for tensor in self.initialisers if tensor.name == of)
        entries = {entry.key: entry.value for entry in source.external_data}
        dtype = helper.tensor_dtype_to_np_dtype(source.data_type)
        return self._external(name, dtype, shape, int(entries["offset"]), int(entries["length"]))

    def _external(self, name: str, dtype: np.dtype, shape: Sequence[int], place: int, length: int) -> str:
        tensor = TensorProto(name=name, data_type=_TYPES[np.dtype(dtype)], data_location=TensorProto.EXTERNAL)
        tensor.dims.extend(shape)
        stated = {"location": self._weights_file.name, "offset": str(place), "length": str(length)}
        for key, value in stated.items():
            tensor.external_data.add(key=key, value=value)
        self.initialisers.append(tensor)
        self._known.add(name)
        return name


def build_graph(architecture: Architecture, weights: Weights, folder: Path, progress: Any = None) -> Path:
    """Write ``model.onnx`` and ``model.onnx.data`` into ``folder``.

    Args:
        progress: called as ``progress(done, total)`` after every block.

    Returns:
        The path of the graph.
    """
    writer = _GraphWriter(folder / WEIGHTS_FILE, flat=_wants_rows(_matrix(architecture, weights, "blocks.0.o")))
    try:
        _write_model(writer, architecture, weights, progress or (lambda done, total: None))
    finally:
        writer.close()
    graph = helper.make_graph(
        writer.nodes, architecture.family, _inputs(architecture), _outputs(architecture), writer.initialisers
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)],
        ir_version=_IR_VERSION,
        producer_name="edgeduet",
    )
    path = folder / GRAPH_FILE
    path.write_bytes(model.SerializeToString())
    return path


def _cache_names(layer: int) -> tuple[str, str]:
    return f"key.{layer}", f"value.{layer}"


def _inputs(arch: Architecture) -> list[onnx.ValueInfoProto]:
    value = helper.make_tensor_value_info
    cache_shape: list[int | str] = [1, arch.kv_heads, "capacity", arch.head_dim]
    return [
        value("input_ids", TensorProto.INT64, [1, "new"]),
        value("rows", TensorProto.INT64, ["rows"]),
        value("seqlens_k", TensorProto.INT32, [1]),
        value("total_sequence_length", TensorProto.INT32, []),
        *(
            value(f"past_{name}", TensorProto.FLOAT, cache_shape)
            for layer in range(arch.layers)
            for name in _cache_names(layer)
        ),
    ]


def _outputs(arch: Architecture) -> list[onnx.ValueInfoProto]:
    value = helper.make_tensor_value_info
    cache_shape: list[int | str] = [1, arch.kv_heads, "capacity", arch.head_dim]
    return [
        value("logits", TensorProto.FLOAT, ["rows", arch.vocab_width]),
        value("hidden", TensorProto.FLOAT, ["rows", arch.hidden_width]),
        *(
            value(f"present_{name}", TensorProto.FLOAT, cache_shape)
            for layer in range(arch.layers)
            for name in _cache_names(layer)
        ),
    ]


def _write_model(writer: _GraphWriter, arch: Architecture, weights: Weights, progress: Any) -> None:
    table = _matrix(arch, weights, "embedding")
    stream = _embed(writer, arch, table)
    normed = _norm(writer, arch, weights, stream, "blocks.0.attention_norm")
    for layer in range(arch.layers):
        block = f"blocks.{layer}"
        attended = _attention(writer, arch, weights, normed, layer)
        if arch.sandwich_norms:
            attended = _norm(writer, arch, weights, attended, f"{block}.post_attention_norm")
        normed, stream = _add_and_norm(writer, arch, weights, attended, stream, f"{block}.mlp_norm")
        mapped = _mlp(writer, arch, weights, normed, block)
        if arch.sandwich_norms:
            mapped = _norm(writer, arch, weights, mapped, f"{block}.post_mlp_norm")
        if layer + 1 < arch.layers:
            following = f"blocks.{layer + 1}.attention_norm"
            normed, stream = _add_and_norm(writer, arch, weights, mapped, stream, following)
        else:
            stream = writer.node("Add", [mapped, stream], "stream.last")
        progress(layer + 1, arch.layers + 1)
    asked = writer.node("Gather", [stream, "rows"], "stream.rows", axis=0 if writer.flat else 1)
    if not writer.flat:
        asked = _flatten(writer, asked)
    hidden = _norm(writer, arch, weights, asked, "final_norm", output="hidden")
    if arch.tied_head:
        _flat_product(writer, table, hidden, "embedding", output="logits")
    else:
        _flat_product(writer, _matrix(arch, weights, "head"), hidden, "head", output="logits")
    progress(arch.layers + 1, arch.layers + 1)


def _embed(writer: _GraphWriter, arch: Architecture, table: AnyMatrix) -> str:
    """Token ids to the residual stream ``(S, H)`` or ``(1, S, H)``."""
    if isinstance(table, DenseMatrix):
        stored = writer.weight("embedding", table.values_NK)
        ids = _flatten(writer, "input_ids") if writer.flat else "input_ids"
        stream = writer.node("Gather", [stored, ids], "embedded", axis=0)
    elif isinstance(table, IntegerMatrix):
        stream = integer_lookup(writer, table, _flatten(writer, "input_ids"))
        stream = stream if writer.flat else _lift(writer, stream)
    elif table.offsets_NB is not None:
        stream = _embed_blocks(writer, table, _flatten(writer, "input_ids"))
        stream = stream if writer.flat else _lift(writer, stream)
    else:
        stream = _embed_blocks(writer, table, _flatten(writer, "input_ids") if writer.flat else "input_ids")
    if arch.embedding_scale == 1.0:
        return stream
    scale = writer.constant("embedding.scale", np.array(arch.embedding_scale, np.float32))
    return writer.node("Mul", [stream, scale], "embedded.scaled")


def _embed_blocks(writer: _GraphWriter, table: BlockMatrix, ids: str) -> str:
    codes, scales, offsets = _store_blocks(writer, "embedding", table)
    outputs, inputs = table.codes_NK.shape
    blocks = table.scales_NB.shape[1]
    by_row = writer.reshaped("embedding.codes.rows", codes, [outputs, blocks * table.block * table.bits // 8])
    # One middle per block; at 4 bits two share a byte.
    middle = (
        np.full((outputs, blocks), 128, np.uint8)
        if table.bits == 8
        else np.full((outputs, -(-blocks // 2)), 0x88, np.uint8)
    )
    stream = writer.node(
        "GatherBlockQuantized",
        [by_row, ids, scales, writer.weight("embedding.middle", middle)],
        "embedded.codes",
        domain=_MICROSOFT,
        bits=table.bits,
        block_size=table.block,
        gather_axis=0,
        quantize_axis=1,
    )
    if blocks * table.block > inputs:
        ends = [writer.constant(f"embedding.{name}", np.array([at])) for name, at in (("first", 0), ("end", inputs))]
        stream = writer.node("Slice", [stream, *ends, writer.constant("axis.last", np.array([-1]))], "embedded.inputs")
    if offsets is None:
        return stream
    # (S, B) offsets, one per block, onto (S, B, block).
    shape = writer.constant("embedding.blocks", np.array([-1, blocks, table.block]))
    cut = writer.node("Reshape", [stream, shape], "embedded.cut")
    gathered = writer.node("Gather", [offsets, ids], "embedded.offsets", axis=0)
    raised = writer.node("Unsqueeze", [gathered, writer.constant("axis.2", np.array([2]))], "embedded.offsets.raised")
    added = writer.node("Add", [cut, raised], "embedded.added")
    flat = writer.constant("embedding.flat", np.array([-1, inputs]))
    return writer.node("Reshape", [added, flat], "embedded")


def _norm(writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, name: str, output: str = "") -> str:
    gain = writer.weight(name, _gain(arch, weights, name))
    return writer.node(
        "SimplifiedLayerNormalization",
        [x, gain],
        output or f"{name}.out",
        axis=-1,
        epsilon=arch.norm_epsilon,
        stash_type=1,
    )


def _add_and_norm(
    writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, stream: str, name: str
) -> tuple[str, str]:
    """Return the norm of ``x + stream``, and the sum, from one fused node."""
    gain = writer.weight(name, _gain(arch, weights, name))
    outputs = [f"{name}.out", "", "", f"{name}.stream"]
    writer.node(
        "SkipSimplifiedLayerNormalization",
        [x, stream, gain],
        f"{name}.add",
        outputs,
        domain=_MICROSOFT,
        epsilon=arch.norm_epsilon,
    )
    return outputs[0], outputs[3]


def _gain(arch: Architecture, weights: Weights, name: str) -> np.ndarray:
    gain = weights.vector(name)
    if gain is None:
        raise ModelError(f"the weights lack the norm '{name}'; the source is incomplete, fetch it again")
    return gain + np.float32(1) if arch.unit_offset_norms else gain


def _attention(writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, layer: int) -> str:
    block = f"blocks.{layer}"
    queries, keys, values = _queries_keys_values(writer, arch, weights, x, block)
    cosines, sines = _rope_tables(writer, arch, arch.ropes[layer])
    window = arch.windows[layer]
    attended = writer.node(
        "GroupQueryAttention",
        [
            queries,
            keys,
            values,
            *(f"past_{name}" for name in _cache_names(layer)),
            "seqlens_k",
            "total_sequence_length",
            cosines,
            sines,
        ],
        f"{block}.attended",
        [f"{block}.attended", *(f"present_{name}" for name in _cache_names(layer))],
        domain=_MICROSOFT,
        num_heads=arch.query_heads,
        kv_num_heads=arch.kv_heads,
        scale=arch.query_scale,
        do_rotary=1,
        local_window_size=-1 if window is None else window,
    )
    if writer.flat:
        attended = _flatten(writer, attended)
    matrix, bias = _matrix(arch, weights, f"{block}.o"), weights.vector(f"{block}.o.bias")
    return _product(writer, matrix, attended, f"{block}.o", bias=bias)


def _rope_tables(writer: _GraphWriter, arch: Architecture, rope: Rope) -> tuple[str, str]:
    """Store the tables of ``rope``, made once however many blocks share it."""
    place = f"rope.{arch.ropes.index(rope)}"
    names = (f"{place}.cos", f"{place}.sin")
    if not writer.stores(names[0]):
        for name, table in zip(names, rope.tables(arch.context_length, arch.head_dim), strict=True):
            writer.weight(name, table)
    return names


def _queries_keys_values(
    writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, block: str
) -> tuple[str, str, str]:
    """Project to queries, keys and values ``(1, S, heads * head_dim)``; all in one where the kernel takes that."""
    names = [f"{block}.{part}" for part in "qkv"]
    parts = _products(writer, arch, weights, x, names, f"{block}.qkv", keep_whole=not arch.query_key_norms)
    if arch.query_key_norms:
        parts[0] = _head_norm(writer, arch, weights, parts[0], f"{block}.q_norm", arch.query_heads)
        parts[1] = _head_norm(writer, arch, weights, parts[1], f"{block}.k_norm", arch.kv_heads)
    if writer.flat:
        parts = [_lift(writer, part) for part in parts]
    queries, keys, values = parts if len(parts) > 1 else (parts[0], "", "")
    return queries, keys, values


def _lift(writer: _GraphWriter, x: str) -> str:
    """``(S, K)`` as ``(1, S, K)``."""
    return writer.node("Unsqueeze", [x, writer.constant("axis.0", np.array([0]))], f"{x}.lifted")


def _flatten(writer: _GraphWriter, x: str) -> str:
    """``(1, S, K)`` as ``(S, K)``; once, however often it is asked for."""
    output = f"{x}.flat"
    if not writer.computes(output):
        writer.node("Squeeze", [x, writer.constant("axis.0", np.array([0]))], output)
    return output


def _head_norm(writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, name: str, heads: int) -> str:
    """Norm every head of ``(..., S, heads * head_dim)`` by itself."""
    split = writer.constant(f"heads.{heads}", np.array([-1, heads, arch.head_dim]))
    batch = [] if writer.flat else [1]
    joined = writer.constant(f"joined.{heads}", np.array([*batch, -1, heads * arch.head_dim]))
    normed = _norm(writer, arch, weights, writer.node("Reshape", [x, split], f"{name}.split"), name)
    return writer.node("Reshape", [normed, joined], f"{name}.joined")


def _mlp(writer: _GraphWriter, arch: Architecture, weights: Weights, x: str, block: str) -> str:
    names = [f"{block}.gate", f"{block}.up"]
    gate, up = _products(writer, arch, weights, x, names, f"{block}.gate_up")
    if arch.activation == "silu":
        # x * sigmoid(alpha * x) with alpha 1 is SiLU, in one node.
        active = writer.node("QuickGelu", [gate], f"{block}.active", domain=_MICROSOFT, alpha=1.0)
    else:
        active = writer.node("FastGelu", [gate], f"{block}.active", domain=_MICROSOFT)
    gated = writer.node("Mul", [active, up], f"{block}.gated")
    bias = weights.vector(f"{block}.down.bias")
    return _product(writer, _matrix(arch, weights, f"{block}.down"), gated, f"{block}.down", bias=bias)


def _products(
    writer: _GraphWriter,
    arch: Architecture,
    weights: Weights,
    x: str,
    names: Sequence[str],
    together: str,
    *,
    keep_whole: bool = False,
) -> list[str]:
    """Multiply ``x`` by several matrices: in one product where that is faster, cut up after.

    It is faster where nothing has to be cut, and where each product comes with a second one for its offsets.

    ``keep_whole``: leave the result of the one product uncut.
    """
    widths = [arch.matrix_shape(name)[0] for name in names]
    matrices = [_matrix(arch, weights, name) for name in names]
    biases = [weights.vector(f"{name}.bias") for name in names]
    has_offsets = any(isinstance(matrix, BlockMatrix) and matrix.offsets_NB is not None for matrix in matrices)
    stacked = _stacked(matrices) if keep_whole or has_offsets else None
    if stacked is None:
        return [
            _product(writer, matrix, x, name, bias=bias)
            for matrix, name, bias in zip(matrices, names, biases, strict=True)
        ]
    bias = None
    if any(part is not None for part in biases):
        bias = np.concatenate(
            [np.zeros(width, np.float32) if part is None else part for part, width in zip(biases, widths, strict=True)]
        )
    whole = _product(writer, stacked, x, together, bias=bias)
    if keep_whole:
        return [whole]
    outputs = [f"{name}.cut" for name in names]
    sizes = writer.constant(f"cut.{'.'.join(map(str, widths))}", np.array(widths, np.int64))
    writer.node("Split", [whole, sizes], f"{together}.cut", outputs, axis=-1)
    return outputs


def _stacked(matrices: Sequence[AnyMatrix]) -> AnyMatrix | None:
    """Put matrices over the same input on top of each other; ``None`` where their forms differ."""
    integers = [matrix for matrix in matrices if isinstance(matrix, IntegerMatrix)]
    if len(integers) == len(matrices):
        return stack_outputs(integers)
    others = [matrix for matrix in matrices if not isinstance(matrix, IntegerMatrix)]
    return None if integers else stack(others)


def _matrix(arch: Architecture, weights: Weights, name: str) -> AnyMatrix:
    """Return a weight matrix, of the shape that the architecture says.

    Raises:
        ModelError: it has another.
    """
    matrix, stated = weights.matrix(name), arch.matrix_shape(name)
    if matrix.shape != stated:
        raise ModelError(
            f"the matrix '{name}' is {matrix.shape[0]} x {matrix.shape[1]}, by the model's settings it should be "
            f"{stated[0]} x {stated[1]}; settings and weights belong to different models"
        )
    return matrix


def _wants_rows(matrix: AnyMatrix) -> bool:
    """Whether a product with this matrix wants ``(rows, K)``: a ``Gemm``, one as second part, or one in integers."""
    return isinstance(matrix, DenseMatrix | IntegerMatrix) or matrix.offsets_NB is not None


def _product(writer: _GraphWriter, matrix: AnyMatrix, x: str, name: str, *, bias: np.ndarray | None = None) -> str:
    """``x @ matrix.T + bias``, in the form the graph has its activations in."""
    if writer.flat or not _wants_rows(matrix):
        return _flat_product(writer, matrix, x, name, bias=bias)
    return _lift(writer, _flat_product(writer, matrix, _flatten(writer, x), name, bias=bias))


def _flat_product(
    writer: _GraphWriter, matrix: AnyMatrix, x: str, name: str, *, bias: np.ndarray | None = None, output: str = ""
) -> str:
    """``x @ matrix.T + bias`` for ``x`` of shape ``(rows, K)``, or any other without a ``Gemm``."""
    output = output or f"{name}.out"
    if isinstance(matrix, IntegerMatrix):
        return integer_product(writer, matrix, x, name, bias=bias, output=output)
    if isinstance(matrix, DenseMatrix):
        inputs = [x, writer.weight(name, matrix.values_NK)]
        if bias is not None:
            inputs.append(writer.weight(f"{name}.bias", bias))
        return writer.node("Gemm", inputs, output, transB=1)
    codes, scales, offsets = _store_blocks(writer, name, matrix)
    inputs = [x, codes, scales]
    if bias is not None:
        inputs += ["", "", writer.weight(f"{name}.bias", bias)]
    rows, width = matrix.codes_NK.shape
    plain = writer.node(
        "MatMulNBits",
        inputs,
        output if offsets is None else f"{name}.codes.out",
        domain=_MICROSOFT,
        K=width,
        N=rows,
        bits=matrix.bits,
        block_size=matrix.block,
        accuracy_level=_ACCURACY_LEVEL,
    )
    if offsets is None:
        return plain
    sums = _block_sums(writer, x, width, matrix.block)
    return writer.node("Gemm", [sums, offsets, plain], output, transB=1)


def _store_blocks(writer: _GraphWriter, name: str, matrix: BlockMatrix) -> tuple[str, str, str | None]:
    codes = writer.weight(f"{name}.codes", matrix.packed())
    scales = writer.weight(f"{name}.scales", matrix.scales_NB)
    if matrix.offsets_NB is None:
        return codes, scales, None
    return codes, scales, writer.weight(f"{name}.offsets", matrix.offsets_NB)


def _block_sums(writer: _GraphWriter, x: str, width: int, block: int) -> str:
    """Sums of ``x`` over blocks, ``(rows, K / block)``, made once per input however many products share it."""
    output = f"{x}.sums.{block}"
    if not writer.computes(output):
        ones = np.kron(np.eye(width // block, dtype=np.float32), np.ones((1, block), np.float32))
        writer.node("Gemm", [x, writer.weight(f"ones.{width}.{block}", ones)], output, transB=1)
    return output
