"""A personal classifier is exported, compared, switched and answered without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms

from edgeduet_client.classifier.classifier_folder import FACTS, MODEL, ClassifierFacts, ClassifierFolder
from edgeduet_client.classifier.classifying import Classifier, open_image
from edgeduet_client.classifier.exporting import export_classifier
from edgeduet_client.classifier.preprocessing import Preprocessing
from edgeduet_shared.backbone import Backbone, load_backbone
from edgeduet_shared.config import Scenario
from edgeduet_shared.duet import DuetModel
from edgeduet_shared.errors import ConfigError, DataError, EdgeDuetError, StateError
from edgeduet_shared.evaluation import Predictor, predictor
from edgeduet_shared.plan import Parts

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("dog", "cat", "house", "tree", "apple")


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone("clip-world")


def trained(backbone: Backbone, *, fused: bool = True) -> Predictor:
    """A model with every part, its values moved away from where they start."""
    config = Scenario(name="test").model
    parts = Parts(adapters=True, experts=True, prompt=True, fusion=True) if fused else Parts(adapters=True)
    model = DuetModel(backbone, NAMES, config, parts)
    generator = torch.Generator().manual_seed(3)
    fresh = model.initial(0)
    params = {name: value + 0.05 * torch.randn(value.shape, generator=generator) for name, value in fresh.items()}
    contexts = None
    if fused:
        width = params["prompt.context"].shape[1]
        contexts = 0.05 * torch.randn(2, config.prompt.length, width, generator=generator)
    return predictor(model, params, len(NAMES), contexts_MLW=contexts, mix=0.7)


def export(source: Predictor, backbone: Backbone, root: Path, stage: int = 0) -> None:
    folder = ClassifierFolder(root)
    export_classifier(source, backbone, folder, run="a run", client=2, stage=stage, class_names=NAMES, seen=(0, 1, 4))


@pytest.fixture(scope="module")
def exported(backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one real version; exporting takes seconds."""
    root = tmp_path_factory.mktemp("exported")
    export(trained(backbone), backbone, root)
    return root / "versions" / "stage-0000"


def put_into_use(exported: Path, root: Path, stage: int) -> None:
    """Publish a copy of a version as that of another stage."""

    def write(folder: Path) -> ClassifierFacts:
        shutil.copy(exported / MODEL, folder / MODEL)
        facts = ClassifierFacts.from_json(json.loads((exported / FACTS).read_text()))
        return replace(facts, stage=stage)

    ClassifierFolder(root).publish(f"stage-{stage:04d}", write)


def picture(seed: int, size: tuple[int, int] = (50, 37)) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, size=(size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("fused", [True, False])
def test_the_exported_classifier_answers_what_the_trained_model_predicts(
    backbone: Backbone, tmp_path: Path, fused: bool
) -> None:
    source = trained(backbone, fused=fused)
    export(source, backbone, tmp_path)
    images = [picture(seed) for seed in range(4)]
    with torch.no_grad():
        x = source.model.front(torch.stack([backbone.transform(image) for image in images]))
        seen = [0, 1, 4]
        expected = source.logits(x)[:, seen].softmax(1).numpy()
    for answer, row in zip(Classifier(ClassifierFolder(tmp_path)).classify(images, top=3), expected, strict=True):
        order = np.argsort(-row)
        assert answer.classes == tuple(NAMES[seen[place]] for place in order)
        np.testing.assert_allclose(answer.probabilities, row[order], atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    width=st.integers(1, 90),
    height=st.integers(1, 90),
    mode=st.sampled_from(["RGB", "L", "RGBA", "P", "CMYK"]),
    crop=st.booleans(),
)
def test_preprocessing_equals_the_transform_of_open_clip(width: int, height: int, mode: str, crop: bool) -> None:
    side = 24
    steps = [transforms.Resize(side if crop else (side, side), transforms.InterpolationMode.BICUBIC)]
    steps += [transforms.CenterCrop(side)] if crop else []
    steps += [transforms.ToTensor(), transforms.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))]
    chain = transforms.Compose(steps)
    image = picture(width * 100 + height, (width, height)).convert(mode)
    ours = Preprocessing.of_transform(chain).pixels(image)
    np.testing.assert_allclose(ours, chain(image.convert("RGB")).numpy(), atol=1e-6)


