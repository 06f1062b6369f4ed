"""What the supervisor starts, with what, and what it does when it may not train."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from edgeduet_client.device import supervisor as device_supervisor
from edgeduet_client.device.device_config import DataSection, DeviceConfig, InferenceSection, LimitsSection
from edgeduet_client.device.enrolment import enrol
from edgeduet_client.device.supervisor import (
    Supervisor,
    client_apps,
    inference_programs,
    supernode_command,
    supernode_environment,
)
from edgeduet_client.device.training_rules import HOME_VARIABLE
from edgeduet_server.deployment.pki import Pki
from edgeduet_shared.errors import StateError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    pki = Pki(tmp_path / "pki")
    pki.create(["localhost"])
    enrol(tmp_path / "device", "localhost:1", pki.ca_certificate, "edge-1", partition=1, partitions=3)
    return tmp_path / "device"


def config(home: Path, *, hours: str = "", **limits: object) -> DeviceConfig:
    return DeviceConfig(
        data=DataSection(partition=1, partitions=3),
        limits=LimitsSection.model_validate({"hours": hours, **limits}),
        inference=InferenceSection(classify_port=0),
        home=home,
    )


def test_the_supernode_gets_share_identity_and_limits(home: Path) -> None:
    command = supernode_command(config(home), 4711)
    assert command[command.index("--node-config") + 1] == "partition-id=1 num-partitions=3"
    assert command[command.index("--root-certificates") + 1] == str(home / "identity/ca.crt")
    assert "--insecure" not in command and "--allow-runtime-dependency-installation" not in command
    variables = supernode_environment(config(home, threads=3))
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables[HOME_VARIABLE] == str(home)
    assert variables["EDGEDUET_CACHE"] == str(home / "cache")
    assert variables["FLWR_HOME"] == str(home / "flwr")


def test_while_it_may_not_train_no_supernode_runs_and_status_says_why(home: Path) -> None:
    supervisor = Supervisor(config(home, train=False))
    supervisor.tick()
    assert not supervisor.supernode.running
    noted = json.loads((home / "device.state.json").read_text())
    assert noted["training"] == "paused"
    assert "switched off" in noted["why"]
    assert noted["complaints"] == []


def test_a_device_without_its_key_does_not_start(home: Path) -> None:
    (home / "identity/node_key").unlink()
    with pytest.raises(StateError, match="reset"):
        Supervisor(config(home))


def test_language_models_and_classifier_are_programs_of_their_own(home: Path) -> None:
    served = config(home).model_copy(update={"inference": InferenceSection(llm_models=["a", "b"], llm_port=5)})
    commands = {made.name: list(made.command()) for made in inference_programs(served)}
    assert commands["classify"][1:] == ["-m", "edgeduet_client.device.classify_service", str(home)]
    assert commands["llm"][3:7] == ["llm", "serve", "a", "b"]
    assert inference_programs(config(home)) == []


# In place of a SuperNode: says that it is connected, then holds a connection to the server, or none.
SUPERNODE = """
import socket, sys, time
server = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print("SuperNode ID: 1", flush=True)
if sys.argv[2] == "silent":
    server.close()
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["silent", "speaks"])
def test_a_supernode_that_has_fallen_silent_is_restarted_and_one_that_speaks_is_not(
    home: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_supervisor, "SILENT_LIMIT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        settings = config(home)
        server = settings.server.model_copy(update={"address": f"localhost:{port}"})
        supervisor = Supervisor(settings.model_copy(update={"server": server}))
        program = replace(
            supervisor.supernode.program, command=lambda: [sys.executable, "-c", SUPERNODE, str(port), kind]
        )
        supervisor.supernode.program = program
        try:
            connections = []
            supervisor.tick()
            door.settimeout(60)
            connections.append(door.accept())
            end = time.monotonic() + (60 if kind == "silent" else 3)
            while supervisor.supernode.restarts == 0 and time.monotonic() < end:
                time.sleep(0.1)
                supervisor.tick()
            assert supervisor.supernode.restarts == (1 if kind == "silent" else 0)
            if kind == "silent":
                assert supervisor.state()["training"] != "connected"
                supervisor.tick()
                connections.append(door.accept())
        finally:
            supervisor.supernode.end()
            for connection, _ in connections:
                connection.close()


def test_client_apps_are_found_below_a_supernode_and_nothing_else() -> None:
    # It says "up" when its children run Python: before that they have next to no memory of their own.
    inner = "import time; print(flush=True); time.sleep(60)"
    code = f"import subprocess, sys; inner = {inner!r}\n"
    code += "c = [subprocess.Popen([sys.executable, '-c', inner, n], stdout=subprocess.PIPE) "
    code += "for n in ('flwr-clientapp', 'other')]; [p.stdout.readline() for p in c]; "
    code += "print('up', flush=True); [p.wait() for p in c]"
    node = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert node.stdout is not None and node.stdout.readline() == b"up\n"
        (found,) = client_apps(node.pid)
        assert found[0].cmdline()[-1] == "flwr-clientapp"
        assert found[1] > 1_000_000
    finally:
        for child in psutil.Process(node.pid).children(recursive=True):
            child.kill()
        node.kill()
        node.wait()
        if node.stdout is not None:
            node.stdout.close()
