"""Cutting the frozen image tower: front plus tail is the tower, wherever the cut is."""

from __future__ import annotations

import open_clip
import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from edgeduet_shared.adapters import AdapterSite
from edgeduet_shared.backbone import Backbone
from edgeduet_shared.config import AdapterConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.image_tower import EmbeddingTower, ImageTower, adapted_image_tower, conv_stages
from edgeduet_shared.text_tower import text_tower
from tiny_towers import EMBED_DIM, pictures, tiny_backbone

# vision tower, placement, layers, expected cut, whether the same kernels run (then equal bit for bit)
CUTS = [
    ("vit", "embedding", (), "embedding", True),
    ("resnet", "embedding", (), "embedding", True),
    ("resnet", "stages", (), "stage2", True),
    ("resnet", "stages", (0, 3), "stage0", True),
    ("efficientnet", "embedding", (), "embedding", True),
    ("efficientnet", "stages", (), "stage5", True),
    ("efficientnet", "stages", (6,), "stage6", True),
    ("vit", "blocks", (), "pixels", False),
    ("vit", "blocks", (2,), "block2", False),
]


def tower_and_sites(vision: str, placement: str, layers: tuple[int, ...]) -> tuple[ImageTower, dict[str, AdapterSite]]:
    config = AdapterConfig.model_validate({"placement": placement, "image_layers": layers, "bottleneck": 4})
    tower = adapted_image_tower(tiny_backbone(vision), config)
    sites = {
        name: AdapterSite(width, config, routed=True).requires_grad_(False) for name, width in tower.site_widths.items()
    }
    for site in sites.values():
        for name, value in site.initial(torch.Generator().manual_seed(0)).items():
            site.get_parameter(name).copy_(value)
    return tower, sites


@pytest.mark.parametrize(("vision", "placement", "layers", "cut", "exact"), CUTS)
def test_fresh_adapters_leave_the_image_embedding_as_it_is(
    vision: str, placement: str, layers: tuple[int, ...], cut: str, exact: bool
) -> None:
    backbone = tiny_backbone(vision)
    tower, sites = tower_and_sites(vision, placement, layers)
    pixels = pictures(backbone)

    front = tower.front(pixels)
    embedding, logits = tower.tail(front, sites, ())

    expected = backbone.model.encode_image(pixels)
    assert tower.front_key == cut
    assert len(logits) == len(sites)
    assert all(site_logits.shape == (4, 4) for site_logits in logits)
    if exact:
        assert torch.equal(embedding, expected)
    else:
        torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-6)
    cached, _ = tower.tail(front.half().float(), sites, ())
    assert cosine_similarity(cached, expected).min() > 0.9999


@pytest.mark.parametrize(("vision", "placement", "layers", "cut", "exact"), CUTS)
def test_every_site_changes_the_embedding_and_reads_its_own_router_input(
    vision: str, placement: str, layers: tuple[int, ...], cut: str, exact: bool
) -> None:
    backbone = tiny_backbone(vision)
    tower, sites = tower_and_sites(vision, placement, layers)
    front = tower.front(pictures(backbone))
    plain, _ = tower.tail(front, sites, ())

    for name, site in sites.items():
        site.shared.up_bias.copy_(torch.linspace(-1, 1, site.width))
        site.router.gate_weight.normal_(generator=torch.Generator().manual_seed(1))
        changed, logits = tower.tail(front, sites, ())
        assert (changed - plain).abs().max() > 1e-4, name
        assert logits[list(sites).index(name)].std(0).min() > 0, name
        site.shared.up_bias.zero_()


