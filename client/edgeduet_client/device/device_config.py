"""``device.toml``: which server, what this device may do and when, what it serves.

A device lives in one folder, its *home*::

    device.toml      this configuration               classifier/       the personal classifier (ONNX)
    identity/        key pair, the server's authority cache/            features of images
    personal/        what never leaves the device     flwr/, logs/      Flower's own folder; logs, rotated
"""

from __future__ import annotations

from datetime import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from edgeduet_shared.atomic_files import atomic_write_text
from edgeduet_shared.config import parse, read_toml
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.names import check_name
from edgeduet_shared.supervision.log_files import LogConfig
from edgeduet_shared.toml_output import documented_toml

CONFIG_FILE = "device.toml"
_HEADING = "Configuration of an edgeduet device. `edgeduet-client doctor` checks it without starting anything."


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerSection(_Section):
    """Where this device belongs to."""

    name: str = Field(default="edge", description="Name of this device; the operator sees it")
    address: str = Field(default="localhost:9443", description="HOST:PORT of the server, as in its certificate")

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        try:
            return check_name(value, "name")
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @field_validator("address")
    @classmethod
    def _has_host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @property
    def host(self) -> str:
        """Name or address of the server, without brackets."""
        return split_address(self.address)[0]

    @property
    def port(self) -> int:
        """Port of the server."""
        return split_address(self.address)[1]


class DataSection(_Section):
    """What this device trains on: images of its own, or its share of the data set of the run."""

    partition: int = Field(default=0, ge=0, description="Which share of the run's data is this device's, from 0")
    partitions: int = Field(default=1, ge=1, le=100_000, description="Number of shares; the runs' number of clients")
    images: str = Field(
        default="",
        description="Folder with this device's own images, class/*.jpg or domain/class/*.jpg, for runs whose source "
        "is 'device'; new images take part from the next message on; empty = it takes part in no such run",
    )
    labels: str = Field(
        default="",
        description="CSV file with the columns file, class (and domain) that says what the images show; empty = the "
        "names of their folders say it",
    )
    sources: list[str] = Field(
        default=["world", "device"],
        description="Data sources a run may use here, exactly as scenarios write them (world, device, folder:PATH); "
        "runs that name others are refused, so that no server decides which files of this device are read",
    )

    @model_validator(mode="after")
    def _share_exists(self) -> DataSection:
        if self.partition >= self.partitions:
            raise ValueError(f"partition must be below partitions = {self.partitions}, got {self.partition}")
        return self

    @model_validator(mode="after")
    def _labels_belong_to_images(self) -> DataSection:
        if self.labels and not self.images:
            raise ValueError("labels says what images show, but images is empty; name the folder too")
        return self


class LimitsSection(_Section):
    """When this device trains, and with how much of itself. Inference is always there."""

    train: bool = Field(default=True, description="Off: no training at all, inference only")
    threads: int = Field(
        default=1,
        ge=1,
        le=256,
        description="CPU threads of the libraries and of the classifier; training itself uses one, so that rounds "
        "can be repeated",
    )
    memory_mb: int = Field(
        default=0, ge=0, description="Training is ended where it takes more memory than this; 0 = no limit"
    )
    hours: str = Field(
        default="", description='Local times between which to train, like "22:00-06:00"; empty = at any time'
    )
    train_on_battery: bool = Field(default=False, description="Train while no mains power is connected")
    train_on_metered: bool = Field(default=False, description="Train while the link is paid by volume")
    metered: Literal["auto", "yes", "no"] = Field(
        default="auto",
        description="Whether the link is paid by volume; auto: NetworkManager is asked, none = it is not",
    )

    @field_validator("hours")
    @classmethod
    def _are_hours(cls, value: str) -> str:
        parse_hours(value)
        return value


class PrivacySection(_Section):
    """What may leave this device. A run that asks for more is refused, and the operator sees why."""

    send_digest: bool = Field(default=True, description="May send its mean image feature (fed-duet needs it)")
    send_usage: bool = Field(default=True, description="May send how much each dispatched prompt was used")
    send_scores: bool = Field(default=True, description="May send how many of its test images were recognised")
    share_drafter: bool = Field(
        default=False,
        description="May send its own drafter of a language model to be handed to other devices; off: only what is "
        "averaged leaves",
    )
    min_update_noise: float = Field(
        default=0.0, ge=0, description="Least noise multiplier on updates that leave; 0 = none needed"
    )
    min_digest_noise: float = Field(
        default=0.0, ge=0, description="Least noise multiplier on digests that leave; 0 = none needed"
    )


