"""A ServerApp's run with the registry: its events, its orders, its models, and how it ended."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as save_arrays
from sqlalchemy import select, update

from edgeduet_server.registry.control import RegistryControl
from edgeduet_server.registry.desired import latest_orders, wishes
from edgeduet_server.registry.errors import RegistryError
from edgeduet_server.registry.listener import RegistryListener, utc_now
from edgeduet_server.registry.models import Artefact, Run
from edgeduet_server.registry.runs import begin_run, end_run, interruption
from edgeduet_server.registry.store import Registry
from edgeduet_shared.atomic_files import atomic_write_bytes
from edgeduet_shared.errors import EdgeDuetError, RunStopped
from edgeduet_shared.run_config import RunConfig

log = logging.getLogger("edgeduet.registry")

MODELS = "models"
GLOBAL_MODEL = "global-model"


class HasShared(Protocol):
    """A server state."""

    @property
    def shared(self) -> Mapping[str, npt.NDArray[Any]]:
        """Arrays of the global model by name."""
        ...


class RecordedRun:
    """The registry's side of one run.

    Attributes:
        listener: takes the run's events.
        control: gives its orders.
    """

    def __init__(self, registry: Registry, run_id: int, config: RunConfig, now: Callable[[], datetime]) -> None:
        self.listener = RegistryListener(registry, run_id, now)
        self.control = RegistryControl(registry, run_id, now)
        self._registry = registry
        self._run_id = run_id
        self._config = config
        self._now = now

    def describe(self, *, tasks: list[str]) -> None:
        """Write down the names of the tasks."""
        with self._registry.writing() as session:
            session.execute(update(Run).where(Run.id == self._run_id).values(tasks=tasks))

    def keep_model(self, state: HasShared, stage: int, about: Mapping[str, str] | None = None) -> Path | None:
        """Write the global model after ``stage`` into the run's folder, and an artefact row about it.

        Args:
            about: more for the file's metadata.

        Returns:
            The file; None for a method whose server holds no model.
        """
        if not state.shared:
            return None
        arrays = {name: np.asarray(value, order="C") for name, value in state.shared.items()}
        content = save_arrays(arrays, metadata={**self._card(stage), **(about or {})})
        relative = f"{MODELS}/stage-{stage + 1:03d}.safetensors"
        path = self._config.run_dir / relative
        atomic_write_bytes(path, content)
        try:
            self._note_model(relative, hashlib.sha256(content).hexdigest(), len(content), stage)
        except RegistryError as error:
            log.warning("the model %s is kept, but the registry does not know of it: %s", path, error)
        return path

    def _card(self, stage: int) -> dict[str, str]:
        config = self._config
        return {
            "run": config.run_name,
            "method": config.method,
            "options": json.dumps(dict(config.options), sort_keys=True),
            "seed": str(config.seed),
            "stage": str(stage),
            "backbone": config.scenario.model.backbone,
            "scenario": config.scenario.name,
            "scenario_digest": config.scenario.digest(),
        }

    def _note_model(self, relative: str, sha256: str, size: int, stage: int) -> None:
        values: Mapping[str, Any] = {"path": relative, "sha256": sha256, "bytes": size, "created_at": self._now()}
        place = {"run_id": self._run_id, "kind": GLOBAL_MODEL, "stage": stage}
        with self._registry.writing() as session:
            row = session.scalar(select(Artefact).filter_by(**place))
            if row is None:
                session.add(Artefact(**place, **values))
            else:
                for name, value in values.items():
                    setattr(row, name, value)


@contextmanager
def recorded_run(
    url: str, config: RunConfig, flower_run_id: str, now: Callable[[], datetime] = utc_now
) -> Iterator[RecordedRun]:
    """Open the registry for a run and write down how the block ended.

    Args:
        url: of the registry.
        config: the run.
        flower_run_id: Flower's id of it.
        now: the clock.

    Raises:
        RegistryError: the registry cannot be opened.
    """
    registry = Registry.open(url)
    try:
        with registry.writing() as session:
            run_id = begin_run(session, config, flower_run_id, now()).id
        run = RecordedRun(registry, run_id, config, now)

        def end(state: str, error: str = "") -> None:
            run.listener.flush()
            with registry.writing() as session:
                # An operator who stops a run at once takes Flower away from it: that is no failure.
                if state != "failed" or session.get_one(Run, run_id).state != "stopped":
                    end_run(session, run_id, state, now(), error)

        try:
            yield run
        except BaseException as error:
            # The cause is on its way up; a registry that does not answer must not hide it.
            with suppress(RegistryError):
                end(*_how_it_ended(registry, run_id, config.run_name, error))
            raise
        end("finished")
    finally:
        registry.close()


def _how_it_ended(registry: Registry, run_id: int, name: str, error: BaseException) -> tuple[str, str]:
    """Return state and error of a run that ``error`` ended.

    A server process is also told to end when the server is stopped or restarted, or its SuperLink is gone: then the
    run was interrupted, and goes on at the next start.
    """
    if _is_from_outside(error):
        with registry.reading() as session:
            ordered = latest_orders(wishes(session, run_id)).stop
        return ("stopped", "") if ordered else ("failed", interruption(", told to from outside", name))
    return "failed", str(error) if isinstance(error, EdgeDuetError) else f"{type(error).__name__}: {error}"


def _is_from_outside(error: BaseException) -> bool:
    """Whether it is a signal, or the connection to SuperLink that broke."""
    signalled = isinstance(error, (RunStopped, KeyboardInterrupt, SystemExit))
    return signalled or type(error).__module__.partition(".")[0] in ("httpx", "httpcore")
