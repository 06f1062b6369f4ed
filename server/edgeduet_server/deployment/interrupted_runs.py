"""What becomes of a training run that was going on when the server went down.

Flower forgets a run whose SuperLink died (it ends as failed), but our ServerApp wrote a checkpoint every
round. So the run is started again under a new Flower id, with ``resume`` set, and ends with the same bits
as if nothing had happened. A run that failed by itself (too few clients, a full disk) is not started again:
its operator has to see to it first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import select

from edgeduet_server.deployment.server_config import ServerConfig
from edgeduet_server.deployment.superlink_client import FlowerRun, SuperLinkClient
from edgeduet_server.registry.models import Run
from edgeduet_server.registry.runs import config_of, interrupted_run, reconcile
from edgeduet_server.registry.store import Registry

log = logging.getLogger("edgeduet.server")


def resume_interrupted(config: ServerConfig, client: SuperLinkClient, runs: Sequence[FlowerRun]) -> None:
    """Resume the registry's unfinished runs that Flower does not run any more, as ``[training] resume`` says.

    Args:
        runs: what SuperLink says after its start.

    Raises:
        FederationError: Flower refuses a run.
        RegistryError: the registry does not answer.
    """
    registry = Registry.open(config.registry_url, backups=config.folder("backups"))
    try:
        for run in _broken_off(registry, runs):
            if config.training.resume == "auto":
                _start_again(registry, client, run)
            elif config.training.resume == "ask":
                log.warning("run %s was interrupted; go on with: edgeduet-admin runs resume %s", run.name, run.name)
            else:
                log.warning("run %s was interrupted and is left as it is ([training] resume = never)", run.name)
    finally:
        registry.close()


def _broken_off(registry: Registry, runs: Sequence[FlowerRun]) -> list[Run]:
    """Write down which active runs are over, and return the one that ended without a word, whoever noticed first."""
    with registry.writing() as session:
        for line in reconcile(session, {run.run_id: run.status for run in runs}, datetime.now(UTC)):
            log.warning("%s", line)
    with registry.reading() as session:
        run = interrupted_run(session)
        return [] if run is None else [run]


def _start_again(registry: Registry, client: SuperLinkClient, run: Run) -> None:
    flower_run_id = client.start_run(config_of(run, resume=True))
    with registry.writing() as session:
        row = session.scalars(select(Run).where(Run.id == run.id)).one()
        row.state, row.flower_run_id, row.error, row.ended_at = "pending", flower_run_id, "", None
    log.warning("run %s was interrupted and goes on from its last checkpoint", run.name)
