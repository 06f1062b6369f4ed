"""Write the templates under deploy/ from the code that reads them: server.toml, device.toml, proxy/nginx.conf.

    python tools/write_deploy.py          # after a change of a configuration or of the proxy

A test compares them, so that they cannot fall behind.
"""

from __future__ import annotations

from pathlib import Path

from edgeduet_client.device.device_config import CONFIG_FILE as DEVICE_FILE
from edgeduet_client.device.device_config import DeviceConfig, ServerSection, write_device_config
from edgeduet_server.deployment.proxy import nginx_configuration
from edgeduet_server.deployment.server_config import CONFIG_FILE as SERVER_FILE
from edgeduet_server.deployment.server_config import NetworkConfig, ServerConfig, write_server_config
from edgeduet_shared.versions import HEADER

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
NAME = "fl.example.org"
SERVER_HOME = Path("/var/lib/edgeduet/server")


def write_templates(folder: Path) -> None:
    """Write the templates into ``folder``."""
    server = ServerConfig(network=NetworkConfig(public_names=[NAME]), home=SERVER_HOME)
    write_server_config(server, folder / SERVER_FILE)
    device = DeviceConfig(server=ServerSection(name="edge-1", address=f"{NAME}:{server.network.public_port}"))
    write_device_config(device, folder / DEVICE_FILE)
    (folder / "proxy").mkdir(parents=True, exist_ok=True)
    (folder / "proxy" / "nginx.conf").write_text(_example_of_nginx(server), encoding="utf-8")


def _example_of_nginx(server: ServerConfig) -> str:
    lines = nginx_configuration(server).splitlines()
    header = next(place for place, line in enumerate(lines) if HEADER in line)
    # The versions are those of this installation: an example has none.
    kept = lines[1 : header - 1] + lines[header + 1 :]
    first = '# For a proxy of your own ([network] proxy = "external" in server.toml), run as: nginx -c FILE'
    return "\n".join([first, *kept]) + "\n"


if __name__ == "__main__":
    write_templates(DEPLOY)
