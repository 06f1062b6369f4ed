"""Train ``clip-world``: a tiny CLIP from scratch on the generated caption world.

Recipe (clip-and-data.md, section 4): open_clip's ModifiedResNet with one block a stage, because a
ViT of this size learns the colour and not the shape; batches of 64, because steps matter more than
negatives here; one caption level and one wording drawn per batch, and cross-entropy between every
picture and the *unique* captions of the batch, both ways, so that two pictures with the same caption
are no false negatives.

The run is a pure function of (steps, seed): batch ``i`` draws from ``default_rng((seed, i))``, so a
run that was killed and resumed ends with the same weights as one that was not.

Shape suffixes: B pictures, U unique captions, D joint embedding.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import open_clip
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from edgeduet_shared import world
from edgeduet_shared.backbone import load_backbone
from edgeduet_sim.backbone_build.export import (
    VOCABULARY,
    VOCABULARY_NOTICE,
    record_zero_shot,
    save_checkpoint,
    write_folder,
    write_vocabulary,
)
from edgeduet_sim.backbone_build.progress import counted, training_bar
from edgeduet_sim.backbone_build.text_tower import encode_trimmed
from edgeduet_sim.backbone_build.zero_shot import world_table

if TYPE_CHECKING:
    from edgeduet_shared.backbone import ClipModel

NAME = "clip-world"
IMAGES = 40_000
BATCH = 64
STEPS = 4_500
PEAK_RATE = 2e-3
WARMUP_STEPS = 200
WEIGHT_DECAY = 0.05
SEED = 0
_CHECKPOINT_SECONDS = 45.0
_MEAN, _STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)

# Shape captions carry what the other levels let the model skip, so they are drawn most often.
_LEVELS = (
    world.CaptionLevel.SHAPE,
    world.CaptionLevel.SHAPE,
    world.CaptionLevel.COLOUR,
    world.CaptionLevel.COLOUR,
    world.CaptionLevel.TEXTURE,
    world.CaptionLevel.COUNT,
    world.CaptionLevel.FULL,
)

CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 128,
        "vision_cfg": {
            "layers": [1, 1, 1, 1],
            "width": 16,
            "head_width": 64,
            "image_size": world.IMAGE_SIZE,
        },
        "text_cfg": {
            "context_length": 24,
            "vocab_size": 8192,
            "width": 96,
            "heads": 4,
            "layers": 2,
            "tokenizer_kwargs": {"bpe_path": VOCABULARY},
        },
    },
    "preprocess_cfg": {
        "mean": list(_MEAN),
        "std": list(_STD),
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}


def build(out: Path, work: Path, *, minutes: float | None = None, seed: int = SEED) -> None:
    """Render, train, measure and write the folder ``out``.

    Args:
        out: folder to (re)place.
        work: where rendered pictures and the training checkpoint lie; a second call resumes there.
        minutes: stop the training early after this many minutes; the learning rate then has not
            decayed, so leave it out for a backbone that is to be kept.
        seed: of pictures, initial weights and batches.
    """
    work.mkdir(parents=True, exist_ok=True)
    vocabulary = work / VOCABULARY
    write_vocabulary(CONFIG["model_cfg"]["text_cfg"]["vocab_size"], vocabulary)
    specs, images = render_training_set(work, seed)
    torch.manual_seed(seed)
    model = new_model()
    tokenizer = open_clip.SimpleTokenizer(bpe_path=str(vocabulary), context_length=24)
    steps = train(model, tokenizer, specs, images, work / "training.pt", seed=seed, minutes=minutes)
    write_folder(
        out,
        model=model,
        config=CONFIG,
        vocabulary=vocabulary,
        card=_card(steps, seed),
        notice=_NOTICE,
    )
    # Measured on the written fp16 files, through the loader that users go through.
    record_zero_shot(out, world_table(load_backbone(f"local-dir:{out}")))


def render_training_set(work: Path, seed: int) -> tuple[list[world.Spec], NDArray[np.uint8]]:
    """Return ``(specs, images [N, 32, 32, 3])``; the pictures are kept in ``work``."""
    rng = np.random.default_rng(seed)
    specs = [world.random_spec(rng, held_out=False) for _ in range(IMAGES)]
    file = work / f"world-{seed}.npy"
    if file.is_file():
        return specs, np.load(file, mmap_mode="r")
    images = np.empty((IMAGES, world.IMAGE_SIZE, world.IMAGE_SIZE, 3), np.uint8)
    for i, spec in enumerate(counted(specs, "rendering")):
        images[i] = world.render(spec, np.random.default_rng((seed, i)))
    partial = file.with_name(f"partial-{file.name}")
    np.save(partial, images)
    partial.replace(file)
    return specs, images


def train(
    model: ClipModel,
    tokenizer: open_clip.SimpleTokenizer,
    specs: list[world.Spec],
    images: NDArray[np.uint8],
    checkpoint: Path,
    *,
    seed: int,
    minutes: float | None,
    steps: int = STEPS,
) -> int:
    """Train in place; return the number of steps done, counting those before a resume."""
    optimizer = torch.optim.AdamW(_parameter_groups(model), lr=PEAK_RATE, betas=(0.9, 0.98))
    first = _resume(model, optimizer, checkpoint)
    started = saved = time.monotonic()
    model.train()
    with training_bar(NAME, total=steps, completed=first) as bar:
        for step in range(first, steps):
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * _schedule(step, steps)
            loss = _loss(model, tokenizer, specs, images, np.random.default_rng((seed, step)))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0.0, math.log(100.0))
            bar(step + 1, loss=loss.item())
            now = time.monotonic()
            out_of_time = minutes is not None and now - started > 60 * minutes
            if out_of_time or now - saved > _CHECKPOINT_SECONDS or step + 1 == steps:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint({**state, "step": step + 1}, checkpoint)
                saved = now
            if out_of_time:
                break
    model.eval()
    return step + 1 if first < steps else steps


def new_model() -> ClipModel:
    """Return the architecture with random weights."""
    config = CONFIG["model_cfg"]
    return open_clip.CLIP(config["embed_dim"], dict(config["vision_cfg"]), dict(config["text_cfg"]))


def _parameter_groups(model: ClipModel) -> list[dict[str, Any]]:
    """Weight decay on matrices only: not on gains, biases and the temperature."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]


