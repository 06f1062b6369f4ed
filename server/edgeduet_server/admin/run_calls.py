"""Calls about runs: start, stop, resume, pause, rounds, settings."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from edgeduet_server.admin.flower_view import Flower, FlowerView
from edgeduet_server.admin.messages import round_message, run_message
from edgeduet_server.admin.tokens import Caller
from edgeduet_server.orders import SETTABLE, changed_scenario
from edgeduet_server.registry.desired import (
    EXCLUDED,
    PAUSED,
    SET,
    STOP,
    latest_orders,
    wish,
    wishes,
)
from edgeduet_server.registry.errors import Conflict, UnknownName
from edgeduet_server.registry.models import ClientSighting, Round, Run
from edgeduet_server.registry.runs import (
    ACTIVE,
    RESUMABLE,
    active_run,
    add_run,
    config_of,
    end_run,
    find_run,
    reconcile,
)
from edgeduet_server.registry.store import Registry
from edgeduet_shared.admin_api import admin_pb2 as pb
from edgeduet_shared.admin_api.as_json import timestamp
from edgeduet_shared.config import Scenario, apply_overrides, known_keys, parse
from edgeduet_shared.errors import ConfigError, EdgeDuetError
from edgeduet_shared.names import check_name
from edgeduet_shared.run_config import RunConfig

log = logging.getLogger("edgeduet.admin")

MANY_RUNS, MANY_ROUNDS, MOST = 50, 20, 1000
_CHECK_SECONDS = 120.0


class RunCalls:
    """Runs of one server home.

    Args:
        registry: the registry.
        runs_folder: where the folders of runs are.
        flower: starts and stops runs.
        view: what Flower says.
        now: the clock.
    """

    def __init__(
        self, registry: Registry, runs_folder: Path, flower: Flower, view: FlowerView, now: Callable[[], datetime]
    ) -> None:
        self._registry = registry
        self._folder = runs_folder
        self._flower = flower
        self._view = view
        self._now = now

    def list_runs(self, request: pb.ListRunsRequest, caller: Caller) -> pb.ListRunsReply:
        """Newest first."""
        self.catch_up()
        with self._registry.reading() as session:
            rows = select(Run).order_by(Run.id.desc()).limit(min(request.limit or MANY_RUNS, MOST))
            return pb.ListRunsReply(runs=[run_message(session, run) for run in session.scalars(rows)])

    def get_run(self, request: pb.RunRequest, caller: Caller) -> pb.Run:
        """Return one run."""
        self.catch_up()
        with self._registry.reading() as session:
            return run_message(session, find_run(session, request.run or "latest"))

    def start_run(self, request: pb.StartRunRequest, caller: Caller) -> pb.Run:
        """Check everything, then give the run to Flower."""
        config = self._config(request)
        check_images(config.scenario)
        check_method(config.method, config.options, config.scenario)
        self.catch_up()
        with self._registry.writing() as session:
            self._nothing_else(session)
            run = add_run(session, config, self._now(), by=caller.name)
        return self._give_to_flower(run.id, run.name, config)

    def resume_run(self, request: pb.RunRequest, caller: Caller) -> pb.Run:
        """Go on from the last checkpoint, with the orders that were in force but for stop and pause."""
        self.catch_up()
        with self._registry.writing() as session:
            run = find_run(session, request.run or "latest")
            if run.state not in RESUMABLE:
                hint = f"; it is paused: runs unpause {run.name}" if run.state == "paused" else ""
                raise Conflict(f"run '{run.name}' is {run.state}; only a stopped or failed one can be resumed{hint}")
            self._nothing_else(session)
            self._lift(session, run, caller, (STOP, PAUSED))
            run.state, run.error, run.ended_at = "requested", "", None
            config = config_of(run, resume=True)
        return self._give_to_flower(run.id, run.name, config)

    def stop_run(self, request: pb.StopRunRequest, caller: Caller) -> pb.Run:
        """Stop after the present round, or at once."""
        self.catch_up()
        with self._registry.writing() as session:
            run = self._active(session, request.run, "stopped")
            wish(session, run.id, STOP, True, by=caller.name, now=self._now())
            flower_run_id, waiting = run.flower_run_id, run.state in ("requested", "pending")
        if (request.now or waiting) and flower_run_id is not None:
            self._flower.stop_run(flower_run_id)
            self._view.forget()
            with self._registry.writing() as session:
                end_run(session, run.id, "stopped", self._now())
        return self._shown(run.id)

    def pause_run(self, request: pb.RunRequest, caller: Caller) -> pb.Run:
        """Order a pause."""
        return self._order(request.run, PAUSED, True, caller, "paused")

    def unpause_run(self, request: pb.RunRequest, caller: Caller) -> pb.Run:
        """Take the pause back."""
        return self._order(request.run, PAUSED, False, caller, "unpaused")

    def exclude_client(self, request: pb.RunClientRequest, caller: Caller) -> pb.Run:
        """Leave a client out from the next round on."""
        return self._exclude(request, caller, True)

    def include_client(self, request: pb.RunClientRequest, caller: Caller) -> pb.Run:
        """Ask it again from the next round on."""
        return self._exclude(request, caller, False)

    def list_rounds(self, request: pb.ListRoundsRequest, caller: Caller) -> pb.ListRoundsReply:
        """Return the newest rounds, oldest of them first."""
        with self._registry.reading() as session:
            run = find_run(session, request.run or "latest")
            newest = (
                select(Round)
                .where(Round.run_id == run.id)
                .order_by(Round.stage.desc(), Round.round.desc())
                .limit(min(request.limit or MANY_ROUNDS, MOST))
            )
            rounds = [round_message(row) for row in session.scalars(newest)]
        return pb.ListRoundsReply(run=run.name, rounds=rounds[::-1])

    def get_config(self, request: pb.RunRequest, caller: Caller) -> pb.Config:
        """Return every setting of the run's scenario with the value in force or ordered."""
        with self._registry.reading() as session:
            return _config_message(session, find_run(session, request.run or "latest"))

    def set_config(self, request: pb.SetConfigRequest, caller: Caller) -> pb.Config:
        """Order another value, checked by the scenario's own rules."""
        try:
            value = json.loads(request.value_json) if request.value_json else None
        except ValueError as error:
            raise ConfigError(f"config set {request.key!a}: the value is not JSON ({error})") from error
        with self._registry.writing() as session:
            run = find_run(session, request.run or "latest")
            if run.state == "finished":
                raise Conflict(f"run '{run.name}' is finished; nothing of it can be changed")
            present = dict(latest_orders(wishes(session, run.id)).overrides)
            if value is None:
                changed_scenario(Scenario.model_validate(run.scenario), {request.key: _at(run.scenario, request.key)})
            else:
                changed_scenario(Scenario.model_validate(run.scenario), {**present, request.key: value})
            wish(session, run.id, SET + request.key, value, by=caller.name, now=self._now())
            return _config_message(session, run)

    def catch_up(self) -> None:
        """Bring the registry in line with what Flower says about runs that it takes for active."""
        with self._registry.reading() as session:
            if active_run(session) is None:
                return
        said, problem = self._view.runs()
        if problem:
            return
        with self._registry.writing() as session:
            for line in reconcile(session, {run.run_id: run.status for run in said}, self._now()):
                log.warning("%s", line)

    # -- pieces ----------------------------------------------------------------------------------------

    def _config(self, request: pb.StartRunRequest) -> RunConfig:
        scenario = _scenario(request)
        options = _json_object(request.options_json)
        if request.seed < 0:
            raise ConfigError(f"seed: {request.seed}; must be 0 or more")
        name = request.name or f"{scenario.name}-{request.method}-seed{request.seed}-{scenario.digest()[:8]}"
        check_name(name, "run name")
        return RunConfig.from_flower(
            {
                "scenario-json": json.dumps(scenario.model_dump(mode="json")),
                "method": check_name(request.method, "method"),
                "options-json": json.dumps(options),
                "seed": request.seed,
                "run-dir": str(self._folder / name),
                "run-name": name,
                "checkpoint-every": request.checkpoint_every or 1,
            }
        )

    def _nothing_else(self, session: Session) -> None:
        other = active_run(session)
        if other is not None:
            raise Conflict(
                f"run '{other.name}' is {other.state}; the devices work on one run at a time: stop it first "
                f"(runs stop {other.name}), or wait"
            )

    def _give_to_flower(self, run_id: int, name: str, config: RunConfig) -> pb.Run:
        try:
            flower_run_id = self._flower.start_run(config)
        except EdgeDuetError as error:
            with self._registry.writing() as session:
                end_run(session, run_id, "failed", self._now(), str(error))
            raise
        finally:
            self._view.forget()
        with self._registry.writing() as session:
            run = session.get_one(Run, run_id)
            # Its ServerApp may have begun already.
            if run.state == "requested":
                run.state = "pending"
            run.flower_run_id = flower_run_id
        log.info("run %s given to Flower as %s", name, flower_run_id)
        return self._shown(run_id)

    def _lift(self, session: Session, run: Run, caller: Caller, keys: tuple[str, ...]) -> None:
        orders = latest_orders(wishes(session, run.id))
        for key, ordered in ((STOP, orders.stop), (PAUSED, orders.paused)):
            if ordered and key in keys:
                wish(session, run.id, key, False, by=caller.name, now=self._now())

    def _active(self, session: Session, name: str, act: str) -> Run:
        run = find_run(session, name or "latest")
        if run.state not in ACTIVE:
            raise Conflict(f"run '{run.name}' is {run.state}; only one that goes on can be {act}")
        return run

    def _order(self, name: str, key: str, value: bool, caller: Caller, act: str) -> pb.Run:
        with self._registry.writing() as session:
            run = self._active(session, name, act)
            wish(session, run.id, key, value, by=caller.name, now=self._now())
        return self._shown(run.id)

    def _exclude(self, request: pb.RunClientRequest, caller: Caller, value: bool) -> pb.Run:
        with self._registry.writing() as session:
            run = find_run(session, request.run or "latest")
            if run.state == "finished":
                raise Conflict(f"run '{run.name}' is finished; nothing of it can be changed")
            client = _client_number(session, run, request.client)
            left = latest_orders(wishes(session, run.id)).excluded | {client}
            if value and len(left) >= run.clients:
                raise Conflict(f"client {client} is the last one of run '{run.name}'; pause or stop the run instead")
            wish(session, run.id, f"{EXCLUDED}{client}", value, by=caller.name, now=self._now())
        return self._shown(run.id)

    def _shown(self, run_id: int) -> pb.Run:
        with self._registry.reading() as session:
            return run_message(session, session.get_one(Run, run_id))


