"""Frozen CLIP backbones by name: two shipped ones, any local folder, any open_clip model.

======================  =========================================================================
spec                    what is loaded
======================  =========================================================================
``clip-world``          shipped, 32 px, the generated caption world (:mod:`edgeduet_shared.world`)
``clip-lite0``          shipped, 128 px, real images
``local-dir:PATH``      a folder with ``open_clip_config.json`` and weights; a bare path works too
``ViT-B-16/openai``     open_clip ``MODEL/PRETRAINED``; the weights come from a hub or its cache
``random:ViT-B-16``     open_clip model with RANDOM weights: mechanics tests and memory planning
======================  =========================================================================

What is loaded when: of a folder with a plain CLIP text tower, the text side at once, without open_clip
(:mod:`edgeduet_shared.clip_text`); the rest, with open_clip, torchvision and timm, when ``model`` is first
asked for, which is never where image features are cached and nothing inside the image tower is trained.

Weights are never initialised at random unless the spec says ``random:``. Shipped folders carry a
``SHA256SUMS``; every listed file is checked at load, so that an altered backbone cannot silently
change the results of an experiment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from PIL import Image
from safetensors import safe_open
from torch import LongTensor, Tensor, nn

from edgeduet_shared.clip_text import ClipText, clip_tokenizer, is_plain, is_text_parameter
from edgeduet_shared.errors import BackboneError, nearest

if TYPE_CHECKING:
    import open_clip

    ClipModel: TypeAlias = open_clip.CLIP | open_clip.CustomTextCLIP
    """Both have ``encode_image``, ``encode_text`` and ``logit_scale``; they differ in where the text
    tower lies (on the model, or under ``model.text``)."""

Tokenizer = Callable[..., LongTensor]
"""List of n texts to ids ``[n, context_length]`` int64."""

_log = logging.getLogger(__name__)

SHIPPED_DIR = Path(__file__).parent / "backbones"
"""Where the shipped backbones lie; one folder each."""

CHECKSUMS = "SHA256SUMS"
CARD = "card.json"
CONFIG = "open_clip_config.json"
WEIGHTS = "open_clip_model.safetensors"

_FINGERPRINT_HEX = 16


class PictureTransform:
    """The deterministic test transform of a backbone: an RGB picture to ``[3, H, W]`` float32.

    Its ``repr`` says all that it does and is part of the key of feature caches.
    """

    def __init__(self, key: str, steps: Callable[[], Callable[[Image.Image], Tensor]]) -> None:
        self._key = key
        self._steps = steps

    @property
    def steps(self) -> Any:
        """The torchvision transform that does it."""
        return self._steps()

    def __call__(self, picture: Image.Image) -> Tensor:
        """Transform one picture."""
        return cast(Tensor, self.steps(picture))

    def __repr__(self) -> str:
        return self._key


@dataclass(frozen=True)
class Backbone:
    """A frozen CLIP and everything needed to feed it.

    Attributes:
        name: the spec it was loaded from; ``random:`` specs keep their prefix.
        text: what encodes text: the text tower alone, or the open_clip model itself.
        tokenizer: list of n texts to ids ``[n, context_length]`` int64.
        fingerprint: 16 hex digits of sha256 over configuration and weights; key of feature caches.
        embed_dim: width of the joint space.
        image_size: input edge in pixels.
        logit_scale: factor on cosines, already exponentiated.
        device: where the weights lie.
        transform: deterministic test transform, an RGB picture to ``[3, H, W]`` float32.
        open_model: loads the open_clip model; called once.
    """

    name: str
    text: ClipText | ClipModel
    tokenizer: Tokenizer
    fingerprint: str
    embed_dim: int
    image_size: int
    logit_scale: float
    device: torch.device
    transform: PictureTransform
    open_model: Callable[[], ClipModel]

    @cached_property
    def model(self) -> ClipModel:
        """The open_clip ``CLIP`` or ``CustomTextCLIP`` in fp32, ``eval()``, no gradients; loaded on first use.

        Raises:
            BackboneError: the weights of the image tower do not fit the configuration.
        """
        return self.open_model()

    @classmethod
    def of_model(
        cls,
        name: str,
        model: ClipModel,
        transform: Callable[[Image.Image], Tensor],
        tokenizer: Tokenizer,
        *,
        embed_dim: int,
        fingerprint: str,
        device: str | torch.device = "cpu",
    ) -> Backbone:
        """Freeze a loaded open_clip model and move it to ``device``."""
        model = model.float().eval().requires_grad_(False).to(device)
        size = model.visual.image_size  # int for ResNets, (height, width) for the other towers
        return cls(
            name=name,
            text=model,
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            embed_dim=embed_dim,
            image_size=int(size[0] if isinstance(size, tuple) else size),
            logit_scale=float(model.logit_scale.exp()) if not model.logit_scale.is_meta else math.nan,
            device=model.logit_scale.device,
            transform=PictureTransform(repr(transform), lambda: transform),
            open_model=lambda: model,
        )


@dataclass(frozen=True)
class BackboneCard:
    """What is known about a shipped backbone, read from its ``card.json``.

    ``zero_shot`` maps a data set to accuracy in percent, as printed by
    ``edgeduet-sim backbone show NAME``; ``sha256`` is that of the weights file.
    """

    name: str
    summary: str
    parameters: int
    bytes: int
    sha256: str
    licence: str
    image_size: int
    embed_dim: int
    zero_shot: dict[str, float]
    folder: Path


def offline_backbones() -> dict[str, BackboneCard]:
    """Return the cards of the shipped backbones by name; works without loading any model."""
    return {folder.name: read_card(folder) for folder in sorted(SHIPPED_DIR.iterdir()) if (folder / CONFIG).is_file()}


def read_card(folder: Path) -> BackboneCard:
    """Read ``card.json`` of a built backbone folder."""
    try:
        raw = json.loads((folder / CARD).read_text(encoding="utf-8"))
        return BackboneCard(
            name=folder.name,
            summary=raw["summary"],
            parameters=raw["parameters"],
            bytes=(folder / WEIGHTS).stat().st_size,
            sha256=_listed_checksums(folder)[WEIGHTS],
            licence=raw["licence"],
            image_size=raw["image_size"],
            embed_dim=raw["embed_dim"],
            zero_shot=dict(raw["zero_shot"]),
            folder=folder,
        )
    except (OSError, ValueError, KeyError) as error:
        raise BackboneError(
            f"backbone '{folder.name}' is incomplete in {folder} ({error}); {_repair(folder)}"
        ) from error


def load_backbone(spec: str, *, device: str | torch.device = "cpu") -> Backbone:
    """Load a frozen backbone.

    Args:
        spec: see the table at the top of this module.
        device: where the model goes; the transform and the tokenizer stay on the CPU.

    Raises:
        BackboneError: unknown name, missing or altered file, or weights that cannot be downloaded.
    """
    if spec.startswith("random:"):
        return _load_random(spec, device)
    if spec.startswith("local-dir:"):
        return _load_folder(spec, Path(spec.removeprefix("local-dir:")).expanduser(), device)
    if spec in _shipped_names():
        folder = SHIPPED_DIR / spec
        verify_checksums(folder)
        return _load_folder(spec, folder, device)
    if _looks_like_path(spec):
        return _load_folder(spec, Path(spec).expanduser(), device)
    return _load_from_hub(spec, device)


def verify_checksums(folder: Path) -> None:
    """Check every file listed in the folder's ``SHA256SUMS``.

    Raises:
        BackboneError: the list, or a listed file, is missing or altered.
    """
    name = folder.name
    if not (folder / CHECKSUMS).is_file():
        raise BackboneError(f"backbone '{name}' has no {CHECKSUMS} in {folder}; {_repair(folder)}")
    for file, expected in _listed_checksums(folder).items():
        if not (folder / file).is_file():
            raise BackboneError(f"backbone '{name}' lacks {file} in {folder}; {_repair(folder)}")
        if _sha256(folder / file) != expected:
            raise BackboneError(f"backbone '{name}': {folder / file} was altered (checksum differs); {_repair(folder)}")


# --- the three ways to load ----------------------------------------------------------------------


def _load_folder(spec: str, folder: Path, device: str | torch.device) -> Backbone:
    folder = folder.resolve()
    if not folder.is_dir():
        raise BackboneError(f"backbone folder '{folder}' does not exist; {_offline_hint()}")
    config_file, weights = folder / CONFIG, folder / WEIGHTS
    for file in (config_file, weights):
        if not file.is_file():
            raise BackboneError(
                f"backbone folder '{folder}' has no {file.name} (open_clip's layout); {_offline_hint()}"
            )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        model_config = config["model_cfg"]
        text_config, embed_dim = model_config["text_cfg"], int(model_config["embed_dim"])
    except (ValueError, KeyError, TypeError) as error:
        raise BackboneError(f"{config_file} is not an open_clip configuration ({_first_line(error)})") from error
    # open_clip does not resolve a vocabulary path against the folder it comes from.
    bpe_path = text_config.get("tokenizer_kwargs", {}).get("bpe_path")
    vocabulary = folder / bpe_path if bpe_path else None
    # The files are hashed, not the tensors: this also covers preprocessing and vocabulary.
    files = [config_file, weights, *([vocabulary] if vocabulary else [])]
    whole = _WholeFolder(folder, torch.device(device))
    try:
        fingerprint = _fingerprint(_sha256(file) for file in files)
        if not is_plain(model_config) or not isinstance(model_config["vision_cfg"].get("image_size"), int):
            with _root_logger_silent():
                import open_clip

                options = {"bpe_path": str(vocabulary)} if vocabulary else {}
                tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}", **options)
            model, transform = whole.loaded
            facts: dict[str, Any] = {"embed_dim": embed_dim, "fingerprint": fingerprint, "device": device}
            return Backbone.of_model(spec, model, transform, tokenizer, **facts)
        tensors = _text_weights(weights)
        return Backbone(
            name=spec,
            text=ClipText.load(embed_dim, text_config, tensors).to(device),
            tokenizer=clip_tokenizer(text_config["context_length"], vocabulary),
            fingerprint=fingerprint,
            embed_dim=embed_dim,
            image_size=model_config["vision_cfg"]["image_size"],
            logit_scale=float(tensors["logit_scale"].float().exp()),
            device=torch.device(device),
            transform=PictureTransform(_preprocessing_key(config), lambda: whole.loaded[1]),
            open_model=lambda: whole.loaded[0],
        )
    except BackboneError:
        raise
    except Exception as error:  # open_clip, safetensors and timm each raise families of their own
        raise BackboneError(f"cannot load the backbone in {folder}: {_first_line(error)}") from error


class _WholeFolder:
    """The open_clip model of a folder and its test transform, loaded on first use."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = folder
        self._device = device

    @cached_property
    def loaded(self) -> tuple[ClipModel, Callable[[Image.Image], Tensor]]:
        """Model and transform."""
        import open_clip  # slow: brings torchvision, timm and transformers

        try:
            with _root_logger_silent():
                model, _, transform = open_clip.create_model_and_transforms(
                    f"local-dir:{self._folder}", require_pretrained=True
                )
        except Exception as error:  # open_clip, safetensors and timm each raise families of their own
            raise BackboneError(f"cannot load the backbone in {self._folder}: {_first_line(error)}") from error
        return model.float().eval().requires_grad_(False).to(self._device), transform


