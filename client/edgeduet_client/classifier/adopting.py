"""Make a classifier of a global model: for a device that has none of its own, or takes no part in training.

The model comes as ``edgeduet-admin models export`` writes it: the arrays that the server averaged, and in the
metadata what they belong to (method, parts, backbone, classes). What a method keeps on clients is not in it: those
parts are as they are at the beginning of training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgeduet_client.classifier.classifier_folder import ClassifierFacts, ClassifierFolder
from edgeduet_shared.errors import ConfigError, StateError

GLOBAL = -1
"""As the client of :class:`ClassifierFacts`: nobody's in particular."""


def adopt_model(root: Path, file: Path, *, replace: bool = False) -> ClassifierFacts:
    """Export the global model in ``file`` to ONNX and put it into use under ``root``.

    Args:
        root: the device's ``classifier`` folder.
        replace: also where a personal model is in use.

    Raises:
        ConfigError: the file is no such model, or a personal model is in use.
        StateError: the exported graph answers otherwise than torch; what is in use stays.
    """
    folder = ClassifierFolder(root)
    present = folder.current()
    if present is not None and present[1].client != GLOBAL and not replace:
        raise ConfigError(
            f"{root} holds this device's personal model (run {present[1].run}, stage {present[1].stage + 1}); give "
            "--replace to answer with the global one until the next stage is trained"
        )
    card, arrays = _read(file)
    try:
        return _export(folder, card, arrays)
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed; adopting needs it: pip install 'edgeduet[device]'") from None


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as content:
            metadata = content.metadata() or {}
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
        texts = {name: json.loads(metadata[name]) for name in ("parts", "model", "class_names", "seen")}
        return {**texts, "run": metadata["run"], **{name: int(metadata[name]) for name in ("stage", "seed")}}, arrays
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); bring it with `edgeduet-admin models export`") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{file}: is no global model with all that a classifier needs ({error}); bring one with "
            "`edgeduet-admin models export` from a server of this version"
        ) from error


def _export(folder: ClassifierFolder, card: dict[str, Any], arrays: dict[str, Any]) -> ClassifierFacts:
    import torch

    from edgeduet_client.classifier.exporting import export_classifier
    from edgeduet_shared.backbone import load_backbone
    from edgeduet_shared.config import ModelConfig, parse
    from edgeduet_shared.duet import DuetModel
    from edgeduet_shared.evaluation import merged_params, predictor
    from edgeduet_shared.plan import Parts

    torch.set_num_threads(1)
    settings = parse(ModelConfig, card["model"], "the model's metadata")
    backbone = load_backbone(settings.backbone)
    names = tuple(map(str, card["class_names"]))
    model = DuetModel(backbone, names, settings, parse(Parts, card["parts"], "the model's metadata"))
    known = {name for name, _ in model.named_parameters()}
    if not arrays or not set(arrays) <= known:
        strange = sorted(set(arrays) - known)[:1]
        raise StateError(f"the model holds {strange or 'nothing'}, which this version of edgeduet has no place for")
    params = merged_params(model, card["seed"], arrays)
    return export_classifier(
        predictor(model, params, len(names)),
        backbone,
        folder,
        run=card["run"],
        client=GLOBAL,
        stage=card["stage"],
        class_names=names,
        seen=card["seen"],
    )
