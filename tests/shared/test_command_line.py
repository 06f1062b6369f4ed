"""Every command ends in one line and an exit code that scripts can rely on."""

from __future__ import annotations

import pytest

from edgeduet_shared.command_line import run_command_line
from edgeduet_shared.errors import ConfigError


def raising(error: Exception):
    def app() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ConfigError("key 'x' is unknown; remove it"), "error: key 'x' is unknown; remove it\n", 2),
        (
            ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
            "error: 'torch.nn' is not installed; get it with: pip install 'edgeduet[export]'\n",
            2,
        ),
        (
            ModuleNotFoundError("No module named 'grpc'", name="grpc"),
            "error: 'grpc' is not installed; get it with: pip install 'edgeduet[llm]'\n",
            2,
        ),
        (
            ModuleNotFoundError("No module named 'edgeduet_client.gone'", name="edgeduet_client.gone"),
            "error: ModuleNotFoundError: No module named 'edgeduet_client.gone' "
            "(a bug of edgeduet; EDGEDUET_DEBUG=1 shows where)\n",
            1,
        ),
        (
            ZeroDivisionError("oh"),
            "error: ZeroDivisionError: oh (a bug of edgeduet; EDGEDUET_DEBUG=1 shows where)\n",
            1,
        ),
    ],
)
def test_what_is_raised_becomes_a_line_and_an_exit_code(
    error: Exception, line: str, code: int, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        run_command_line(raising(error), extra="llm", extras={"torch": "export"})
    assert ended.value.code == code
    assert capsys.readouterr().err == line


def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EDGEDUET_DEBUG", "1")
    with pytest.raises(ConfigError):
        run_command_line(raising(ConfigError("no")), extra="llm")


def test_a_command_that_does_its_work_ends_quietly(capsys: pytest.CaptureFixture[str]):
    run_command_line(lambda: None, extra="llm")
    assert capsys.readouterr() == ("", "")
