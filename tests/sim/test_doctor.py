"""``edgeduet-sim doctor``: every finding says what to do, and only what stops the demo is bad."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from edgeduet_sim import doctor
from edgeduet_sim.doctor import Check, check_machine


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def by_subject(checks: tuple[Check, ...]) -> dict[str, Check]:
    return {check.subject: check for check in checks}


def test_this_machine_can_run_the_demo():
    found = by_subject(check_machine())
    assert [check.line() for check in found.values() if check.verdict == "bad"] == []
    assert found["backbone clip-world"].verdict == "good"
    assert found["hub"].verdict == "note"


def test_a_missing_package_is_bad_and_says_how_to_install(monkeypatch: pytest.MonkeyPatch):
    real = metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    bad = [check for check in check_machine() if check.verdict == "bad"]
    assert len(bad) == 1 and "missing peft" in bad[0].text and "pip install" in bad[0].text


def test_an_unusable_cache_folder_is_bad_and_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEDUET_CACHE", str(tmp_path / "file"))
    bad = [check for check in check_machine() if check.verdict == "bad"]
    assert len(bad) == 1 and "EDGEDUET_CACHE" in bad[0].text


def test_more_threads_are_a_note(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert by_subject(check_machine())["threads"].verdict == "note"


def test_a_hub_that_cannot_be_reached_is_a_note_not_a_failure(monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_reaches", lambda host: False)
    assert by_subject(check_machine())["hub"].verdict == "note"


def test_reaching_a_host_never_raises():
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network")

    assert doctor._reaches("huggingface.co", refuse) is False
