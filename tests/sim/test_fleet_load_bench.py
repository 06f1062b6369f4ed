"""The load benchmark, small: ten devices speak the fleet protocol to a real server, and nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "simulations" / "benchmarks"))

from fleet_load_bench import Load, measure, table

from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.e2e
def test_ten_devices_lose_no_round_and_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    paths = ":".join(str(ROOT / folder) for folder in ("shared", "server", "client", "simulations"))
    monkeypatch.setenv("PYTHONPATH", paths)
    load = measure(10, 2, 0.1, tmp_path)
    assert (load.lost_rounds, load.lost_replies, load.evaluated) == (0, 0, 10)
    assert len(load.round_seconds) == 2 and load.bytes_up > 0
    assert {"SuperLink", "ServerApp", "nginx"} <= set(load.cpu)
    assert load.cpu["SuperLink"] > 0 and load.peak_memory > 50_000_000 and load.registry > 0


def test_the_table_has_a_row_per_size() -> None:
    load = Load(10, [2.0, 3.0], 4.0, {"SuperLink": 1.0, "ServerApp": 2.0}, 9.0, 10**8, 10**5, 10**6, 10, 20, 0, 0, 10)
    lines = table([load, Load(**{**vars(load), "devices": 50})]).splitlines()
    assert lines[2].startswith("| 10 | 2.0, 3.0 | 4.0 | 1.5 | 150 |")
    assert lines[3].startswith("| 50 |") and lines[3].endswith("| 0 | 0 |")
    assert lines[5] == "| CPU s of the whole run | ServerApp | SuperLink | devices (not the server) |"