@pytest.mark.parametrize(("vision", "placement"), [("efficientnet", "stages"), ("vit", "blocks"), ("vit", "embedding")])
def test_routers_read_the_pooled_map_the_class_token_or_the_embedding(vision: str, placement: str) -> None:
    tower, sites = tower_and_sites(vision, placement, ())
    name, site = next(iter(sites.items()))
    site.router.gate_weight.normal_(generator=torch.Generator().manual_seed(1))
    x = tower.front(pictures(tiny_backbone(vision)))

    _, logits = tower.tail(x, sites, ())

    if placement == "stages":
        read = x.mean((2, 3))
    elif placement == "embedding":
        read = x / x.norm(dim=-1, keepdim=True) * EMBED_DIM**0.5
    else:
        block = tiny_backbone(vision).model.visual.transformer.resblocks[0]
        tokens = tiny_backbone(vision).model.visual._embeds(x)
        read = (tokens + block.attention(block.ln_1(tokens)))[:, 0]
    assert name in ("stage5", "block0", "embedding")
    torch.testing.assert_close(logits[0], read @ site.router.gate_weight, rtol=1e-4, atol=1e-5)


def test_the_embedding_site_reads_norm_sqrt_d_and_ignores_the_embeddings_length() -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, stream: Tensor, routing: Tensor, noise: object) -> tuple[Tensor, None]:
            seen.append(routing)
            return torch.ones_like(stream), None

    tower = EmbeddingTower(tiny_backbone("vit").model.encode_image, EMBED_DIM, adapted=True)
    raw = torch.randn(3, EMBED_DIM, generator=torch.Generator().manual_seed(0))

    short, _ = tower.tail(raw, {"embedding": Spy()}, ())  # type: ignore[dict-item]
    long, _ = tower.tail(100 * raw, {"embedding": Spy()}, ())  # type: ignore[dict-item]

    torch.testing.assert_close(seen[0].norm(dim=-1), torch.full((3,), EMBED_DIM**0.5))
    torch.testing.assert_close(100 * short, long, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        short / raw.norm(dim=-1, keepdim=True) * EMBED_DIM**0.5, seen[0] + 1, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    ("vision", "placement", "works"),
    [
        ("vit", "stages", "embedding, blocks"),
        ("resnet", "blocks", "embedding, stages"),
        ("efficientnet", "blocks", "embedding, stages"),
    ],
)
def test_a_placement_the_tower_does_not_have_names_those_that_work(vision: str, placement: str, works: str) -> None:
    with pytest.raises(ConfigError, match=rf"placement='{placement}' does not fit .* use one of: {works}$"):
        tower_and_sites(vision, placement, ())


@pytest.mark.parametrize(
    ("vision", "placement", "layer", "message"),
    [
        ("resnet", "stages", 4, r"stages 0\.\.3"),
        ("vit", "blocks", 3, r"blocks 0\.\.2"),
        ("vit", "embedding", 0, "must be empty"),
    ],
)
def test_layers_the_tower_does_not_have_are_a_config_error(
    vision: str, placement: str, layer: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tower_and_sites(vision, placement, (layer,))


@pytest.mark.parametrize("name", ["convnext_base", "RN50"])
def test_stages_of_other_convolutional_clips_have_the_widths_of_their_maps(name: str) -> None:
    model = _on_meta(name)
    stages = conv_stages(model.visual)

    assert stages is not None
    x = stages.stem(torch.empty(1, 3, 224, 224, device="meta"))
    for stage, width in zip(stages.stages, stages.widths, strict=True):
        x = stage(x)
        assert x.shape[1] == width
    assert stages.head(x).shape == model.encode_image(torch.empty(1, 3, 224, 224, device="meta")).shape


def test_vit_b_16_has_sites_of_its_real_widths_in_every_block() -> None:
    model = _on_meta("ViT-B-16")

    facts = {"embed_dim": 512, "fingerprint": "0" * 16, "device": "meta"}
    backbone = Backbone.of_model("ViT-B-16", model, lambda _: torch.empty(0), SimpleTokenizer(), **facts)

    tower = adapted_image_tower(backbone, AdapterConfig(placement="blocks"))

    assert tower.site_widths == {f"block{index}": 768 for index in range(12)}
    text = text_tower(model)
    assert (text.width, text.blocks, text.context_length) == (512, 12, 77)


def _on_meta(name: str) -> nn.Module:
    """An open_clip model without memory for its weights: shapes only."""
    with torch.device("meta"):
        return open_clip.create_model(name, pretrained=None, device="meta").eval().requires_grad_(False)
