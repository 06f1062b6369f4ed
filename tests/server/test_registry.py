"""The registry on real databases: tables, migrations, transactions, events of runs, wishes of operators."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, select, text

from edgeduet_server.recorder import JsonlRecorder, read_events
from edgeduet_server.registry import migrate as migration
from edgeduet_server.registry.desired import STOP, wish
from edgeduet_server.registry.errors import Conflict, RegistryError, UnknownName
from edgeduet_server.registry.listener import RegistryListener
from edgeduet_server.registry.models import AuditEntry, Base, ClientMetric, Round, Run, Stage
from edgeduet_server.registry.runs import (
    add_run,
    begin_run,
    end_run,
    find_run,
    interrupted_run,
    position,
    reconcile,
)
from edgeduet_server.registry.store import Registry
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.run_config import RunConfig

NOW = datetime(2026, 12, 1, 3, 0, tzinfo=UTC)
Events = list[dict[str, Any]]


@pytest.fixture
def registry(registry_url: str) -> Iterator[Registry]:
    opened = Registry.open(registry_url)
    yield opened
    opened.close()


def config(name: str = "first", folder: Path = Path("/nowhere"), **federation: Any) -> RunConfig:
    scenario = Scenario.model_validate({"name": "small", "federation": {"clients": 3, "rounds": 2, **federation}})
    return RunConfig(scenario, "fed-duet", {"fusion": False}, seed=2**40, run_dir=folder / name, run_name=name)


def new_run(registry: Registry, name: str = "first") -> int:
    with registry.writing() as session:
        return add_run(session, config(name), NOW).id


# -- the database ---------------------------------------------------------------------------------------


def test_migrations_make_exactly_the_tables_of_the_models(registry: Registry) -> None:
    with registry.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    assert set(Base.metadata.tables) <= set(inspect(registry.engine).get_table_names())


def test_opening_again_changes_nothing_and_backs_nothing_up(registry_url: str, tmp_path: Path) -> None:
    new_run(Registry.open(registry_url))
    again = Registry.open(registry_url, backups=tmp_path / "backups")
    with again.reading() as session:
        assert find_run(session, "first").seed == 2**40
    assert not (tmp_path / "backups").exists()
    again.close()


def test_a_transaction_is_kept_whole_or_not_at_all(registry: Registry) -> None:
    with pytest.raises(ZeroDivisionError), registry.writing() as session:
        add_run(session, config(), NOW)
        raise ZeroDivisionError
    with registry.reading() as session:
        assert session.scalars(select(Run)).all() == []


def test_times_come_back_as_utc_whatever_zone_they_had(registry: Registry) -> None:
    local = NOW.astimezone(timezone(timedelta(hours=5)))
    with registry.writing() as session:
        add_run(session, config(), local)
    with registry.reading() as session:
        found = find_run(session, "first").created_at
    assert (found, found.tzinfo) == (NOW, UTC)


def test_a_time_without_zone_is_refused(registry: Registry) -> None:
    with pytest.raises(Exception, match="without a time zone"), registry.writing() as session:
        add_run(session, config(), NOW.replace(tzinfo=None))


def _hammer(url: str, number: int, count: int) -> None:
    registry = Registry.open(url)
    for index in range(count):
        with registry.writing() as session:
            rows = session.scalars(select(AuditEntry)).all()
            session.add(
                AuditEntry(
                    time=NOW,
                    token=str(number),
                    role="",
                    action="count",
                    target=str(index),
                    detail={},
                    outcome=str(len(rows)),
                )
            )
    registry.close()


def test_processes_that_open_and_write_at_the_same_time_all_succeed(registry_url: str) -> None:
    # None of them finds tables: one migrates, the others wait.
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_hammer, args=(registry_url, n, 10)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    registry = Registry.open(registry_url)
    with registry.reading() as session:
        rows = session.scalars(select(AuditEntry)).all()
    assert len(rows) == 30
    if registry.is_sqlite:
        # Read and write in one transaction: nobody wrote in between.
        assert sorted(int(row.outcome) for row in rows) == list(range(30))
    registry.close()


def test_a_reader_neither_waits_for_a_writer_nor_sees_half_of_it(registry: Registry) -> None:
    new_run(registry)
    begun, seen = threading.Event(), threading.Event()

    def write() -> None:
        with registry.writing() as session:
            find_run(session, "first").state = "running"
            session.flush()
            begun.set()
            assert seen.wait(20)

    writer = threading.Thread(target=write)
    writer.start()
    assert begun.wait(20)
    with registry.reading() as session:
        assert find_run(session, "first").state == "requested"
    seen.set()
    writer.join()
    with registry.reading() as session:
        assert find_run(session, "first").state == "running"


def test_a_sqlite_registry_is_a_private_file_in_wal_mode(tmp_path: Path) -> None:
    registry = Registry.open(f"sqlite:///{tmp_path / 'home' / 'registry.db'}")
    with registry.engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
        assert connection.execute(text("PRAGMA busy_timeout")).scalar() == 30_000
    for path in (tmp_path / "home").glob("registry.db*"):
        if not path.name.endswith(".lock"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    registry.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("not a url, password=hunter2", "cannot be read"),
        ("mysql+pymysql://root:hunter2@db/x", "cannot be read|only SQLite and PostgreSQL"),
        ("sqlite://", "in memory"),
        ("sqlite:////proc/nowhere/registry.db", "cannot write"),
        (
            "postgresql+psycopg://someone:hunter2@127.0.0.1:1/x",
            r"someone:\*\*\*@127.0.0.1.*check that the database runs",
        ),
    ],
)
def test_a_registry_that_cannot_be_opened_is_one_line_without_the_password(url: str, words: str) -> None:
    with pytest.raises(Exception, match=words) as caught:
        Registry.open(url)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_bytes(b"this is no database, only some text that is long enough" * 100)
    with pytest.raises(RegistryError, match=r"registry\.db.*backups/"):
        Registry.open(f"sqlite:///{path}")


# -- migrations -----------------------------------------------------------------------------------------

SECOND = """
import sqlalchemy as sa
from alembic import op
revision = "0002"
down_revision = "0001"
branch_labels = depends_on = None
def upgrade():
    with op.batch_alter_table("runs") as batch:
        batch.add_column(sa.Column("remark", sa.Text(), nullable=False, server_default="none"))
    {trouble}
