"""Export a client's personal model to ONNX: image tower with adapters, text features and fusion as constants.

The texts of all classes are encoded once, under the client's prompt and under the prompts dispatched to it;
what remains is image in, logits out. The graph is compared with torch before it is put into use.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edgeduet_client.classifier.classifier_folder import MODEL, ClassifierFacts, ClassifierFolder, file_sha256
from edgeduet_client.classifier.preprocessing import Preprocessing
from edgeduet_shared.backbone import Backbone
from edgeduet_shared.errors import StateError
from edgeduet_shared.evaluation import Predictor

log = logging.getLogger("edgeduet.client")

# Logits are a few units large; ONNX Runtime and torch add in different orders (measured: 3e-6).
LARGEST_DIFFERENCE = 1e-3
_BATCHES = (1, 3)


class _ImageToLogits(nn.Module):
    """Pixels ``(B, 3, H, W)`` to logits ``(B, C)`` of a predictor."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.predictor = predictor

    def forward(self, pixels: Tensor) -> Tensor:
        model, params = self.predictor.model, self.predictor.params
        z_BD, _ = model.run(params, "encode_image", model.front(pixels))
        if self.predictor.dispatched_MCD is None:
            local: Tensor = model.run(params, "local_logits", z_BD, self.predictor.text_CD)
            return local
        texts, mix = (self.predictor.text_CD, self.predictor.dispatched_MCD), self.predictor.mix
        fused: Tensor = model.run(params, "fused_logits", z_BD, *texts, mix)[0]
        return fused


def export_classifier(
    predictor: Predictor,
    backbone: Backbone,
    folder: ClassifierFolder,
    *,
    run: str,
    client: int,
    stage: int,
    class_names: Sequence[str],
    seen: Sequence[int],
) -> ClassifierFacts:
    """Export what ``predictor`` computes and put it into use.

    Raises:
        StateError: the exported graph answers otherwise than torch; the version in use stays.
        EdgeDuetError: the disk is full.
    """
    preprocessing = Preprocessing.of_transform(backbone.transform.steps)

    def write(into: Path) -> ClassifierFacts:
        module = _ImageToLogits(predictor).eval()
        _to_onnx(module, backbone.image_size, into / MODEL)
        return ClassifierFacts(
            run=run,
            client=client,
            stage=stage,
            class_names=tuple(class_names),
            seen=tuple(int(label) for label in seen),
            preprocessing=preprocessing,
            model_sha256=file_sha256(into / MODEL),
            largest_difference=_compare(module, backbone.image_size, into / MODEL),
        )

    return folder.publish(f"stage-{stage:04d}", write)


def _to_onnx(module: nn.Module, side: int, path: Path) -> None:
    # Two images: a batch of one would be taken for a constant.
    example = torch.zeros(2, 3, side, side)
    exporter = logging.getLogger("onnxscript")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=["pixels"],
                output_names=["logits"],
                dynamic_shapes={"pixels": {0: torch.export.Dim.DYNAMIC}},
            )
            program.save(path, external_data=False)
    finally:
        exporter.setLevel(level)


def _compare(module: nn.Module, side: int, path: Path) -> float:
    import onnxruntime

    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for batch in _BATCHES:
        pixels = torch.randn(batch, 3, side, side, generator=generator)
        with torch.no_grad():
            ours = module(pixels).numpy()
        (theirs,) = session.run(["logits"], {"pixels": pixels.numpy()})
        largest = max(largest, float(np.abs(theirs - ours).max()))
    if not largest <= LARGEST_DIFFERENCE:
        raise StateError(
            f"the exported classifier differs from the trained model (logits up to {largest:.3g} apart); "
            "the former classifier stays in use; please report this"
        )
    return largest
