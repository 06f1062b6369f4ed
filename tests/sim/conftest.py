"""Fixtures of the simulation's tests."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from recorded_runs import record_run as write_run


@pytest.fixture
def record_run(tmp_path: Path) -> partial[Path]:
    """Write a run folder; see :func:`recorded_runs.record_run`."""
    return partial(write_run, tmp_path / "runs")
