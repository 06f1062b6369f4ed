"""Prompt tokens, contexts and the initial pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgeduet_shared.config import PromptConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.prompts import (
    class_tokens,
    context_from_words,
    place_context,
    pool_contexts,
    template_words,
    token_ids,
    word_embedding_table,
    word_ids,
)
from edgeduet_shared.text_tower import text_tower
from tiny_towers import CLASS_NAMES, tiny_backbone

BACKBONES = [("vit", "native"), ("vit", "custom"), ("vit", "mean_pooler"), ("vit", "cls_last_hidden_state_pooler")]


@pytest.mark.parametrize("kind", BACKBONES)
def test_prompt_tokens_leave_room_for_the_context_after_the_start(kind: tuple[str, str]) -> None:
    backbone = tiny_backbone(*kind)
    tower = text_tower(backbone.model)

    tokens = class_tokens(tower, backbone.tokenizer, CLASS_NAMES, PromptConfig(), 3)

    assert (tokens.start, tokens.length) == (1, 3)
    for row, present, name in zip(tokens.ids_CT.tolist(), tokens.present_CT.tolist(), CLASS_NAMES, strict=True):
        plain = token_ids(backbone.tokenizer, f"{name}.")
        length = len(plain) + 3
        assert row[:1] + row[4:length] == plain
        assert present == [1.0] * length + [0.0] * (len(row) - length)
    assert max(map(sum, tokens.present_CT.tolist())) == tokens.ids_CT.shape[1], "padding is cut to the longest class"


def test_the_pooled_position_is_that_of_the_original_end_of_text() -> None:
    backbone = tiny_backbone("vit")

    tokens = class_tokens(text_tower(backbone.model), backbone.tokenizer, CLASS_NAMES, PromptConfig(), 2)

    ends = tokens.present_CT.sum(-1).long() - 1
    assert torch.equal(tokens.read_CT.argmax(-1), ends)
    assert tokens.read_CT.sum() == len(CLASS_NAMES)


def test_underscores_in_class_names_are_spaces() -> None:
    backbone = tiny_backbone("vit")
    tower = text_tower(backbone.model)

    with_underscore = class_tokens(tower, backbone.tokenizer, ["red_tree"], PromptConfig(), 2)
    with_space = class_tokens(tower, backbone.tokenizer, ["red tree"], PromptConfig(), 2)

    assert torch.equal(with_underscore.ids_CT, with_space.ids_CT)


@pytest.mark.parametrize("kind", [("vit", "native"), ("vit", "mean_pooler")])
@pytest.mark.parametrize("length", [0, 4])
def test_a_prompt_may_fill_the_context_but_not_exceed_it(kind: tuple[str, str], length: int) -> None:
    backbone = tiny_backbone(*kind)
    tower = text_tower(backbone.model)
    limit = tower.context_length
    config = PromptConfig(template="{}.")
    name = " ".join(["dog"] * (limit - length - 3))

    fits = class_tokens(tower, backbone.tokenizer, ["cup", name], config, length)

    assert fits.ids_CT.shape[1] == limit
    remedy = r"lower model\.prompt\.length \(now 4\)" if length else r"shorten model\.prompt\.template"
    with pytest.raises(ConfigError, match=rf"class 'dog .* {limit + 1} tokens .* holds {limit}; {remedy}"):
        class_tokens(tower, backbone.tokenizer, ["cup", f"{name} dog"], config, length)


def test_a_template_without_a_place_for_the_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'a photo' has no \{\}"):
        template_words("a photo")


def test_a_context_takes_only_its_own_positions() -> None:
    embedded = torch.arange(24.0).reshape(2, 4, 3)
    context = -torch.ones(2, 3)

    placed = place_context(embedded, context, 1)

    assert torch.equal(placed[:, [0, 3]], embedded[:, [0, 3]])
    assert torch.equal(placed[:, 1:3], context.expand(2, -1, -1))


@pytest.mark.parametrize(("length", "first_word"), [(2, None), (4, 0), (7, 3)])
def test_a_context_starts_with_the_words_next_to_the_class_name(length: int, first_word: int | None) -> None:
    backbone = tiny_backbone("vit")
    words = word_embedding_table(backbone)[word_ids(backbone.tokenizer, "a photo of a")]

    context = context_from_words(backbone, "a photo of a", length, seed=0)

    assert context.shape == (length, 32)
    assert context.dtype == np.float32
    if first_word is None:
        np.testing.assert_array_equal(context, words[-length:])
    else:
        np.testing.assert_array_equal(context[first_word:], words)
        assert np.abs(context[:first_word]).max(initial=0.0) < 0.02 * 5
    np.testing.assert_array_equal(context, context_from_words(backbone, "a photo of a", length, seed=0))
    assert (length > 4) == bool((context != context_from_words(backbone, "a photo of a", length, seed=1)).any())


@pytest.mark.parametrize(("length", "words"), [(1, 0), (4, 3), (6, 4)])
def test_pool_prompts_are_template_words_and_a_word_centroid(length: int, words: int) -> None:
    backbone = tiny_backbone("vit")
    table = word_embedding_table(backbone)[word_ids(backbone.tokenizer, "a photo of a")]

    pool = pool_contexts(backbone, 8, length, seed=0)

    assert pool.shape == (8, length, 32)
    assert pool.dtype == np.float32
    spread = np.abs(pool[:, :words] - table[None, :words])
    assert spread.max(initial=0.0) < 0.02 * 5
    centroids = pool[:, words:].mean(1)
    distance = np.linalg.norm(centroids[:, None] - centroids[None], axis=-1)
    assert distance[~np.eye(8, dtype=bool)].min() > 0
    np.testing.assert_array_equal(pool, pool_contexts(backbone, 8, length, seed=0))


@pytest.mark.parametrize(
    ("size", "length", "message"),
    [(5000, 4, r"model\.pool\.size=5000 exceeds the \d+ names"), (8, 0, r"model\.prompt\.length >= 1")],
)
def test_a_pool_that_cannot_be_built_is_a_config_error(size: int, length: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pool_contexts(tiny_backbone("vit"), size, length, seed=0)