def _text_weights(weights: Path) -> dict[str, Tensor]:
    """The text tower's weights and ``logit_scale``; the rest of the file is not read."""
    with safe_open(weights, framework="pt") as file:
        wanted = [name for name in file.keys() if is_text_parameter(name) or name == "logit_scale"]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in wanted}


def _preprocessing_key(config: Mapping[str, Any]) -> str:
    size, steps = config["model_cfg"]["vision_cfg"]["image_size"], config.get("preprocess_cfg", {})
    return f"open_clip test transform, {size} px, {json.dumps(steps, sort_keys=True)}"


def _load_from_hub(spec: str, device: str | torch.device) -> Backbone:
    import open_clip

    model_name, _, tag = spec.partition("/")
    config = _open_clip_config(spec, model_name)
    tags = open_clip.list_pretrained_tags_by_model(model_name)
    if not tag:
        choices = ", ".join(f"{model_name}/{known}" for known in tags) or "none is published"
        raise BackboneError(
            f"backbone '{spec}' names no weights; write MODEL/PRETRAINED ({choices}), "
            f"or 'random:{spec}' for random weights"
        )
    if tag not in tags:
        raise BackboneError(f"open_clip has no weights '{tag}' for {model_name}{nearest(tag, tags)}")
    try:
        with _root_logger_silent():
            model, _, transform = open_clip.create_model_and_transforms(
                model_name, pretrained=tag, require_pretrained=True
            )
            tokenizer = open_clip.get_tokenizer(model_name)
    except Exception as error:  # hub clients raise many unrelated types when there is no network
        raise BackboneError(
            f"the weights of '{spec}' are not in the local cache and no hub can be reached "
            f"({_first_line(error)}); {_offline_hint()}"
        ) from error
    fingerprint = _fingerprint([json.dumps(config, sort_keys=True), *_tensor_digests(model)])
    facts: dict[str, Any] = {"embed_dim": config["embed_dim"], "fingerprint": fingerprint, "device": device}
    return Backbone.of_model(spec, model, transform, tokenizer, **facts)


