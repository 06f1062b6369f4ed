"""The text side loads without open_clip's package and gives the same bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image

from edgeduet_shared.backbone import CONFIG, SHIPPED_DIR, load_backbone
from edgeduet_shared.clip_text import ClipText, clip_tokenizer, imagenet_class_names, is_plain, is_text_parameter
from edgeduet_shared.errors import BackboneError
from tiny_towers import VISION

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ["a photo of a red star.", "", "sketch", "a photo of a rhinoceros beetle, seen from very far away. " * 3]
PLAIN = {"context_length": 12, "vocab_size": 40, "width": 16, "heads": 2, "layers": 2}

AFTER_TRAINING = """
import sys
import torch
from edgeduet_client.local_training import Job, train_clients
from edgeduet_server.strategies.catalogue import make_strategy
from edgeduet_shared.backbone import load_backbone
from edgeduet_shared.config import Scenario
from edgeduet_shared.duet import DuetModel
from edgeduet_shared.experiment import Experiment

scenario = Scenario.model_validate({"name": "light", "data": {"source": "world"}})
plan = make_strategy("fedclip", {}, scenario, Experiment(scenario, 0)).plan(0, 0)
model = DuetModel(load_backbone("clip-world"), ["star", "ring"], scenario.model, plan.parts)
jobs = [
    Job(client, 0, 0, 0, torch.randn(3, 128), torch.tensor([0, 1, 0]), model.initial(0), torch.zeros(0, 4, 96))
    for client in range(CLIENTS)
]
assert train_clients(model, plan, [0, 1], jobs)[0].steps
print(*(name for name in ("open_clip", "torchvision", "timm", "transformers", "torch._dynamo", "sympy")
        if name in sys.modules))
"""


@pytest.mark.parametrize("name", ["clip-world", "clip-lite0"])
def test_the_tower_alone_gives_the_bits_of_the_whole_model(name: str) -> None:
    backbone = load_backbone(name)
    ids = backbone.tokenizer(TEXTS)

    assert isinstance(backbone.text, ClipText)
    assert torch.equal(backbone.text.encode_text(ids), backbone.model.encode_text(ids))
    assert torch.equal(backbone.text.encode_text(ids, normalize=True), backbone.model.encode_text(ids, normalize=True))
    assert backbone.logit_scale == float(backbone.model.logit_scale.exp())


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_width=st.sampled_from([4, 8]),
    layers=st.integers(1, 3),
    length=st.integers(3, 9),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_every_plain_tower_gives_open_clips_bits(
    heads: int, head_width: int, layers: int, length: int, count: int, seed: int
) -> None:
    text: dict[str, Any] = {
        "context_length": length,
        "vocab_size": 40,
        "width": heads * head_width,
        "heads": heads,
        "layers": layers,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip = CLIP(8, CLIPVisionCfg(**VISION["vit"]), CLIPTextCfg(**text)).eval().requires_grad_(False)
        for parameter in clip.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # fresh biases are zero and would hide bugs
        ids = torch.randint(0, 40, (count, length))

    assert torch.equal(ClipText.load(8, text, clip.state_dict()).encode_text(ids), clip.encode_text(ids))


def test_loading_draws_nothing_from_torchs_generator() -> None:
    before = torch.random.get_rng_state()
    load_backbone("clip-world")

    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_missing_weight_is_an_error() -> None:
    weights = {name: value for name, value in ClipText(8, PLAIN).state_dict().items() if name != "text_projection"}

    with pytest.raises(RuntimeError, match="text_projection"):
        ClipText.load(8, PLAIN, weights)


def test_parameters_of_the_image_tower_are_not_text() -> None:
    with torch.device("meta"):
        clip = CLIP(8, CLIPVisionCfg(**VISION["vit"]), CLIPTextCfg(**PLAIN))
    names = [name for name, _ in clip.named_parameters()]

    assert {name for name in names if is_text_parameter(name)} == set(ClipText(8, PLAIN).state_dict())
    assert {name.partition(".")[0] for name in names if not is_text_parameter(name)} == {"visual", "logit_scale"}


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"quick_gelu": True}, {}),
        ({"custom_text": True}, {}),
        ({"init_logit_bias": -10}, {}),
        ({}, {"no_causal_mask": True}),
        ({}, {"pool_type": "eos"}),
        ({}, {"hf_model_name": "roberta-base"}),
        ({}, {"tokenizer_kwargs": {"clean": "canonicalize"}}),
    ],
)
def test_towers_with_anything_else_are_left_to_open_clip(model: dict[str, Any], text: dict[str, Any]) -> None:
    plain = {"embed_dim": 8, "vision_cfg": {}, "text_cfg": dict(PLAIN)}
    assert is_plain(plain)

    assert not is_plain({**plain, **model, "text_cfg": {**PLAIN, **text}})


def test_a_folder_that_is_not_plain_still_loads(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    _configure(folder, lambda config: config["model_cfg"].update(quick_gelu=True))

    backbone = load_backbone(f"local-dir:{folder}")

    assert not isinstance(backbone.text, ClipText)
    ids = backbone.tokenizer(TEXTS)
    assert not torch.equal(backbone.text.encode_text(ids), load_backbone("clip-world").text.encode_text(ids))


def test_the_image_tower_is_loaded_when_it_is_asked_for_and_once() -> None:
    backbone = load_backbone("clip-world")
    assert "model" not in vars(backbone)

    pixels = backbone.transform(Image.new("RGB", (40, 40), "red"))

    assert backbone.model.encode_image(pixels[None]).shape == (1, backbone.embed_dim)
    assert backbone.model is backbone.model


def test_an_image_tower_that_does_not_fit_is_one_line_when_it_is_asked_for(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    _configure(folder, lambda config: config["model_cfg"]["vision_cfg"].update(width=8))
    backbone = load_backbone(f"local-dir:{folder}")

    with pytest.raises(BackboneError, match="cannot load the backbone") as caught:
        _ = backbone.model
    assert "\n" not in str(caught.value)


def test_the_transforms_key_names_its_settings_and_nothing_of_the_process(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    keys = {repr(load_backbone(f"local-dir:{folder}").transform), repr(load_backbone("clip-world").transform)}
    _configure(folder, lambda config: config["preprocess_cfg"].update(resize_mode="shortest"))

    assert len(keys) == 1
    assert repr(load_backbone(f"local-dir:{folder}").transform) not in keys


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=30))
def test_the_tokenizer_is_open_clips(text: str) -> None:
    assert torch.equal(_TOKENIZERS[0]([text]), _TOKENIZERS[1]([text]))


_TOKENIZERS = (clip_tokenizer(24), SimpleTokenizer(context_length=24))


def test_the_class_names_are_open_clips() -> None:
    from open_clip import IMAGENET_CLASSNAMES

    assert imagenet_class_names() == list(IMAGENET_CLASSNAMES)


@pytest.mark.parametrize("clients", [1, 2])
def test_training_on_cached_features_imports_neither_open_clip_nor_torchs_compiler(clients: int) -> None:
    """A device starts a process for every message: what is imported is paid every time."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "server", "client"))
    result = subprocess.run(
        [sys.executable, "-c", AFTER_TRAINING.replace("CLIENTS", str(clients))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def _copy(into: Path) -> Path:
    return Path(shutil.copytree(SHIPPED_DIR / "clip-world", into / "clip-world"))


def _configure(folder: Path, change: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    change(config)
    (folder / CONFIG).write_text(json.dumps(config))
