"""The duet model: a structure on a frozen backbone, parameters as values."""

from __future__ import annotations

import warnings
from typing import Any

import open_clip
import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from edgeduet_shared.backbone import Backbone
from edgeduet_shared.config import ModelConfig
from edgeduet_shared.duet import DuetModel, Noise, Params, stack_noise
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.losses import balance_loss, mean_routing, routing_consistency, stability_loss
from edgeduet_shared.plan import GROUPS, Parts
from tiny_towers import CLASS_NAMES, EMBED_DIM, pictures, tiny_backbone

IDS = torch.arange(len(CLASS_NAMES))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])
FULL = Parts(adapters=True, experts=True, prompt=True, fusion=True)


def config(**adapter: Any) -> ModelConfig:
    sizes = {"bottleneck": 4, "shared_bottleneck": 8, "experts": 3, "top_k": 2, **adapter}
    return ModelConfig.model_validate({"adapter": sizes, "fusion": {"stride": 2, "heads": 4}, "lora_rank": 2})


def duet(vision: str = "vit", text: str = "native", parts: Parts = FULL, **adapter: Any) -> DuetModel:
    return DuetModel(tiny_backbone(vision, text), CLASS_NAMES, config(**adapter), parts)


def moved(params: Params, seed: int = 0, by: float = 0.1) -> Params:
    """Parameters away from their initial zeros."""
    source = torch.Generator().manual_seed(seed)
    return {name: value + by * torch.randn(value.shape, generator=source) for name, value in params.items()}


def contexts(count: int) -> Tensor:
    return 0.05 * torch.randn(count, 4, 32, generator=torch.Generator().manual_seed(5))


DISPATCHED = contexts(3)


def full_loss(model: DuetModel, params: Params, x: Tensor, noise: Noise | None) -> Tensor:
    """Every part and every loss at once."""
    z, image_logits = model.run(params, "encode_image", x, noise)
    t, text_logits = model.run(params, "encode_text", IDS, noise)
    u = model.run(params, "encode_text_under", DISPATCHED, IDS)
    logits, _ = model.run(params, "fused_logits", z, t, u, 0.5)
    means = [mean_routing(site) for site in image_logits]
    return (
        cross_entropy(logits, LABELS)
        + 0.01 * balance_loss([site.softmax(-1) for site in image_logits])
        + routing_consistency(image_logits, text_logits, LABELS, 0.1)
        + 0.1 * stability_loss(means, [torch.full_like(mean, 1 / 3) for mean in means])
    )


def train(model: DuetModel, steps: int, lr: float = 0.01) -> tuple[Params, list[float]]:
    x = model.front(pictures(tiny_backbone("vit"), len(LABELS)))
    params, losses = model.initial(0), []
    source = torch.Generator().manual_seed(0)
    for _ in range(steps):
        noise = model.draw_noise(len(LABELS), len(CLASS_NAMES), source)
        gradients, loss = torch.func.grad_and_value(lambda values, noise=noise: full_loss(model, values, x, noise))(
            params
        )
        params = {name: value - lr * gradients[name] for name, value in params.items()}
        losses.append(loss.item())
    return params, losses


# -- the frozen side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["native", "custom", "mean_pooler"])
def test_with_nothing_learned_text_features_are_open_clips_bit_for_bit(text: str) -> None:
    backbone = tiny_backbone("vit", text)
    tokens = backbone.tokenizer([f"a photo of a {name}." for name in CLASS_NAMES])
    no_context = ModelConfig.model_validate({"prompt": {"length": 0}})

    for settings, parts in ((config(), Parts(head=True)), (no_context, Parts(prompt=True))):
        model = DuetModel(backbone, CLASS_NAMES, settings, parts)
        t, _ = model.run(model.initial(0), "encode_text", IDS)
        assert torch.equal(t, normalize(backbone.model.encode_text(tokens), dim=-1))
        assert torch.equal(t, backbone.model.encode_text(tokens, normalize=True))


@pytest.mark.parametrize(
    ("vision", "parts", "adapter", "cut"),
    [
        ("vit", Parts(), {}, "embedding"),
        ("resnet", Parts(head=True), {}, "embedding"),
        ("efficientnet", FULL, {}, "embedding"),
        ("efficientnet", FULL, {"placement": "stages"}, "stage5"),
        ("resnet", FULL, {"placement": "stages"}, "stage2"),
    ],
)
def test_fresh_parts_leave_image_features_bit_for_bit(
    vision: str, parts: Parts, adapter: dict[str, Any], cut: str
) -> None:
    backbone = tiny_backbone(vision)
    model = duet(vision, parts=parts, **adapter)

    z, _ = model.run(model.initial(0), "encode_image", model.front(pictures(backbone)))

    assert model.front_key == cut
    assert torch.equal(z, backbone.model.encode_image(pictures(backbone), normalize=True))