def test_an_unknown_step_of_a_transform_is_refused() -> None:
    with pytest.raises(ConfigError, match="RandomRotation"):
        Preprocessing.of_transform(transforms.Compose([transforms.RandomRotation(5)]))


def test_the_former_version_is_used_when_the_newest_is_damaged(exported: Path, tmp_path: Path) -> None:
    put_into_use(exported, tmp_path, 0)
    put_into_use(exported, tmp_path, 1)
    folder = ClassifierFolder(tmp_path)
    newest = folder.current()
    assert newest is not None and newest[1].stage == 1
    (newest[0] / MODEL).write_bytes(b"half")
    found = folder.current()
    assert found is not None and found[1].stage == 0


def test_when_no_version_is_good_the_message_says_so(exported: Path, tmp_path: Path) -> None:
    put_into_use(exported, tmp_path, 0)
    next(tmp_path.rglob(MODEL)).write_bytes(b"half")
    with pytest.raises(StateError, match="made anew after the next stage"):
        ClassifierFolder(tmp_path).current()


def test_only_the_version_in_use_and_the_one_before_are_kept(exported: Path, tmp_path: Path) -> None:
    for stage in range(3):
        put_into_use(exported, tmp_path, stage)
    assert sorted(path.name for path in (tmp_path / "versions").iterdir()) == ["stage-0001", "stage-0002"]


def test_exporting_a_stage_again_does_not_touch_the_version_in_use(exported: Path, tmp_path: Path) -> None:
    put_into_use(exported, tmp_path, 0)
    put_into_use(exported, tmp_path, 0)
    found = ClassifierFolder(tmp_path).current()
    assert found is not None and found[0].name == "stage-0000-again"


def test_a_failed_export_leaves_the_version_in_use(
    backbone: Backbone, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(backbone, fused=False)
    put_into_use(exported, tmp_path, 0)
    monkeypatch.setattr("edgeduet_client.classifier.exporting.LARGEST_DIFFERENCE", -1.0)
    with pytest.raises(StateError, match="differs from the trained model"):
        export(source, backbone, tmp_path, stage=1)
    found = ClassifierFolder(tmp_path).current()
    assert found is not None and found[1].stage == 0
    assert [path.name for path in (tmp_path / "versions").iterdir()] == ["stage-0000"]


def test_a_full_disk_while_exporting_is_one_line_and_leaves_the_version_in_use(exported: Path, tmp_path: Path) -> None:
    put_into_use(exported, tmp_path, 0)

    def no_room(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EdgeDuetError, match="disk is full"):
        ClassifierFolder(tmp_path).publish("stage-0001", no_room)  # type: ignore[arg-type]
    found = ClassifierFolder(tmp_path).current()
    assert found is not None and found[1].stage == 0


def test_before_the_first_stage_the_message_says_when_there_will_be_a_classifier(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="after the first stage"):
        Classifier(ClassifierFolder(tmp_path))


@pytest.mark.parametrize("content", [b"", b"no picture", b"\x89PNG\r\n\x1a\nhalf"])
def test_a_file_that_is_no_picture_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"photo\.png"):
        open_image(path, "photo.png")


def test_a_picture_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeduet_client.classifier.classifying.MOST_PIXELS", 100)
    picture(0).save(tmp_path / "large.png")
    with pytest.raises(DataError, match="too many"):
        open_image(tmp_path / "large.png", "large.png")


def test_classifying_imports_no_torch(exported: Path, tmp_path: Path) -> None:
    put_into_use(exported, tmp_path, 0)
    picture(1).save(tmp_path / "photo.png")
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from edgeduet_client.classifier.classifying import Classifier, open_image\n"
        "from edgeduet_client.classifier.classifier_folder import ClassifierFolder\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "answer = Classifier(ClassifierFolder(folder)).classify([open_image(folder / 'photo.png', 'photo')])[0]\n"
        "print(json.dumps([answer.classes, 'torch' in sys.modules, 'torchvision' in sys.modules]))"
    )
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "client"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}
    )
    classes, torch_loaded, torchvision_loaded = json.loads(done.stdout)
    assert sorted(classes) == ["apple", "cat", "dog"]
    assert not torch_loaded and not torchvision_loaded
