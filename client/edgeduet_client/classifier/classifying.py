"""Answer what is in a picture, with ONNX Runtime; nothing here imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from edgeduet_client.classifier.classifier_folder import MODEL, ClassifierFacts, ClassifierFolder
from edgeduet_shared.errors import DataError, StateError

# Pictures that unpack to more pixels than this are refused (a few kilobytes can unpack to gigabytes).
MOST_PIXELS = 100_000_000


@dataclass(frozen=True)
class Answer:
    """Classes and their probabilities, likeliest first; probabilities are over the classes seen so far."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


class Classifier:
    """The classifier in use, loaded.

    Raises:
        StateError: there is none yet, or it is damaged.
    """

    def __init__(self, folder: ClassifierFolder, *, threads: int = 1) -> None:
        found = folder.current()
        if found is None:
            raise StateError(f"{folder.root}: there is no classifier yet; it is made after the first stage of training")
        path, self.facts = found
        self._session = _session(path / MODEL, threads)

    def classify(self, images: Sequence[Image.Image], *, top: int = 5) -> list[Answer]:
        """Return the ``top`` likeliest of the classes seen so far, for every picture."""
        if not images:
            return []
        facts: ClassifierFacts = self.facts
        pixels = np.stack([facts.preprocessing.pixels(image) for image in images])
        (logits,) = self._session.run(["logits"], {"pixels": pixels})
        seen = np.array(facts.seen)
        probabilities = _softmax(logits[:, seen].astype(np.float64))
        answers = []
        for row in probabilities:
            order = np.argsort(-row, kind="stable")[:top]
            names = tuple(facts.class_names[seen[place]] for place in order)
            answers.append(Answer(names, tuple(float(row[place]) for place in order)))
        return answers


def open_image(source: Path | Any, name: str) -> Image.Image:
    """Decode a picture.

    Args:
        source: a path or a binary file.
        name: for the message.

    Raises:
        DataError: it is missing, no picture, damaged, or far too large.
    """
    try:
        image = Image.open(source)
        if image.width * image.height > MOST_PIXELS:
            raise DataError(f"{name}: {image.width} x {image.height} pixels are too many; give a smaller picture")
        image.load()
    except FileNotFoundError:
        raise DataError(f"{name}: there is no such file") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: is no picture that can be read ({error}); give a JPEG or PNG") from error
    return image


def _session(model: Path, threads: int) -> Any:
    try:
        onnxruntime = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise StateError(f"classifying needs onnxruntime ({error}); pip install 'edgeduet[llm]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    normalised: np.ndarray = powers / powers.sum(axis=1, keepdims=True)
    return normalised
