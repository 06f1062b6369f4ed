"""Check what this machine can run, and say what to do about what it cannot."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from edgeduet_shared.errors import EdgeDuetError

_MARKS = {"good": "ok  ", "note": "note", "bad": "BAD "}
_NEEDED = ("torch", "torchvision", "open_clip_torch", "timm", "peft", "flwr", "matplotlib", "jinja2", "tensorboard")


@dataclass(frozen=True)
class Check:
    """One finding: ``bad`` stops the demo, ``note`` only limits what can be run."""

    verdict: Literal["good", "note", "bad"]
    subject: str
    text: str

    def line(self) -> str:
        """One line for people."""
        return f"{_MARKS[self.verdict]} {self.subject}: {self.text}"


def check_machine() -> tuple[Check, ...]:
    """Run every check; a check that cannot even be made is a finding, not a crash."""
    found: list[Check] = []
    for check in (_python, _packages, _threads, _memory, _cache, _backbones, _device, _ray, _data, _hub):
        try:
            found += check()
        except (EdgeDuetError, OSError, ImportError) as error:
            found.append(Check("bad", check.__name__.strip("_"), str(error)))
    return tuple(found)


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Check("good" if good else "bad", "python", version + ("" if good else "; install 3.11 or newer"))


def _packages() -> Iterator[Check]:
    missing, present = [], []
    for name in _NEEDED:
        try:
            present.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Check("bad", "packages", f"missing {', '.join(missing)}; pip install 'edgeduet[sim]'")
    yield Check("good", "packages", ", ".join(present))


def _threads() -> Iterator[Check]:
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{os.cpu_count()} cores, OMP_NUM_THREADS={threads}"
    if threads == "1":
        yield Check("good", "threads", text)
    else:
        yield Check("note", "threads", text + "; more than one thread gives results that differ in the last digits")


def _memory() -> Iterator[Check]:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    enough = free > 2
    yield Check(
        "good" if enough else "note", "memory", f"{free:.1f} GB free" + ("" if enough else "; close other programs")
    )


def _cache() -> Iterator[Check]:
    from edgeduet_shared.data.cache_folder import cache_folder, make_folder

    folder = make_folder(cache_folder())
    probe = folder / ".edgeduet-doctor"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        yield Check("bad", "cache", f"{folder} cannot be written ({error.strerror}); set EDGEDUET_CACHE")
        return
    free = shutil.disk_usage(folder).free / 1e9
    verdict: Literal["good", "note"] = "good" if free > 1 else "note"
    yield Check(verdict, "cache", f"{folder}, {free:.1f} GB free; set EDGEDUET_CACHE to use another folder")


def _backbones() -> Iterator[Check]:
    from edgeduet_shared.backbone import offline_backbones, verify_checksums

    cards = offline_backbones()
    if not cards:
        yield Check("bad", "backbones", "none is shipped with this installation; reinstall edgeduet")
    for name, card in cards.items():
        verify_checksums(card.folder)
        yield Check("good", f"backbone {name}", f"{card.bytes / 1e6:.1f} MB, checksum right")


def _device() -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        yield Check("good", "GPU", torch.cuda.get_device_name())
    else:
        yield Check("note", "GPU", "none: the ViT-B/16 scenarios would take days; everything else is made for a CPU")


def _ray() -> Iterator[Check]:
    try:
        yield Check("good", "ray", f"{metadata.version('ray')} (only for --engine ray)")
    except metadata.PackageNotFoundError:
        yield Check("note", "ray", "not installed; --engine ray needs pip install 'flwr[simulation]'")


def _data() -> Iterator[Check]:
    from edgeduet_sim.scenario_files import real_data_folder

    folder = real_data_folder()
    if folder is None:
        yield Check("note", "real images", "EDGEDUET_DATA is not set; the pacs and caltech scenarios need --data PATH")
        return
    for name in ("pacs", "caltech101"):
        there = (folder / name).is_dir()
        yield Check(
            "good" if there else "note", f"real images {name}", str(folder / name) + ("" if there else " missing")
        )


def _hub() -> Iterator[Check]:
    offline = next((name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name) == "1"), None)
    if offline:
        yield Check("note", "hub", f"{offline}=1: hub data sets and weights only from the local cache")
    elif _reaches("huggingface.co"):
        yield Check("good", "hub", "huggingface.co can be reached")
    else:
        yield Check(
            "note", "hub", "huggingface.co cannot be reached: the world, image folders and shipped backbones work"
        )


def _reaches(host: str, connect: Callable[..., socket.socket] = socket.create_connection) -> bool:
    try:
        connect((host, 443), timeout=3).close()
    except OSError:
        return False
    return True