def check_images(scenario: Scenario) -> None:
    """Refuse what only a simulation of devices with images of their own can do.

    Raises:
        ConfigError: the scenario names the devices' folders.
    """
    if scenario.data.on_devices and scenario.data.source != "device":
        raise ConfigError(
            f"scenario: data.source = {scenario.data.source!a} is for simulations; set it to 'device': each device "
            "names its own folder in its device.toml"
        )


def check_method(method: str, options: Any, scenario: Scenario) -> None:
    """Check a method, its options and whether it suits the scenario where torch is loaded: in a process of its own.

    Raises:
        ConfigError: no such method or option, a bad value, or a method for other scenarios.
    """
    asked = {"method": method, "options": dict(options), "scenario": scenario.model_dump(mode="json")}
    _check(method, json.dumps(asked, sort_keys=True))


# The process takes seconds; what was found right once is right until the service is upgraded, and so restarted.
@lru_cache(maxsize=64)
def _check(method: str, text: str) -> None:
    command = [sys.executable, "-m", "edgeduet_server.admin.method_check"]
    try:
        result = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=_CHECK_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"method '{method}' could not be checked within {_CHECK_SECONDS:.0f} s; try again") from error
    if result.returncode == 2:
        raise ConfigError(result.stdout.strip())
    if result.returncode != 0:
        log.error("checking method %s failed: %s", method, result.stderr[-2000:])
        raise EdgeDuetError("the method could not be checked; the log of the admin service says why")


