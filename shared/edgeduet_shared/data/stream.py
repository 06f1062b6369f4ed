"""Cut a table into an ordered stream of tasks.

* class-incremental: ``stream.classes_per_task`` new classes per task, images of all domains;
* domain-incremental: one domain per task, the same classes throughout.

``stream.order = "seeded"`` shuffles what arrives over time: the classes in the first case, the
domains in the second. Held-out classes are drawn by the seed, belong to no task and are used only
to measure zero-shot retention.

Class ids follow the stream: ids of the first task are 0, 1, ...; held-out classes come last. Names
and ids are renumbered by the same permutation, in this module and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeduet_shared.config import StreamConfig
from edgeduet_shared.data.image_table import ImageTable
from edgeduet_shared.errors import ConfigError, DataError
from edgeduet_shared.seeds import derive_seed


@dataclass(frozen=True)
class Task:
    """One task of the stream. ``class_ids`` index ``Split.class_names``."""

    name: str
    class_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Stream:
    """The ordered tasks over a table of ``C`` classes.

    ``class_names`` in stream order, worded for prompts; ``labels`` ``[N]`` int64 index it;
    ``domains_of``: per task the table's domain ids it draws from.
    """

    class_names: tuple[str, ...]
    labels: NDArray[np.int64]
    tasks: tuple[Task, ...]
    domains_of: tuple[tuple[int, ...], ...]
    held_out_classes: tuple[int, ...]


def prompt_name(class_name: str) -> str:
    """``car_side`` -> ``car side``: a class name as words of a sentence."""
    return " ".join(class_name.replace("_", " ").split())


def build_stream(table: ImageTable, config: StreamConfig, seed: int) -> Stream:
    """Order classes and domains into tasks.

    Raises:
        ConfigError: too few domains or classes for the stream asked for.
        DataError: two classes have the same name once underscores are spaces.
    """
    order, held_out = _class_order(table, config, seed)
    names = tuple(prompt_name(table.class_names[old]) for old in order)
    _check_distinct(names)
    new_id = np.empty(len(order), np.int64)
    new_id[order] = np.arange(len(order))
    streamed = len(order) - held_out
    if config.kind == "class-incremental":
        groups = _groups(streamed, config.classes_per_task)
        tasks = tuple(Task(_group_name([names[i] for i in ids]), ids) for ids in groups)
        domains_of = (tuple(range(len(table.domain_names))),) * len(tasks)
    else:
        domains = _domain_order(table, config, seed)
        everything = tuple(range(streamed))
        tasks = tuple(Task(prompt_name(table.domain_names[domain]), everything) for domain in domains)
        domains_of = tuple((int(domain),) for domain in domains)
    return Stream(names, new_id[table.labels], tasks, domains_of, tuple(range(streamed, len(order))))


def _class_order(table: ImageTable, config: StreamConfig, seed: int) -> tuple[NDArray[np.int64], int]:
    """Table class ids in stream order (held-out ones last), and how many are held out."""
    classes, held = len(table.class_names), config.held_out_classes
    if held >= classes:
        raise ConfigError(
            f"stream.held_out_classes={held} leaves no class to learn: {table.source} has {classes}; lower it"
        )
    drawn = np.random.default_rng(derive_seed(seed, "held-out")).permutation(classes)
    held_out, streamed = np.sort(drawn[:held]), np.sort(drawn[held:])
    if config.kind == "class-incremental" and config.order == "seeded":
        streamed = np.random.default_rng(derive_seed(seed, "class-order")).permutation(streamed)
    return np.concatenate((streamed, held_out)), held


def _domain_order(table: ImageTable, config: StreamConfig, seed: int) -> NDArray[np.int64]:
    domains = len(table.domain_names)
    if domains < 2:
        raise ConfigError(
            f"stream.kind=domain-incremental needs at least two domains, {table.source} has "
            f"{'one' if domains else 'none'}; use --set stream.kind=class-incremental, or a ROOT/domain/class/ folder"
        )
    if config.order == "seeded":
        return np.random.default_rng(derive_seed(seed, "domain-order")).permutation(domains)
    return np.arange(domains)


def _groups(classes: int, per_task: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive ids, ``per_task`` each; the last task may be smaller.

    One class left over joins the task before it: alone it would have nothing to be told apart from.
    """
    starts = list(range(0, classes, per_task))
    if len(starts) > 1 and per_task > 1 and classes - starts[-1] == 1:
        starts.pop()
    return tuple(tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], classes], strict=True))


def _group_name(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"


def _check_distinct(names: tuple[str, ...]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(
                f"two classes are both called '{name}' once underscores are read as spaces; rename one of the folders"
            )
        seen.add(name)
