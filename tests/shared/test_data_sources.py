"""Reading images into a table: order, filters, fingerprints, and what is said about bad input."""

from __future__ import annotations

import logging
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgeduet_shared import world
from edgeduet_shared.config import DataConfig
from edgeduet_shared.data import image_folder
from edgeduet_shared.data.sources import WORLD_PER_CLASS, load_table
from edgeduet_shared.errors import ConfigError, DataError

DATA = Path(os.environ.get("EDGEDUET_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def save_image(path: Path, shade: int, size: int = 40) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(shade).integers(0, 255, (size, size, 3), np.uint8)
    pixels[: size // 2] = shade % 256
    Image.fromarray(pixels).save(path, **({"quality": 95} if path.suffix in (".jpg", ".jpeg") else {}))


@pytest.fixture
def domains(tmp_path: Path) -> Path:
    """Two domains, three classes, four images each; JPEG and PNG, lower and upper case."""
    root = tmp_path / "images"
    for d, domain in enumerate(("photo", "sketch")):
        for c, name in enumerate(("car_side", "ant", "zebra")):
            for i, suffix in enumerate((".jpg", ".png", ".jpeg", ".PNG")):
                save_image(root / domain / name / f"{i}{suffix}", 40 * d + 10 * c + i)
    return root


def folder(root: Path, **options: object) -> DataConfig:
    return DataConfig(source=f"folder:{root}", **options)


def cut_short(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_becomes_rows_ordered_by_domain_class_and_name(domains: Path) -> None:
    table = load_table(folder(domains))
    assert table.domain_names == ("photo", "sketch")
    assert table.class_names == ("ant", "car_side", "zebra")
    assert len(table) == 24
    assert table.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    assert table.domains.tolist() == [0] * 12 + [1] * 12
    names = [Path(table.image_name(row)).relative_to(domains).as_posix() for row in range(24)]
    assert names[:4] == ["photo/ant/0.jpg", "photo/ant/1.png", "photo/ant/2.jpeg", "photo/ant/3.PNG"]
    expected = np.asarray(Image.open(domains / "photo/ant/1.png"))
    assert np.array_equal(np.asarray(table.image(1)), expected)
    assert table.image(0).mode == "RGB"


def test_a_folder_of_classes_has_one_domain(tmp_path: Path) -> None:
    save_image(tmp_path / "cat" / "a.jpg", 1)
    save_image(tmp_path / "dog" / "a.jpg", 2)
    table = load_table(folder(tmp_path))
    assert table.domain_names == (image_folder.ONLY_DOMAIN,)
    assert table.class_names == ("cat", "dog")


def test_images_of_any_mode_are_read_as_rgb(tmp_path: Path) -> None:
    for mode in ("L", "P", "RGBA", "1"):
        (tmp_path / mode).mkdir()
        Image.new(mode, (5, 4)).save(tmp_path / mode / "x.png")
    table = load_table(folder(tmp_path))
    assert [table.image(row).mode for row in range(4)] == ["RGB"] * 4


def test_domains_and_classes_keep_the_order_in_which_they_are_asked_for(domains: Path) -> None:
    table = load_table(folder(domains, domains=("sketch", "photo"), classes=("zebra", "ant")))
    assert table.domain_names == ("sketch", "photo")
    assert table.class_names == ("zebra", "ant")
    for row in range(len(table)):
        *_, domain, name, _ = Path(table.image_name(row)).parts
        assert table.domain_names[table.domains[row]] == domain
        assert table.class_names[table.labels[row]] == name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"domains": ("phto",)}, r"data.domains: folder:.* has no 'phto'; did you mean 'photo'\?"),
        ({"classes": ("car side",)}, r"data.classes: folder:.* has no 'car side'; did you mean 'car_side'\?"),
        ({"classes": ("ant", "ant")}, "listed twice"),
    ],
)
def test_unknown_and_repeated_names_are_refused(domains: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_table(folder(domains, **options))


def test_max_per_class_keeps_a_seeded_subset_that_ignores_other_filters(domains: Path) -> None:
    def names(seed: int, **options: object) -> set[str]:
        table = load_table(folder(domains, max_per_class=2, **options), seed=seed)
        assert np.bincount(table.domains * 3 + table.labels).max() == 2
        return {table.image_name(row) for row in range(len(table)) if "/zebra/" in table.image_name(row)}

    assert names(0) == names(0) == names(0, classes=("zebra",))
    assert len({frozenset(names(seed)) for seed in range(8)}) > 1


def test_the_fingerprint_follows_content_and_rows(domains: Path) -> None:
    original = load_table(folder(domains))
    assert re.fullmatch("[0-9a-f]{16}", original.fingerprint)
    assert load_table(folder(domains)).fingerprint == original.fingerprint
    assert load_table(folder(domains, domains=("sketch", "photo"))).fingerprint != original.fingerprint
    assert load_table(folder(domains, classes=("ant",))).fingerprint != original.fingerprint
    victim = domains / "photo/ant/1.png"
    pixels = np.asarray(Image.open(victim)).copy()
    pixels[0, 0] ^= 1
    Image.fromarray(pixels).save(victim)
    assert load_table(folder(domains)).fingerprint != original.fingerprint


def test_the_fingerprint_does_not_depend_on_where_the_folder_is(domains: Path, tmp_path: Path) -> None:
    before = load_table(folder(domains)).fingerprint
    moved = domains.rename(tmp_path / "elsewhere")
    assert load_table(folder(moved)).fingerprint == before


def test_slow_scans_are_remembered_and_changed_files_read_again(
    domains: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGEDUET_CACHE", str(tmp_path / "cache"))
    first = load_table(folder(domains)).fingerprint
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(image_folder, "SLOW_S", 0.0)
    assert load_table(folder(domains)).fingerprint == first
    (store,) = (tmp_path / "cache" / "files").iterdir()
    reads = []
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: reads.append(self) or original(self))
    assert load_table(folder(domains)).fingerprint == first
    assert reads == []
    save_image(domains / "photo/ant/1.png", 99)
    assert load_table(folder(domains)).fingerprint != first
    assert reads == [domains / "photo/ant/1.png"]
    # What only looked at headers is not enough when corrupt images are to be left out.
    load_table(folder(domains, skip_corrupt=True))
    assert len(reads) == 1 + 24
    store.write_text("{")
    assert load_table(folder(domains)).fingerprint != first


def test_a_hash_store_that_cannot_be_written_costs_a_warning_only(
    domains: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEDUET_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(image_folder, "SLOW_S", 0.0)
    with caplog.at_level(logging.WARNING):
        assert len(load_table(folder(domains))) == 24
    assert "not remembered" in caplog.text


# --- folders that are not as they should be -------------------------------------------------------


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path}/nope: no such folder; .*data.source=world"):
        load_table(folder(tmp_path / "nope"))


def test_a_folder_without_images_is_named(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match="no image in it; expected ROOT/class"):
        load_table(folder(tmp_path))


@pytest.mark.parametrize("odd", ["photo/stray.jpg", "stray.jpg", "photo/ant/deep/stray.jpg"])
def test_an_image_at_another_depth_is_named(domains: Path, odd: str) -> None:
    save_image(domains / odd, 7)
    with pytest.raises(DataError, match=rf"{domains / odd}: image in an unexpected place"):
        load_table(folder(domains))


def test_hidden_files_other_files_and_a_link_to_a_parent_are_ignored(domains: Path) -> None:
    before = load_table(folder(domains)).fingerprint
    (domains / "README.md").write_text("about")
    save_image(domains / ".thumbnails" / "x.jpg", 3)
    save_image(domains / "photo" / "ant" / "._0.jpg", 3)
    assert load_table(folder(domains)).fingerprint == before


def test_a_folder_linked_into_itself_is_not_followed_forever(domains: Path) -> None:
    before = load_table(folder(domains)).fingerprint
    (domains / "photo" / "up").symlink_to(domains)
    assert load_table(folder(domains)).fingerprint == before


def test_a_file_that_is_no_image_stops_with_its_name_and_the_remedy(domains: Path) -> None:
    bad = domains / "sketch/ant/2.jpeg"
    bad.write_bytes(b"not a picture")
    with pytest.raises(DataError, match=rf"{bad}: corrupt image .*data.skip_corrupt=true"):
        load_table(folder(domains))


def test_a_damaged_png_is_found_when_the_table_is_made(domains: Path) -> None:
    bad = domains / "sketch/ant/1.png"
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 0xFF
    bad.write_bytes(data)
    with pytest.raises(DataError, match=str(bad)):
        load_table(folder(domains))


def test_a_jpeg_cut_short_is_named_when_it_is_decoded(domains: Path) -> None:
    bad = domains / "sketch/ant/0.jpg"
    cut_short(bad)
    table = load_table(folder(domains))
    row = next(row for row in range(len(table)) if table.image_name(row) == str(bad))
    with pytest.raises(DataError, match=rf"{bad}: corrupt image .*data.skip_corrupt=true"):
        table.image(row)


def test_skip_corrupt_leaves_out_and_counts_every_kind_of_damage(domains: Path) -> None:
    cut_short(domains / "sketch/ant/0.jpg")
    cut_short(domains / "sketch/ant/1.png")
    (domains / "photo/zebra/2.jpeg").write_bytes(b"")
    table = load_table(folder(domains, skip_corrupt=True))
    assert (table.skipped, len(table)) == (3, 21)
    for row in range(len(table)):
        table.image(row)


def test_skipped_images_are_replaced_by_others_up_to_max_per_class(domains: Path) -> None:
    cut_short(domains / "sketch/ant/0.jpg")
    for seed in range(4):
        table = load_table(folder(domains, skip_corrupt=True, max_per_class=3), seed=seed)
        assert np.bincount(table.domains * 3 + table.labels).tolist() == [3] * 6


def test_only_corrupt_images_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="no usable image is left"):
        load_table(folder(tmp_path, skip_corrupt=True))


