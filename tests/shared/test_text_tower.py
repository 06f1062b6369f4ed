"""The frozen text tower as a function of embeddings: equal to open_clip, pooled by the original ids."""

from __future__ import annotations

import warnings

import pytest
import torch
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from torch import Tensor

from edgeduet_shared.adapters import AdapterSite
from edgeduet_shared.config import AdapterConfig, PromptConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.prompts import class_tokens, place_context
from edgeduet_shared.text_tower import HuggingFaceTextTower, NativeTextTower, text_tower
from tiny_towers import CLASS_NAMES, TEXT, VISION, tiny_backbone

TEXT_KINDS = ["native", "custom", "mean_pooler", "cls_last_hidden_state_pooler"]


def encoded(text: str, length: int, context: Tensor | None = None) -> Tensor:
    backbone = tiny_backbone("vit", text)
    tower = text_tower(backbone.model)
    tokens = class_tokens(tower, backbone.tokenizer, CLASS_NAMES, PromptConfig(), length)
    embedded = tower.word_embeddings()[tokens.ids_CT]
    if context is not None:
        embedded[:, tokens.start : tokens.start + length] = context
    return tower.encode(embedded, tokens.read_CT, tokens.present_CT, {}, ())[0]


@pytest.mark.parametrize("text", TEXT_KINDS)
def test_the_hand_template_equals_encode_text(text: str) -> None:
    backbone = tiny_backbone("vit", text)
    expected = backbone.model.encode_text(backbone.tokenizer([f"a photo of a {name}." for name in CLASS_NAMES]))

    torch.testing.assert_close(encoded(text, 0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", TEXT_KINDS)
def test_a_context_of_the_templates_own_words_equals_encode_text(text: str) -> None:
    """So positions, end-of-text pooling and padding are right for both kinds of tower."""
    backbone = tiny_backbone("vit", text)
    words = backbone.tokenizer(["a photo of a"])[0, 1:5]
    context = text_tower(backbone.model).word_embeddings()[words]
    expected = backbone.model.encode_text(backbone.tokenizer([f"a photo of a {name}." for name in CLASS_NAMES]))

    torch.testing.assert_close(encoded(text, 4, context), expected, rtol=1e-5, atol=1e-6)
    assert (encoded(text, 4, context.flip(-1)) - expected).abs().max() > 1e-3


def test_towers_are_recognised() -> None:
    assert isinstance(text_tower(tiny_backbone("vit", "custom").model), NativeTextTower)
    assert isinstance(text_tower(tiny_backbone("vit", "mean_pooler").model), HuggingFaceTextTower)


def site_logits(read: str) -> Tensor:
    """Router logits of block 0 when the router reads the end-of-text token, or the start-of-text token."""
    backbone = tiny_backbone("vit")
    tower = text_tower(backbone.model)
    tokens = class_tokens(tower, backbone.tokenizer, CLASS_NAMES, PromptConfig(), 2)
    site = AdapterSite(tower.width, AdapterConfig(experts=3, top_k=2), routed=True).requires_grad_(False)
    site.router.gate_weight.copy_(torch.randn(tower.width, 3, generator=torch.Generator().manual_seed(0)))
    read_CT = tokens.read_CT if read == "end" else torch.eye(tokens.ids_CT.shape[1])[[0] * len(CLASS_NAMES)]
    embedded = tower.word_embeddings()[tokens.ids_CT]
    return tower.encode(embedded, read_CT, tokens.present_CT, {"block0": site}, ())[1][0]


def test_text_routing_depends_on_the_class() -> None:
    """U3: the published code reads the start token, which causal attention makes the same for every class."""
    assert site_logits("end").std(0).min() > 1e-4
    assert site_logits("start").std(0).max() < 1e-6


def test_the_native_tower_maps_over_clients_without_falling_back() -> None:
    backbone = tiny_backbone("vit")
    tower = text_tower(backbone.model)
    tokens = class_tokens(tower, backbone.tokenizer, CLASS_NAMES, PromptConfig(), 2)
    embedded = tower.word_embeddings()[tokens.ids_CT]
    contexts = torch.randn(3, 2, tower.width, generator=torch.Generator().manual_seed(0))

    def total(context: Tensor) -> Tensor:
        prompted = place_context(embedded, context, tokens.start)
        return tower.encode(prompted, tokens.read_CT, tokens.present_CT, {}, ())[0].square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = torch.func.vmap(torch.func.grad(total))(contexts)

    looped = torch.stack([torch.func.grad(total)(context) for context in contexts])
    torch.testing.assert_close(mapped, looped, rtol=1e-4, atol=1e-5)


def test_towers_with_their_own_class_token_are_refused() -> None:
    coca = CustomTextCLIP(32, CLIPVisionCfg(**VISION["vit"]), CLIPTextCfg(**{**TEXT, "embed_cls": True}))

    with pytest.raises(ConfigError, match=r"TextTransformer appends its own class token.*text_layers = \[\]"):
        text_tower(coca)


def test_hugging_face_towers_take_no_adapters() -> None:
    backbone = tiny_backbone("vit", "mean_pooler")
    tower = text_tower(backbone.model)
    site = AdapterSite(tower.width, AdapterConfig(), routed=False)

    with pytest.raises(ConfigError, match=r"text_layers = \[\]"):
        tower.encode(torch.zeros(1, 3, tower.width), torch.eye(3)[:1], torch.ones(1, 3), {"block0": site}, ())
