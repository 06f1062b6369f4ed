"""The feature cache: right values, encoded once, survives kills, says what a full disk needs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import Compose, Resize

from edgeduet_shared.config import DataConfig
from edgeduet_shared.data.features import BATCH, CHUNK, FeatureCache, transform_key
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.data.sources import load_table
from edgeduet_shared.errors import DataError


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """``[B, 3, 32, 32]`` -> ``[B, 3, 4]``."""
    return pixels.mean(dim=3)[..., :4]


def never(pixels: torch.Tensor) -> torch.Tensor:
    raise AssertionError("encoded again")


@pytest.fixture(scope="module")
def table() -> ImageTable:
    """300 pictures: one whole chunk and a part of one, the last batch not full."""
    return load_table(DataConfig(domains=("photo", "sketch"), classes=("star", "moon", "cup"), max_per_class=50))


def open_cache(
    root: Path,
    table: ImageTable,
    encode: Callable[[torch.Tensor], torch.Tensor] = encode,
    *,
    model_key: str = "mean",
    transform: Callable[[Image.Image], torch.Tensor] = to_tensor,
) -> np.memmap:
    return FeatureCache(root).open(table, model_key=model_key, transform=transform, encode=encode, progress=False)


def entries(root: Path) -> list[str]:
    """What is in the cache besides locks."""
    return sorted(path.name for path in (root / "features").iterdir() if path.suffix != ".lock")


def test_features_are_those_of_the_encoder_in_half_precision(table: ImageTable, tmp_path: Path) -> None:
    features = open_cache(tmp_path, table)
    assert isinstance(features, np.memmap)
    assert (features.shape, features.dtype) == ((300, 3, 4), np.float16)
    for row in (0, 63, 64, 255, 256, 299):
        expected = encode(to_tensor(table.image(row))[None])[0].half().numpy()
        assert np.array_equal(features[row], expected)
    with pytest.raises(ValueError, match="read-only"):
        features[0] = 0


def test_images_are_encoded_once_in_batches(table: ImageTable, tmp_path: Path) -> None:
    batches = []
    first = open_cache(tmp_path, table, lambda x: batches.append(len(x)) or encode(x))
    assert batches == [BATCH] * 4 + [44]
    assert np.array_equal(open_cache(tmp_path, table, never), first)
    assert len(entries(tmp_path)) == 1


def test_model_transform_and_images_each_have_their_own_entry(table: ImageTable, tmp_path: Path) -> None:
    small = load_table(DataConfig(domains=("photo",), classes=("star",), max_per_class=2))
    other = load_table(DataConfig(domains=("photo",), classes=("star",), max_per_class=2), seed=1)
    open_cache(tmp_path, small)
    open_cache(tmp_path, other)
    open_cache(tmp_path, small, model_key="other")
    open_cache(tmp_path, small, transform=Compose([Resize(16), to_tensor]))
    assert len(entries(tmp_path)) == 4


def test_the_key_of_a_transform_has_no_memory_addresses() -> None:
    def made() -> Compose:
        def convert(image: Image.Image) -> Image.Image:
            return image.convert("RGB")

        return Compose([Resize(16), convert])

    assert repr(made()) != repr(made())
    assert transform_key(made()) == transform_key(made())
    assert transform_key(Compose([Resize(16)])) != transform_key(Compose([Resize(17)]))


def test_the_default_folder_is_the_users_cache(
    table: ImageTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEDUET_CACHE", str(tmp_path))
    assert FeatureCache().path(table, model_key="m", transform=to_tensor).is_relative_to(tmp_path)


# --- kills and other processes --------------------------------------------------------------------

_PROGRAM = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    import numpy as np, torch
    from edgeduet_shared.config import DataConfig
    from edgeduet_shared.data.features import FeatureCache
    from edgeduet_shared.data.sources import load_table

    root, seconds, log = Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    table = load_table(DataConfig(domains=("photo", "sketch"), classes=("star", "moon", "cup"), max_per_class=100))

    class ToTensor:
        def __repr__(self):
            return "ToTensor()"
        def __call__(self, image):
            return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255

    def encode(pixels):
        time.sleep(seconds)
        with log.open("a") as file:
            file.write(f"{len(pixels)}\\n")
        return pixels.mean(dim=3)[..., :4]

    features = FeatureCache(root).open(table, model_key="mean", transform=ToTensor(), encode=encode, progress=True)
    print(features.shape, float(np.asarray(features, np.float64).sum()))
    """
)