# --- the source setting ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fodler:/x", r"unknown source 'fodler:/x'; did you mean 'folder'\?"),
        ("/data/pacs", "unknown source '/data/pacs'"),
        ("folder", "lacks its argument, as in folder:"),
        ("world:5", "takes no argument"),
        ("torchvision:MNIST", "lacks the folder"),
        ("torchvision:FashionMnist:/x", r"'FashionMnist' is not supported; did you mean 'FashionMNIST'\?"),
    ],
)
def test_a_source_of_no_known_form_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_table(DataConfig(source=source))


# --- the generated world --------------------------------------------------------------------------


def test_the_world_is_a_table_of_styles_and_shapes() -> None:
    table = load_table(DataConfig())
    assert set(table.domain_names) == set(world.STYLES)
    assert set(table.class_names) == set(world.SHAPES)
    assert len(table) == len(world.STYLES) * len(world.SHAPES) * WORLD_PER_CLASS


def test_world_rows_show_what_their_labels_say() -> None:
    config = DataConfig(domains=("sketch", "photo"), classes=("star", "cup"), max_per_class=3)
    table = load_table(config, seed=5)
    expected, _ = world.world_images("photo", ("cup",), 3, 5)
    rows = np.flatnonzero((table.domains == 1) & (table.labels == 1))
    assert [np.asarray(table.image(row)).tolist() for row in rows] == expected.tolist()


