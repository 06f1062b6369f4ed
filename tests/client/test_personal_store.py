"""Personal state survives what happens to devices."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgeduet_client.personal_store import AFTER_STAGE, KEPT, DiskStore, MemoryStore, run_folder_name
from edgeduet_shared.errors import StateError
from edgeduet_shared.names import check_name

RUN = "demo-fed-duet-seed0"


def state(number: float) -> dict[str, np.ndarray]:
    return {"params/a.b": np.full((3, 2), number, np.float32), "stage": np.array(int(number))}


def number(arrays: dict[str, np.ndarray] | None) -> float | None:
    return None if arrays is None else float(arrays["params/a.b"][0, 0])


def written(root: Path, *positions: tuple[int, int]) -> DiskStore:
    """A store with one state per position, its number 10 * stage + round."""
    store = DiskStore(root)
    for stage, round in positions:
        store.save(RUN, 7, (stage, round), state(10 * stage + round))
    return store


def damage(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


# -- on disk -----------------------------------------------------------------------------------------


def test_a_request_starts_from_the_newest_state_made_before_it(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0), (0, 1), (1, 0))

    assert number(store.load(RUN, 7, (0, 0))) is None
    assert number(store.load(RUN, 7, (0, 1))) == 0
    assert number(store.load(RUN, 7, (0, AFTER_STAGE))) == 1
    assert number(store.load(RUN, 7, (1, 0))) == 1, "a round that is repeated starts from the same state again"
    assert number(store.load(RUN, 7, (1, 1))) == 10
    assert number(store.load(RUN, 7, (9, 9))) == 10


def test_arrays_come_back_with_shape_type_and_bits(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    saved = {
        "params/x": np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32).T,
        "none": np.zeros((0, 2), np.float32),
        "stage": np.array(3),
    }
    store.save(RUN, 0, (0, 0), saved)

    loaded = store.load(RUN, 0, (0, 1))

    assert loaded is not None and set(loaded) == set(saved)
    for name, value in saved.items():
        assert loaded[name].dtype == value.dtype and np.array_equal(loaded[name], value)


def test_clients_and_runs_do_not_see_each_other(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0))

    assert store.load(RUN, 8, (9, 9)) is None
    assert store.load("another", 7, (9, 9)) is None


def test_only_the_last_few_states_stay(tmp_path: Path) -> None:
    written(tmp_path, *((0, round) for round in range(KEPT + 2)))

    assert files(tmp_path) == [f"0000-{round:07d}.safetensors" for round in range(2, KEPT + 2)]


def test_a_run_that_goes_on_from_an_earlier_point_leaves_the_later_states_behind(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0), (0, 1), (0, 2))
    store.save(RUN, 7, (0, 1), state(42))

    assert number(store.load(RUN, 7, (9, 9))) == 42
    assert files(tmp_path) == ["0000-0000000.safetensors", "0000-0000001.safetensors"]


@pytest.mark.parametrize("content", ["flipped", "short", "empty"])
def test_a_damaged_state_is_reported_and_moved_aside_and_the_one_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    store = written(tmp_path, (0, 0), (0, 1))
    newest = tmp_path / RUN / "client-7" / "0000-0000001.safetensors"
    if content == "flipped":
        damage(newest)
    else:
        newest.write_bytes(newest.read_bytes()[:100] if content == "short" else b"")

    with caplog.at_level(logging.WARNING, logger="edgeduet.client"):
        assert number(store.load(RUN, 7, (1, 0))) == 0

    assert str(newest) in caplog.text and "damaged" in caplog.text
    assert files(tmp_path) == ["0000-0000000.safetensors", "0000-0000001.damaged"]
    caplog.clear()
    assert number(store.load(RUN, 7, (1, 0))) == 0
    assert not caplog.records, "told once"


def test_when_every_state_is_damaged_the_error_names_folder_and_remedy(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0), (0, 1))
    folder = tmp_path / RUN / "client-7"
    for path in folder.iterdir():
        damage(path)

    with pytest.raises(StateError, match="remove the folder") as caught:
        store.load(RUN, 7, (1, 0))

    assert str(folder) in str(caught.value) and "client 7" in str(caught.value)


def test_a_client_whose_every_state_is_damaged_does_not_silently_start_afresh_when_asked_again(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0))
    damage(tmp_path / RUN / "client-7" / "0000-0000000.safetensors")
    for _ in range(2):
        with pytest.raises(StateError):
            store.load(RUN, 7, (1, 0))


@pytest.mark.parametrize(
    "run",
    [
        "../x",
        "a/../../x",
        "/etc",
        "..\\x",
        "über lauf",
        "x\ny",
        "..",
        ".",
    ],
)
def test_no_run_name_leads_out_of_the_folder(tmp_path: Path, run: str) -> None:
    root = tmp_path / "inner" / "root"
    store = DiskStore(root)
    store.save(run, 0, (0, 0), state(1))

    assert number(store.load(run, 0, (0, 1))) == 1
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and root not in path.resolve().parents]
    assert not outside
    assert [path.name for path in (next(root.iterdir())).iterdir()] == ["client-0"], "a folder of the run's own"


@given(names=st.lists(st.text(max_size=12), min_size=2, max_size=6, unique=True))
@example(names=["a/b", "a_b", "a b", "a%2Fb", "", ".", "..", "%"])
def test_no_two_runs_share_a_folder(names: list[str]) -> None:
    folders = [run_folder_name(name) for name in names]

    assert len(set(folders)) == len(names)
    assert all(name not in ("", ".", "..") and "/" not in name and "\\" not in name for name in folders)


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True))
def test_names_that_runs_may_have_are_their_folders(name: str) -> None:
    assert run_folder_name(check_name(name, "run name")) == name


def test_a_damaged_state_goes_when_enough_newer_ones_are_there(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    for round in range(2):
        store.save(RUN, 7, (0, round), state(round))
    newest = max((tmp_path / RUN / "client-7").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    assert number(store.load(RUN, 7, (0, 2))) == 0
    kept = []
    for round in range(2, 7):
        store.save(RUN, 7, (0, round), state(round))
        kept.append(len(list((tmp_path / RUN / "client-7").glob("*.damaged"))))

    assert kept == [1, 1, 0, 0, 0]


WRITER = """
import sys, numpy as np
from pathlib import Path
from edgeduet_client.personal_store import DiskStore
store = DiskStore(Path(sys.argv[1]))
for round in range(10**6):
    store.save("run", 0, (0, round), {"params/a.b": np.full((300, 300), round, np.float32)})
    print(round, flush=True)
