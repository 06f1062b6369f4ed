"""Write a backbone folder: configuration, fp16 weights, vocabulary, card, notice, checksums."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from edgeduet_shared.backbone import CARD, CHECKSUMS, CONFIG, WEIGHTS
from edgeduet_shared.errors import BackboneError

VOCABULARY = "bpe.txt.gz"
"""Name of the vocabulary file; the configuration names it relative to the folder."""

VOCABULARY_NOTICE = """\
bpe.txt.gz: the first merges of the byte-pair vocabulary shipped with open_clip, which took it from
OpenAI's CLIP; both under the MIT licence:

  Copyright (c) 2012-2021 Gabriel Ilharco, Mitchell Wortsman, Nicholas Carlini, Rohan Taori, Achal Dave,
  Vaishaal Shankar, John Miller, Hongseok Namkoong, Hannaneh Hajishirzi, Ali Farhadi, Ludwig Schmidt
  Copyright (c) 2021 OpenAI

  Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
  associated documentation files (the "Software"), to deal in the Software without restriction,
  including without limitation the rights to use, copy, modify, merge, publish, distribute,
  sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
  furnished to do so, subject to the following conditions:

  The above copyright notice and this permission notice shall be included in all copies or substantial
  portions of the Software.

  THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT
  LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT.
  IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
  LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION
  WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.

"""

_BYTE_TOKENS = 2 * 256
_SPECIAL_TOKENS = 2


def write_vocabulary(size: int, file: Path) -> None:
    """Cut open_clip's own byte-pair vocabulary to ``size`` tokens.

    Merges are ordered by frequency, so the first ones are the ones to keep. The start and end tokens
    stay the last two ids, which is what argmax pooling relies on.
    """
    package = importlib.util.find_spec("open_clip")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "bpe_simple_vocab_16e6.txt.gz"
    lines = gzip.decompress(source.read_bytes()).decode("utf-8").split("\n")
    merges = lines[: 1 + size - _BYTE_TOKENS - _SPECIAL_TOKENS]  # the first line is a header
    with file.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as stream:
        # No newline at the end: open_clip would read an empty merge after it.
        stream.write("\n".join(merges).encode("utf-8"))


def write_folder(
    out: Path,
    *,
    model: nn.Module,
    config: Mapping[str, Any],
    vocabulary: Path,
    card: Mapping[str, Any],
    notice: str,
) -> None:
    """Write everything beside ``out`` first and move it into place: ``out`` is never half written.

    ``card`` holds ``summary``, ``licence``, ``zero_shot`` and whatever else the model card tells;
    parameters and sizes are filled in here.
    """
    staging = out.with_name(f".{out.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        weights = {
            name: (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in model.state_dict().items()
        }
        save_file(weights, staging / WEIGHTS, metadata={"format": "pt"})
        (staging / WEIGHTS).chmod(0o644)  # safetensors writes for the owner alone
        (staging / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(vocabulary, staging / VOCABULARY)
        (staging / "NOTICE").write_text(notice, encoding="utf-8")
        write_checksums(staging)
        complete = {
            **card,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "image_size": config["model_cfg"]["vision_cfg"]["image_size"],
            "embed_dim": config["model_cfg"]["embed_dim"],
        }
        write_card(staging, complete)
        shutil.rmtree(out, ignore_errors=True)
        os.replace(staging, out)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise BackboneError(f"cannot write the backbone to {out}: {error}") from error


def write_checksums(folder: Path) -> None:
    """``SHA256SUMS`` over what determines the results: weights, configuration, vocabulary."""
    files = sorted((folder / CONFIG, folder / WEIGHTS, folder / VOCABULARY))
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def write_card(folder: Path, card: Mapping[str, Any]) -> None:
    """Write ``card.json`` (read by the code) and ``MODEL_CARD.md`` (read by people) from one source.

    ``card["sections"]`` maps a heading to its text.
    """
    (folder / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    size = (folder / WEIGHTS).stat().st_size / 1e6
    name = folder.name.removeprefix(".").removesuffix(".partial")
    lines = [
        f"# {name}",
        "",
        card["summary"],
        "",
        "| fact | value |",
        "| --- | --- |",
        f"| parameters | {card['parameters'] / 1e6:.2f} M, fp16, {size:.1f} MB |",
        f"| input | {card['image_size']} px |",
        f"| joint space | {card['embed_dim']} dimensions |",
        f"| licence | {card['licence']} |",
        f"| made by | `edgeduet-sim backbone build {name}` |",
        "",
        f"## Zero-shot accuracy, % (printed by `edgeduet-sim backbone show {name}`)",
        "",
        "| task | accuracy |",
        "| --- | --- |",
        *(f"| {task} | {value:.1f} |" for task, value in card["zero_shot"].items()),
    ]
    for heading, text in card.get("sections", {}).items():
        lines += ["", f"## {heading}", "", text.strip()]
    (folder / "MODEL_CARD.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def record_zero_shot(folder: Path, table: Mapping[str, float]) -> None:
    """Put measured accuracies, in percent, into the card of a built backbone."""
    card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    card["zero_shot"] = {task: round(value, 1) for task, value in table.items()}
    write_card(folder, card)


def save_checkpoint(state: Mapping[str, Any], file: Path) -> None:
    """Write training state so that a kill at any moment leaves the previous one intact."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(dict(state), partial)
    os.replace(partial, file)