"""


@pytest.fixture
def newer_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that makes this process a later version, with one more migration."""

    def install(trouble: str = "pass") -> None:
        folder = tmp_path / "migrations"
        shutil.copytree(Path(migration.__file__).parent / "migrations", folder, dirs_exist_ok=True)
        (folder / "versions" / "r0002_remark.py").write_text(SECOND.format(trouble=trouble))
        original = migration._alembic()
        original.set_main_option("script_location", str(folder))
        monkeypatch.setattr(migration, "_alembic", lambda: original)

    return install


def test_an_older_registry_is_backed_up_then_brought_forward(
    registry_url: str, tmp_path: Path, newer_version: Any
) -> None:
    old = Registry.open(registry_url)
    new_run(old)
    old.close()
    newer_version()
    new = Registry.open(registry_url, backups=tmp_path / "backups")
    with new.reading() as session:
        assert session.execute(text("SELECT name, remark FROM runs")).all() == [("first", "none")]
    copies = list((tmp_path / "backups").iterdir()) if new.is_sqlite else []
    assert len(copies) == new.is_sqlite
    for copy in copies:
        assert copy.name.startswith("registry-0001-")
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        before = sqlite3.connect(copy)
        assert before.execute("SELECT name FROM runs").fetchall() == [("first",)]
        assert "remark" not in [row[1] for row in before.execute("PRAGMA table_info(runs)")]
        before.close()
    new.close()


def test_a_migration_that_fails_leaves_the_registry_as_it_was(registry_url: str, newer_version: Any) -> None:
    old = Registry.open(registry_url)
    new_run(old)
    newer_version('op.execute("SELECT * FROM nowhere")')
    with pytest.raises(RegistryError, match="nowhere"):
        Registry.open(registry_url)
    with old.reading() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"
        assert "remark" not in [column["name"] for column in inspect(old.engine).get_columns("runs")]
        assert find_run(session, "first").name == "first"
    old.close()


def test_a_registry_of_a_newer_version_is_refused_and_left_alone(registry: Registry, registry_url: str) -> None:
    with registry.writing() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(RegistryError, match="made by a newer edgeduet"):
        Registry.open(registry_url)
    with registry.reading() as session:
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == "9999"


# -- runs -----------------------------------------------------------------------------------------------


def test_a_name_is_taken_once_and_looked_up_with_a_suggestion(registry: Registry) -> None:
    new_run(registry)
    with registry.writing() as session, pytest.raises(Conflict, match="there is a run 'first' already"):
        add_run(session, config(), NOW)
    with registry.reading() as session:
        with pytest.raises(UnknownName, match="did you mean 'first'"):
            find_run(session, "frist")
        assert find_run(session, "latest").name == "first"


@pytest.mark.parametrize("name", ["../etc", "a/b", "", ".hidden", "a\nb", "a\x1b[31m", "é", "x" * 101, "-rf"])
def test_a_run_cannot_be_named_like_a_path_or_an_escape(registry: Registry, name: str) -> None:
    with registry.writing() as session, pytest.raises(ConfigError) as caught:
        add_run(session, config(name), NOW)
    assert str(caught.value).isprintable()


