"""What every test runs under: one thread, no network, no telemetry, its own cache folder.

The environment is set before anything imports torch or flwr, and child processes inherit it.
"""

from __future__ import annotations

import os
import signal

# Started in the background of a shell script, Python inherits an ignored Ctrl-C, and so would every program that a
# test starts and then interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_QUIET = {
    # On few cores a second thread costs more than it gains, and one thread is what makes runs repeatable.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MPLBACKEND": "Agg",
}
os.environ.update(_QUIET)

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

# Timings on a shared machine say nothing about the code, so no example has a deadline.
settings.register_profile(
    "edgeduet", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("ci", settings.get_profile("edgeduet"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "edgeduet")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Torch computes on one thread, as everything that must be repeatable does."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A feature cache and Flower home of this test session only; returns the cache folder."""
    cache = tmp_path_factory.mktemp("cache")
    patch = pytest.MonkeyPatch()
    patch.setenv("EDGEDUET_CACHE", str(cache))
    patch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flwr")))
    yield cache
    patch.undo()


def _shared_data_folder() -> Path:
    return Path(os.environ.get("EDGEDUET_DATA") or ROOT.parent / "shared" / "data")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the real images ``pacs/`` and ``caltech101/``; skips where there are none."""
    folder = _shared_data_folder()
    if not (folder / "pacs").is_dir():
        pytest.skip(f"no real images in {folder}; set EDGEDUET_DATA=FOLDER with pacs/ and caltech101/ in it")
    return folder


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Root folder of the checkout."""
    return ROOT
