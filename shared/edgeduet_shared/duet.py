"""The duet model: a frozen CLIP with the trainable parts a method asks for.

One object holds the structure; parameters are values that travel in and out::

    model = DuetModel(backbone, class_names, config, parts)
    params = model.initial(seed)                              # flat dict, same on every machine
    z, routing = model.run(params, "encode_image", x, noise)  # x = model.front(pixels), cached

``run`` goes through ``torch.func.functional_call``, so gradients come from ``torch.func.grad`` and many
clients from ``torch.func.vmap`` over a leading client axis of ``params`` and data. The frozen backbone
is shared by all models built on it: it is held outside the module tree, is not among the parameters,
and is never changed, so that nothing nests when another model is built.

Nothing is drawn inside a forward pass: training noise and dropout come from :meth:`DuetModel.draw_noise`.

``run`` swaps parameters into this object while it works, so one object must not run in two threads at
once; build one per thread (the backbone can be shared).

Shape suffixes: B images, C classes, D joint width, E experts, M dispatched prompts, P = M + 1, L context
length, T tokens, W text width, N = M * C.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from edgeduet_shared.adapters import AdapterSite, SiteNoise
from edgeduet_shared.backbone import Backbone
from edgeduet_shared.config import AdapterConfig, ModelConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.fusion import Fusion
from edgeduet_shared.head import AttentionHead
from edgeduet_shared.image_tower import EmbeddingTower, ImageTower, adapted_image_tower
from edgeduet_shared.plan import GROUPS, Group, Parts
from edgeduet_shared.prompts import (
    ClassTokens,
    PromptContext,
    class_tokens,
    context_from_words,
    place_context,
    spoken,
    template_words,
)
from edgeduet_shared.seeds import derive_seed
from edgeduet_shared.text_tower import TextTower, text_tower

if TYPE_CHECKING:
    from edgeduet_shared.lora import LoraCopy

Params = dict[str, Tensor]
"""Flat parameters, named as in ``DuetModel.named_parameters()``."""

METHODS = ("encode_image", "encode_text", "encode_text_under", "local_logits", "fused_logits")
"""What :meth:`DuetModel.run` can call."""

_CHUNK = 512


class Noise(NamedTuple):
    """Randomness of one training step: one entry per image site and per text site, in layer order.

    A pytree of tensors only, so it can be stacked and mapped over clients.
    """

    image: tuple[SiteNoise, ...]
    text: tuple[SiteNoise, ...]


class RouterShapes(NamedTuple):
    """Sites that have a router, and experts per router (0 without routers)."""

    image_sites: int
    text_sites: int
    experts: int


def stack_noise(per_client: Sequence[Noise]) -> Noise:
    """Stack the noise of several clients along a new leading axis."""
    leaves = [pytree.tree_flatten(noise) for noise in per_client]
    stacked = [torch.stack(list(same)) for same in zip(*(flat for flat, _ in leaves), strict=True)]
    return cast(Noise, pytree.tree_unflatten(stacked, leaves[0][1]))


class DuetModel(nn.Module):
    """Structure of the trainable parts on a frozen backbone.

    Args:
        backbone: the frozen CLIP; shared, never changed.
        class_names: names of all classes of the stream, in label order.
        config: sizes and placement of the parts.
        parts: which parts exist.

    Raises:
        ConfigError: parts or sizes that do not fit each other or the backbone.

    Attributes:
        front_key: names the cut of the image tower; the feature cache's key together with the
            backbone's fingerprint.
        router_shapes: how many sites have routers.
    """

    def __init__(self, backbone: Backbone, class_names: Sequence[str], config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        _check_parts(parts, class_names)
        self.parts = parts
        self.config = config
        self._backbone = backbone
        self._class_names = tuple(class_names)
        text: Any = backbone.text
        self.lora_copy: LoraCopy | None = None
        if parts.lora:
            from edgeduet_shared.lora import LoraCopy  # peft is slow to import and only this part needs it

            self.lora_copy = LoraCopy(backbone.model, config.lora_rank)
            text = self.lora_copy.model
            self.lora = self.lora_copy.updates
        self._image: ImageTower = self._image_tower()
        self.front_key = self._image.front_key
        adapter = config.adapter
        self.image_adapters = _sites(self._image.site_widths, adapter, parts)
        self._prepare_text(text)
        if parts.fusion:
            self.fusion = Fusion(backbone.embed_dim, config.fusion)
        if parts.head:
            self.head = AttentionHead(backbone.embed_dim)
        self.requires_grad_(False)
        self._groups = {name: _group(name) for name, _ in self.named_parameters()}
        experts = adapter.experts if parts.experts else 0
        self.router_shapes = RouterShapes(
            len(self.image_adapters) if experts else 0, len(self.text_adapters) if experts else 0, experts
        )

    # -- values ------------------------------------------------------------------------------------

    def initial(self, seed: int) -> Params:
        """Fresh parameters; the same seed gives the same values on every machine and for every set of parts."""
        fresh: Params = {}
        for prefix, part in self._trainable_parts():
            generator = torch.Generator().manual_seed(derive_seed(seed, "initial", prefix))
            if isinstance(part, PromptContext):
                words = template_words(self.config.prompt.template)
                context = context_from_words(self._backbone, words, self.config.prompt.length, seed)
                values = {"context": torch.from_numpy(context)}
            else:
                values = part.initial(generator)
            fresh.update({f"{prefix}.{name}": value.to(self._device) for name, value in values.items()})
        return {name: fresh[name] for name, _ in self.named_parameters()}

    def group_of(self, name: str) -> Group:
        """The parameter group that ``name`` belongs to.

        Raises:
            KeyError: no parameter of that name.
        """
        return self._groups[name]

    def count(self) -> dict[Group, int]:
        """Trainable numbers per group; 0 for groups this model does not have."""
        totals: dict[Group, int] = dict.fromkeys(GROUPS, 0)
        for name, parameter in self.named_parameters():
            totals[self.group_of(name)] += parameter.numel()
        return totals

    def draw_noise(self, batch: int, classes: int, generator: torch.Generator, *, router: bool = True) -> Noise:
        """Draw the randomness of one training step.

        Args:
            batch: images B.
            classes: classes C whose texts are encoded.
            generator: where all values come from.
            router: draw router noise; without it only dropout masks are drawn.
        """
        image = tuple(site.draw_noise(batch, generator, router=router) for site in _in_order(self.image_adapters))
        text = tuple(site.draw_noise(classes, generator, router=router) for site in _in_order(self.text_adapters))
        return Noise(image, text)

    # -- computation -------------------------------------------------------------------------------

    @torch.no_grad()
    def front(self, pixels_BCHW: Tensor) -> Tensor:
        """The frozen part of the image tower, up to the first place where something is trained; no gradient."""
        return self._image.front(pixels_BCHW)

    def run(self, params: Params, method: str, *args: Any) -> Any:
        """Call one of :data:`METHODS` with ``params`` in place; works under ``torch.func`` transforms.

        Raises:
            ConfigError: unknown method.
            RuntimeError: ``params`` lacks a parameter or has one too many.
        """
        return torch.func.functional_call(self, params, (method, *args), strict=True)

    def forward(self, method: str, *args: Any) -> Any:
        """Dispatch for ``functional_call``; use :meth:`run`."""
        if method not in METHODS:
            raise ConfigError(f"DuetModel has no method '{method}'; known: {', '.join(METHODS)}")
        return getattr(self, method)(*args)

    def encode_image(self, x: Tensor, noise: Noise | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalised image features (B, D) and the clean router logits (B, E) of each routed site.

        Args:
            x: output of :meth:`front` (the cached features), first axis B, fp32 or fp16.
            noise: training randomness; None evaluates.
        """
        sites = _as_mapping(self.image_adapters)
        raw_BD, logits = self._image.tail(x.float(), sites, () if noise is None else noise.image)
        if self.parts.head:
            raw_BD = self.head(raw_BD)
        return functional.normalize(raw_BD, dim=-1), logits

    def encode_text(self, class_ids_C: Tensor, noise: Noise | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalised text features (C, D) and the clean router logits (C, E) of each routed site.

        Under the local prompt when there is one, else under the hand-written template.

        Args:
            class_ids_C: labels of the wanted classes.
            noise: training randomness; None evaluates.
        """
        if self._fixed_text is not None:
            return self._fixed_text[class_ids_C], ()
        tokens, embedded = self._own_tokens
        embedded_CTW = embedded[class_ids_C]
        if self._has_context:
            embedded_CTW = place_context(embedded_CTW, self.prompt.context, tokens.start)
        read_CT, present_CT = tokens.read_CT[class_ids_C], tokens.present_CT[class_ids_C]
        site_noise = () if noise is None else noise.text
        raw_CD, logits = self._text.encode(
            embedded_CTW, read_CT, present_CT, _as_mapping(self.text_adapters), site_noise
        )
        return functional.normalize(raw_CD, dim=-1), logits

    def encode_text_under(self, contexts_MLW: Tensor, class_ids_C: Tensor) -> Tensor:
        """Normalised text features (M, C, D) under M given contexts, text adapters in evaluation mode.

        Raises:
            ConfigError: contexts of another length than ``model.prompt.length``.
        """
        if contexts_MLW.shape[-2] != self.config.prompt.length or self._prompted is None:
            raise ConfigError(
                f"contexts have {contexts_MLW.shape[-2]} vectors, model.prompt.length is {self.config.prompt.length}; "
                "the pool must be built with the scenario's prompt length (at least 1)"
            )
        tokens, embedded = self._prompted
        dispatched, classes = contexts_MLW.shape[0], class_ids_C.shape[0]
        if dispatched == 0:
            return contexts_MLW.new_zeros(0, classes, self._backbone.embed_dim)
        embedded_CTW = embedded[class_ids_C]
        start, end = tokens.start, tokens.start + tokens.length
        before, after = (
            part.unsqueeze(0).expand(dispatched, -1, -1, -1)
            for part in (embedded_CTW[:, :start], embedded_CTW[:, end:])
        )
        context_MCLW = contexts_MLW.unsqueeze(1).expand(-1, classes, -1, -1)
        embedded_NTW = torch.cat([before, context_MCLW, after], dim=2).flatten(0, 1)
        read_NT = tokens.read_CT[class_ids_C].repeat(dispatched, 1)
        present_NT = tokens.present_CT[class_ids_C].repeat(dispatched, 1)
        raw_ND, _ = self._text.encode(embedded_NTW, read_NT, present_NT, _as_mapping(self.text_adapters), ())
        return functional.normalize(raw_ND, dim=-1).unflatten(0, (dispatched, classes))

    def local_logits(self, z_BD: Tensor, t_CD: Tensor) -> Tensor:
        """Temperature times cosine, (B, C)."""
        return self._backbone.logit_scale * (z_BD @ t_CD.transpose(-1, -2))

    def fused_logits(self, z_BD: Tensor, t_CD: Tensor, u_MCD: Tensor, mix: float) -> tuple[Tensor, Tensor]:
        """``mix`` * local + (1 - ``mix``) * fused logits (B, C), and the attention (B, C, M + 1).

        The attention is the mean over heads and sums to 1 over prompts; index 0 is the local prompt.

        Raises:
            ConfigError: the model was built without fusion.
        """
        if not self.parts.fusion:
            raise ConfigError("fused logits need a model built with parts.fusion")
        shared_BC, attention_BCP = self.fusion(z_BD, t_CD, u_MCD)
        local_BC = self.local_logits(z_BD, t_CD)
        return mix * local_BC + (1.0 - mix) * self._backbone.logit_scale * shared_BC, attention_BCP

    # -- construction ------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._backbone.device

    @property
    def _has_context(self) -> bool:
        return self.parts.prompt and self.config.prompt.length > 0

    def _image_tower(self) -> ImageTower:
        if self.parts.adapters:
            return adapted_image_tower(self._backbone, self.config.adapter)
        if self.lora_copy is not None:
            return self.lora_copy.image_tower(self._backbone.embed_dim)
        backbone = self._backbone
        return EmbeddingTower(lambda pixels: backbone.model.encode_image(pixels), backbone.embed_dim, adapted=False)

    def _prepare_text(self, text: Any) -> None:
        self._fixed_text: Tensor | None = None
        self._prompted: tuple[ClassTokens, Tensor] | None = None
        self.text_adapters = nn.ModuleDict()
        wants_sites = self.parts.adapters and self.config.adapter.text_layers != ()
        if not (wants_sites or self.parts.lora or self._has_context):
            self._fixed_text = self._template_features()
        if not (wants_sites or self.parts.lora or self._has_context or self.parts.fusion):
            return
        self._text: TextTower = text_tower(text)
        if wants_sites:
            layers = _text_layers(self.config.adapter, self._text)
            widths = {f"block{layer}": self._text.width for layer in layers}
            self.text_adapters = _sites(widths, self.config.adapter, self.parts)
        if self._has_context:
            self.prompt = PromptContext(self.config.prompt.length, self._text.width)
        if (self.parts.prompt or self.parts.fusion) and self.config.prompt.length:
            self._prompted = self._tokens(self.config.prompt.length)
        if self._fixed_text is None:
            self._own_tokens = self._prompted if self._has_context and self._prompted else self._tokens(0)

    def _tokens(self, length: int) -> tuple[ClassTokens, Tensor]:
        tokens = class_tokens(self._text, self._backbone.tokenizer, self._class_names, self.config.prompt, length)
        return tokens, self._text.word_embeddings()[tokens.ids_CT]

    @torch.no_grad()
    def _template_features(self) -> Tensor:
        template = self.config.prompt.template
        template_words(template)
        texts = [template.replace("{}", spoken(name)) for name in self._class_names]
        encode = self._backbone.text.encode_text
        chunks = [
            encode(self._backbone.tokenizer(texts[start : start + _CHUNK]).to(self._device), normalize=True)
            for start in range(0, len(texts), _CHUNK)
        ]
        return torch.cat(chunks)

    def _trainable_parts(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [(f"image_adapters.{name}", site) for name, site in self.image_adapters.items()]
        found += [(f"text_adapters.{name}", site) for name, site in self.text_adapters.items()]
        found += [(name, getattr(self, name)) for name in ("prompt", "fusion", "head", "lora") if hasattr(self, name)]
        return found


def _group(name: str) -> Group:
    top, *rest = name.split(".")
    if top in ("image_adapters", "text_adapters"):
        kinds: dict[str, Group] = {"shared": "shared_adapter", "routed": "routed_adapters", "router": "router"}
        return kinds[rest[1]]
    return cast(Group, top)


def _check_parts(parts: Parts, class_names: Sequence[str]) -> None:
    if not class_names:
        raise ConfigError("a model needs at least one class name")
    if parts.experts and not parts.adapters:
        raise ConfigError("parts.experts needs parts.adapters: routed adapters live at the sites of shared ones")
    if parts.lora and parts.adapters:
        raise ConfigError("parts.lora and parts.adapters exclude each other: LoRA takes the adapters' place")


def _sites(widths: dict[str, int], config: AdapterConfig, parts: Parts) -> nn.ModuleDict:
    if not parts.adapters:
        return nn.ModuleDict()
    routed = parts.experts and config.experts > 0
    return nn.ModuleDict({name: AdapterSite(width, config, routed=routed) for name, width in widths.items()})


def _text_layers(config: AdapterConfig, tower: TextTower) -> tuple[int, ...]:
    if tower.blocks == 0:
        raise ConfigError(
            "text adapters need open_clip's own text tower, this one is a Hugging Face encoder; "
            "set model.adapter.text_layers = []"
        )
    layers = tuple(range(tower.blocks)) if config.text_layers is None else tuple(sorted(set(config.text_layers)))
    if not all(0 <= layer < tower.blocks for layer in layers):
        raise ConfigError(f"model.adapter.text_layers={list(layers)}: this tower has blocks 0..{tower.blocks - 1}")
    return layers


def _as_mapping(sites: nn.ModuleDict) -> dict[str, AdapterSite]:
    return cast(dict[str, AdapterSite], dict(sites.items()))


def _in_order(sites: nn.ModuleDict) -> list[AdapterSite]:
    return cast(list[AdapterSite], list(sites.values()))
