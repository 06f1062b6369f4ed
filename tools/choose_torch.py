"""Choose the torch build for a fresh environment: a CPU build where one is at hand, else what the installer finds.

The frozen backbones here are small and run on a CPU, while the usual Linux build of torch brings about
5 GB of CUDA libraries. A CPU build helps only together with a torchvision built against it (the usual
torchvision does not even import beside it), so both are looked for together. Standard library only:
this runs before anything is installed.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]

# torchvision 0.(N + 15) is built against torch 2.N.
_MINOR_GAP = 15
_CPU_VERSION = re.compile(r"\b(\d+(?:\.\d+)+)\+cpu\b")
_CUDA_HINT = "about 6 GB on disk with its CUDA libraries; set TORCH_INDEX=URL of an index of CPU wheels to save 5 GB"


@dataclass(frozen=True)
class Choice:
    """What to hand to the installer first (nothing: let it resolve torch with the rest), and the line that says why."""

    arguments: tuple[str, ...]
    explanation: str


def requirement(pyproject: Path, name: str) -> str:
    """Return the requirement on ``name`` in the extra ``train``, such as ``torch>=2.9,<2.15``.

    Raises:
        LookupError: the extra does not ask for ``name``.
    """
    train = tomllib.loads(pyproject.read_text("utf-8"))["project"]["optional-dependencies"]["train"]
    for line in train:
        if re.match(rf"{re.escape(name)}\s*[<>=!~]", line):
            return str(line).replace(" ", "")
    raise LookupError(f"{pyproject}: the extra 'train' does not ask for {name}")


def admits(requirement: str, version: Version) -> bool:
    """Whether ``requirement`` (bounds ``>=`` and ``<`` only) admits ``version``."""
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", requirement):
        limit = tuple(int(part) for part in bound.split("."))
        if (sign == ">=" and version < limit) or (sign == "<" and version >= limit):
            return False
    return True


def cpu_versions(listing: str, requirement: str) -> list[Version]:
    """Return the ``+cpu`` versions named in ``listing`` that ``requirement`` admits, newest first."""
    found = {tuple(int(part) for part in text.split(".")) for text in _CPU_VERSION.findall(listing)}
    return sorted((version for version in found if admits(requirement, version)), reverse=True)


def cpu_pair(torches: Sequence[Version], torchvisions: Sequence[Version]) -> tuple[str, str] | None:
    """Return the newest CPU builds of torch and torchvision that belong together, or None."""
    for torch in torches:
        for torchvision in torchvisions:
            if torchvision[1] == torch[1] + _MINOR_GAP and torchvision[2:] == torch[2:]:
                return _cpu_text(torch), _cpu_text(torchvision)
    return None


def choose(python: Path, pyproject: Path, installer: str, torch_index: str) -> Choice:
    """Decide how ``python`` (of the new environment) gets torch.

    Args:
        python: interpreter of the environment that is being filled.
        pyproject: file with the extra ``train``.
        installer: ``pip`` or ``uv``.
        torch_index: URL of a package index, or a folder of wheels, that holds CPU builds; empty: none given.

    Raises:
        LookupError: ``torch_index`` is a folder without a matching pair of CPU wheels.
    """
    wanted = requirement(pyproject, "torch"), requirement(pyproject, "torchvision")
    if torch_index and not Path(torch_index).is_dir():
        return Choice(("--index-url", torch_index, *wanted), "torch: the build that TORCH_INDEX offers")
    extra = ("--find-links", str(Path(torch_index).resolve())) if torch_index else ()
    if installer == "pip":
        listings = [_available(python, name, extra) for name in ("torch", "torchvision")]
        pair = cpu_pair(*(cpu_versions(text, want) for text, want in zip(listings, wanted, strict=True)))
        if pair:
            pins = (f"torch=={pair[0]}", f"torchvision=={pair[1]}")
            return Choice((*extra, *pins), f"torch: CPU build {pair[0]} with torchvision {pair[1]}")
    elif torch_index:
        return Choice((*extra, *wanted), f"torch: uv's choice, with the wheels in {torch_index} at hand")
    if torch_index:
        raise LookupError(f"TORCH_INDEX={torch_index} holds no CPU wheels of torch and torchvision that fit {wanted}")
    if sys.platform != "linux":
        return Choice((), f"torch: the usual build for {platform.system()}, which is a CPU build")
    reason = "no CPU build with a matching torchvision at hand" if installer == "pip" else "uv was not told of another"
    return Choice((), f"torch: the newest build that {installer} finds for {wanted[0]} ({reason}; {_CUDA_HINT})")


def _available(python: Path, name: str, extra: Sequence[str]) -> str:
    """Return pip's listing of the versions of ``name`` at hand; empty where pip cannot tell."""
    command = [str(python), "-m", "pip", "index", "versions", *extra, name]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout


def _cpu_text(version: Version) -> str:
    return ".".join(map(str, version)) + "+cpu"