def _load_random(spec: str, device: str | torch.device) -> Backbone:
    import open_clip

    model_name = spec.removeprefix("random:")
    config = _open_clip_config(spec, model_name)
    _log.warning("backbone %s has random weights: no accuracy measured with it means anything", spec)
    with torch.random.fork_rng(devices=[]), _root_logger_silent():
        torch.manual_seed(0)
        model, _, transform = open_clip.create_model_and_transforms(
            model_name, pretrained=None, pretrained_image=False, pretrained_text=False
        )
    try:
        tokenizer = open_clip.get_tokenizer(model_name)
    except Exception as error:  # Hugging Face tokenizers are downloaded
        raise BackboneError(
            f"the tokenizer of '{model_name}' is not in the local cache and no hub can be reached; "
            f"take a model with open_clip's own tokenizer, for example random:ViT-B-16"
        ) from error
    fingerprint = _fingerprint([spec, *_tensor_digests(model)])
    facts: dict[str, Any] = {"embed_dim": config["embed_dim"], "fingerprint": fingerprint, "device": device}
    return Backbone.of_model(spec, model, transform, tokenizer, **facts)


# --- names, checksums, messages ------------------------------------------------------------------


def _shipped_names() -> list[str]:
    if not SHIPPED_DIR.is_dir():
        return []
    return sorted(folder.name for folder in SHIPPED_DIR.iterdir() if folder.is_dir())