def _resume(model: ClipModel, optimizer: torch.optim.Optimizer, checkpoint: Path) -> int:
    if not checkpoint.is_file():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)))


def _loss(
    model: ClipModel,
    tokenizer: open_clip.SimpleTokenizer,
    specs: list[world.Spec],
    images: NDArray[np.uint8],
    rng: np.random.Generator,
) -> Tensor:
    rows = rng.integers(len(specs), size=BATCH)
    level = _LEVELS[rng.integers(len(_LEVELS))]
    wording = int(rng.integers(len(world.TEMPLATES)))
    texts = [world.captions(specs[row], level)[wording] for row in rows]
    unique = sorted(set(texts))
    target_B = torch.tensor([unique.index(text) for text in texts])
    image_BD = F.normalize(model.encode_image(_pixels(images[rows], rng)), dim=-1)
    text_UD = F.normalize(encode_trimmed(model, tokenizer(unique)), dim=-1)
    logits_BU = model.logit_scale.exp() * image_BD @ text_UD.T
    # A caption may be true of several pictures: it spreads its probability over all of them.
    match_BU = F.one_hot(target_B, len(unique)).to(logits_BU.dtype)
    share_BU = match_BU / match_BU.sum(0, keepdim=True)
    text_to_image = -(share_BU * logits_BU.log_softmax(0)).sum(0).mean()
    return 0.5 * (F.cross_entropy(logits_BU, target_B) + text_to_image)


def _pixels(images_BHWC: NDArray[np.uint8], rng: np.random.Generator) -> Tensor:
    """Normalised ``[B, 3, H, W]``, shifted by up to two pixels."""
    shifted = np.roll(images_BHWC, tuple(rng.integers(-2, 3, size=2)), axis=(1, 2))
    pixels_BCHW = torch.from_numpy(shifted).permute(0, 3, 1, 2).float() / 255.0
    mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
    return (pixels_BCHW - mean) / std


def _card(steps: int, seed: int) -> dict[str, Any]:
    return {
        "zero_shot": {},
        "summary": (
            "Tiny CLIP (ModifiedResNet [1,1,1,1] and a two-layer text tower) trained from scratch on "
            "the generated caption world. For the demo and the tests: it knows nothing about real "
            "photographs."
        ),
        "licence": "Apache-2.0 (weights are ours; vocabulary: open_clip, MIT)",
        "sections": {
            "Training": (
                f"{steps} steps of {BATCH} pictures from {IMAGES} rendered ones (12 shapes, 10 colours, "
                f"photo and cartoon styles), AdamW, peak rate {PEAK_RATE}, cosine, seed {seed}. One "
                "caption level and one wording per batch. Never shown: 24 of 120 shape-colour pairs, "
                "the sketch and painting styles, 8 further shapes."
            ),
            "How to read the numbers": (
                "shape is one of 12 words, pair one of 120 phrases, count one of three. The rows are "
                "600 pictures each, drawn with another seed than the training. Single training run."
            ),
        },
    }


_NOTICE = f"""\
clip-world
Weights: trained by edgeduet's own script on pictures generated by edgeduet; Apache-2.0.
{VOCABULARY_NOTICE}"""