def start(root: Path, seconds: float, log: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(root), str(seconds), str(log)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def encoded(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def wait_for_chunk(root: Path) -> None:
    """Until the first chunk of 256 rows of 12 half-precision values is on disk."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(path.stat().st_size >= CHUNK * 24 for path in root.glob("features/*.partial")):
            return
        time.sleep(0.01)
    raise AssertionError("no chunk was written within a minute")


@pytest.mark.e2e
def test_a_killed_encoding_goes_on_where_it_was_and_two_processes_share_the_work(tmp_path: Path) -> None:
    killed = start(tmp_path, 0.15, tmp_path / "killed.log")
    wait_for_chunk(tmp_path)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert [name.rpartition(".")[2] for name in entries(tmp_path)] == ["partial"]

    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    both = [start(tmp_path, 0.05, log) for log in logs]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum(sum(encoded(log)) for log in logs) == 600 - CHUNK
    assert outputs[0][0] == outputs[1][0]
    assert outputs[0][1] == ""  # no progress bar when not on a terminal

    table = load_table(DataConfig(domains=("photo", "sketch"), classes=("star", "moon", "cup"), max_per_class=100))
    open_cache(tmp_path / "fresh", table)
    (resumed,) = (tmp_path / "features").glob("*.npy")
    (uninterrupted,) = (tmp_path / "fresh" / "features").glob("*.npy")
    assert resumed.read_bytes() == uninterrupted.read_bytes()


def test_an_interrupted_batch_is_not_trusted(table: ImageTable, tmp_path: Path) -> None:
    final = FeatureCache(tmp_path).path(table, model_key="mean", transform=to_tensor)
    expected = open_cache(tmp_path / "whole", table)
    whole = next((tmp_path / "whole" / "features").glob("*.npy")).read_bytes()
    final.parent.mkdir()
    for cut in (0, 5, 128, 129, len(whole) // 2, len(whole) - 1):
        final.with_suffix(".partial").write_bytes(whole[:cut])
        counted: list[int] = []
        features = open_cache(tmp_path, table, lambda x, counted=counted: counted.append(len(x)) or encode(x))
        assert np.array_equal(features, expected)
        kept = CHUNK if cut >= 128 + CHUNK * 24 else 0
        assert sum(counted) == 300 - kept
        final.unlink()


def test_a_partial_file_of_something_else_is_started_again(table: ImageTable, tmp_path: Path) -> None:
    final = FeatureCache(tmp_path).path(table, model_key="mean", transform=to_tensor)
    final.parent.mkdir()
    with final.with_suffix(".partial").open("wb") as file:
        np.save(file, np.zeros((300, 12), np.float32))
    assert np.array_equal(open_cache(tmp_path, table), open_cache(tmp_path / "clean", table))


# --- what can go wrong ----------------------------------------------------------------------------


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(table: ImageTable, tmp_path: Path) -> None:
    def huge(pixels: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1, 1).expand(len(pixels), 1)

    rows = 10**15
    endless = ImageTable(
        labels=np.broadcast_to(np.int64(0), (rows,)),
        domains=np.broadcast_to(np.int64(0), (rows,)),
        class_names=("star",),
        domain_names=("photo",),
        fingerprint="0" * 16,
        skipped=0,
        source="world",
        reader=table.reader,
        positions=np.broadcast_to(np.int64(0), (rows,)),
    )
    with pytest.raises(DataError, match=r"disk full: .* needs 2000000000\.0 MB, .* are free; .*EDGEDUET_CACHE"):
        open_cache(tmp_path, endless, huge)
    assert entries(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_disk_that_fills_up_while_writing_is_one_clear_line(table: ImageTable, tmp_path: Path) -> None:
    final = FeatureCache(tmp_path).path(table, model_key="mean", transform=to_tensor)
    final.parent.mkdir()
    final.with_suffix(".partial").symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"disk full: caching the features of 300 images needs 0\.0 MB") as caught:
        open_cache(tmp_path, table)
    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_a_cache_folder_that_cannot_be_made_is_named(table: ImageTable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=rf"{tmp_path / 'file'}.*cannot be created .*EDGEDUET_CACHE"):
        open_cache(tmp_path / "file", table)


def test_an_image_that_cannot_be_decoded_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    for i in range(3):
        path = tmp_path / "images" / "cat" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(i).integers(0, 255, (64, 64, 3), np.uint8)
        Image.fromarray(noise).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    source = f"folder:{tmp_path / 'images'}"
    with pytest.raises(DataError, match=rf"{path}: corrupt image .*skip_corrupt=true"):
        open_cache(tmp_path, load_table(DataConfig(source=source)))
    assert entries(tmp_path) == []
    features = open_cache(tmp_path, load_table(DataConfig(source=source, skip_corrupt=True)))
    assert len(features) == 2


def test_features_beyond_half_precision_are_refused(table: ImageTable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"world photo/star/0: its features are not finite"):
        open_cache(tmp_path, table, lambda x: encode(x) * 1e9)
    assert entries(tmp_path) == []


def test_a_damaged_entry_is_refused_with_the_remedy(table: ImageTable, tmp_path: Path) -> None:
    open_cache(tmp_path, table)
    (entry,) = (tmp_path / "features").glob("*.npy")
    entry.write_bytes(entry.read_bytes()[:200])
    with pytest.raises(DataError, match=rf"{entry}: damaged feature cache .*delete it"):
        open_cache(tmp_path, table, never)
