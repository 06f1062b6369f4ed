"""Files are replaced whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared import atomic_files
from edgeduet_shared.atomic_files import (
    atomic_output,
    atomic_write_bytes,
    atomic_write_json,
    atomic_write_text,
    write_failure,
)
from edgeduet_shared.errors import EdgeDuetError


@given(content=st.binary(max_size=2000))
def test_bytes_are_read_back_as_written(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "new" / "folder" / "file.bin"
    atomic_write_bytes(path, content)
    assert path.read_bytes() == content
    assert os.listdir(path.parent) == ["file.bin"]


@given(content=st.text(max_size=200))
def test_text_keeps_its_line_ends(tmp_path_factory: pytest.TempPathFactory, content: str) -> None:
    path = tmp_path_factory.mktemp("text") / "file.txt"
    atomic_write_text(path, content)
    assert path.read_bytes() == content.encode("utf-8")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=_json)
def test_json_is_read_back_as_written(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    path = tmp_path_factory.mktemp("json") / "file.json"
    atomic_write_json(path, value)
    assert json.loads(path.read_text("utf-8")) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_json_refuses_numbers_other_parsers_cannot_read(tmp_path: Path, value: object) -> None:
    path = tmp_path / "file.json"
    atomic_write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        atomic_write_json(path, value)
    assert json.loads(path.read_text()) == {"old": 1}


def test_new_files_obey_the_umask_like_any_other_file(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "ours", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_an_exception_in_the_body_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")
    with pytest.raises(RuntimeError, match="stop here"), atomic_output(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError("stop here")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    atomic_write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files.os, step, full)
        with pytest.raises(EdgeDuetError) as caught:
            atomic_write_text(path, "new")
    assert str(path) in str(caught.value)
    assert "free some space" in str(caught.value)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_real_full_device_is_one_clear_line() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError) as caught:
        Path("/dev/full").write_bytes(b"x")
    line = str(write_failure("/dev/full", caught.value))
    assert line == "cannot write /dev/full: the disk is full; free some space or choose another folder"


def test_a_file_where_a_folder_should_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(EdgeDuetError, match="is a file, not a folder"):
        atomic_write_text(tmp_path / "file" / "below", "x")


def test_a_folder_where_the_file_should_be_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(EdgeDuetError, match="the path is a folder"):
        atomic_write_text(tmp_path / "folder", "x")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_folder_without_write_permission_is_one_clear_line(tmp_path: Path) -> None:
    line = str(write_failure(tmp_path / "f", PermissionError(errno.EACCES, "Permission denied")))
    assert line.startswith(f"cannot write {tmp_path / 'f'}: permission denied; choose")
    assert "\n" not in line


def test_an_unknown_system_error_keeps_the_systems_words(tmp_path: Path) -> None:
    assert "Input/output error" in str(write_failure(tmp_path, OSError(errno.EIO, "Input/output error")))


def test_a_reader_never_sees_half_a_file_even_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = textwrap.dedent(
        """
        import sys
        from edgeduet_shared.atomic_files import atomic_write_bytes
        while True:
            for letter in b"ab":
                atomic_write_bytes(sys.argv[1], bytes([letter]) * 300_000)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", writer, str(path)])
    try:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for _ in range(50):
            content = path.read_bytes()
            assert len(content) == 300_000
            assert len(set(content)) == 1
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    content = path.read_bytes()
    assert len(content) == 300_000
    assert len(set(content)) == 1
