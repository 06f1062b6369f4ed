"""Who holds which training images: IID, Dirichlet, by domain, pathological.

The algorithms are those of ``flwr-datasets`` (``IidPartitioner``, ``DirichletPartitioner`` with
``self_balancing=True``; Yurochkin et al., arXiv 1905.12022; Li et al., arXiv 2102.02079), and the
tests hold ours against them: same generator state, same assignment. They are written again on row
numbers because the originals (flwr-datasets 0.6.1) do not fit here:

* they refuse more clients than images, and the Dirichlet one gives up after 10 draws;
* ``PathologicalPartitioner`` leaves out images of classes that no client drew;
* the Dirichlet one gives what floating point leaves over to the last client, even when it is full;
* none can reuse one draw of class proportions over several tasks;
* one ``datasets.Dataset`` per client costs 0.8 ms per client and task, and importing ``datasets``
  costs every worker process seconds and 100 MB.

What persists from task to task (``persistent``, used by domain-incremental streams): a client's
class proportions (Dirichlet) or class list (pathological) are drawn once for all tasks, because
there a client keeps its own preference while the domain changes. In class-incremental streams
classes are new, so each task has its own draw. Per task, rows are shuffled by
``derive_seed(seed, "partition", task)``.

Legend: ``n`` images of one task, ``K`` classes of one task, ``M`` clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeduet_shared.config import PartitionConfig
from edgeduet_shared.errors import ConfigError, DataError
from edgeduet_shared.seeds import derive_seed

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ATTEMPTS = 100
"""Draws of Dirichlet proportions before the minimum size is declared out of reach."""


@dataclass(frozen=True, eq=False)
class TaskRows:
    """Training images of one task: ``rows`` ``[n]`` of the table, their ``labels`` and ``domains`` ``[n]``."""

    name: str
    class_ids: tuple[int, ...]
    rows: Ints
    labels: Ints
    domains: Ints


def partition_tasks(
    tasks: Sequence[TaskRows],
    config: PartitionConfig,
    *,
    clients: int,
    domain_names: Sequence[str],
    persistent: bool,
    seed: int,
) -> tuple[tuple[Ints, ...], ...]:
    """Return ``[task][client] -> sorted table rows``; every row is held by exactly one client.

    Raises:
        ConfigError: the kind of partition does not suit the stream, the domains or the classes.
        DataError: ``partition.min_size`` cannot be met.
    """
    for task in tasks:
        _check_enough(task, config, clients)
    shuffled = [_shuffled(task, seed, index) for index, task in enumerate(tasks)]
    owners = _KINDS[config.kind](shuffled, config, clients, domain_names, persistent, seed)
    result = []
    for task, owner in zip(shuffled, owners, strict=True):
        _check_minimum(task, owner, config, clients)
        result.append(_by_client(task.rows, owner, clients))
    return tuple(result)


# --- the assignments: owner [n] of each row -------------------------------------------------------


def iid_owners(count: int, clients: int) -> Ints:
    """Equal contiguous runs; the first ``count % clients`` clients hold one more."""
    sizes = np.full(clients, count // clients)
    sizes[: count % clients] += 1
    return np.repeat(np.arange(clients), sizes)


def dirichlet_owners(labels: Ints, class_ids: Sequence[int], shares: Floats) -> Ints:
    """Divide each class over the clients in proportion to ``shares`` ``[K, M]``.

    Classes are handled in order; a client that already holds more than ``n / M`` images gets no more,
    and the others' shares are scaled up to 1 (they share equally if all of theirs are 0).
    """
    count, clients = len(labels), shares.shape[1]
    owner = np.empty(count, np.int64)
    held = np.zeros(clients, np.int64)
    for class_id, row in zip(class_ids, shares, strict=True):
        members = np.flatnonzero(labels == class_id)
        open_clients = held <= count / clients
        share = np.where(open_clients, row, 0.0)
        total = share.sum()
        share = share / total if total > 0 else open_clients / open_clients.sum()
        # The guard keeps 0.9999999 * len from losing an image to whichever client comes last.
        cuts = np.floor(np.cumsum(share) * len(members) + 1e-9).astype(np.int64)
        sizes = np.diff(cuts, prepend=0)
        owner[members] = np.repeat(np.arange(clients), sizes)
        held += sizes
    return owner


def pathological_classes(class_count: int, clients: int, per_client: int, rng: np.random.Generator) -> Ints:
    """``[M, per_client]`` class positions: distinct within a client, each class used almost equally often."""
    order = rng.permutation(class_count)
    start = rng.permutation(clients) * per_client
    return order[(start[:, None] + np.arange(per_client)) % class_count]


def pathological_owners(labels: Ints, class_ids: Sequence[int], held: Ints) -> Ints:
    """Divide each class equally over the clients whose row of ``held`` ``[M, per_client]`` lists it."""
    owner = np.empty(len(labels), np.int64)
    for position, class_id in enumerate(class_ids):
        members = np.flatnonzero(labels == class_id)
        holders = np.flatnonzero((held == position).any(axis=1))
        owner[members] = holders[iid_owners(len(members), len(holders))]
    return owner


# --- kinds ----------------------------------------------------------------------------------------


def _iid(
    tasks: Sequence[TaskRows], config: PartitionConfig, clients: int, names: Sequence[str], persistent: bool, seed: int
) -> list[Ints]:
    return [iid_owners(len(task.rows), clients) for task in tasks]


def _dirichlet(
    tasks: Sequence[TaskRows], config: PartitionConfig, clients: int, names: Sequence[str], persistent: bool, seed: int
) -> list[Ints]:
    if persistent:
        return _draw_until_large_enough(tasks, config, clients, derive_seed(seed, "partition", "shares"))
    owners: list[Ints] = []
    for index, task in enumerate(tasks):
        owners += _draw_until_large_enough([task], config, clients, derive_seed(seed, "partition", "shares", index))
    return owners


def _draw_until_large_enough(tasks: Sequence[TaskRows], config: PartitionConfig, clients: int, seed: int) -> list[Ints]:
    """One draw of shares for all ``tasks`` (same classes), repeated until every client has ``min_size`` in each."""
    rng = np.random.default_rng(seed)
    class_ids = tasks[0].class_ids
    best = -1
    for _ in range(ATTEMPTS):
        shares = rng.dirichlet(np.full(clients, config.beta), size=len(class_ids))
        owners = [dirichlet_owners(task.labels, class_ids, shares) for task in tasks]
        smallest = min(int(np.bincount(owner, minlength=clients).min()) for owner in owners)
        if smallest >= config.min_size:
            return owners
        best = max(best, smallest)
    where = f"task '{tasks[0].name}'" if len(tasks) == 1 else f"{len(tasks)} tasks"
    raise DataError(
        f"partition.min_size={config.min_size}: {ATTEMPTS} Dirichlet draws with beta={config.beta:g} left some of "
        f"{clients} clients with at most {best} images ({where}); set partition.min_size=0, raise partition.beta, or "
        "lower federation.clients"
    )


def _by_domain(
    tasks: Sequence[TaskRows], config: PartitionConfig, clients: int, names: Sequence[str], persistent: bool, seed: int
) -> list[Ints]:
    """Client ``c`` belongs to domain ``c % D``; a domain's images are divided equally over its clients."""
    if persistent:
        raise ConfigError(
            "partition.kind=domain needs stream.kind=class-incremental: in a domain-incremental stream a task has one "
            "domain, so all but one domain's clients would be idle; use --set partition.kind=dirichlet"
        )
    if len(names) < 2:
        raise ConfigError("partition.kind=domain needs at least two domains; use --set partition.kind=iid")
    if clients < len(names):
        raise ConfigError(
            f"partition.kind=domain: {clients} clients for {len(names)} domains leave images that belong to nobody; "
            f"set federation.clients to at least {len(names)}, or list fewer data.domains"
        )
    owners = []
    for task in tasks:
        owner = np.empty(len(task.rows), np.int64)
        for domain in range(len(names)):
            members = np.flatnonzero(task.domains == domain)
            of_domain = np.arange(domain, clients, len(names))
            owner[members] = of_domain[iid_owners(len(members), len(of_domain))]
        owners.append(owner)
    return owners


