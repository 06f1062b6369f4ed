"""Backbones load offline, are checked byte by byte, and never start from random weights by accident."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edgeduet_shared import backbone as backbones
from edgeduet_shared import world
from edgeduet_shared.backbone import (
    CARD,
    CHECKSUMS,
    CONFIG,
    SHIPPED_DIR,
    WEIGHTS,
    Backbone,
    load_backbone,
    offline_backbones,
)
from edgeduet_shared.errors import BackboneError
from edgeduet_shared.world import CaptionLevel, Spec

SHIPPED = ("clip-lite0", "clip-world")
MEGABYTES = {"clip-lite0": 12.0, "clip-world": 5.0}


@pytest.fixture(scope="module", autouse=True)
def offline() -> None:
    """No test here may depend on a network, not even where there is one."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]
    else:
        os.environ["HF_HUB_OFFLINE"] = before


@pytest.fixture(scope="module")
def shipped() -> dict[str, Backbone]:
    return {name: load_backbone(name) for name in SHIPPED}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private copy of clip-world that takes the place of the shipped one."""
    folder = tmp_path / "backbones" / "clip-world"
    shutil.copytree(SHIPPED_DIR / "clip-world", folder)
    monkeypatch.setattr(backbones, "SHIPPED_DIR", folder.parent)
    return folder


def unit(features: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(features, dim=-1)


def pictures(specs: list[Spec]) -> list[Image.Image]:
    return [Image.fromarray(world.render(spec, np.random.default_rng(i))) for i, spec in enumerate(specs)]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_backbones_load_frozen_with_matching_towers(name: str, shipped: dict[str, Backbone]) -> None:
    backbone = shipped[name]
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in backbone.model.parameters())
    image = backbone.transform(Image.new("RGB", (50, 40), "red"))
    assert image.shape == (3, backbone.image_size, backbone.image_size)
    ids = backbone.tokenizer(["a photo of a star.", "a dog"])
    assert backbone.model.encode_image(image[None]).shape == (1, backbone.embed_dim)
    assert backbone.model.encode_text(ids).shape == (2, backbone.embed_dim)
    assert 1.0 < backbone.logit_scale <= 100.0


@pytest.mark.parametrize("name", SHIPPED)
def test_cards_state_what_is_shipped(name: str, shipped: dict[str, Backbone]) -> None:
    card = offline_backbones()[name]
    assert card.parameters == sum(parameter.numel() for parameter in shipped[name].model.parameters())
    assert card.image_size == shipped[name].image_size
    assert card.embed_dim == shipped[name].embed_dim
    assert card.zero_shot
    folder_size = sum(file.stat().st_size for file in card.folder.iterdir())
    assert folder_size < MEGABYTES[name] * 1e6
    for file in ("NOTICE", "MODEL_CARD.md", CARD, CHECKSUMS):
        assert (card.folder / file).is_file()


def test_encoding_is_deterministic_across_loads(shipped: dict[str, Backbone]) -> None:
    again = load_backbone("clip-world")
    image = again.transform(pictures([Spec("star", "red")])[0])[None]
    ids = again.tokenizer(["a red star"])
    assert again.fingerprint == shipped["clip-world"].fingerprint
    assert torch.equal(again.model.encode_image(image), shipped["clip-world"].model.encode_image(image))
    assert torch.equal(again.model.encode_text(ids), shipped["clip-world"].model.encode_text(ids))


def test_fingerprints_tell_backbones_apart(shipped: dict[str, Backbone]) -> None:
    prints = [backbone.fingerprint for backbone in shipped.values()]
    assert len(set(prints)) == len(prints)
    assert all(len(fingerprint) == 16 for fingerprint in prints)


def test_a_local_folder_and_a_bare_path_give_the_same_model(copied: Path) -> None:
    by_scheme, by_path = load_backbone(f"local-dir:{copied}"), load_backbone(str(copied))
    assert by_scheme.fingerprint == by_path.fingerprint
    assert by_scheme.tokenizer(["a star"]).tolist() == by_path.tokenizer(["a star"]).tolist()


def test_a_relative_path_finds_its_vocabulary(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied.parent)
    assert load_backbone("./clip-world").image_size == 32


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG, "bpe.txt.gz"])
def test_one_altered_byte_is_detected(file: str, copied: Path) -> None:
    content = bytearray((copied / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / file).write_bytes(content)
    with pytest.raises(BackboneError, match=r"altered.*edgeduet-sim backbone build clip-world") as caught:
        load_backbone("clip-world")
    assert file in str(caught.value)


@pytest.mark.parametrize("file", [WEIGHTS, CONFIG, "bpe.txt.gz", CHECKSUMS])
def test_a_missing_file_is_one_line_with_the_command_that_fixes_it(file: str, copied: Path) -> None:
    (copied / file).unlink()
    with pytest.raises(BackboneError, match="edgeduet-sim backbone build clip-world") as caught:
        load_backbone("clip-world")
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncated_weights_in_a_folder_of_ones_own_are_one_line(copied: Path) -> None:
    content = (copied / WEIGHTS).read_bytes()
    (copied / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(BackboneError, match="cannot load the backbone") as caught:
        load_backbone(f"local-dir:{copied}")
    assert "\n" not in str(caught.value)


def test_weights_of_another_architecture_are_refused(copied: Path) -> None:
    config = (copied / CONFIG).read_text()
    (copied / CONFIG).write_text(config.replace('"embed_dim": 128', '"embed_dim": 64'))
    with pytest.raises(BackboneError, match="cannot load the backbone"):
        load_backbone(f"local-dir:{copied}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clip-wrld", "did you mean 'clip-world'"),
        ("ViT-B-17/openai", "did you mean 'ViT-B-16'"),
        ("ViT-B-16/opnai", "did you mean 'openai'"),
        ("ViT-B-16", "names no weights.*ViT-B-16/openai.*random:ViT-B-16"),
        ("random:ViT-B-17", "did you mean 'ViT-B-16'"),
        ("/nowhere/at/all", "does not exist.*clip-lite0"),
        ("local-dir:/nowhere/at/all", "does not exist.*clip-lite0"),
    ],
)
def test_names_that_cannot_be_used_say_what_can(spec: str, message: str) -> None:
    with pytest.raises(BackboneError, match=message) as caught:
        load_backbone(spec)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_backbone_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match=CONFIG):
        load_backbone(f"local-dir:{tmp_path}")


def test_a_hub_name_without_a_network_names_the_offline_backbones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BackboneError, match=r"no hub can be reached.*clip-lite0 or clip-world") as caught:
        load_backbone("ViT-B-32/laion2b_s34b_b79k")
    assert "\n" not in str(caught.value)


def test_random_weights_must_be_asked_for_and_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        backbone = load_backbone("random:ViT-S-32-alt")
    assert backbone.name == "random:ViT-S-32-alt"
    assert "random weights" in caplog.text


def test_clip_world_composes_pairs_it_was_never_shown(shipped: dict[str, Backbone]) -> None:
    """120-way zero-shot on held-out shape-colour pairs; chance is 0.8 %."""
    backbone = shipped["clip-world"]
    rng = np.random.default_rng(123)
    specs = [world.random_spec(rng, held_out=True) for _ in range(200)]
    options = [Spec(shape, colour) for shape in world.TRAINED_SHAPES for colour in world.COLOURS]
    texts = [world.captions(option, CaptionLevel.COLOUR)[1] for option in options]
    images = torch.stack([backbone.transform(picture) for picture in pictures(specs)])
    scores = unit(backbone.model.encode_image(images)) @ unit(backbone.model.encode_text(backbone.tokenizer(texts))).T
    wanted = [texts.index(world.captions(spec, CaptionLevel.COLOUR)[1]) for spec in specs]
    assert scores.argmax(-1).eq(torch.tensor(wanted)).float().mean() > 0.8


def _pacs_photo() -> Path:
    root = Path(os.environ.get("EDGEDUET_DATA", Path(__file__).parents[3] / "shared" / "data"))
    folder = root / "pacs" / "photo"
    if not folder.is_dir():
        pytest.skip(f"real images are not in {folder}; set EDGEDUET_DATA to the folder that holds pacs/")
    return folder


def test_clip_lite0_recognises_real_photographs(shipped: dict[str, Backbone]) -> None:
    """Seven-way zero-shot on every 60th PACS photograph; chance is 14 %."""
    backbone = shipped["clip-lite0"]
    files = sorted(_pacs_photo().glob("*/*.jpg"))[::60]
    classes = sorted({file.parent.name for file in files})
    images = torch.stack([backbone.transform(Image.open(file)) for file in files])
    ids = backbone.tokenizer([f"a photo of a {name}." for name in classes])
    scores = unit(backbone.model.encode_image(images)) @ unit(backbone.model.encode_text(ids)).T
    wanted = torch.tensor([classes.index(file.parent.name) for file in files])
    assert scores.argmax(-1).eq(wanted).float().mean() > 0.6
