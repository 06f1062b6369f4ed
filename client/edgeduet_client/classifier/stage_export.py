"""The classifier of a device follows its training: exported after every stage, never at the cost of the reply."""

from __future__ import annotations

import logging
from pathlib import Path

from edgeduet_client.classifier.classifier_folder import ERROR_FILE, ClassifierFolder
from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.evaluation import Predictor
from edgeduet_shared.experiment import Experiment

log = logging.getLogger("edgeduet.client")


def export_after_stage(
    personal: Predictor, experiment: Experiment, root: Path, *, run: str, client: int, stage: int
) -> None:
    """Export the personal model and put it into use; what goes wrong is logged and noted in ``ERROR_FILE``."""
    try:
        from edgeduet_client.classifier.exporting import export_classifier

        split = experiment.split
        export_classifier(
            personal,
            experiment.backbone,
            ClassifierFolder(root),
            run=run,
            client=client,
            stage=stage,
            class_names=split.class_names,
            seen=split.seen_classes(stage),
        )
        (root / ERROR_FILE).unlink(missing_ok=True)
    except Exception as error:
        # The federation must not lose a client because its disk is full or its exporter is missing.
        log.exception("the classifier of stage %d was not exported; the one before stays in use", stage)
        _note(root, f"stage {stage}: {type(error).__name__}: {error}\n")


def _note(root: Path, text: str) -> None:
    try:
        atomic_write_text(root / ERROR_FILE, text)
    except Exception as error:
        log.error("nor could that be noted: %s", error)
