"""Bytes of token ids: what tokenizers' own decoder says, for each spelling of bytes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.token_bytes import read_token_bytes

TEXTS = ["the cat sat on the mat", "один два три", "漢字かな交じり文", "שלום עולם", "🙂 ok", "a\tb\nc"]


def byte_level(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def byte_fallback(folder: Path) -> Path:
    """A small Gemma: spaces as U+2581, unknown characters as bytes."""
    pieces = ["<pad>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "漢"]
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def unigram(folder: Path) -> Path:
    pieces = [("<unk>", 0.0), ("▁", -1.0), ("▁hello", -2.0), ("world", -3.0), ("<0x41>", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
@given(text=st.text(max_size=20).filter(lambda t: "▁" not in t))
def test_the_bytes_of_an_encoding_joined_are_the_text(
    make: Callable[[Path], Path], text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tokenizer")
    path = make(folder)
    tokens = read_token_bytes(path)
    ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
    assert b"".join(tokens.pieces[i] or b"" for i in ids) == text.encode("utf-8")


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte-level", "byte-fallback"])
def test_every_id_reads_as_the_tokenizers_library_decodes_it(make: Callable[[Path], Path], tmp_path: Path) -> None:
    path = make(tmp_path)
    tokens, library = read_token_bytes(path), Tokenizer.from_file(str(path))
    assert tokens.vocab_size == library.get_vocab_size()
    for token_id, piece in enumerate(tokens.pieces):
        assert piece is not None
        assert piece.decode("utf-8", "replace") == library.decode([token_id], skip_special_tokens=False)


def test_a_byte_token_is_one_byte_where_the_tokenizer_falls_back_to_bytes(tmp_path: Path) -> None:
    tokens = read_token_bytes(byte_fallback(tmp_path))
    assert tokens.pieces[2:258] == tuple(bytes([byte]) for byte in range(256))
    assert tokens.special == {0, 1}


def test_without_byte_fallback_the_same_spelling_is_text(tmp_path: Path) -> None:
    tokens = read_token_bytes(unigram(tmp_path))
    assert tokens.pieces == (b"<unk>", b" ", b" hello", b"world", b"<0x41>")


def test_ids_without_a_token_are_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 3}, "merges": []}}))
    assert read_token_bytes(path).pieces == (b"a", None, None, b"b")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json", "no tokenizer.json"),
        ("[]", "no tokenizer.json"),
        ('{"model": {"type": "WordPiece", "vocab": {"a": 0}}}', "WordPiece"),
        ('{"model": {"type": "BPE", "vocab": {"a": 0}, "end_of_word_suffix": "</w>"}}', "end_of_word_suffix"),
    ],
)
def test_what_is_not_understood_is_refused(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=says):
        read_token_bytes(path)


def test_a_missing_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        read_token_bytes(tmp_path / "tokenizer.json")
