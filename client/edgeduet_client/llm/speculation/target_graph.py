"""Parts of a target's graph, cut out without touching its weights.

What is cut out goes on naming the target's weights file. A session is given the folder where that lies, so a part
costs the disk next to nothing, and pages in memory are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeduet_client.llm.errors import ModelError

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