def test_the_world_fingerprint_follows_the_choice_and_the_seed() -> None:
    config = DataConfig(max_per_class=2)
    assert load_table(config).fingerprint == load_table(config).fingerprint
    others = {
        load_table(config, seed=1).fingerprint,
        load_table(DataConfig(max_per_class=3)).fingerprint,
        load_table(DataConfig(max_per_class=2, domains=("photo",))).fingerprint,
        load_table(config).fingerprint,
    }
    assert len(others) == 4


def test_an_unknown_world_style_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no 'cartoons'; did you mean 'cartoon'\?"):
        load_table(DataConfig(domains=("cartoons",)))


# --- torchvision ----------------------------------------------------------------------------------


def _write_fashion_mnist(root: Path, part: str, labels: list[int]) -> np.ndarray:
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(len(labels)).integers(0, 255, (len(labels), 28, 28), np.uint8)
    header = struct.pack(">IIII", 0x803, len(labels), 28, 28)
    (raw / f"{part}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
    (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, len(labels)) + bytes(labels))
    return pixels


def test_a_torchvision_set_on_disk_joins_its_parts(tmp_path: Path) -> None:
    train = _write_fashion_mnist(tmp_path, "train", [9, 1, 1])
    test = _write_fashion_mnist(tmp_path, "t10k", [1, 9])
    table = load_table(DataConfig(source=f"torchvision:FashionMNIST:{tmp_path}", classes=("Ankle boot", "Trouser")))
    assert table.class_names == ("Ankle boot", "Trouser")
    assert table.labels.tolist() == [0, 0, 1, 1, 1]
    shown = [np.asarray(table.image(row))[..., 0] for row in range(5)]
    for got, expected in zip(shown, (train[0], test[1], train[1], train[2], test[0]), strict=True):
        assert np.array_equal(got, expected)
    _write_fashion_mnist(tmp_path, "t10k", [1, 9, 9])
    other = load_table(DataConfig(source=f"torchvision:FashionMNIST:{tmp_path}", classes=("Ankle boot", "Trouser")))
    assert other.fingerprint != table.fingerprint


