"""The scripts that make the shipped backbones: resumable, exact where they claim it, clear when they cannot."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch

from edgeduet_shared import world
from edgeduet_shared.backbone import SHIPPED_DIR, load_backbone
from edgeduet_shared.errors import BackboneError
from edgeduet_sim.backbone_build import commands, emoji_probe, lite0, wordnet, world_clip
from edgeduet_sim.backbone_build.export import write_vocabulary
from edgeduet_sim.backbone_build.text_tower import encode_trimmed
from edgeduet_sim.backbone_build.wordnet import Synset, WordNet


def _train(checkpoint: Path, minutes: float | None, steps: int = 3) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    specs = [world.random_spec(rng, held_out=False) for _ in range(96)]
    images = np.stack([world.render(spec, rng) for spec in specs])
    vocabulary = SHIPPED_DIR / "clip-world" / "bpe.txt.gz"
    tokenizer = open_clip.SimpleTokenizer(bpe_path=str(vocabulary), context_length=24)
    torch.manual_seed(0)
    model = world_clip.new_model()
    world_clip.train(model, tokenizer, specs, images, checkpoint, seed=0, minutes=minutes, steps=steps)
    return model.state_dict()


def test_a_training_that_was_stopped_and_resumed_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole.pt", minutes=None)
    _train(tmp_path / "parts.pt", minutes=0.0)  # stops after one step
    assert torch.load(tmp_path / "parts.pt", weights_only=True)["step"] == 1
    parts = _train(tmp_path / "parts.pt", minutes=None)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


@pytest.mark.parametrize("name", ["clip-world", "clip-lite0"])
def test_the_shipped_vocabulary_is_what_the_script_cuts(name: str, tmp_path: Path) -> None:
    size = {"clip-world": world_clip, "clip-lite0": lite0}[name].CONFIG["model_cfg"]["text_cfg"]["vocab_size"]
    write_vocabulary(size, tmp_path / "bpe.txt.gz")
    cut, shipped = tmp_path / "bpe.txt.gz", SHIPPED_DIR / name / "bpe.txt.gz"
    # Compressed bytes differ between zlib versions.
    assert gzip.decompress(cut.read_bytes()) == gzip.decompress(shipped.read_bytes())
    tokenizer = open_clip.SimpleTokenizer(bpe_path=str(cut))
    assert tokenizer.vocab_size == size
    assert tokenizer.eot_token_id == size - 1


def test_leaving_the_padding_away_changes_no_text_feature() -> None:
    backbone = load_backbone("clip-world")
    ids = backbone.tokenizer(["a star", "two striped red stars on grass"])
    torch.testing.assert_close(encode_trimmed(backbone.model, ids), backbone.model.encode_text(ids))


def test_composed_token_ids_are_those_of_the_filled_template() -> None:
    tokenizer = load_backbone("clip-lite0").tokenizer
    words = ("dog", "rhinoceros beetle", "jack-o'-lantern", "okapi")
    tokens = lite0.tokenise(tokenizer, words)
    for template, fill in enumerate(open_clip.OPENAI_IMAGENET_TEMPLATES):
        for row, word in enumerate(words):
            composed = tokens.batch(np.array([row]), template)[0].tolist()
            assert composed == tokenizer([fill(word)])[0].tolist()[: len(composed)]


def test_unknown_names_and_missing_ingredients_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackboneError, match="did you mean 'clip-world'"):
        commands.build("clip-wurld", tmp_path / "out")
    with pytest.raises(BackboneError, match="apt-get install wordnet-base"):
        wordnet.read_wordnet(tmp_path)
    monkeypatch.setattr(lite0, "PACKAGES", {"no_such_package_here": "no-such-package"})
    with pytest.raises(BackboneError, match=r"no-such-package.*pip install 'edgeduet\[backbone\]'"):
        lite0.build(tmp_path / "out", tmp_path / "work")
    assert not (tmp_path / "out").exists()


def test_wordnet_files_are_read_as_documented(tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(
        "  1 licence text\n"
        "00000010 03 n 01 entity 0 000 | that which is\n"
        '00000020 05 n 02 dog 0 domestic_dog 0 001 @ 00000010 n 0000 | a pet; "the dog barked"\n'
        "00000030 18 n 01 dog 1 001 @i 00000010 n 0000 | a person\n"
    )
    (tmp_path / "index.noun").write_text("  1 licence text\ndog n 2 1 @ 2 1 00000020 00000030  \n")
    (tmp_path / "cntlist.rev").write_text("dog%1:05:00:: 1 41\ndog%2:38:00:: 1 2\n")
    nouns = wordnet.read_wordnet(tmp_path)
    assert nouns.synsets[20].words == ("dog", "domestic dog")
    assert nouns.synsets[20].definition == "a pet"
    assert nouns.synsets[30].named
    assert nouns.ancestors(20) == {10, 20}
    shares = dict(nouns.senses["dog"])
    assert shares[20] == pytest.approx(42 / 42.5)
    assert shares[30] == pytest.approx(0.5 / 42.5)


SYNSETS = {
    1: Synset(1, 5, ("cat",), (), "an animal", False),
    2: Synset(2, 7, ("beauty",), (), "a quality", False),
    3: Synset(3, 3, ("thing",), (), "anything", False),
}
NAMES = WordNet(
    SYNSETS, {"cat": ((1, 0.9), (2, 0.1)), "beauty": ((2, 1.0),), "thing": ((3, 1.0),), "mix": ((1, 0.3), (2, 0.7))}
)


@pytest.mark.parametrize(
    ("name", "word", "kept"),
    [
        ("cat", "cat", True),
        ("cat face", "cat", True),
        ("beauty", "beauty", False),
        ("thing", "thing", False),
        ("mix", "mix", False),
        ("smiling face", "smiling face", False),
    ],
)
def test_glyphs_count_when_their_noun_mostly_means_something_drawable(name: str, word: str, kept: bool) -> None:
    assert emoji_probe.noun(NAMES, name) == word
    assert emoji_probe.drawable(NAMES, word) is kept


def test_the_emoji_that_choices_were_made_on_are_chosen_again() -> None:
    """As many as the model card says; needs the font and WordNet of the build."""
    if not emoji_probe.FONT.is_file() or not (wordnet.DATABASE / "data.noun").is_file():
        pytest.skip("needs apt-get install fonts-noto-color-emoji wordnet-base")
    glyphs = emoji_probe.choose_glyphs(wordnet.read_wordnet())

    assert len(glyphs.pictures) == len(glyphs.label_N)
    assert glyphs.names == sorted(set(glyphs.names))
    assert set(glyphs.label_N.tolist()) == set(range(len(glyphs.names)))
    assert {"abacus", "horse", "robot"} <= set(glyphs.names)
    assert "485 emoji" in (SHIPPED_DIR / "clip-lite0" / "MODEL_CARD.md").read_text()
    assert len(glyphs.pictures) >= 485, "a newer font may have more"


def test_a_missing_font_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="apt-get install fonts-noto-color-emoji"):
        emoji_probe.choose_glyphs(NAMES, tmp_path / "none.ttf")


def test_a_kernel_left_out_leaves_the_others_targets() -> None:
    generator = torch.Generator().manual_seed(0)
    cosine, prototypes = torch.rand(3, 4, generator=generator), torch.randn(4, 5, generator=generator)
    kernels = lite0.Kernels(cosine, torch.eye(4), lambda sharpness: torch.softmax(sharpness * cosine.flip(1), -1))
    language, graph = kernels.targets(prototypes, 9.0, 0.0), kernels.targets(prototypes, 0.0, 4.0)

    both = kernels.targets(prototypes, 9.0, 4.0)

    torch.testing.assert_close(both, torch.nn.functional.normalize(language + graph, dim=-1))
    torch.testing.assert_close(both.norm(dim=-1), torch.ones(3))


def test_the_axes_of_the_joint_space_are_orthonormal_and_nested() -> None:
    rows = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    wide, _ = lite0.joint_space(rows, 6)
    narrow, prototypes = lite0.joint_space(rows, 3)

    torch.testing.assert_close(wide.T @ wide, torch.eye(6), atol=1e-5, rtol=0)
    assert torch.equal(narrow, wide[:, :3])
    torch.testing.assert_close(prototypes, rows @ narrow)
