"""Which code produced a result: package versions and the revision of the checkout."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("torch", "open_clip_torch", "timm", "peft", "flwr", "numpy")


def versions() -> dict[str, str]:
    """Return the versions a result depends on; "none" where a package is not installed."""
    found = {"python": platform.python_version(), "edgeduet": package_version("edgeduet")}
    return found | {package: package_version(package) for package in _PACKAGES}


def package_version(package: str) -> str:
    """Return the installed version of a package, or "none"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def git_revision() -> str:
    """Return the revision of the checkout this code runs from (with "+changes" when edited), or "none"."""
    here = Path(__file__).resolve().parent
    try:
        revision = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "none"
    return revision + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
