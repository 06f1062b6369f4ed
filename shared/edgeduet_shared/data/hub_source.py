"""Hugging Face data sets by name, through the ``datasets`` library that flwr-datasets builds on.

All splits are joined (see ``sources``). The image column is the one of type ``Image``; the label column
is ``label``, ``fine_label`` or the only ``ClassLabel``; a ``domain`` column, where there is one, names the
domains. Images stay encoded until they are read.
"""

from __future__ import annotations

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import httpx
import huggingface_hub
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from numpy.typing import NDArray
from PIL import Image

from edgeduet_shared.data.image_check import decode, problem
from edgeduet_shared.data.image_folder import ONLY_DOMAIN
from edgeduet_shared.data.image_table import Inspection, Listing
from edgeduet_shared.errors import DataError

log = logging.getLogger(__name__)

HUB_TIMEOUT_S = 10.0
_LABEL_COLUMNS = ("label", "fine_label")
_OTHER_DATA = (
    "use --set data.source=folder:PATH for images on disk or --set data.source=world for generated ones; "
    "if it is in the local Hugging Face cache, set HF_HUB_OFFLINE=1"
)


def list_hub(name: str, *, full_decode: bool) -> Listing:
    """List the images of the data set ``name`` (``owner/name``, or a local folder that ``datasets`` can load).

    Raises :class:`DataError` when the hub cannot be reached, the data set does not exist, or it has
    no image and label column.
    """
    rows = _load(name)
    image_column, label_column = _columns(name, rows)
    labels, class_names = _encoded(rows, label_column)
    if "domain" in rows.column_names:
        domains, domain_names = _encoded(rows, "domain")
    else:
        domains, domain_names = np.zeros(len(labels), np.int64), (ONLY_DOMAIN,)
    labelled = np.flatnonzero((labels >= 0) & (domains >= 0))
    if len(labelled) < len(labels):
        log.warning("hub:%s: %d images without a label are left out", name, len(labels) - len(labelled))
    reader = _HubReader(name, rows, image_column, labelled)
    return Listing(
        reader=reader,
        labels=labels[labelled],
        domains=domains[labelled],
        class_names=class_names,
        domain_names=domain_names,
        inspect=lambda index: reader.inspect(index, full_decode),
    )


def _load(name: str) -> Any:
    """All splits of the data set as one ``datasets.Dataset``."""
    if not Path(name).is_dir():
        _check_reachable(name)
    try:
        splits = datasets.load_dataset(name)
        return datasets.concatenate_datasets([splits[split] for split in sorted(splits)])
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"hub:{name}: cannot be loaded ({_first_line(error)}); {_OTHER_DATA}") from error


def _check_reachable(name: str) -> None:
    """Ask the hub once. ``datasets`` alone would retry for half a minute and print every attempt."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError) as error:
        raise DataError(f"hub:{name}: not available ({_first_line(error)}); {_OTHER_DATA}") from error
    except (httpx.HTTPError, OSError, OfflineModeIsEnabled) as error:
        raise DataError(
            f"hub:{name}: the Hugging Face hub cannot be reached ({_first_line(error)}); {_OTHER_DATA}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _columns(name: str, rows: Any) -> tuple[str, str]:
    images = [column for column, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    class_labels = [column for column, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)]
    labels = [column for column in _LABEL_COLUMNS if column in rows.features] or class_labels
    if not images or not labels or (len(labels) > 1 and labels[0] not in _LABEL_COLUMNS):
        raise DataError(
            f"hub:{name}: needs one image column and a label column called 'label' (or a single ClassLabel), "
            f"it has {', '.join(rows.column_names)}; {_OTHER_DATA}"
        )
    return images[0], labels[0]


def _encoded(rows: Any, column: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Values of a column as ids, and the names of the ids. Missing values are -1."""
    values = rows[column][:]
    kind = rows.features[column]
    if isinstance(kind, datasets.ClassLabel):
        return np.array([-1 if value is None else value for value in values], np.int64), tuple(kind.names)
    names = sorted({value for value in values if value is not None})
    ids = {value: position for position, value in enumerate(names)}
    return np.array([ids.get(value, -1) for value in values], np.int64), tuple(str(value) for value in names)


class _HubReader:
    """Encoded images in Arrow files. ``index`` counts labelled rows."""

    def __init__(self, name: str, rows: Any, column: str, labelled: NDArray[np.int64]) -> None:
        self._name = name
        self._column = column
        self._labelled = labelled
        self._rows = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))

    def read(self, index: int) -> Image.Image:
        return decode(io.BytesIO(self._bytes(index)), self.name(index))

    def name(self, index: int) -> str:
        return f"hub:{self._name} image {int(self._labelled[index])}"

    def inspect(self, index: int, full_decode: bool) -> Inspection:
        try:
            data = self._bytes(index)
        except OSError as error:
            return Inspection("", error.strerror or str(error))
        return Inspection(f"{index} {hashlib.sha256(data).hexdigest()}", problem(data, full=full_decode))

    def _bytes(self, index: int) -> bytes:
        value = self._rows[int(self._labelled[index])][self._column]
        return value["bytes"] if value["bytes"] is not None else Path(value["path"]).read_bytes()