def test_the_backbone_is_untouched_by_building_and_training_models() -> None:
    backbone = tiny_backbone("vit")
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    tree = [(name, id(module)) for name, module in backbone.model.named_modules()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in backbone.model.modules())

    names = []
    for _ in range(3):
        for adapter in ({}, {"placement": "blocks"}):
            train(duet(**adapter), 2)
        names.append(list(duet().initial(0)))

    assert [(name, id(module)) for name, module in backbone.model.named_modules()] == tree
    after = backbone.model.state_dict()
    assert list(after) == list(before)
    assert all(value.numpy().tobytes() == before[name].numpy().tobytes() for name, value in after.items())
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backbone.model.modules())
    assert names[0] == names[1] == names[2], "nothing nests when another model is built"


def test_the_front_carries_no_gradient_and_is_not_among_the_parameters() -> None:
    model = duet()

    assert not model.front(pictures(tiny_backbone("vit"))).requires_grad
    frozen = {value.data_ptr() for value in tiny_backbone("vit").model.parameters()}
    assert not frozen & {value.data_ptr() for value in model.parameters()}
    assert all(model.group_of(name) in GROUPS for name, _ in model.named_parameters())


# -- parameters as values ----------------------------------------------------------------------------


def test_initial_values_depend_on_the_seed_and_on_no_other_part() -> None:
    alone, full = duet(parts=Parts(adapters=True, experts=True)), duet()

    small, large = alone.initial(7), full.initial(7)

    assert all(torch.equal(value, large[name]) for name, value in small.items())
    assert all(torch.equal(value, full.initial(7)[name]) for name, value in large.items())
    other = full.initial(8)
    assert any(not torch.equal(value, other[name]) for name, value in large.items())
    assert all(value.dtype == torch.float32 for value in large.values())


@pytest.mark.parametrize(
    ("parts", "groups"),
    [
        (Parts(), set()),
        (Parts(adapters=True), {"shared_adapter"}),
        (Parts(adapters=True, experts=True), {"shared_adapter", "routed_adapters", "router"}),
        (FULL, {"shared_adapter", "routed_adapters", "router", "prompt", "fusion"}),
        (Parts(lora=True, prompt=True), {"lora", "prompt"}),
        (Parts(head=True), {"head"}),
    ],
)
def test_parts_become_groups_and_every_number_is_counted(parts: Parts, groups: set[str]) -> None:
    model = duet("efficientnet", parts=parts)

    count = model.count()

    assert {group for group, numbers in count.items() if numbers} == groups
    assert sum(count.values()) == sum(value.numel() for value in model.initial(0).values())


def test_an_unknown_name_has_no_group() -> None:
    with pytest.raises(KeyError):
        duet().group_of("image_adapters.embedding.shared.typo")


def test_counts_of_vit_b_16_are_those_of_the_paper() -> None:
    """fed-duet.md 3.2, with the published sizes; shapes only, no memory for the backbone."""
    with torch.device("meta"):
        clip = open_clip.create_model("ViT-B-16", pretrained=None, device="meta").eval().requires_grad_(False)
    facts = {"embed_dim": 512, "fingerprint": "0" * 16, "device": "meta"}
    backbone = Backbone.of_model("ViT-B-16", clip, lambda _: torch.empty(0), SimpleTokenizer(), **facts)
    published = ModelConfig.model_validate(
        {
            "adapter": {"placement": "blocks", "bottleneck": 64, "shared_bottleneck": 512, "experts": 8, "top_k": 2},
            "prompt": {"length": 16},
        }
    )

    count = DuetModel(backbone, ["dog", "cat"], published, FULL).count()

    assert count["shared_adapter"] == 15_756_288
    assert count["routed_adapters"] == 15_863_808
    assert count["router"] == 245_760
    assert (count["prompt"], count["fusion"]) == (8_192, 66_048)


