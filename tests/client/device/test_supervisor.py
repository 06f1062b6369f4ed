"""What the supervisor starts, with what, and what it does when it may not train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

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
