"""What a drafter proposes, and what is known afterwards about what it would have proposed."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgeduet_client.llm.distribution import Distribution


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow the committed text.

    The verifier believes ``laws``: each must be the very distribution its token was drawn from, after any
    truncation, temperature or mask of the drafter's own. How many tokens are proposed, and by which rule each was
    chosen, must be settled before the token is drawn.

    Attributes:
        tokens: g >= 0 proposed tokens.
        laws: per token, what it was drawn from; ``None`` where it was certain (a lookup, an argmax): a point mass.
        part: of a drafter made of others, the one that spoke.
    """

    tokens: tuple[int, ...] = ()
    laws: tuple[Distribution | None, ...] = ()
    part: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.laws):
            raise ValueError(f"{len(self.tokens)} drafted tokens with {len(self.laws)} laws")

    @classmethod
    def certain(cls, tokens: tuple[int, ...], part: str = "") -> Draft:
        """Return a draft all of whose tokens were certain."""
        return cls(tokens, (None,) * len(tokens), part)

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Draft:
        """Return the first ``count`` tokens; ``count`` must not depend on the tokens."""
        return self if count >= len(self.tokens) else Draft(self.tokens[:count], self.laws[:count], self.part)


@dataclass(frozen=True)
class Redraft:
    """Evidence about one drafter at one past place of the committed text: what it would have proposed there.

    One of ``tokens`` and ``laws`` is given.

    Attributes:
        start: how many tokens of the text were there; the first proposed token would have become ``tokens[start]``.
        tokens: of a drafter whose proposals are certain, the whole proposal; where it is shorter than the depth that
            was asked for, nothing survives beyond its end.
        laws: of a drafter that draws, its law at ``start + k`` given the committed tokens before it.
    """

    start: int
    tokens: tuple[int, ...] | None = None
    laws: tuple[Distribution, ...] | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.laws is None):
            raise ValueError("a redraft has either tokens or laws")