def _looks_like_path(spec: str) -> bool:
    return spec.startswith(("/", "./", "../", "~", "\\")) or Path(spec).is_dir()


def _open_clip_config(spec: str, model_name: str) -> dict[str, Any]:
    """Configuration of an open_clip architecture, or an error that names the nearest one."""
    import open_clip

    known = open_clip.list_models()
    if model_name in known:
        config: dict[str, Any] = open_clip.get_model_config(model_name)
        return config
    # The list of architectures is long: name it only through its nearest member.
    candidates = [*_shipped_names(), *known]
    hint = nearest(model_name, candidates)
    raise BackboneError(f"unknown backbone '{spec}'" + (hint if "did you mean" in hint else f"; {_offline_hint()}"))


def _listed_checksums(folder: Path) -> dict[str, str]:
    """Parse ``SHA256SUMS`` (the format of sha256sum) to file name -> hex digest."""
    lines = (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines()
    pairs = (line.split(maxsplit=1) for line in lines if line.strip())
    return {name.lstrip("*"): digest for digest, name in pairs}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tensor_digests(model: nn.Module) -> Iterator[str]:
    for name, tensor in sorted(model.state_dict().items()):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        yield f"{name} {hashlib.sha256(content).hexdigest()}"


def _fingerprint(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_FINGERPRINT_HEX]


def _repair(folder: Path) -> str:
    command = f"edgeduet-sim backbone build {folder.name} --out {folder}"
    return f"reinstall edgeduet, or rebuild it with: {command}"


def _offline_hint() -> str:
    return f"without a network use {' or '.join(_shipped_names())}, or local-dir:PATH"


@contextlib.contextmanager
def _root_logger_silent() -> Iterator[None]:
    """open_clip logs failures on the root logger and raises them too: the error alone is enough."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        root.setLevel(level)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
