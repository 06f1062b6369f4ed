"""A vector for a text: the mean of the last hidden states of its tokens, scaled to length one.

A decoder was not trained for this. Mean-pooled states of a small decoder rank texts of the same topic above others
more often than not, and are far behind a model trained to embed; a causal model's states also say more about the
end of a text than its beginning. Good enough to find near duplicates, not for search over many documents.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeduet_client.llm.session import TargetSession, prefill_chunks


def embed(session: TargetSession, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the vector of ``ids``, shape (H,), float32, of length one.

    Raises:
        RequestError: ``ids`` are more than the context holds.
    """
    cache = session.new_cache()
    total = np.zeros(session.hidden_width, np.float64)
    for _, chunk in prefill_chunks(ids):
        hidden = session.forward(chunk, cache, rows=range(len(chunk)), hidden=True).hidden
        assert hidden is not None
        total += hidden.sum(axis=0, dtype=np.float64)
    return (total / np.linalg.norm(total)).astype(np.float32)