class InferenceSection(_Section):
    """What programs on this device may ask. A token is needed beyond loopback: set EDGEDUET_LLM_TOKEN."""

    host: str = Field(default="127.0.0.1", description="Address to listen on")
    classify_port: int = Field(default=8227, ge=0, le=65535, description="Port of POST /v1/classify; 0 = not served")
    llm_models: list[str] = Field(
        default=[], description="Language models to serve, by name; see `edgeduet-client llm list`"
    )
    llm_port: int = Field(default=8217, ge=1, le=65535, description="HTTP port of the language models (OpenAI's API)")

    @model_validator(mode="after")
    def _ports_differ(self) -> InferenceSection:
        if self.llm_models and self.llm_port == self.classify_port:
            raise ValueError(f"classify_port and llm_port must differ, both are {self.llm_port}")
        return self

    @field_validator("llm_models")
    @classmethod
    def _are_names(cls, value: list[str]) -> list[str]:
        # A leading dash would be read as an option by the command that serves them.
        for name in value:
            if not name or name.startswith("-") or not name.isprintable():
                raise ValueError(f"{name!a} is no name of a model")
        return value


class DeviceConfig(_Section):
    """The whole of ``device.toml``."""

    server: ServerSection = ServerSection()
    data: DataSection = DataSection()
    limits: LimitsSection = LimitsSection()
    privacy: PrivacySection = PrivacySection()
    inference: InferenceSection = InferenceSection()
    logs: LogConfig = LogConfig()
    home: Path = Field(default=Path(), exclude=True, description="Folder of the configuration; not part of the file")

    def folder(self, name: str) -> Path:
        """Return a folder of the home."""
        return self.home / name

    def own_images(self) -> tuple[Path, Path | None] | None:
        """Return the folder of the device's own images and its labels file; relative paths begin at the home."""
        if not self.data.images:
            return None
        labels = self.home / Path(self.data.labels).expanduser() if self.data.labels else None
        return self.home / Path(self.data.images).expanduser(), labels


def load_device_config(home: Path) -> DeviceConfig:
    """Read ``device.toml`` of a home folder.

    Raises:
        ConfigError: no such file, no TOML, an unknown key (with the nearest name) or a value out of bounds.
    """
    home = home.expanduser().resolve()
    path = home / CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"{home} is no device home: there is no {CONFIG_FILE}; run `edgeduet-client enroll {home}`")
    values = read_toml(path)
    if "home" in values:
        raise ConfigError(f"{path}: 'home' cannot be set; it is the folder of the file")
    return parse(DeviceConfig, values, str(path)).model_copy(update={"home": home})


def write_device_config(config: DeviceConfig, path: Path) -> None:
    """Write a configuration with its documentation, key by key."""
    atomic_write_text(path, documented_toml(config, _HEADING))


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    plain = bare != host or ":" not in host
    usable = bare and plain and bare.isascii() and bare.isprintable() and not set(bare) & set(" /@[]'\"\\")
    if not colon or not usable or bare.startswith("-"):
        raise ValueError(f"{text!a} is not HOST:PORT, for example fl.example.org:9443")
    if not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!a}: the port must be a number from 1 to 65535")
    return bare, int(port)


def parse_hours(text: str) -> tuple[time, time] | None:
    """Return begin and end of ``"HH:MM-HH:MM"``, ``None`` for "at any time".

    Raises:
        ValueError: it is neither.
    """
    if not text:
        return None
    first, dash, last = text.partition("-")
    try:
        if not dash or len(first) != 5 or len(last) != 5:
            raise ValueError
        begin, end = time.fromisoformat(first), time.fromisoformat(last)
    except ValueError:
        raise ValueError(f'{text!a} are no hours; write them like "22:00-06:00"') from None
    if begin == end:
        raise ValueError(f'{text!a} has no length; leave it empty for "at any time"')
    return begin, end
