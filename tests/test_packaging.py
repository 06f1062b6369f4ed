"""What is shipped: the wheel holds every file of the packages, the Flower bundle holds configuration only."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    ROOT / "shared" / "edgeduet_shared",
    ROOT / "server" / "edgeduet_server",
    ROOT / "client" / "edgeduet_client",
    ROOT / "simulations" / "edgeduet_sim",
]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WHEEL_LIMIT = 30_000_000
FLOWER_BUNDLE_LIMIT = 100_000
LINK_TARGET = re.compile(r"\]\(([^)#\s]+)")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from this checkout, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel: Path) -> None:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout, so there is no list of the files that belong to it")
    listing = subprocess.run(["git", "ls-files", "-z", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = {Path(name) for name in listing.stdout.split("\0") if name}
    wanted = {path.relative_to(path.parts[0]).as_posix() for path in tracked if (ROOT / path).exists()}
    assert any(name.endswith(".safetensors") for name in wanted)
    assert any(name.endswith(".toml") for name in wanted)
    assert not wanted - set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_only_the_four_packages_and_stays_small(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {package.name for package in PACKAGES}
    assert wheel.stat().st_size < WHEEL_LIMIT


def test_the_wheel_has_every_program_and_extra_that_deploy_uses(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        (scripts,) = [name for name in content.namelist() if name.endswith(".dist-info/entry_points.txt")]
        (metadata,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        programs = set(re.findall(r"^([\w-]+) = ", content.read(scripts).decode(), re.MULTILINE))
        extras = set(re.findall(r"^Provides-Extra: (\S+)", content.read(metadata).decode(), re.MULTILINE))
    files = [path.read_text() for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    used = {name for text in files for name in re.findall(r"/opt/edgeduet/bin/(edgeduet-\w+)|\"(edgeduet-\w+)\"", text)}
    named = {name for pair in used for name in pair if name}
    assert named == {"edgeduet-server", "edgeduet-client"} and named <= programs
    installed = [group for text in files for group in re.findall(r"edgeduet-\*\.whl\)\[([a-z,]+)\]", text)]
    assert len(installed) == 3 and {extra for group in installed for extra in group.split(",")} <= extras


def test_every_console_script_points_at_something_that_exists() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    for target in scripts.values():
        module, _, name = target.partition(":")
        code = f"import importlib; assert callable(getattr(importlib.import_module({module!r}), {name!r}))"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_the_flower_bundle_builds_and_carries_no_code(tmp_path: Path) -> None:
    flwr = Path(sys.executable).with_name("flwr")
    # Flower looks at every file below the folder before it leaves out the ignored ones, a whole .venv among them.
    app = tmp_path / "app"
    shutil.copytree(ROOT, app, ignore=shutil.ignore_patterns(".venv*", ".git", ".*_cache", "runs", "*.safetensors"))
    command = [str(flwr), "build", "--app", str(app)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (bundle,) = tmp_path.glob("*.fab")
    assert bundle.stat().st_size < FLOWER_BUNDLE_LIMIT
    assert not [name for name in zipfile.ZipFile(bundle).namelist() if name.endswith(".py")]


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda page: page.name
)
def test_links_between_pages_and_files_lead_somewhere(page: Path) -> None:
    targets = LINK_TARGET.findall(page.read_text("utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing
