"""The two tables a drafter shares with its target: what tokens are read as, and the rows its head multiplies.

Read from the target's own files, row by row, whatever form they are stored in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.speculation.drafter_dataset import TargetTables
from edgeduet_client.llm.speculation.target_graph import read_graph, stored_array

if TYPE_CHECKING:
    from edgeduet_client.llm.model_folder import ModelFolder


@dataclass(frozen=True)
class StoredTable:
    """A matrix of the target on disk, (V, H): dense, or in blocks of 4 or 8 bits.

    Attributes:
        codes: float32 (V, H), uint8 (V, bytes of a row), or int8 (V, H), which has no middle.
        scales: (V, blocks), or ``None`` for a dense table.
        offsets: (V, blocks), or ``None`` where all are zero.
        width: H.
        factor: what rows are multiplied with: a number, or (H,).
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32] | None
    offsets: NDArray[np.float32] | None
    width: int
    factor: float | NDArray[np.float32] = 1.0

    def rows(self, ids: NDArray[np.integer]) -> NDArray[np.float32]:
        """Return float32 rows (n, H)."""
        if self.scales is None:
            return np.asarray(self.factor, np.float32) * self.codes[ids].astype(np.float32)
        codes, scales = self.codes[ids], self.scales[ids]
        blocks = scales.shape[1]
        if codes.dtype == np.int8:
            return np.asarray(self.factor, np.float32) * codes.astype(np.float32) * scales
        if codes.shape[1] * 2 >= 2 * self.width:
            values, middle = codes.astype(np.float32), 128
        else:
            values = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1).astype(np.float32)
            middle = 8
        values = (values.reshape(len(codes), blocks, -1) - middle) * scales[..., None]
        if self.offsets is not None:
            values += self.offsets[ids][..., None]
        dense: NDArray[np.float32] = (
            np.asarray(self.factor, np.float32) * values.reshape(len(codes), -1)[:, : self.width]
        )
        return dense


def target_tables(folder: ModelFolder, vocabulary: NDArray[np.integer]) -> TargetTables:
    """Return what a drafter for the ids ``vocabulary`` (ascending) shares with the model in ``folder``.

    Raises:
        ModelError: the graph was not written by ``llm import``.
    """
    embedding = embedding_table(folder)
    head = head_table(folder)
    return TargetTables(np.asarray(vocabulary, np.int64), head.rows(np.asarray(vocabulary)), embedding.rows)


def embedding_table(folder: ModelFolder) -> StoredTable:
    """Return what ids are read as by the first block."""
    graph = read_graph(folder.graph)
    scale = _small(graph, "embedding.scale")
    return _table(folder, graph, "embedding", 1.0 if scale is None else scale.item())


def head_table(folder: ModelFolder) -> StoredTable:
    """Return the output matrix."""
    graph = read_graph(folder.graph)
    tied = not any(tensor.name in ("head", "head.codes", "head.integers") for tensor in graph.initializer)
    return _table(folder, graph, "embedding" if tied else "head", 1.0)


def _table(folder: ModelFolder, graph: Any, name: str, factor: float | NDArray[np.float32]) -> StoredTable:
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    if f"{name}.factors" in tensors:
        factor = np.asarray(factor * stored_array(folder.path, tensors[f"{name}.factors"]), np.float32)
    width = folder.manifest.hidden_width
    if name in tensors:
        return StoredTable(stored_array(folder.path, tensors[name]), None, None, width, factor)
    if f"{name}.codes" not in tensors:
        columns = stored_array(folder.path, tensors[f"{name}.integers"])
        steps = stored_array(folder.path, tensors[f"{name}.steps"])
        return StoredTable(columns.T, steps[:, None], None, width, factor)
    codes = stored_array(folder.path, tensors[f"{name}.codes"])
    offsets = tensors.get(f"{name}.offsets")
    return StoredTable(
        codes.reshape(len(codes), -1),
        stored_array(folder.path, tensors[f"{name}.scales"]).reshape(len(codes), -1),
        None if offsets is None else stored_array(folder.path, offsets).reshape(len(codes), -1),
        width,
        factor,
    )


def _small(graph: Any, name: str) -> NDArray[Any] | None:
    import onnx

    for tensor in graph.initializer:
        if tensor.name == name:
            return np.asarray(onnx.numpy_helper.to_array(tensor))
    return None
