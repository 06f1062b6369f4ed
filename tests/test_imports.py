"""Imports point only the way docs/architecture.md draws them, and light things stay light."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "edgeduet_shared": "shared",
    "edgeduet_server": "server",
    "edgeduet_client": "client",
    "edgeduet_sim": "simulations",
}
MAY_IMPORT = {
    "edgeduet_shared": {"edgeduet_shared"},
    "edgeduet_server": {"edgeduet_server", "edgeduet_shared"},
    "edgeduet_client": {"edgeduet_client", "edgeduet_shared"},
    "edgeduet_sim": {"edgeduet_sim", "edgeduet_server", "edgeduet_client", "edgeduet_shared"},
}
# Extras a package may count on when one of its modules is imported; the longest name that fits counts.
# What only some commands need (ray, plots, hub data sets) is imported inside the function that needs it.
EXTRAS = {
    "edgeduet_shared": {"train"},
    "edgeduet_shared.admin_api": {"server"},
    "edgeduet_shared.data.hub_source": {"train", "sim"},
    "edgeduet_shared.supervision": {"server"},
    "edgeduet_server": {"train", "server"},
    "edgeduet_client": {"train"},
    "edgeduet_client.classifier": set(),
    "edgeduet_client.classifier.exporting": {"train"},
    "edgeduet_client.classifier.stage_export": {"train"},
    "edgeduet_client.cli": set(),
    "edgeduet_client.device": {"llm", "device"},
    "edgeduet_client.device.commands": set(),
    "edgeduet_client.device.training_rules": set(),
    "edgeduet_client.drafters": {"train", "llm"},
    "edgeduet_client.llm": {"llm"},
    "edgeduet_client.llm.graph": {"export"},
    "edgeduet_sim": {"train", "server", "sim"},
    "edgeduet_sim.backbone_build": {"train", "server", "sim", "backbone"},
}
LANGUAGE_MODEL = "edgeduet_client.llm"
MEETING_POINTS = {"edgeduet_client.cli", "edgeduet_client.device", "edgeduet_client.drafters"}


@dataclass(frozen=True)
class Import:
    """One import of one module."""

    importer: str
    imported: str
    line: int
    deferred: bool  # inside a function, so it costs nothing until that function runs

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def module_files() -> dict[str, Path]:
    """Every module of the four packages by its dotted name; packages by that of their ``__init__``."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder / package).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imports_of(module: str, source: str) -> Iterator[Import]:
    """Every import statement and literal ``import_module`` call, but for those seen by type checkers only."""

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            # A type may be named without installing what defines it, but not across our own borders.
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, deferred)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, deferred)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} uses a relative import"
            for alias in node.names:
                yield Import(module, f"{node.module}.{alias.name}", node.lineno, deferred)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield Import(module, str(node.args[0].value), node.lineno, deferred)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(source), False)


def all_imports() -> list[Import]:
    """The imports of all modules of the four packages."""
    return [found for module, path in module_files().items() for found in imports_of(module, path.read_text("utf-8"))]


def within(module: str, package: str) -> bool:
    """Whether ``module`` is ``package`` or lies in it."""
    return module == package or module.startswith(package + ".")


def test_imports_between_our_packages_point_one_way() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if (top := found.imported.split(".")[0]) in MAY_IMPORT and top not in MAY_IMPORT[found.importer.split(".")[0]]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_language_model_and_the_federated_part_of_the_client_do_not_import_each_other() -> None:
    wrong = []
    for found in all_imports():
        if not within(found.importer, "edgeduet_client") or not within(found.imported, "edgeduet_client"):
            continue
        if any(within(found.importer, point) or within(found.imported, point) for point in MEETING_POINTS):
            continue
        if within(found.importer, LANGUAGE_MODEL) != within(found.imported, LANGUAGE_MODEL):
            wrong.append(str(found))
    assert not wrong, "\n".join(wrong)


def test_only_the_client_app_reaches_what_trains_drafters_and_only_when_it_is_asked_to() -> None:
    drafters = "edgeduet_client.drafters"
    reaching = [f for f in all_imports() if within(f.imported, drafters) and not within(f.importer, drafters)]
    inside_the_client = [found for found in reaching if within(found.importer, "edgeduet_client")]
    assert {found.importer for found in inside_the_client} == {"edgeduet_client.app"}
    assert all(found.deferred for found in inside_the_client)


def extras_of(module: str) -> set[str]:
    """Extras that may be taken for installed where ``module`` is imported."""
    return EXTRAS[max((package for package in EXTRAS if within(module, package)), key=len)]


def declared(extras: set[str]) -> set[str]:
    """Normalised names of the distributions that the base install and ``extras`` ask for themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return {normalised(re.match(r"[\w.-]+", line).group()) for line in lines}  # type: ignore[union-attr]


def normalised(name: str) -> str:
    """Distribution name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_third_party_import_is_declared_where_it_is_needed() -> None:
    every_extra = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    providers = packages_distributions()
    wrong = []
    for found in all_imports():
        top = found.imported.split(".")[0]
        if top in sys.stdlib_module_names or top in FOLDERS or top == "__future__":
            continue
        allowed = declared(every_extra if found.deferred else extras_of(found.importer))
        names = {normalised(name) for name in providers.get(top, [top])}
        if not names & allowed:
            wrong.append(f"{found}, which {'no extra' if found.deferred else 'its extras do not'} declare")
    assert not wrong, "\n".join(wrong)


def modules_after(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after ``statement``."""
    path = os.pathsep.join(str(ROOT / folder) for folder in FOLDERS.values())
    result = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_no_package_init_imports_torch() -> None:
    packages = [module for module, path in module_files().items() if path.name == "__init__.py"]
    assert set(FOLDERS) <= set(packages)
    assert "torch" not in modules_after("import " + ", ".join(packages))


def test_the_command_line_starts_without_torch() -> None:
    loaded = modules_after("import edgeduet_sim.cli")
    assert not loaded & {"torch", "open_clip", "matplotlib", "ray"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import a.b", [("a.b", False)]),
        ("def f():\n    from a import b", [("a.b", True)]),
        ("class C:\n    import a", [("a", False)]),
        ("if TYPE_CHECKING:\n    import a\nelse:\n    import b", [("a", True), ("b", False)]),
        ("f = lambda: importlib.import_module('a.b')", [("a.b", True)]),
        ("try:\n    import a\nexcept ImportError:\n    pass", [("a", False)]),
    ],
)
def test_the_scan_sees_every_kind_of_import(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(found.imported, found.deferred) for found in imports_of("m", source)] == expected
