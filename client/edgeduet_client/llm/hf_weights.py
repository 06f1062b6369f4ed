"""A Hugging Face model folder as a source of weights: ``config.json`` and safetensors under our names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edgeduet_client.llm.architecture import Architecture, from_config
from edgeduet_client.llm.block_matrix import DenseMatrix
from edgeduet_client.llm.errors import ModelError

_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# The second norm of a block stands before the MLP in most families; Gemma has one after the attention, one
# before and one after the MLP.
_PLAIN_NORMS = {"mlp_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}


class HuggingFaceWeights:
    """The weights of a folder with ``config.json`` and ``*.safetensors``.

    Raises:
        ModelError: a file is missing, or the weights are in a format other than safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder)
        self.files = _weight_files(folder)
        self._used: set[str] = set()
        self._places = self._index()
        self._prefix = self._find_prefix()

    @cached_property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        architecture = from_config(self.config)
        width = self._rows("embedding")
        if width != architecture.vocab_width:
            raise ModelError(
                f"{self.folder}: config.json states {architecture.vocab_width} tokens, the embedding has {width}; "
                "config and weights belong to different models"
            )
        return architecture

    def unused(self) -> list[str]:
        """Names of tensors of the language model that nobody asked for.

        What lies outside it (a vision tower) is not its own, and rotary frequencies are computed, not learned.
        """
        own = (name for name in self._places if name.startswith(self._prefix) and not name.endswith(".inv_freq"))
        return sorted(set(own) - self._used)

    def vector(self, name: str) -> np.ndarray | None:
        """Return a vector as float32 or ``None`` (see :class:`edgeduet_client.llm.graph.Weights`)."""
        stored = self._stored_name(name)
        return None if stored is None else self._read(stored)

    def matrix(self, name: str) -> DenseMatrix:
        """Return a matrix as float32 ``(N, K)``."""
        stored = self._stored_name(name)
        if stored is None:
            raise ModelError(f"{self.folder}: the weights lack '{name}'; the folder is incomplete, fetch it again")
        values = self._read(stored)
        if values.ndim != 2:
            raise ModelError(f"{self.folder}: {stored} has {values.ndim} axes, not 2; the weights are of another model")
        return DenseMatrix(values)

    def _rows(self, name: str) -> int:
        """Rows of a matrix, without reading it."""
        from safetensors import safe_open

        stored = self._stored_name(name)
        assert stored is not None  # the prefix was found by the embedding
        with safe_open(self._places[stored], framework="pt") as opened:
            return int(opened.get_slice(stored).get_shape()[0])

    def _stored_name(self, name: str) -> str | None:
        top = {"embedding": f"{self._prefix}embed_tokens.weight", "head": "lm_head.weight"}
        if name in top:
            stored = top[name]
        elif name == "final_norm":
            stored = f"{self._prefix}norm.weight"
        else:
            _, layer, part, *rest = name.split(".")
            sandwich = f"{self._prefix}layers.0.pre_feedforward_layernorm.weight" in self._places
            norms = _SANDWICH_NORMS if sandwich else _PLAIN_NORMS
            known = {**_MATRICES, **norms}
            if part not in known:
                return None
            stored = f"{self._prefix}layers.{layer}.{known[part]}.{rest[0] if rest else 'weight'}"
        return stored if stored in self._places else None

    def _index(self) -> dict[str, Path]:
        from safetensors import SafetensorError, safe_open

        places: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as opened:
                    places.update(dict.fromkeys(opened.keys(), file))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: not a whole safetensors file ({error}); fetch it again") from error
        return places

    def _find_prefix(self) -> str:
        end = "embed_tokens.weight"
        found = [name.removesuffix(end) for name in self._places if name.endswith(end)]
        if not found:
            raise ModelError(f"{self.folder}: the weights have no {end}; this is no decoder-only language model")
        return found[0]

    def _read(self, stored: str) -> np.ndarray:
        from safetensors import safe_open

        self._used.add(stored)
        # Through torch, since numpy has no bfloat16.
        with safe_open(self._places[stored], framework="pt") as opened:
            values: np.ndarray = opened.get_tensor(stored).float().numpy()
        return values


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in ``file``.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        stated = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); fetch it again") from error
    if not isinstance(stated, dict):
        raise ModelError(f"{file} holds no JSON object; fetch it again")
    return stated


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        inside = sorted(folder.glob("*.gguf"))
        hint = f" (it holds {inside[0].name}: give that file)" if inside else ""
        raise ModelError(f"{folder}: no config.json; give a model folder, a repo id or a .gguf file{hint}")
    config = read_json_object(file)
    if config.get("quantization_config"):
        raise ModelError(f"{file}: the weights are quantised already; import the original, or a GGUF file")
    # Multi-modal Gemma 3 keeps the language model's settings one level down.
    if config.get("model_type") == "gemma3" and isinstance(config.get("text_config"), dict):
        return {**config, **config["text_config"]}
    return config


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, by its index where it has one.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json_object(index).get("weight_map")
        files = sorted({folder / str(name) for name in places.values()}) if isinstance(places, dict) else []
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            lacking = ", ".join(missing[:3]) or "all its files"
            raise ModelError(f"{folder}: {index.name} names files that are missing ({lacking}); fetch them too")
        return files
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder}: no .safetensors file; save the model with save_pretrained, or import a GGUF")
    return files
