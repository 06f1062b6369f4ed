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
        self.files = sorted(folder.glob("*.safetensors"))
        if not self.files:
            raise ModelError(f"{folder}: no .safetensors file; save the model with save_pretrained, or import a GGUF")
        self._places = self._index()
        self._prefix = self._find_prefix()

    @cached_property
    def architecture(self) -> Architecture:
        """The shape of the model."""
        architecture = from_config(self.config)
        width = self.matrix("embedding").dense().shape[0]
        if width != architecture.vocab_width:
            raise ModelError(
                f"{self.folder}: config.json states {architecture.vocab_width} tokens, the embedding has {width}; "
                "config and weights belong to different models"
            )
        return architecture

    def vector(self, name: str) -> np.ndarray | None:
        """Return a vector as float32 or ``None`` (see :class:`edgeduet_client.llm.graph.Weights`)."""
        stored = self._stored_name(name)
        return None if stored is None else self._read(stored)

    def matrix(self, name: str) -> DenseMatrix:
        """Return a matrix as float32 ``(N, K)``."""
        stored = self._stored_name(name)
        if stored is None:
            raise ModelError(f"{self.folder}: the weights lack '{name}'; the folder is incomplete, fetch it again")
        return DenseMatrix(self._read(stored))

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

        # Through torch, since numpy has no bfloat16.
        with safe_open(self._places[stored], framework="pt") as opened:
            values: np.ndarray = opened.get_tensor(stored).float().numpy()
        return values


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{folder}: no config.json; give a model folder, a repo id or a .gguf file") from None
    except ValueError as error:
        raise ModelError(f"{file} is not JSON ({error}); fetch it again") from error
    # Multi-modal Gemma 3 keeps the language model's settings one level down.
    return {**config, **config["text_config"]} if "text_config" in config else config
