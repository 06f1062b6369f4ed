"""CoOp-style prompts: learnable context vectors between start-of-text and the class name.

A prompt reads ``[start] ctx_1 .. ctx_L name . [end]`` (Zhou et al. 2022, CoOp, class token at the
end, one context for all classes). Only the context changes, so the tokens of all class names are
prepared once. The ids keep a placeholder where the context goes: the text tower pools and masks by
the original ids.

How contexts start:

* local prompt, :func:`context_from_words`: the token embeddings of the template's words before the
  class name ("a photo of a" fills 4 positions) next to the class name, N(0, 0.02^2) in any positions
  before them; a shorter context keeps the last words. (Words last, not first: on PACS with
  clip-lite0 a context of 8 starts at 45.5 % instead of 37.3 %, and after 100 steps reaches 73.1 %
  instead of 71.0 %; one seed.)
* the server's pool, :func:`pool_contexts` (fed-duet.md U5): the same words, and a K-means centroid of
  word embeddings in the remaining positions, plus N(0, 0.02^2) noise. The last position always holds
  the centroid, so a context of 4 reads "a photo of <centroid>". The vocabulary is the 1000 ImageNet
  class names that come with open_clip; a name's vector is the mean of its real word tokens (no start,
  end or padding).

Shape suffixes: C classes, T tokens, L context length, W text width, K pool size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edgeduet_shared.backbone import Backbone
from edgeduet_shared.clip_text import imagenet_class_names
from edgeduet_shared.config import PromptConfig
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.seeds import derive_seed
from edgeduet_shared.text_tower import TextTower, text_tower

CONTEXT_NOISE = 0.02
"""Standard deviation of the noise that contexts start with."""

_UNCUT = 256


class PromptContext(nn.Module):
    """The learnable context (L, W) of a client's local prompt."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.context = nn.Parameter(torch.zeros(length, width))


@dataclass(frozen=True)
class ClassTokens:
    """Token ids of one prompt per class, padding cut to the longest.

    Attributes:
        ids_CT: int64; positions ``start .. start + length`` are placeholders of the context.
        read_CT: one-hot of the token that the tower pools.
        present_CT: 1 where there is a token, 0 on padding.
        start: first context position.
        length: context length L; 0 for hand-written text.
    """

    ids_CT: Tensor
    read_CT: Tensor
    present_CT: Tensor
    start: int
    length: int


def spoken(class_name: str) -> str:
    """A class name as it goes into text: underscores become spaces."""
    return class_name.replace("_", " ")


def template_words(template: str) -> str:
    """The words of a template before the class name.

    Raises:
        ConfigError: the template has no ``{}``.
    """
    before, braces, _ = template.partition("{}")
    if not braces:
        raise ConfigError(f"model.prompt.template '{template}' has no {{}} where the class name goes")
    return before.strip()


def token_ids(tokenizer: Callable[..., Tensor], text: str) -> list[int]:
    """Ids of ``text`` with special tokens, without padding, never cut short."""
    pad = _pad_id(tokenizer)
    ids = tokenizer([text], context_length=_UNCUT)[0].tolist()
    while len(ids) > 1 and ids[-1] == pad:
        ids.pop()
    return ids


def word_ids(tokenizer: Callable[..., Tensor], words: str) -> list[int]:
    """Ids of ``words`` without special tokens."""
    leading, trailing = _special_counts(tokenizer)
    ids = token_ids(tokenizer, words)
    return ids[leading : len(ids) - trailing]


def class_tokens(
    tower: TextTower,
    tokenizer: Callable[..., Tensor],
    class_names: Sequence[str],
    config: PromptConfig,
    length: int,
) -> ClassTokens:
    """Prepare the prompts of all classes.

    Args:
        tower: the text tower the tokens are for.
        tokenizer: open_clip's tokenizer of that tower.
        class_names: any texts; at least one.
        config: where the template comes from when ``length`` is 0.
        length: context positions L; 0 fills the hand-written template instead.

    Raises:
        ConfigError: a prompt is longer than the tower's context; names the class and the remedy.
    """
    template_words(config.template)
    leading, _ = _special_counts(tokenizer)
    rows = []
    for name in class_names:
        text = f"{spoken(name)}." if length else config.template.replace("{}", spoken(name))
        ids = token_ids(tokenizer, text)
        # Any ordinary id serves as placeholder; the name's first token surely is one.
        row = ids[:leading] + [ids[leading]] * length + ids[leading:]
        if len(row) > tower.context_length:
            raise ConfigError(_too_long(name, len(row), tower.context_length, length))
        rows.append(row)
    total = max(map(len, rows)) if tower.trims else tower.context_length
    ids_CT = torch.full((len(rows), total), _pad_id(tokenizer), dtype=torch.long)
    present_CT = torch.zeros(len(rows), total)
    for index, row in enumerate(rows):
        ids_CT[index, : len(row)] = torch.tensor(row)
        present_CT[index, : len(row)] = 1.0
    device = tower.word_embeddings().device
    read_CT = tower.read_positions(ids_CT).to(device)
    return ClassTokens(ids_CT.to(device), read_CT, present_CT.to(device), leading, length)


