"""Run the main job: make the environment, compare the methods on one scenario, say where the report is.

``make demo`` calls this. Standard library only: it starts before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from make_venv import ROOT, SetupFailure, refresh

METHODS = "zero-shot,local,promptfl,fedavg-adapter,fed-duet,joint"
IMAGES = {".jpg", ".jpeg", ".png"}
TASKS = 5


def main() -> int:
    """Parse the command line and run; the exit code is that of ``edgeduet-sim``, or 2 for a problem before it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="", help="folder of images (root/[domain/]class/*.jpg) or hub:NAME")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--out", default="", help="folder of the results; runs/demo or runs/demo-DATA when not given")
    parser.add_argument("--set", default="", help="further key=value settings, separated by blanks")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--installer", choices=("pip", "uv"), default="pip")
    parser.add_argument("--torch-index", default="")
    options = parser.parse_args()
    try:
        arguments = data_arguments(options.data)
        print(first_line(options.data), flush=True)
        refresh(options.venv.absolute(), "sim", options.installer, options.torch_index)
    except SetupFailure as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    for setting in shlex.split(options.set):
        arguments += ["--set", setting]
    command = [str(options.venv.absolute() / "bin" / "edgeduet-sim"), "compare", "demo", "--methods", METHODS]
    command += ["--seeds", str(options.seeds), "--out", options.out or default_out(options.data), *arguments]
    print("running: edgeduet-sim " + shlex.join(command[1:]), flush=True)
    started = time.monotonic()
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        print(f"done in {time.monotonic() - started:.0f} s")
    return code


def first_line(data: str) -> str:
    """Say which data and backbone are used, and how to get the other."""
    if data:
        return (
            f"data: {data}, backbone: clip-lite0 (real images). "
            "For the built-in world with its backbone clip-world: make demo"
        )
    return (
        "data: the built-in generated world, backbone: clip-world. "
        "For real images with backbone clip-lite0: make demo DATA=FOLDER or DATA=hub:NAME"
    )


def default_out(data: str) -> str:
    """Return a folder of its own for each choice of data, so that one demo does not overwrite another."""
    name = re.sub(r"[^a-z0-9]+", "-", data.removeprefix("hub:").rstrip("/").rpartition("/")[2].lower()).strip("-")
    return f"runs/demo-{name}" if name else "runs/demo"


def data_arguments(data: str) -> list[str]:
    """Return what turns the demo scenario, which is about the built-in world, into one about ``data``.

    Raises:
        SetupFailure: ``data`` is a path without images in the folder layout.
    """
    if not data:
        return []
    arguments = ["--data", data, "--set", "model.backbone=clip-lite0"]
    if data.startswith(("hub:", "torchvision:")):
        return [*arguments, "--set", "stream.kind=class-incremental"]
    domains, classes = layout(Path(data).expanduser())
    if domains > 1:
        return [*arguments, "--set", "stream.kind=domain-incremental"]
    per_task = max(1, -(-classes // TASKS))
    return [*arguments, "--set", "stream.kind=class-incremental", "--set", f"stream.classes_per_task={per_task}"]


def layout(root: Path) -> tuple[int, int]:
    """Return (number of domains, number of classes) of an image folder ``root/[domain/]class/*.jpg``.

    Raises:
        SetupFailure: no such folder, or no images where the layout wants them.
    """
    if not root.is_dir():
        raise SetupFailure(
            f"DATA={root} is not a folder; give one with images in it as [domain/]class/*.jpg, or hub:NAME"
        )
    children = [child for child in sorted(root.iterdir()) if child.is_dir()]
    classes = [child for child in children if _has_images(child)]
    if classes:
        return 1, len(classes)
    domains = {child: {inner.name for inner in child.iterdir() if _has_images(inner)} for child in children}
    names = set().union(*domains.values())
    if not names:
        raise SetupFailure(f"DATA={root} holds no images as [domain/]class/*.jpg or *.png")
    return sum(1 for found in domains.values() if found), len(names)


def _has_images(folder: Path) -> bool:
    return folder.is_dir() and any(path.suffix.lower() in IMAGES for path in folder.iterdir())


if __name__ == "__main__":
    raise SystemExit(main())
