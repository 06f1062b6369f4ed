"""Parts of a target's graph, cut out without touching its weights.

What is cut out goes on naming the target's weights file. A session is given the folder where that lies, so a part
costs the disk next to nothing, and pages in memory are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.errors import ModelError

if TYPE_CHECKING:
    from edgeduet_client.llm.model_folder import ModelFolder

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"

WEIGHTS_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's setting for where the weights lie of a graph that is handed over as bytes."""


@dataclass(frozen=True)
class GraphPart:
    """Some nodes of a graph, in order.

    Attributes:
        nodes: with the names they have in the target.
        initialisers: what they read, as the target stores it.
        output: the value they are there for.
    """

    nodes: Sequence[Any]
    initialisers: Sequence[Any]
    output: str


def read_graph(path: Path) -> Any:
    """Return the graph of a model without its weights.

    Raises:
        ModelError: it was not written by ``llm import``.
    """
    import onnx

    graph = onnx.load(str(path), load_external_data=False).graph
    names = {tensor.name for tensor in graph.initializer}
    if not names & {"embedding", "embedding.codes"}:
        raise ModelError(f"{path} is no graph that `llm import` wrote; import the model again")
    return graph


def embedding_nodes(path: Path) -> GraphPart:
    """Return what turns ``input_ids`` (1, S) into what the first block reads, (1, S, H) or (S, H)."""
    graph = read_graph(path)
    # The first norm of a model is that of its first block.
    first = next(node for node in graph.node if node.op_type == "SimplifiedLayerNormalization")
    return part_for(graph, first.input[0])


def part_for(graph: Any, output: str) -> GraphPart:
    """Return the nodes that ``output`` depends on."""
    nodes = needed_nodes(graph.node, [output])
    read = {name for node in nodes for name in node.input}
    return GraphPart(nodes, [tensor for tensor in graph.initializer if tensor.name in read], output)


def needed_nodes(nodes: Iterable[Any], outputs: Sequence[str]) -> list[Any]:
    """Return those of ``nodes`` (in order) that any of ``outputs`` depends on, in order."""
    wanted, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


def write_truncated_graph(path: Path, folder: ModelFolder, layers: int, vocabulary: NDArray[np.int64] | None) -> None:
    """Write the graph of a model's first ``layers`` blocks and its head.

    Args:
        path: the file; it names the model's weights.
        folder: the model.
        layers: at least 1.
        vocabulary: ids whose logits to compute, ascending; ``None``: all. Their rows of the head are in the file.
    """
    from onnx import helper

    graph = read_graph(folder.graph)
    nodes, tensors = list(graph.node), {tensor.name: tensor for tensor in graph.initializer}
    if layers < folder.manifest.layers:
        nodes = _with_stream_of(nodes, f"blocks.{layers}.attention_norm.add")
    if vocabulary is not None:
        _trim_head(nodes, tensors, folder, vocabulary)
    presents = [f"present_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]
    outputs = ["logits", "hidden", *presents]
    nodes = needed_nodes(nodes, outputs)
    read = {name for node in nodes for name in node.input}
    infos = {info.name: info for info in graph.output}
    if vocabulary is not None:
        infos["logits"] = helper.make_tensor_value_info("logits", 1, ["rows", len(vocabulary)])
    part = helper.make_graph(
        nodes,
        f"{graph.name}_{layers}_layers",
        [info for info in graph.input if info.name in read],
        [infos[name] for name in outputs],
        [tensor for name, tensor in tensors.items() if name in read],
    )
    model = helper.make_model(
        part,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=IR_VERSION,
        producer_name="edgeduet",
    )
    path.write_bytes(model.SerializeToString())


def _with_stream_of(nodes: list[Any], add_and_norm: str) -> list[Any]:
    """Return the nodes with the last residual sum replaced by that in front of an upper block."""
    from onnx import helper

    above = next(node for node in nodes if node.name == add_and_norm)
    last = helper.make_node("Add", list(above.input[:2]), ["stream.last"], name="stream.last")
    return [last if node.name == "stream.last" else node for node in nodes]


def _trim_head(nodes: list[Any], tensors: dict[str, Any], folder: ModelFolder, vocabulary: NDArray[np.int64]) -> None:
    """Give the nodes between ``hidden`` and ``logits`` only the rows (or columns) of the ids in ``vocabulary``."""
    from onnx import helper, numpy_helper

    before = {node.name for node in needed_nodes(nodes, ["hidden"])}
    width = folder.manifest.vocab_width
    for place, node in enumerate(nodes):
        if node.name in before or node not in needed_nodes(nodes, ["logits"]):
            continue
        inputs = list(node.input)
        for slot, name in enumerate(inputs):
            if name not in tensors or width not in tensors[name].dims:
                continue
            axis = list(tensors[name].dims).index(width)
            values = np.take(stored_array(folder.path, tensors[name]), vocabulary, axis=axis)
            inputs[slot] = f"{name}.trimmed"
            tensors[inputs[slot]] = numpy_helper.from_array(np.ascontiguousarray(values), inputs[slot])
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
        if attributes.get("N") == width:
            attributes["N"] = len(vocabulary)
        nodes[place] = helper.make_node(
            node.op_type, inputs, list(node.output), name=node.name, domain=node.domain, **attributes
        )


def stored_array(folder: Path, tensor: Any) -> NDArray[Any]:
    """Return a tensor of a graph, as a view of its file where it lies in one."""
    import onnx

    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(folder / entries["location"], dtype, "r", int(entries["offset"]), tuple(tensor.dims))
