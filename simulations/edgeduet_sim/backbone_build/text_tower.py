"""Run open_clip's native text tower on short sequences.

Attention is causal and the end-of-text token is pooled, so the padding behind it cannot change the
result: leaving it away gives the same features for a fraction of the cost.

Shape suffixes: N texts, C context length, L longest text, W tower width, D joint embedding.
"""

from __future__ import annotations

import open_clip
from torch import Tensor


def encode_trimmed(model: open_clip.CLIP, ids_NC: Tensor) -> Tensor:
    """``model.encode_text`` without the padding: not normalised, ``[N, D]``."""
    length = int((ids_NC != 0).sum(-1).max())
    ids_NL = ids_NC[:, :length]
    x_NLW = model.token_embedding(ids_NL) + model.positional_embedding[:length]
    x_NLW = model.transformer(x_NLW, attn_mask=model.attn_mask[:length, :length])
    x_NLW = model.ln_final(x_NLW)
    # The end-of-text token has the largest id.
    pooled_NW = x_NLW[range(len(ids_NL)), ids_NL.argmax(-1)]
    return pooled_NW @ model.text_projection
