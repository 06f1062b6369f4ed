"""``server.toml``: how a coordinator is reached, where it keeps things, what it does after a crash.

A server lives in one folder, its *home*::

    server.toml      this configuration               runs/NAME/        one folder per training run
    pki/             authority and server certificate logs/             logs, rotated
    registry.db      the registry, if it is SQLite    flwr/, app/       Flower's own folder, the app it is given
    superlink.db     Flower's state                   proxy/            configuration of the proxy
                                                      backups/          registry before each migration
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.config import parse
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.supervision.log_files import LogConfig
from edgeduet_shared.toml_output import documented_toml

CONFIG_FILE = "server.toml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NetworkConfig(_Section):
    """Addresses. Devices need ``public_port`` only."""

    public_names: list[str] = Field(
        default=["localhost"],
        min_length=1,
        description="Names and IP addresses devices use for this server; they go into its certificate",
    )
    public_host: str = Field(default="0.0.0.0", description="Address the proxy listens on")
    public_port: int = Field(default=9443, ge=1, le=65535, description="Port of the proxy: devices connect here")
    proxy: Literal["nginx", "external"] = Field(
        default="nginx",
        description="nginx: started and kept running by edgeduet-server; external: you run one, see deploy/proxy",
    )
    superlink_port: int = Field(default=9444, ge=1, le=65535, description="Flower's SuperLink, on loopback only")
    admin_host: str = Field(default="127.0.0.1", description="Address of the admin service")
    admin_port: int = Field(default=9445, ge=1, le=65535, description="Port of the admin service (gRPC, TLS, tokens)")
    admin_reflection: bool = Field(
        default=False, description="Let tools list the admin service's calls (gRPC reflection)"
    )
    metrics_port: int = Field(default=9446, ge=1, le=65535, description="Readiness and Prometheus, on loopback only")

    @model_validator(mode="after")
    def _ports_differ(self) -> NetworkConfig:
        ports = [self.public_port, self.superlink_port, self.admin_port, self.metrics_port]
        if len(set(ports)) < len(ports):
            raise ValueError(f"the four ports must differ, got {ports}")
        return self


class RegistryConfig(_Section):
    """Where runs, clients, metrics and wishes are kept."""

    url: str = Field(
        default="",
        description="SQLAlchemy URL; empty: SQLite in the home folder. postgresql+psycopg://USER@HOST/DATABASE "
        "takes its password from PGPASSFILE or the environment, not from here",
    )


class TrainingConfig(_Section):
    """What happens to an interrupted training run."""

    resume: Literal["auto", "ask", "never"] = Field(
        default="auto",
        description="auto: go on from the last checkpoint when the server starts; ask: wait for "
        "`edgeduet-admin runs resume`; never: leave it failed",
    )
    pending_limit: float = Field(
        default=60.0, gt=0, description="Seconds a run may wait to start before the server says so and restarts Flower"
    )


class LimitsConfig(_Section):
    """What keeps a long-lived server small."""

    max_request_bytes: int = Field(default=16_000_000, ge=6_000_000, description="Largest request a device may send")
    max_superlink_db_bytes: int = Field(
        default=1_000_000_000,
        ge=10_000_000,
        description="Flower's database is emptied and made anew between runs when it is larger",
    )


class ServerConfig(_Section):
    """The whole of ``server.toml``."""

    network: NetworkConfig = NetworkConfig()
    registry: RegistryConfig = RegistryConfig()
    training: TrainingConfig = TrainingConfig()
    logs: LogConfig = LogConfig()
    limits: LimitsConfig = LimitsConfig()
    home: Path = Field(default=Path(), exclude=True, description="Folder of the configuration; not part of the file")

    @property
    def registry_url(self) -> str:
        """The registry's URL with the default resolved."""
        return self.registry.url or f"sqlite:///{self.home / 'registry.db'}"

    def folder(self, name: str) -> Path:
        """Return a folder of the home."""
        return self.home / name


def load_server_config(home: Path) -> ServerConfig:
    """Read ``server.toml`` of a home folder.

    Raises:
        ConfigError: no such file, no TOML, an unknown key (with the nearest name) or a value out of bounds.
    """
    home = home.expanduser().resolve()
    path = home / CONFIG_FILE
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{home} is no server home: there is no {CONFIG_FILE}; run `edgeduet-server init {home}`"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); correct it, or compare with deploy/server.toml"
        ) from error
    if "home" in values:
        raise ConfigError(f"{path}: 'home' cannot be set; it is the folder of the file")
    return parse(ServerConfig, values, str(path)).model_copy(update={"home": home})


def write_server_config(config: ServerConfig, path: Path) -> None:
    """Write a configuration with its documentation, key by key."""
    heading = "Configuration of an edgeduet server. `edgeduet-server check` reads it without starting anything."
    atomic_write_text(path, documented_toml(config, heading))
