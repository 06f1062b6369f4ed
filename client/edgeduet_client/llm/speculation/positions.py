"""The target's view of a block of drafted tokens, one position at a time, and what a position emits.

Positions are computed when they are reached: what lies behind a rejection or an end of text costs nothing, and each
row goes through the very call plain decoding makes, so that its distribution is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgeduet_client.llm.distribution import Distribution, sampling_distributions
from edgeduet_client.llm.plan import SamplingPlan
from edgeduet_client.llm.sampler_state import SamplerState
from edgeduet_client.llm.session import Forward
from edgeduet_client.llm.speculation.draft import Draft


@dataclass(frozen=True)
class Emission:
    """A token to commit.

    Attributes:
        token: the id.
        row: of the step, that predicted it.
        target: what it was drawn from; for a token that only a lossy rule let stand, see :mod:`.fly`.
        state: the sampler's, after the token.
        drafted: whether it is the drafter's.
        relaxed: whether only a lossy rule let it stand.
    """

    token: int
    row: int
    target: Distribution
    state: SamplerState
    drafted: bool
    relaxed: bool = False


class Positions:
    """Distributions along a block.

    Args:
        forward: g + 1 rows: behind the last committed token, and behind each of the g drafted ones.
        generated: the answer so far.
        draft: the proposed tokens.
    """

    def __init__(self, forward: Forward, generated: Sequence[int], draft: Draft) -> None:
        self._forward = forward
        self._before = list(generated)
        self._answered = len(self._before)
        self._draft = draft

    def target(self, row: int, plan: SamplingPlan, state: SamplerState) -> Distribution:
        """Return what the token behind the first ``row`` drafted ones is drawn from.

        Args:
            row: 0 to g; never smaller than before.
            plan: the request's.
            state: the sampler's, after those drafted tokens.
        """
        self._before += self._draft.tokens[len(self._before) - self._answered : row]
        logits = self._forward.logits[row : row + 1]
        hidden = None if self._forward.hidden is None else self._forward.hidden[row : row + 1]
        distributions, _ = sampling_distributions(logits, hidden, self._before, (), plan, state)
        return distributions[0]