def test_values_that_are_missing_or_too_many_are_refused() -> None:
    model = duet()
    params = model.initial(0)

    with pytest.raises(RuntimeError, match=r"prompt\.context"):
        model.run({name: value for name, value in params.items() if name != "prompt.context"}, "encode_text", IDS)
    with pytest.raises(RuntimeError, match="typo"):
        model.run({**params, "typo": torch.zeros(1)}, "encode_text", IDS)
    with pytest.raises(ConfigError, match="no method 'encode_sound'"):
        model.run(params, "encode_sound")


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (Parts(experts=True), "needs parts.adapters"),
        (Parts(adapters=True, lora=True), "exclude each other"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_a_config_error(parts: Parts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        duet(parts=parts)


def test_a_model_needs_a_class() -> None:
    with pytest.raises(ConfigError, match="at least one class"):
        DuetModel(tiny_backbone("vit"), [], config(), FULL)


def test_text_adapters_on_a_hugging_face_tower_are_a_config_error_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"set model\.adapter\.text_layers = \[\]"):
        duet(text="mean_pooler")

    assert duet(text="mean_pooler", text_layers=()).router_shapes == (1, 0, 3)


def test_text_layers_out_of_range_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"text_layers=\[5\]: this tower has blocks 0\.\.1"):
        duet(text_layers=(5,))


# -- computation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vision", "adapter", "shapes"),
    [
        ("vit", {}, (1, 2, 3)),
        ("vit", {"placement": "blocks", "image_layers": (1, 2), "text_layers": (1,)}, (2, 1, 3)),
        ("resnet", {"placement": "stages"}, (2, 2, 3)),
        ("vit", {"experts": 0, "top_k": 1}, (0, 0, 0)),
    ],
)
def test_router_shapes_say_how_many_logits_come_back(
    vision: str, adapter: dict[str, Any], shapes: tuple[int, int, int]
) -> None:
    model = duet(vision, **adapter)
    params = model.initial(0)
    noise = model.draw_noise(4, len(CLASS_NAMES), torch.Generator().manual_seed(0))

    _, image_logits = model.run(params, "encode_image", model.front(pictures(tiny_backbone(vision))), noise)
    _, text_logits = model.run(params, "encode_text", IDS, noise)

    assert model.router_shapes == shapes
    assert [tuple(site.shape) for site in image_logits] == [(4, 3)] * shapes[0]
    assert [tuple(site.shape) for site in text_logits] == [(len(CLASS_NAMES), 3)] * shapes[1]


@pytest.mark.parametrize("tower", ["image", "text"])
@pytest.mark.parametrize("kind", ["router", "dropout"])
def test_noise_is_drawn_outside_reaches_its_tower_and_repeats_with_its_generator(tower: str, kind: str) -> None:
    model = duet(dropout=0.5 if kind == "dropout" else 0.0)
    params, x = moved(model.initial(0)), model.front(pictures(tiny_backbone("vit")))

    def features(seed: int | None) -> Tensor:
        noise = None
        if seed is not None:
            noise = model.draw_noise(4, 5, torch.Generator().manual_seed(seed), router=kind == "router")
            assert all(set(site) == {kind} for site in (*noise.image, *noise.text))
        result: Tensor = model.run(params, f"encode_{tower}", x if tower == "image" else IDS, noise)[0]
        return result

    assert torch.equal(features(1), features(1))
    assert not torch.equal(features(1), features(2))
    assert not torch.equal(features(1), features(None))


def test_features_are_normalised_and_logits_are_scaled_cosines() -> None:
    model = duet()
    params = moved(model.initial(0))

    z, _ = model.run(params, "encode_image", model.front(pictures(tiny_backbone("vit"))))
    t, _ = model.run(params, "encode_text", IDS[[3, 1]])

    torch.testing.assert_close(z.norm(dim=-1), torch.ones(4))
    torch.testing.assert_close(t.norm(dim=-1), torch.ones(2))
    torch.testing.assert_close(model.run(params, "local_logits", z, t), 20.0 * z @ t.T)


def test_a_class_subset_gives_the_same_features_as_all_classes() -> None:
    model = duet()
    params = moved(model.initial(0))
    wanted = torch.tensor([3, 1, 4])

    torch.testing.assert_close(
        model.run(params, "encode_text", wanted)[0],
        model.run(params, "encode_text", IDS)[0][wanted],
        rtol=1e-5,
        atol=1e-6,
    )
    torch.testing.assert_close(
        model.run(params, "encode_text_under", contexts(2), wanted),
        model.run(params, "encode_text_under", contexts(2), IDS)[:, wanted],
        rtol=1e-5,
        atol=1e-6,
    )


def test_features_under_the_local_context_are_the_local_features() -> None:
    model = duet()
    params = moved(model.initial(0))
    own = params["prompt.context"]

    u = model.run(params, "encode_text_under", torch.stack([own, own + 0.1 * own.flip(-1)]), IDS)

    t, _ = model.run(params, "encode_text", IDS)
    torch.testing.assert_close(u[0], t, rtol=1e-5, atol=1e-6)
    assert (u[1] - t).abs().max() > 1e-4