def test_a_run_that_was_killed_is_found_out_from_what_flower_says(registry: Registry) -> None:
    with registry.writing() as session:
        for number, name in enumerate(["killed", "alive", "stopped", "forgotten", "done", "ended"]):
            run = begin_run(session, config(name), str(2**63 + number), NOW)
            if name == "stopped":
                wish(session, run.id, STOP, True, by="ana", now=NOW)
    said = {str(2**63): "finished:failed", str(2**63 + 1): "running", str(2**63 + 2): "finished:stopped"}
    # A SuperLink that was told to end says of its runs that they were stopped; nobody had ordered it.
    said |= {str(2**63 + 4): "finished:completed", str(2**63 + 5): "finished:stopped"}
    with registry.writing() as session:
        lines = reconcile(session, said, NOW)
    with registry.reading() as session:
        states = {run.name: run.state for run in session.scalars(select(Run))}
        assert states == {
            "killed": "failed",
            "alive": "running",
            "stopped": "stopped",
            "forgotten": "failed",
            "done": "finished",
            "ended": "failed",
        }
        assert interrupted_run(session) is None  # one is alive
        assert "runs resume killed" in find_run(session, "killed").error
    assert len(lines) == 5
    with registry.writing() as session:
        end_run(session, find_run(session, "alive").id, "failed", NOW, "too few clients")
        ended = interrupted_run(session)
        assert ended is not None and ended.name == "ended"
        end_run(session, ended.id, "finished", NOW)
        assert interrupted_run(session) is None  # the newest one is done
        begin_run(session, config("newest"), "7", NOW)
        reconcile(session, {}, NOW)
        found = interrupted_run(session)
        assert found is not None
        assert found.name == "newest"
        end_run(session, found.id, "failed", NOW, "too few clients")
        assert interrupted_run(session) is None


def test_an_error_with_nul_or_of_any_length_can_be_noted(registry: Registry) -> None:
    run = new_run(registry)
    with registry.writing() as session:
        end_run(session, run, "failed", NOW, "bad\x00 " + "é" * 10_000)
    with registry.reading() as session:
        assert find_run(session, "first").error.startswith("bad é")


# -- events ---------------------------------------------------------------------------------------------


def round_event(stage: int, round: int, **fields: Any) -> dict[str, Any]:
    return {
        "stage": stage,
        "round": round,
        "asked": [0, 1, 2],
        "skipped": False,
        "clients": [{"client": 0, "examples": 5, "loss": 0.5, "accuracy": 0.5, "steps": 1}],
        "rejected": {"no-answer": 1},
        "failures": [{"client": 1, "reason": "client-error", "text": "no\x00 camera"}],
        "missing": [2],
        "loss": 0.5,
        "accuracy": None,
        "trained": ["prompt"],
        "dispatch": {"0": [1, 2]},
        "bytes_down": 2**40,
        "bytes_up": 7,
        "timing": {"seconds": 1.5, "client_seconds": 0.5},
        **fields,
    }


def evaluate_event(stage: int) -> dict[str, Any]:
    counts = {
        "personal": [3, 2],
        "shared": [1, 1],
        "totals": [4, 4],
        "personal_common": [-1, -1],
        "common_totals": [0, 0],
    }
    return {
        "stage": stage,
        "clients": [{"client": c, **counts, "held_out": -1, "held_out_total": 0} for c in (0, 1)],
        "absent": [2],
        "failures": [],
        "common": {"correct": [5, 6], "totals": [10, 10], "held_out": -1, "held_out_total": 0},
        "bytes_down": 1,
        "bytes_up": 1,
        "timing": {"seconds": 1.0, "client_seconds": 0.5},
    }


def whole_run(recorder: JsonlRecorder) -> list[int]:
    """Record two stages of two rounds; return the file's length after each event."""
    ends = []

    def note(event: str, **fields: Any) -> None:
        recorder.record(event, **fields)
        ends.append(recorder.position())

    note("run-start", stages=2, clients=3)
    for stage in range(2):
        note("stage-start", stage=stage)
        for round in range(2):
            note("round", **round_event(stage, round))
        note("evaluate", **evaluate_event(stage))
    note("run-end", skipped_rounds=0)
    return ends


def contents(registry: Registry, times: bool = False) -> dict[str, Any]:
    """Everything the listener writes, without the moments."""
    found: dict[str, Any] = {}
    with registry.reading() as session:
        for table in (Stage, Round, ClientMetric):
            columns = [column.name for column in table.__table__.columns if times or not column.name.endswith("_at")]
            rows = [{name: getattr(row, name) for name in columns} for row in session.scalars(select(table))]
            found[table.__tablename__] = sorted(rows, key=lambda row: json.dumps(row, default=str, sort_keys=True))
    return found


