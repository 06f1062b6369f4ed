"""Whether two models mean the same by the same token ids."""

from __future__ import annotations

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.token_bytes import TokenBytes


def common_ids(target: TokenBytes, drafter: TokenBytes, *, drafter_name: str = "the drafter") -> int:
    """Return how many ids, from 0 on, both vocabularies have; larger ones must never be proposed.

    Every common id must stand for the same bytes and be special in both or in neither. Tables may be padded to
    different sizes; a tail of the drafter's is only never proposed, but a token of the target's that the drafter
    has not could not be read by it.

    Raises:
        ModelError: they differ; says at which id first.
    """
    size = min(target.vocab_size, drafter.vocab_size)
    for token, (wanted, found) in enumerate(zip(target.pieces, drafter.pieces, strict=False)):
        if wanted != found:
            raise ModelError(
                f"{drafter_name} has another vocabulary than the model: token {token} is {_shown(found)} there "
                f"and {_shown(wanted)} here; use a drafter made for this model's tokenizer"
            )
    differing = sorted((target.special ^ drafter.special) & set(range(size)))
    if differing:
        token = differing[0]
        side = "the model" if token in target.special else drafter_name
        raise ModelError(
            f"{drafter_name} has another vocabulary than the model: token {token} ({_shown(target.pieces[token])}) "
            f"is a special token of {side} only; use a drafter made for this model's tokenizer"
        )
    for token, piece in enumerate(target.pieces[size:], start=size):
        if piece is not None:
            raise ModelError(
                f"{drafter_name} knows tokens 0 to {size - 1} and cannot read token {token} ({_shown(piece)}) of the "
                "model; use a drafter made for this model's tokenizer"
            )
    return size


def _shown(piece: bytes | None) -> str:
    return "no token" if piece is None else repr(piece.decode("utf-8", "backslashreplace"))
