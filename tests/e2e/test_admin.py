"""The control plane as real processes: ``edgeduet-server start`` with Flower's SuperLink, and ``edgeduet-admin``.

Shown: the first token, logging in, letting a device in and out of the real SuperLink, a run without devices that
ends with the reason in ``status``, and that no secret is in any log or command line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from edgeduet_server.deployment.home import create_home
from edgeduet_server.deployment.server_config import CONFIG_FILE, ServerConfig, write_server_config
from edgeduet_shared.enrolment import make_request, request_code

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# A quiet machine needs a tenth of it.
PATIENCE = 420.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return ports


@dataclass
class Server:
    """A started server, and an operator's shell beside it."""

    config: ServerConfig
    folder: Path
    process: subprocess.Popen[bytes]
    secrets: list[str] = field(default_factory=list)
    command_lines: set[str] = field(default_factory=set)

    def admin(self, *arguments: str, input: str | None = None, code: int = 0, out: bool = False) -> str:
        """Run ``edgeduet-admin``; return what it printed (on standard error where it was to fail, without ``out``)."""
        process = subprocess.Popen(
            python("edgeduet_server.admin_cli.main", *arguments),
            env=environment() | {"EDGEDUET_ADMIN_CONFIG": str(self.folder / "admin.json"), "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.look()
        printed, errors = process.communicate(input, timeout=PATIENCE)
        assert process.returncode == code, printed + errors
        assert "Traceback" not in errors
        return errors if code and not out else printed

    def json(self, *arguments: str, **more: Any) -> Any:
        return json.loads(self.admin(*arguments, "--json", **more))

    def look(self) -> None:
        """Note the command lines and environments' owners of everything that runs for this test."""
        for process in [psutil.Process(self.process.pid), *psutil.Process().children(recursive=True)]:
            try:
                self.command_lines.add(" ".join(process.cmdline()))
            except psutil.Error:
                continue

    def wait(self, what: str, arguments: tuple[str, ...], until: Any) -> Any:
        """Ask until the answer is right."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self.json(*arguments)
            if until(answer):
                return answer
            time.sleep(3)
        raise AssertionError(f"{what} did not happen; {answer}\n{self.logs()}")

    def logs(self) -> str:
        files = [*self.config.folder("logs").glob("*.log*"), *self.config.home.rglob("error.txt"), self.folder / "out"]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "server", "client", "simulations"))
    return {**os.environ, "PYTHONPATH": path}


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", f"from {module} import main; main()", *arguments]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("admin")
    config = create_home(folder / "home", ["localhost"])
    names = ("public_port", "superlink_port", "admin_port", "metrics_port")
    network = dict(zip(names, free_ports(4), strict=True))
    config = config.model_copy(update={"network": config.network.model_copy(update={**network, "proxy": "external"})})
    write_server_config(config, config.home / CONFIG_FILE)
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            python("edgeduet_server.cli", "start", str(config.home)),
            env=environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Server(config, folder, process)
    try:
        first = made.json("tokens", "create", "first", "--role", "admin", "--home", str(config.home))
        made.secrets.append(first["secret"])
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            for child in psutil.Process().children(recursive=True):
                if any(str(folder) in part for part in child.cmdline()):
                    child.kill()


def test_an_operator_logs_in_and_finds_flower_answering(server: Server) -> None:
    arguments = ("login", "--server", f"localhost:{server.config.network.admin_port}")
    arguments += ("--ca", str(server.config.folder("pki") / "ca.crt"))
    end = time.monotonic() + PATIENCE
    while True:
        try:
            server.admin(*arguments, input=server.secrets[0] + "\n")
            break
        except AssertionError:
            assert time.monotonic() < end, server.logs()
            time.sleep(3)
    status = server.wait(
        "an answer of SuperLink", ("status",), lambda s: not any("SuperLink" in w for w in s["warnings"])
    )
    assert (status["token"], status["devices"], status["run"]) == ("first", 0, None)


def test_a_device_is_let_in_and_locked_out_of_the_real_superlink(server: Server) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    line = make_request(key, name="edge-1", server=f"localhost:{server.config.network.public_port}")
    swapped = make_request(ec.generate_private_key(ec.SECP384R1()), name="edge-1", server="localhost:1")
    said = server.admin("clients", "approve", swapped, "--code", request_code(line), code=2)
    assert "code does not belong to this request" in said
    device = server.json("clients", "approve", "-", "--code", request_code(line), input=line)
    assert device["status"] == "approved"
    assert "was used before" in server.admin("clients", "approve", line, "--code", request_code(line), code=2)
    time.sleep(6)  # what Flower says may be five seconds old
    listed = server.json("clients", "list")["clients"]
    assert [(c["name"], c["node_id"], c["connection"]) for c in listed] == [("edge-1", device["node_id"], "registered")]
    server.admin("clients", "revoke", "edge-1", "--yes")
    again = make_request(key, name="edge-2", server="localhost:1")
    said = server.admin("clients", "approve", again, "--code", request_code(again), code=2)
    assert "a revoked key cannot come back" in said
    assert server.json("clients", "show", "edge-1")["status"] == "revoked"


def test_a_viewer_cannot_change_anything(server: Server) -> None:
    made = server.json("tokens", "create", "looker", "--role", "viewer")
    server.secrets.append(made["secret"])
    environ = environment() | {
        "EDGEDUET_ADMIN_CONFIG": str(server.folder / "admin.json"),
        "EDGEDUET_ADMIN_TOKEN": made["secret"],
    }
    command = python("edgeduet_server.admin_cli.main", "runs", "start", "demo")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: StartRun needs role operator; the token 'looker' is a viewer's\n"
    entry = server.json("audit")["entries"][-1]
    assert (entry["token"], entry["action"], entry["outcome"][:7]) == ("looker", "StartRun", "refused")


def test_a_run_that_no_device_answers_ends_with_the_reason_in_status(server: Server) -> None:
    small = ["data.max_per_class=8", 'data.classes=["circle","square"]', 'data.domains=["photo","sketch"]']
    few = ["federation.clients=2", "federation.node_wait=1", "federation.max_bad_rounds=1"]
    settings = [part for setting in (*small, *few) for part in ("--set", setting)]
    run = server.json("runs", "start", "demo", "--method", "local", "--name", "nobody", *settings)
    assert run["state"] in ("pending", "running")
    ended = server.wait("the end of the run", ("runs", "show", "nobody"), lambda r: r["state"] == "failed")
    assert "0 clients were asked" in ended["error"]
    assert ended["starts"] == 1
    status = server.json("status")
    assert any("run nobody failed" in line and "federation.quorum" in line for line in status["warnings"])
    assert server.json("rounds", "nobody")["rounds"][0]["skipped"]


def test_doctor_and_backup_work_on_the_running_server(server: Server) -> None:
    def wrong(code: int) -> list[str]:
        checks = json.loads(server.admin("doctor", "--json", code=code, out=True))["checks"]
        return [check["what"] for check in checks if not check["ok"]]

    assert wrong(code=1) == ["backup of the registry"]
    out = server.folder / "registry.jsonl.gz"
    server.admin("backup", "--out", str(out))
    assert out.stat().st_size > 500
    assert wrong(code=0) == []


def test_no_secret_is_in_a_log_or_on_a_command_line(server: Server) -> None:
    server.look()
    assert len(server.command_lines) > 4
    seen = server.logs() + "\n".join(server.command_lines)
    assert len(seen) > 1000
    for secret in server.secrets:
        assert secret.split("_", 2)[2] not in seen
