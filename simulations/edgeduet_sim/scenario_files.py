"""Find scenarios by name or path, and the folder their data lies in.

Built-in scenarios are the TOML files next to this package's code; a path to a file of one's own
works everywhere a name does. ``${EDGEDUET_DATA}`` in a scenario's ``data.source`` stands for the
folder that holds the image folders of the real-data scenarios.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgeduet_shared.config import Scenario, load_scenario
from edgeduet_shared.errors import ConfigError, DataError, nearest

_FOLDER = Path(__file__).parent / "scenarios"
_VARIABLE = "${EDGEDUET_DATA}"
_PREFIXES = ("folder:", "hub:", "torchvision:")


def scenario_names() -> tuple[str, ...]:
    """Return the names of the built-in scenarios, sorted, the demo first."""
    names = sorted(path.stem for path in _FOLDER.glob("*.toml"))
    return tuple(sorted(names, key=lambda name: name != "demo"))


def scenario_path(name: str) -> Path:
    """Return the file of a built-in scenario, or the path itself when ``name`` is a TOML file.

    Raises:
        ConfigError: no such scenario or file; names the nearest scenario.
    """
    if name in scenario_names():
        return _FOLDER / f"{name}.toml"
    path = Path(name)
    if path.suffix == ".toml" or os.sep in name:
        if not path.is_file():
            raise ConfigError(f"scenario file {name} does not exist; 'edgeduet-sim list' shows the built-in scenarios")
        return path
    raise ConfigError(f"unknown scenario '{name}'{nearest(name, scenario_names())}")


def open_scenario(name: str, overrides: Sequence[str] = (), data: str | None = None) -> Scenario:
    """Read a scenario, apply ``key=value`` overrides and a data choice, and resolve where its data lies.

    Args:
        name: built-in name, or path of a TOML file.
        overrides: ``key=value`` settings, later ones win.
        data: ``world``, ``hub:NAME``, ``torchvision:NAME:ROOT``, or the path of an image folder; replaces
            ``data.source``, drops the file's lists of domains and classes, and takes the backbone
            ``clip-lite0`` instead of ``clip-world`` (which knows nothing but the generated world) unless
            ``overrides`` choose one.
    """
    scenario = load_scenario(scenario_path(name), overrides)
    if data is not None and source_of(data) != scenario.data.source:
        scenario = _with_data(scenario, source_of(data), {override.partition("=")[0] for override in overrides})
    return _replaced(scenario, "data", source=resolve_source(scenario.data.source))


def _with_data(scenario: Scenario, source: str, chosen: set[str]) -> Scenario:
    """Put other data under ``scenario``; settings in ``chosen`` stay as they are."""
    lists: dict[str, Any] = {key: () for key in ("domains", "classes") if f"data.{key}" not in chosen}
    scenario = _replaced(scenario, "data", source=source, **lists)
    if source != "world" and scenario.model.backbone == "clip-world" and "model.backbone" not in chosen:
        scenario = _replaced(scenario, "model", backbone="clip-lite0")
    return scenario


def _replaced(scenario: Scenario, section: str, **changes: Any) -> Scenario:
    return scenario.model_copy(update={section: getattr(scenario, section).model_copy(update=changes)})


def source_of(data: str) -> str:
    """Turn what people write after ``--data`` into a ``data.source``: a bare path means an image folder."""
    if data == "world" or data.startswith(_PREFIXES):
        return data
    return f"folder:{data}"


def resolve_source(source: str) -> str:
    """Replace ``${EDGEDUET_DATA}`` and make a folder absolute.

    Raises:
        DataError: the variable is needed but not set and no ``../shared/data`` exists, or the folder does not exist.
    """
    if not source.startswith("folder:"):
        return source
    text = source.removeprefix("folder:")
    if _VARIABLE in text:
        text = text.replace(_VARIABLE, str(_data_folder(text)))
    path = Path(text).expanduser()
    if not path.is_dir():
        raise DataError(f"image folder {path} does not exist; give it with --data PATH (root/[domain/]class/*.jpg)")
    return f"folder:{path.resolve()}"


def real_data_folder() -> Path | None:
    """Return the folder that ``${EDGEDUET_DATA}`` stands for: the variable, else ``../shared/data``, else None."""
    variable = os.environ.get("EDGEDUET_DATA")
    if variable:
        return Path(variable).expanduser()
    checkout = Path(__file__).resolve().parents[2]
    candidates = (Path.cwd().parent / "shared" / "data", checkout.parent / "shared" / "data")
    return next((candidate for candidate in candidates if candidate.is_dir()), None)


def _data_folder(text: str) -> Path:
    folder = real_data_folder()
    if folder is not None:
        return folder
    wanted = text.replace(_VARIABLE, "").strip("/")
    raise DataError(
        f"this scenario needs the image folder '{wanted}'; give it with --data PATH, "
        f"or set EDGEDUET_DATA to the folder that holds '{wanted}'"
    )
