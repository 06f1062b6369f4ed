"""The frozen text tower as a function of token embeddings, for learned contexts and adapters.

Two kinds of tower, one interface: open_clip's own transformer (``CLIP`` keeps its parts on the model,
``CustomTextCLIP`` under ``.text``) and Hugging Face encoders inside open_clip (``HFTextEncoder``).
Both pool by the *original* token ids, never by what was put in their place.

The tower object only refers to the frozen model: it is not an ``nn.Module``, registers nothing, and
changes nothing. Where nothing is adapted or trained, callers use open_clip's ``encode_text`` itself.

Shape suffixes: N sequences, T tokens, W text width, D joint width, E experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeduet_shared.adapters import AdapterSite, SiteNoise
from edgeduet_shared.clip_text import ClipText
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.transformer_block import block_forward

if TYPE_CHECKING:
    from open_clip.hf_model import HFTextEncoder

Sites = Mapping[str, AdapterSite]


class TextTower(ABC):
    """A frozen text tower.

    Attributes:
        width: W of the token embeddings.
        context_length: longest sequence the tower takes.
        blocks: number of transformer blocks that can carry an adapter; 0 when none can.
        trims: shorter padding does not change the result, so sequences may be cut to the longest.
    """

    width: int
    context_length: int
    blocks: int
    trims: bool

    @abstractmethod
    def word_embeddings(self) -> Tensor:
        """The frozen token table (V, W)."""

    @abstractmethod
    def read_positions(self, ids_NT: Tensor) -> Tensor:
        """One-hot (N, T) choice of the token that is pooled and that routers read."""

    @abstractmethod
    def encode(
        self, embedded_NTW: Tensor, read_NT: Tensor, present_NT: Tensor, sites: Sites, noise: Sequence[SiteNoise]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Text features before normalisation, and the clean router logits of each site.

        Args:
            embedded_NTW: token embeddings without positions.
            read_NT: one-hot from :meth:`read_positions` of the original ids.
            present_NT: 1 where there is a token, 0 on padding.
            sites: adapter sites by name ``block<i>``; may be empty.
            noise: one entry per site, or empty for evaluation.

        Returns:
            features (N, D), and (N, E) per site that has a router, first block first.
        """


def text_tower(model: Any) -> TextTower:
    """Wrap a :class:`~edgeduet_shared.clip_text.ClipText`, or the text side of an open_clip model.

    Raises:
        ConfigError: the tower appends its own class token or masks padding inside a bidirectional
            transformer (CoCa, SigLIP 2); contexts and text adapters are not supported there.
    """
    if isinstance(model, ClipText):
        return NativeTextTower(model)
    from open_clip.hf_model import HFTextEncoder

    parts = getattr(model, "text", model)
    if isinstance(parts, HFTextEncoder):
        return HuggingFaceTextTower(parts)
    if getattr(parts, "cls_emb", None) is not None or getattr(parts, "use_pad_mask", False):
        raise ConfigError(
            f"text tower {type(parts).__name__} appends its own class token or masks padding; learned prompts and "
            "text adapters do not work there: use a plain CLIP text tower, or a method without prompt and with "
            "model.adapter.text_layers = []"
        )
    return NativeTextTower(parts)


class NativeTextTower(TextTower):
    """open_clip's own text transformer, in open_clip's model or alone."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self.width = parts.token_embedding.weight.shape[1]
        self.context_length = parts.positional_embedding.shape[0]
        self.blocks = len(parts.transformer.resblocks)
        self._pool_type = getattr(parts, "text_pool_type", None) or parts.pool_type
        self._eos: Any = getattr(parts, "text_eos_id", None) or getattr(parts, "eos_id", None)
        # Without a causal mask, padding takes part in attention; "last" pools the last padded position.
        self.trims = parts.attn_mask is not None and self._pool_type in ("argmax", "eos", "first")

    def word_embeddings(self) -> Tensor:
        """The frozen token table (V, W)."""
        return self._parts.token_embedding.weight.detach()

    def read_positions(self, ids_NT: Tensor) -> Tensor:
        """One-hot choice of the end-of-text token (or what the tower pools), from the original ids."""
        length = ids_NT.shape[-1]
        if self._pool_type == "argmax":
            position_N = ids_NT.argmax(-1)
        elif self._pool_type == "eos":
            position_N = torch.eq(ids_NT, self._eos).int().argmax(-1)
        elif self._pool_type == "first":
            position_N = torch.zeros_like(ids_NT[:, 0])
        elif self._pool_type == "last":
            position_N = torch.full_like(ids_NT[:, 0], length - 1)
        else:
            raise ConfigError(f"text towers with pool_type '{self._pool_type}' have no single text feature")
        return functional.one_hot(position_N, length).float()

    def encode(
        self, embedded_NTW: Tensor, read_NT: Tensor, present_NT: Tensor, sites: Sites, noise: Sequence[SiteNoise]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`TextTower.encode`; padding needs no mask because attention is causal."""
        parts, length = self._parts, embedded_NTW.shape[1]
        mask = None if parts.attn_mask is None else parts.attn_mask[:length, :length]
        noise_of = dict(zip(sites, noise, strict=True)) if noise else {}
        x_NTW = embedded_NTW + parts.positional_embedding[:length]
        logits = []
        for index, block in enumerate(parts.transformer.resblocks):
            name = f"block{index}"
            x_NTW, logits_NE = block_forward(
                block,
                x_NTW,
                mask=mask,
                site=sites.get(name),
                noise=noise_of.get(name),
                read_NT=read_NT,
                only_read=index == self.blocks - 1,
            )
            if logits_NE is not None:
                logits.append(logits_NE)
        return self._project(parts.ln_final(x_NTW[:, 0])), tuple(logits)

    def _project(self, pooled_NW: Tensor) -> Tensor:
        projection = self._parts.text_projection
        if projection is None:
            return pooled_NW
        return projection(pooled_NW) if isinstance(projection, nn.Module) else pooled_NW @ projection


class HuggingFaceTextTower(TextTower):
    """A Hugging Face encoder inside open_clip: contexts go in as ``inputs_embeds``; no adapter sites."""

    def __init__(self, parts: HFTextEncoder) -> None:
        self._parts = parts
        self.width = parts.transformer.get_input_embeddings().weight.shape[1]
        self.context_length = parts.context_length or 512
        self.blocks = 0
        self.trims = True

    def word_embeddings(self) -> Tensor:
        """The frozen token table (V, W)."""
        return self._parts.transformer.get_input_embeddings().weight.detach()

    def read_positions(self, ids_NT: Tensor) -> Tensor:
        """One-hot choice of the first token; only the tower's own pooler decides what is pooled."""
        return functional.one_hot(torch.zeros_like(ids_NT[:, 0]), ids_NT.shape[-1]).float()

    def encode(
        self, embedded_NTW: Tensor, read_NT: Tensor, present_NT: Tensor, sites: Sites, noise: Sequence[SiteNoise]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See :meth:`TextTower.encode`; the encoder adds positions and masks padding itself."""
        if sites:
            raise ConfigError("Hugging Face text towers take no adapters; set model.adapter.text_layers = []")
        mask_NT = present_NT.long()
        out = self._parts.transformer(inputs_embeds=embedded_NTW, attention_mask=mask_NT)
        return self._parts.proj(self._parts.pooler(out, mask_NT)), ()
