"""What ``edgeduet-sim backbone build|list|show`` calls."""

from __future__ import annotations

import importlib
from pathlib import Path

from rich.console import Console
from rich.table import Table

from edgeduet_shared.backbone import BackboneCard, load_backbone, offline_backbones
from edgeduet_shared.data.cache_folder import cache_folder
from edgeduet_shared.errors import BackboneError, nearest
from edgeduet_sim.backbone_build.zero_shot import world_table, zero_shot_table

_BUILDERS = {"clip-world": "world_clip", "clip-lite0": "lite0"}


def build(name: str, out: Path, *, minutes: float | None = None) -> None:
    """Build a shipped backbone again into the folder ``out``.

    A build that was killed continues where it stopped when it is started again: rendered pictures,
    embedded texts and the training checkpoint lie in the user's cache folder.

    Raises:
        BackboneError: unknown name, a missing build ingredient, or an unwritable folder.
    """
    if name not in _BUILDERS:
        raise BackboneError(f"no build script for a backbone '{name}'{nearest(name, _BUILDERS)}")
    # Imported late: the scripts need packages that no other command needs.
    script = importlib.import_module(f"edgeduet_sim.backbone_build.{_BUILDERS[name]}")
    work = cache_folder() / "backbone-build" / name
    try:
        script.build(out, work, minutes=minutes)
    except OSError as error:
        raise BackboneError(f"cannot write while building '{name}': {error}") from error


def choices(name: str, *, console: Console | None = None) -> None:
    """Print what the choices of a backbone's build were made on, measured again.

    Raises:
        BackboneError: only ``clip-lite0`` has such choices; a build ingredient or the emoji font is missing.
    """
    if name != "clip-lite0":
        raise BackboneError(f"no choices of '{name}' were measured on a set of their own; clip-lite0 has some")
    from edgeduet_sim.backbone_build.emoji_probe import compare_choices

    glyphs, found = compare_choices()
    title = f"{len(glyphs.pictures)} emoji, {len(glyphs.names)} names: nearest name right, %"
    table = Table("alternative", "first", "among 5", title=title, title_justify="left")
    for choice in found:
        table.add_row(choice.what, f"{100 * choice.first:.1f}", f"{100 * choice.first_five:.1f}")
    (console or Console()).print(table)


def list_cards() -> list[BackboneCard]:
    """Return the cards of the shipped backbones, by name."""
    return list(offline_backbones().values())


def show(name: str, *, data: Path | None = None, console: Console | None = None) -> None:
    """Print a card and measure the backbone's zero-shot accuracy.

    ``clip-world`` is measured on the generated world; the others on the images under ``data``
    (``pacs/domain/class/*`` and ``caltech101/class/*``), or not at all without it.
    """
    console = console or Console()
    cards = offline_backbones()
    if name not in cards:
        raise BackboneError(f"no shipped backbone '{name}'{nearest(name, cards)}")
    card = cards[name]
    console.print(f"{card.name}: {card.summary}")
    console.print(
        f"{card.parameters / 1e6:.2f} M parameters, {card.bytes / 1e6:.1f} MB, {card.image_size} px, "
        f"{card.embed_dim}-d, licence {card.licence}\nsha256 {card.sha256}",
        highlight=False,
    )
    measured: dict[str, float] = {}
    if name == "clip-world":
        measured = world_table(load_backbone(name))
    elif data is not None:
        measured = zero_shot_table(load_backbone(name), data)
    else:
        console.print("pass the folder of pacs/ and caltech101/ to measure it again")
    table = Table("zero-shot", "card, %", "measured now, %")
    for task in dict.fromkeys((*card.zero_shot, *measured)):
        table.add_row(task, _percent(card.zero_shot.get(task)), _percent(measured.get(task)))
    console.print(table)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
