"""LoRA through peft: exact start, PEFT's own file format, an untouched backbone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch.nn.functional import normalize

from edgeduet_shared.backbone import Backbone
from edgeduet_shared.config import ModelConfig
from edgeduet_shared.duet import DuetModel, Params
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.lora import lora_targets, save_lora
from edgeduet_shared.plan import Parts
from tiny_towers import CLASS_NAMES, pictures, tiny_backbone

KINDS = [("efficientnet", "native"), ("vit", "custom"), ("resnet", "native"), ("efficientnet", "mean_pooler")]
IDS = torch.arange(len(CLASS_NAMES))


def lora_model(backbone: Backbone, rank: int = 3) -> DuetModel:
    return DuetModel(backbone, CLASS_NAMES, ModelConfig(lora_rank=rank), Parts(lora=True))


def moved(params: Params) -> Params:
    source = torch.Generator().manual_seed(1)
    return {name: value + 0.2 * torch.randn(value.shape, generator=source) for name, value in params.items()}


@pytest.mark.parametrize(("kind", "cut"), list(zip(KINDS, ["pooled", "pixels", "embedding", "pooled"], strict=True)))
def test_fresh_lora_is_the_backbone(kind: tuple[str, str], cut: str) -> None:
    backbone = tiny_backbone(*kind)
    model = lora_model(backbone)
    params = model.initial(0)

    z, _ = model.run(params, "encode_image", model.front(pictures(backbone)))
    t, _ = model.run(params, "encode_text", IDS)

    texts = backbone.tokenizer([f"a photo of a {name}." for name in CLASS_NAMES])
    assert model.front_key == cut
    torch.testing.assert_close(
        z, normalize(backbone.model.encode_image(pictures(backbone)), dim=-1), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(t, normalize(backbone.model.encode_text(texts), dim=-1), rtol=1e-5, atol=1e-6)
    assert all((torch.count_nonzero(value) == 0) == ("lora_B" in name) for name, value in params.items())


@pytest.mark.parametrize("kind", KINDS)
def test_peft_opens_what_was_saved_and_computes_the_same(kind: tuple[str, str], tmp_path: Path) -> None:
    backbone = tiny_backbone(*kind)
    model = lora_model(backbone)
    params = moved(model.initial(0))
    z, _ = model.run(params, "encode_image", model.front(pictures(backbone)))
    t, _ = model.run(params, "encode_text", IDS)

    save_lora(model, params, tmp_path)

    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in tmp_path.iterdir()}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 3
    base = copy.deepcopy(backbone.model)
    opened = PeftModel.from_pretrained(base, str(tmp_path))
    texts = backbone.tokenizer([f"a photo of a {name}." for name in CLASS_NAMES])
    torch.testing.assert_close(z, normalize(base.encode_image(pictures(backbone)), dim=-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(t, normalize(base.encode_text(texts), dim=-1), rtol=1e-4, atol=1e-5)
    restored = opened.unload().state_dict()
    assert all(torch.equal(value, restored[name]) for name, value in backbone.model.state_dict().items())


def test_lora_changes_both_sides_and_leaves_the_backbone_alone() -> None:
    backbone = tiny_backbone("efficientnet")
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    modules = [(name, type(module)) for name, module in backbone.model.named_modules()]
    model = lora_model(backbone)
    fresh, trained = model.initial(0), moved(model.initial(0))
    x = model.front(pictures(backbone))

    for method, argument in (("encode_image", x), ("encode_text", IDS)):
        difference = model.run(fresh, method, argument)[0] - model.run(trained, method, argument)[0]
        assert difference.abs().max() > 1e-3

    assert [(name, type(module)) for name, module in backbone.model.named_modules()] == modules
    after = backbone.model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_the_copy_shares_every_tensor_with_the_backbone() -> None:
    backbone = tiny_backbone("efficientnet")
    model = lora_model(backbone)
    assert model.lora_copy is not None

    own = {value.data_ptr() for value in backbone.model.state_dict().values()}
    copied = {name: value for name, value in model.lora_copy.model.state_dict().items() if ".lora_" not in name}

    assert len(copied) == len(backbone.model.state_dict())
    assert all(value.data_ptr() in own for value in copied.values())


def test_gradients_over_clients_equal_those_of_each_client() -> None:
    backbone = tiny_backbone("efficientnet")
    model = lora_model(backbone)
    x = model.front(pictures(backbone))
    clients = [moved(model.initial(seed)) for seed in range(3)]

    def total(params: Params) -> torch.Tensor:
        z, _ = model.run(params, "encode_image", x)
        t, _ = model.run(params, "encode_text", IDS)
        return model.run(params, "local_logits", z, t).square().mean()

    stacked = {name: torch.stack([params[name] for params in clients]) for name in clients[0]}
    mapped = torch.func.vmap(torch.func.grad(total))(stacked)

    for index, params in enumerate(clients):
        for name, gradient in torch.func.grad(total)(params).items():
            torch.testing.assert_close(mapped[name][index], gradient, rtol=1e-3, atol=1e-4)


def test_targets_are_text_mlps_and_the_images_projection() -> None:
    targets = lora_targets(tiny_backbone("efficientnet").model)

    assert targets == [
        "transformer.resblocks.0.mlp.c_fc",
        "transformer.resblocks.0.mlp.c_proj",
        "transformer.resblocks.1.mlp.c_fc",
        "transformer.resblocks.1.mlp.c_proj",
        "visual.head.proj",
    ]


def test_saving_without_lora_is_a_config_error(tmp_path: Path) -> None:
    model = DuetModel(tiny_backbone("vit"), CLASS_NAMES, ModelConfig(), Parts())

    with pytest.raises(ConfigError, match=r"built without parts\.lora"):
        save_lora(model, {}, tmp_path)
