"""Versions that must fit between server and devices, and the text in which a server shows its own.

Flower refuses peers of another major.minor release; our messages carry a schema version of their own, but a
fleet on one release is what is tested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

HEADER = "Edgeduet-Versions"
"""Header of every answer of the proxy to a device: ``edgeduet/0.1.0 flwr/1.42.0``."""

_PACKAGES = ("edgeduet", "flwr")
_ENTRY = re.compile(r"([a-z]+)/([0-9A-Za-z.+!-]+)")


def installed_versions() -> dict[str, str]:
    """Return the versions that are installed here; what is not installed is left out."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def versions_text(versions: Mapping[str, str]) -> str:
    """Return versions as the value of :data:`HEADER`."""
    return " ".join(f"{name}/{number}" for name, number in versions.items())


def parse_versions(text: str) -> dict[str, str]:
    """Return what :func:`versions_text` wrote; anything else in the text is skipped."""
    return dict(_ENTRY.findall(text))


def misfits(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return a line for every package whose major.minor differs between the two."""
    return [
        f"{name} is {ours[name]} here and {theirs[name]} there"
        for name in _PACKAGES
        if name in ours and name in theirs and _release(ours[name]) != _release(theirs[name])
    ]


def _release(number: str) -> tuple[str, ...]:
    return tuple(number.split(".")[:2])