def _pathological(
    tasks: Sequence[TaskRows], config: PartitionConfig, clients: int, names: Sequence[str], persistent: bool, seed: int
) -> list[Ints]:
    owners = []
    for index, task in enumerate(tasks):
        classes, per_client = len(task.class_ids), config.classes_per_client
        if per_client > classes:
            raise ConfigError(
                f"partition.classes_per_client={per_client}: task '{task.name}' has {classes} classes; "
                f"lower it to {classes} or less"
            )
        if clients * per_client < classes:
            raise ConfigError(
                f"partition.classes_per_client={per_client}: {clients} clients hold too few to cover the {classes} "
                f"classes of task '{task.name}'; raise it to {-(-classes // clients)} or more"
            )
        draw = (seed, "partition", "classes") if persistent else (seed, "partition", "classes", index)
        held = pathological_classes(classes, clients, per_client, np.random.default_rng(derive_seed(*draw)))
        owners.append(pathological_owners(task.labels, task.class_ids, held))
    return owners


_Kind = Callable[[Sequence[TaskRows], PartitionConfig, int, Sequence[str], bool, int], list[Ints]]
_KINDS: dict[str, _Kind] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "domain": _by_domain,
    "pathological": _pathological,
}


# --- common steps ---------------------------------------------------------------------------------


def _shuffled(task: TaskRows, seed: int, index: int) -> TaskRows:
    order = np.random.default_rng(derive_seed(seed, "partition", index)).permutation(len(task.rows))
    return TaskRows(task.name, task.class_ids, task.rows[order], task.labels[order], task.domains[order])


def _by_client(rows: Ints, owner: Ints, clients: int) -> tuple[Ints, ...]:
    grouped = rows[np.lexsort((rows, owner))]
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return tuple(np.split(grouped, ends[:-1]))


def _check_enough(task: TaskRows, config: PartitionConfig, clients: int) -> None:
    if clients * config.min_size > len(task.rows):
        raise DataError(
            f"partition.min_size={config.min_size}: task '{task.name}' has {len(task.rows)} training images for "
            f"{clients} clients; lower federation.clients, or set partition.min_size=0 to allow empty clients"
        )


def _check_minimum(task: TaskRows, owner: Ints, config: PartitionConfig, clients: int) -> None:
    sizes = np.bincount(owner, minlength=clients)
    if sizes.min() < config.min_size:
        raise DataError(
            f"partition.min_size={config.min_size}: client {int(sizes.argmin()) + 1} of {clients} gets "
            f"{int(sizes.min())} images of task '{task.name}' (partition.kind={config.kind}); "
            "lower federation.clients, or set partition.min_size=0"
        )