def recorded(registry: Registry, folder: Path, name: str) -> tuple[JsonlRecorder, int]:
    run = new_run(registry, name)
    return JsonlRecorder(folder / f"{name}.jsonl", [RegistryListener(registry, run)]), run


def test_each_event_becomes_rows(registry: Registry, tmp_path: Path) -> None:
    recorder, run = recorded(registry, tmp_path, "first")
    whole_run(recorder)
    found = contents(registry)
    assert sorted((row["stage"], row["round"]) for row in found["rounds"]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {row["bytes_down"] for row in found["rounds"]} == {2**40}
    assert found["rounds"][0]["failures"][0]["text"] == "no\x00 camera"
    assert [row["common"]["correct"] for row in found["stages"]] == [[5, 6], [5, 6]]
    metrics = {(row["stage"], row["client"], row["metric"]): row["value"] for row in found["client_metrics"]}
    assert metrics[1, 0, "personal/1"] == 2
    assert metrics[0, 1, "common/0"] == -1
    assert len(metrics) == 2 * 2 * 12
    with registry.reading() as session:
        assert (find_run(session, "first").stages, position(session, run).stage) == (2, 2)


@pytest.mark.parametrize("cut", range(10))
def test_a_resumed_run_leaves_the_same_rows_as_an_uninterrupted_one(
    registry_url: str, tmp_path: Path, cut: int
) -> None:
    if cut % 3 and registry_url.startswith("postgresql"):
        pytest.skip("every third place is enough for the second database")
    registry = Registry.open(registry_url)
    recorder, run = recorded(registry, tmp_path, "first")
    ends = whole_run(recorder)
    uninterrupted = contents(registry)
    with registry.reading() as session:
        first_round = session.get_one(Round, (run, 0, 0)).ended_at
    # Killed at the end, taken up again from a checkpoint made after event number `cut`.
    again = JsonlRecorder(recorder.path, [RegistryListener(registry, run)])
    again.rewind(ends[cut])
    kept = list(read_events(recorder.path))
    after_cut = contents(registry)
    assert len(after_cut["rounds"]) == sum(event["event"] == "round" for event in kept)
    assert sum(row["evaluated"] for row in after_cut["stages"]) == sum(e["event"] == "evaluate" for e in kept)
    assert len(after_cut["client_metrics"]) == 24 * sum(e["event"] == "evaluate" for e in kept)
    whole = list(_all_events())[cut + 1 :]
    for event in whole:
        again.record(**event)
    assert contents(registry) == uninterrupted
    if cut >= 2:
        with registry.reading() as session:
            assert session.get_one(Round, (run, 0, 0)).ended_at == first_round
    registry.close()


def _all_events() -> Iterator[dict[str, Any]]:
    yield {"event": "run-start", "stages": 2, "clients": 3}
    for stage in range(2):
        yield {"event": "stage-start", "stage": stage}
        for round in range(2):
            yield {"event": "round", **round_event(stage, round)}
        yield {"event": "evaluate", **evaluate_event(stage)}
    yield {"event": "run-end", "skipped_rounds": 0}


def test_rounds_trained_again_replace_those_that_were_there(registry: Registry, tmp_path: Path) -> None:
    recorder, _ = recorded(registry, tmp_path, "first")
    whole_run(recorder)
    recorder.record("round", **round_event(0, 1, loss=9.0))
    found = contents(registry)
    assert [(row["stage"], row["round"], row["loss"]) for row in found["rounds"]] == [(0, 0, 0.5), (0, 1, 9.0)]
    assert [(row["stage"], row["evaluated"]) for row in found["stages"]] == [(0, False)]
    assert found["client_metrics"] == []


def test_two_runs_do_not_touch_each_other(registry: Registry, tmp_path: Path) -> None:
    first, _ = recorded(registry, tmp_path, "first")
    whole_run(first)
    second, run = recorded(registry, tmp_path, "second")
    second.rewind(0)
    second.record("run-start", stages=2)
    second.record("stage-start", stage=0)
    second.record("round", **round_event(0, 0))
    found = contents(registry)
    assert [row["run_id"] for row in found["rounds"]].count(run) == 1
    assert len(found["rounds"]) == 5


def test_events_wait_while_the_database_does_not_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "registry.db"
    registry = Registry.open(f"sqlite:///{path}")
    recorder, _ = recorded(registry, tmp_path, "first")
    recorder.record("run-start", stages=2)
    recorder.record("stage-start", stage=0)
    registry.engine.dispose()
    away = tmp_path / "away.db"
    os.rename(path, away)
    path.mkdir()
    recorder.record("round", **round_event(0, 0))
    assert "wait for the registry" in caplog.text
    path.rmdir()
    os.rename(away, path)
    recorder.record("round", **round_event(0, 1))
    assert [(row["stage"], row["round"]) for row in contents(registry)["rounds"]] == [(0, 0), (0, 1)]
    registry.close()