def test_no_dispatched_prompt_is_allowed_and_a_wrong_length_is_not() -> None:
    model = duet()
    params = model.initial(0)

    assert model.run(params, "encode_text_under", torch.zeros(0, 4, 32), IDS).shape == (0, 5, EMBED_DIM)
    with pytest.raises(ConfigError, match=r"contexts have 7 vectors, model\.prompt\.length is 4"):
        model.run(params, "encode_text_under", torch.zeros(2, 7, 32), IDS)


def test_fused_logits_mix_local_and_shared() -> None:
    model = duet()
    params = moved(model.initial(0))
    z, _ = model.run(params, "encode_image", model.front(pictures(tiny_backbone("vit"))))
    t, _ = model.run(params, "encode_text", IDS)
    u = model.run(params, "encode_text_under", contexts(3), IDS)

    only_local, attention = model.run(params, "fused_logits", z, t, u, 1.0)
    only_shared, _ = model.run(params, "fused_logits", z, t, u, 0.0)
    mixed, _ = model.run(params, "fused_logits", z, t, u, 0.3)

    fusion = {name.removeprefix("fusion."): value for name, value in params.items() if name.startswith("fusion.")}
    shared, _ = torch.func.functional_call(model.fusion, fusion, (z, t, u))
    torch.testing.assert_close(only_shared, 20.0 * shared)
    torch.testing.assert_close(only_local, model.run(params, "local_logits", z, t))
    torch.testing.assert_close(mixed, 0.3 * only_local + 0.7 * only_shared)
    assert attention.shape == (4, 5, 4)
    torch.testing.assert_close(attention.sum(-1), torch.ones(4, 5))


def test_fused_logits_need_fusion() -> None:
    model = duet(parts=Parts())

    with pytest.raises(ConfigError, match=r"parts\.fusion"):
        model.run({}, "fused_logits", torch.zeros(1, 32), torch.zeros(1, 32), torch.zeros(0, 1, 32), 0.5)


# -- training ----------------------------------------------------------------------------------------


def test_training_repeats_bit_for_bit_and_lowers_the_loss() -> None:
    first, losses = train(duet(dropout=0.2), 12, lr=0.05)
    second, _ = train(duet(dropout=0.2), 12, lr=0.05)

    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("parts", [Parts(adapters=True), Parts(prompt=True), Parts(head=True), Parts(lora=True)])
def test_each_part_alone_learns(parts: Parts) -> None:
    model = duet("efficientnet", parts=parts)
    x = model.front(pictures(tiny_backbone("efficientnet"), len(LABELS)))

    def loss(values: Params) -> Tensor:
        z, _ = model.run(values, "encode_image", x)
        t, _ = model.run(values, "encode_text", IDS)
        return cross_entropy(model.run(values, "local_logits", z, t), LABELS)

    params = {name: value.requires_grad_() for name, value in model.initial(0).items()}
    optimiser = torch.optim.AdamW(params.values(), lr=0.01)
    before = loss(params).item()
    for _ in range(15):
        optimiser.zero_grad()
        loss(params).backward()
        optimiser.step()

    assert loss(params).item() < before - 0.05


@pytest.mark.parametrize("adapter", [{}, {"placement": "blocks", "image_layers": (2,)}])
def test_a_block_of_clients_trains_like_each_of_them_without_falling_back(adapter: dict[str, Any]) -> None:
    model = duet(dropout=0.3, **adapter)
    pixels = pictures(tiny_backbone("vit"), 3 * len(LABELS))
    x = model.front(pixels).unflatten(0, (3, len(LABELS)))
    clients = [moved(model.initial(0), seed) for seed in range(3)]
    noises = [model.draw_noise(len(LABELS), len(CLASS_NAMES), torch.Generator().manual_seed(seed)) for seed in range(3)]
    step = torch.func.grad_and_value(lambda values, x, noise: full_loss(model, values, x, noise))

    stacked = {name: torch.stack([params[name] for params in clients]) for name in clients[0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients, losses = torch.func.vmap(step)(stacked, x, stack_noise(noises))

    for index in range(3):
        one, loss = step(clients[index], x[index], noises[index])
        assert losses[index].item() == pytest.approx(loss.item(), abs=1e-4)
        for name, gradient in one.items():
            torch.testing.assert_close(gradients[name][index], gradient, rtol=1e-3, atol=1e-5)