def test_a_torchvision_set_of_files_is_checked_like_a_folder(tmp_path: Path) -> None:
    for name in ("Forest", "River"):
        for i in range(2):
            save_image(tmp_path / "eurosat" / "2750" / name / f"{i}.jpg", i)
    source = f"torchvision:EuroSAT:{tmp_path}"
    table = load_table(DataConfig(source=source))
    assert table.class_names == ("Forest", "River")
    assert table.labels.tolist() == [0, 0, 1, 1]
    bad = tmp_path / "eurosat" / "2750" / "River" / "1.jpg"
    bad.write_bytes(b"")
    with pytest.raises(DataError, match=str(bad)):
        load_table(DataConfig(source=source))
    assert load_table(DataConfig(source=source, skip_corrupt=True)).skipped == 1


def test_a_torchvision_set_that_is_not_on_disk_is_not_downloaded(tmp_path: Path) -> None:
    _write_fashion_mnist(tmp_path, "train", [1])
    with pytest.raises(DataError, match=rf"{tmp_path}: torchvision CIFAR10 \(train=True\) .*nothing is downloaded"):
        load_table(DataConfig(source=f"torchvision:CIFAR10:{tmp_path}"))
    with pytest.raises(DataError, match="no such folder"):
        load_table(DataConfig(source=f"torchvision:CIFAR10:{tmp_path}/nope"))


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.fixture
def hub_folder(domains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in the form in which the hub serves it: Parquet files with encoded images, two splits."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    names = datasets.ClassLabel(names=["zebra", "ant", "car_side"])
    features = datasets.Features({"image": datasets.Image(), "domain": datasets.Value("string"), "label": names})
    target = tmp_path / "served"
    target.mkdir()
    for split, numbers in (("train", (0, 1, 2)), ("test", (3,))):
        columns: dict[str, list[object]] = {"image": [], "domain": [], "label": []}
        for path in sorted(domains.rglob("*.*")):
            if int(path.stem) in numbers:
                columns["image"].append({"bytes": path.read_bytes(), "path": None})
                columns["domain"].append(path.parts[-3])
                columns["label"].append(names.str2int(path.parts[-2]))
        datasets.Dataset.from_dict(columns, features=features).to_parquet(target / f"{split}.parquet")
    return target


def test_a_hub_data_set_joins_splits_and_reads_domains(hub_folder: Path, domains: Path) -> None:
    table = load_table(DataConfig(source=f"hub:{hub_folder}"))
    here = load_table(folder(domains))
    assert table.class_names == here.class_names
    assert table.domain_names == here.domain_names
    assert len(table) == 24

    def content(t: object) -> list[tuple[int, int, bytes]]:
        return sorted((int(t.domains[r]), int(t.labels[r]), t.image(r).tobytes()) for r in range(len(t)))

    assert content(table) == content(here)


def test_a_hub_that_cannot_be_reached_is_one_line_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match=r"hub:flwrlabs/pacs: the Hugging Face hub cannot be reached .*folder:PATH"):
        load_table(DataConfig(source="hub:flwrlabs/pacs"))


def test_an_uncached_hub_data_set_offline_is_one_line_with_a_way_out() -> None:
    with pytest.raises(DataError, match=r"hub:flwrlabs/pacs: cannot be loaded .*data.source=world") as caught:
        load_table(DataConfig(source="hub:flwrlabs/pacs"))
    assert "\n" not in str(caught.value)


def test_a_hub_data_set_without_labels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    (tmp_path / "text").mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "text" / "train.parquet")
    with pytest.raises(DataError, match="needs one image column and a label column"):
        load_table(DataConfig(source=f"hub:{tmp_path / 'text'}"))


# --- real images ----------------------------------------------------------------------------------


@pytest.mark.skipif(not (DATA / "pacs").is_dir(), reason=f"no real images at {DATA} (set EDGEDUET_DATA)")
def test_pacs_has_its_published_size() -> None:
    table = load_table(folder(DATA / "pacs"))
    assert len(table) == 9991
    assert table.domain_names == ("art_painting", "cartoon", "photo", "sketch")
    assert np.bincount(table.domains).tolist() == [2048, 2344, 1670, 3929]
    assert len(table.class_names) == 7
    assert table.image(5000).mode == "RGB"


@pytest.mark.skipif(not (DATA / "caltech101").is_dir(), reason=f"no real images at {DATA} (set EDGEDUET_DATA)")
def test_caltech_is_one_domain_of_a_hundred_classes() -> None:
    table = load_table(folder(DATA / "caltech101", max_per_class=5))
    assert table.domain_names == (image_folder.ONLY_DOMAIN,)
    assert np.bincount(table.labels).tolist() == [5] * 100
