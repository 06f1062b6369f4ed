"""Make a server home, and check one without starting anything."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.server_config import CONFIG_FILE, NetworkConfig, ServerConfig, write_server_config
from edgeduet_shared.atomic_files import write_failure
from edgeduet_shared.config import parse
from edgeduet_shared.errors import ConfigError, EdgeDuetError

# SuperLink is reached by these from the same machine, by the proxy and by Flower's command line.
_LOOPBACK = ("localhost", "127.0.0.1")
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_RENEW_BEFORE = timedelta(days=30)


def create_home(home: Path, names: Sequence[str], *, public_port: int | None = None) -> ServerConfig:
    """Make a server home: configuration, authority, server certificate, registry.

    Args:
        home: a folder that is not a server home yet; made where missing.
        names: names and addresses by which devices reach the server.

    Raises:
        ConfigError: it is a home already, or a name is none.
        EdgeDuetError: the folder cannot be written, or the registry not made.
    """
    home = home.expanduser().resolve()
    if (home / CONFIG_FILE).exists():
        raise ConfigError(f"{home} is a server home already; change {CONFIG_FILE}, or choose another folder")
    for name in names:
        _check_name(name)
    network: dict[str, object] = {"public_names": list(names)}
    if public_port is not None:
        # The other ports follow it, so that two servers on one machine need one choice each.
        network |= {
            "public_port": public_port,
            "superlink_port": public_port + 1,
            "admin_port": public_port + 2,
            "metrics_port": public_port + 3,
        }
    config = ServerConfig(network=parse(NetworkConfig, network, "--port"), home=home)
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise write_failure(home, error) from error
    Pki(config.folder("pki")).create(certificate_names(config))
    _open_registry(config)
    # Last, since this file makes the folder a home: an interrupted init can be run again.
    write_server_config(config, home / CONFIG_FILE)
    return config


def certificate_names(config: ServerConfig) -> list[str]:
    """Return the names a server's certificate must have."""
    return list(dict.fromkeys([*config.network.public_names, *_LOOPBACK]))


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: in order, or a problem with its remedy."""

    what: str
    problem: str = ""


def check_home(config: ServerConfig, *, now: datetime | None = None) -> list[Finding]:
    """Check what a start needs."""
    from edgeduet_server.deployment.proxy import find_nginx
    from edgeduet_shared.supervision.programs import program

    pki = Pki(config.folder("pki"))
    findings = [
        _tried("certificate", lambda: _check_certificate(config, pki, now or datetime.now(UTC))),
        _tried("registry", lambda: _open_registry(config)),
        _tried("flower-superlink", lambda: program("flower-superlink")),
    ]
    if config.network.proxy == "nginx":
        findings.append(_tried("nginx", find_nginx))
    return findings


def _tried(what: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except EdgeDuetError as error:
        return Finding(what, str(error))
    return Finding(what)


def _check_certificate(config: ServerConfig, pki: Pki, now: datetime) -> None:
    missing = set(certificate_names(config)) - set(pki.names())
    renew = f"`edgeduet-server certificate renew {config.home}`"
    if missing:
        raise ConfigError(f"the server certificate lacks {', '.join(sorted(missing))}; run {renew}")
    left = pki.expires() - now
    if left < _RENEW_BEFORE:
        raise ConfigError(f"the server certificate ends on {pki.expires():%Y-%m-%d}; run {renew}")


def _open_registry(config: ServerConfig) -> None:
    from edgeduet_server.registry.store import Registry

    Registry.open(config.registry_url, backups=config.folder("backups")).close()


def _check_name(name: str) -> None:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if not _NAME.fullmatch(name) or len(name) > 253:
            raise ConfigError(f"--name '{name}' is neither a host name nor an IP address") from None
