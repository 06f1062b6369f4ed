"""Options of selectors that are one of a few words."""

from __future__ import annotations

from collections.abc import Collection


def check_choice(name: str, value: str, known: Collection[str]) -> None:
    """Refuse a word that is not known.

    Raises:
        ValueError: it is not; says which are.
    """
    if value not in known:
        raise ValueError(f"{name}={value} is not one of {', '.join(known)}")
