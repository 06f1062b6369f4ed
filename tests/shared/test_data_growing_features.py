"""Features of a folder that changes: what is new is encoded, what was known is copied, old entries go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.features import FeatureCache
from edgeduet_shared.data.growing_features import open_growing
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.own_images import own_table
from own_image_folders import SHAPES, write_images

CONFIG = DataConfig(source="device", classes=SHAPES)


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def features_of(
    root: Path, folder: Path, seen: list[int] | None = None, *, model_key: str = "mean"
) -> tuple[ImageTable, np.memmap]:
    """Open the features of a folder; ``seen`` gets the size of every batch that is encoded."""

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if seen is not None:
            seen.append(len(pixels))
        return pixels.mean(dim=3)[..., :4]

    table = own_table(CONFIG, folder, seed=0)
    cache = FeatureCache(root)
    opened = open_growing(
        cache, table, folder=folder, model_key=model_key, transform=to_tensor, encode=encode, progress=False
    )
    return table, opened


def expected(table: ImageTable) -> np.ndarray:
    pixels = torch.stack([to_tensor(table.image(row)) for row in range(len(table))])
    return pixels.mean(dim=3)[..., :4].half().numpy()


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "features").glob("*.npy"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", {"circle": 40, "star": 50})
    return tmp_path / "images"


def test_only_new_images_are_encoded_and_every_row_is_right(folder: Path, tmp_path: Path) -> None:
    batches: list[int] = []
    features_of(tmp_path, folder, batches)
    assert sum(batches) == 90
    batches.clear()
    write_images(folder, {"square": 3}, first=0)
    write_images(folder, {"circle": 2}, first=40)
    table, features = features_of(tmp_path, folder, batches)
    assert sum(batches) == 5
    assert np.array_equal(features, expected(table))


def test_images_that_went_or_got_another_name_cost_nothing(folder: Path, tmp_path: Path) -> None:
    features_of(tmp_path, folder)
    (folder / "circle" / "0000.png").unlink()
    (folder / "star" / "0001.png").rename(folder / "circle" / "was-star.png")
    batches: list[int] = []
    table, features = features_of(tmp_path, folder, batches)
    assert batches == []
    assert len(table) == 89
    assert np.array_equal(features, expected(table))


def test_old_entries_do_not_pile_up(folder: Path, tmp_path: Path) -> None:
    for number in range(4):
        write_images(folder, {"square": 1}, first=number)
        features_of(tmp_path, folder)
        assert len(entries(tmp_path)) == 1


def test_an_entry_in_use_goes_with_the_change_after(folder: Path, tmp_path: Path) -> None:
    _, held = features_of(tmp_path, folder)
    write_images(folder, {"square": 1})
    features_of(tmp_path, folder)
    assert len(entries(tmp_path)) == 2
    assert held[0].sum() > 0
    del held
    write_images(folder, {"square": 1}, first=1)
    features_of(tmp_path, folder)
    assert len(entries(tmp_path)) == 1


def test_another_model_part_has_features_of_its_own(folder: Path, tmp_path: Path) -> None:
    features_of(tmp_path, folder)
    batches: list[int] = []
    features_of(tmp_path, folder, batches, model_key="other")
    assert sum(batches) == 90
    assert len(entries(tmp_path)) == 2


def _cut(note: Path, entry: Path) -> None:
    note.write_text(note.read_text()[:20])


def _lead_away(note: Path, entry: Path) -> None:
    note.write_text(json.dumps({"entry": "../precious", "contents": [], "left": ["../../precious"]}))


def _damage(note: Path, entry: Path) -> None:
    entry.write_bytes(b"no features")


def _remove(note: Path, entry: Path) -> None:
    entry.unlink()


@pytest.mark.parametrize("spoil", [_cut, _lead_away, _damage, _remove])
def test_a_note_or_entry_that_is_spoilt_costs_an_encoding_and_nothing_else(
    folder: Path, tmp_path: Path, spoil: Callable[[Path, Path], None]
) -> None:
    (tmp_path / "precious").write_text("mine")
    features_of(tmp_path, folder)
    (note,) = (tmp_path / "own").iterdir()
    spoil(note, tmp_path / "features" / entries(tmp_path)[0])
    write_images(folder, {"square": 1})
    batches: list[int] = []
    table, features = features_of(tmp_path, folder, batches)
    assert sum(batches) == 91
    assert np.array_equal(features, expected(table))
    assert (tmp_path / "precious").read_text() == "mine"