"""


def test_a_kill_while_writing_leaves_the_last_finished_state_readable(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        for _ in range(5):
            assert process.stdout.readline()
        time.sleep(0.013)
        process.send_signal(signal.SIGKILL)
        last = 4 + len(process.stdout.read().split())

    found = number(DiskStore(tmp_path).load("run", 0, (9, 9)))

    assert found is not None and found >= last
    assert process.returncode == -signal.SIGKILL


# -- in memory ---------------------------------------------------------------------------------------


def test_what_a_power_cut_left_half_written_is_removed(tmp_path: Path) -> None:
    store = written(tmp_path, (0, 0))
    folder = tmp_path / RUN / "client-7"
    (folder / ".0000-0000001.safetensors.0123456789ab.tmp").write_bytes(b"half")
    assert number(store.load(RUN, 7, (0, 1))) == 0
    assert [path.name for path in folder.iterdir()] == ["0000-0000000.safetensors"]


def test_memory_keeps_the_newest_state_per_run_and_client() -> None:
    store = MemoryStore()
    store.save("a", 0, (0, 0), state(1))
    store.save("a", 0, (0, 1), state(2))
    store.save("b", 0, (0, 0), state(3))

    assert number(store.load("a", 0, (0, 2))) == 2
    assert number(store.load("b", 0, (0, 2))) == 3
    assert store.load("a", 1, (0, 2)) is None


def test_a_snapshot_of_the_open_run_is_what_restore_brings_back() -> None:
    store = MemoryStore()
    store.open("a")
    store.save("a", 0, (0, 0), state(1))
    store.save("a", 1, (0, 0), state(2))
    store.save("b", 0, (0, 0), state(9))
    kept = store.snapshot([0, 1, 5])
    store.save("a", 0, (0, 1), state(3))
    store.save("a", 4, (0, 1), state(4))

    store.restore(kept)

    assert sorted(kept) == [0, 1]
    assert [number(store.load("a", client, (9, 9))) for client in (0, 1, 4)] == [1, 2, None]
    assert number(store.load("b", 0, (9, 9))) == 9