def place_context(embedded_CTW: Tensor, context_LW: Tensor, start: int) -> Tensor:
    """Put the context over the placeholder positions of every class, (C, T, W)."""
    length = context_LW.shape[0]
    context_CLW = context_LW.unsqueeze(0).expand(embedded_CTW.shape[0], -1, -1)
    return torch.cat([embedded_CTW[:, :start], context_CLW, embedded_CTW[:, start + length :]], dim=1)


def word_embedding_table(backbone: Backbone) -> NDArray[np.float32]:
    """The frozen token embeddings (V, W) of the backbone's text tower."""
    return text_tower(backbone.text).word_embeddings().cpu().numpy()


def context_from_words(
    backbone: Backbone, words: str, length: int, seed: int, noise: float = CONTEXT_NOISE
) -> NDArray[np.float32]:
    """A context (L, W) that starts as the token embeddings of ``words``.

    The words stand last, next to the class name; longer contexts get N(0, noise^2) before them,
    shorter ones keep the last words.
    """
    generator = np.random.default_rng(derive_seed(seed, "context-from-words"))
    vectors = word_embedding_table(backbone)[word_ids(backbone.tokenizer, words)] if words else None
    context = noise * generator.standard_normal((length, word_width(backbone)))
    if vectors is not None and length:
        kept = vectors[-length:]
        context[length - len(kept) :] = kept
    return context.astype(np.float32)


def word_width(backbone: Backbone) -> int:
    """Width W of the text tower's token embeddings."""
    return text_tower(backbone.text).width


def word_centroids(backbone: Backbone, size: int, seed: int) -> NDArray[np.float32]:
    """K-means centroids (K, W) of the ImageNet class names' mean word-token embeddings.

    Raises:
        ConfigError: more centroids than names.
    """
    names = sorted(set(imagenet_class_names()))
    if size > len(names):
        raise ConfigError(f"model.pool.size={size} exceeds the {len(names)} names of the vocabulary; lower it")
    table = word_embedding_table(backbone)
    vectors = np.stack([table[word_ids(backbone.tokenizer, name)].mean(axis=0) for name in names])
    from sklearn.cluster import KMeans  # only the server makes a pool, so devices need no scikit-learn

    state = derive_seed(seed, "word-centroids") % 2**32
    return KMeans(n_clusters=size, n_init=1, random_state=state).fit(vectors).cluster_centers_.astype(np.float32)


def pool_contexts(
    backbone: Backbone, size: int, length: int, seed: int, template: str = "a photo of a {}."
) -> NDArray[np.float32]:
    """Initial contexts (K, L, W) of the server's semantic prompt pool.

    Raises:
        ConfigError: ``length`` is 0 (a prompt without context cannot differ from another), or more
            prompts than vocabulary.
    """
    if length < 1:
        raise ConfigError("the prompt pool needs model.prompt.length >= 1")
    generator = np.random.default_rng(derive_seed(seed, "pool-contexts"))
    centroids = word_centroids(backbone, size, seed)
    vectors = word_embedding_table(backbone)[word_ids(backbone.tokenizer, template_words(template))]
    words = vectors[: length - 1]
    contexts = np.repeat(centroids[:, None, :], length, axis=1)
    contexts[:, : len(words)] = words
    contexts += CONTEXT_NOISE * generator.standard_normal(contexts.shape).astype(np.float32)
    return contexts.astype(np.float32)


def _pad_id(tokenizer: Callable[..., Tensor]) -> int:
    return int(tokenizer([""], context_length=_UNCUT)[0, -1])


def _special_counts(tokenizer: Callable[..., Tensor]) -> tuple[int, int]:
    # The empty text is made of special tokens only; the last of them closes, any others open.
    specials = len(token_ids(tokenizer, ""))
    return max(specials - 1, 0), 1


def _too_long(name: str, tokens: int, limit: int, length: int) -> str:
    remedy = f"lower model.prompt.length (now {length})" if length else "shorten model.prompt.template"
    return (
        f"class '{name}': its prompt has {tokens} tokens and the text tower holds {limit}; "
        f"{remedy} or shorten the class name"
    )