def _scenario(request: pb.StartRunRequest) -> Scenario:
    source = request.WhichOneof("source")
    if source == "scenario_toml":
        try:
            values = tomllib.loads(request.scenario_toml)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"scenario: not valid TOML ({error})") from error
    elif source == "scenario":
        name = check_name(request.scenario, "scenario")
        if name.endswith(".toml"):
            raise ConfigError(f"scenario: '{name}' is a file here on the server; send its content")
        values = RunConfig.from_flower({"scenario": name}).scenario.model_dump(mode="json")
    else:
        raise ConfigError("scenario: none was given; name one that comes with edgeduet, or send a file")
    return parse(Scenario, apply_overrides(values, list(request.set), Scenario), "scenario")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"options: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError("options: must be a JSON object")
    return value


def _client_number(session: Session, run: Run, client: str) -> int:
    """Return the number of a client, given as such or as the name of its device."""
    if client.isascii() and client.isdigit():
        number = int(client[:9])
        if number >= run.clients:
            raise UnknownName(f"run '{run.name}' has clients 0 to {run.clients - 1}, not {number}")
        return number
    name = check_name(client, "client")
    found = session.scalar(
        select(ClientSighting.client).where(ClientSighting.run_id == run.id, ClientSighting.name == name)
    )
    if found is None:
        raise UnknownName(f"device '{name}' was not seen in run '{run.name}'; give the number of the client")
    return found


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _config_message(session: Session, run: Run) -> pb.Config:
    newest = {row.key.removeprefix(SET): row for row in wishes(session, run.id) if row.key.startswith(SET)}
    message = pb.Config(run=run.name)
    for key, meaning in known_keys(Scenario).items():
        own = _at(run.scenario, key)
        row = newest.get(key)
        value = own if row is None or row.value is None else row.value
        message.settings.add(
            key=key,
            value_json=json.dumps(value),
            scenario_value_json=json.dumps(own),
            settable=key in SETTABLE and run.state != "finished",
            pending=row is not None and row.applied_stage is None,
            by=row.by if row else "",
            since=timestamp(row.since) if row else None,
            meaning=meaning,
        )
    return message
