"""device.toml: every value is documented and bounded, and what cannot be used is refused in one line."""

from __future__ import annotations

import itertools
import tomllib
from datetime import datetime, time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.device.device_config import (
    CONFIG_FILE,
    DataSection,
    DeviceConfig,
    InferenceSection,
    LimitsSection,
    ServerSection,
    load_device_config,
    parse_hours,
    split_address,
    write_device_config,
)
from edgeduet_client.device.permission import Surroundings, metered_in, why_not_train, within
from edgeduet_shared.errors import ConfigError

NOON = datetime(2026, 12, 1, 12, 0)
MINUTES = st.integers(0, 24 * 60 - 1)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    write_device_config(DeviceConfig(), tmp_path / CONFIG_FILE)
    text = (tmp_path / CONFIG_FILE).read_text()
    assert old in text
    (tmp_path / CONFIG_FILE).write_text(text.replace(old, new))
    return tmp_path


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config = DeviceConfig(
        server=ServerSection(name="edge-7", address="[::1]:9443"),
        data=DataSection(partition=2, partitions=3, sources=["world", "folder:/data/p"]),
        limits=LimitsSection(hours="22:00-06:00", memory_mb=900, metered="yes"),
        inference=InferenceSection(llm_models=["smollm2-135m"]),
        home=tmp_path.resolve(),
    )
    write_device_config(config, tmp_path / CONFIG_FILE)
    assert load_device_config(tmp_path) == config


def test_every_key_is_written_with_its_documentation(tmp_path: Path) -> None:
    write_device_config(DeviceConfig(), tmp_path / CONFIG_FILE)
    lines = (tmp_path / CONFIG_FILE).read_text().splitlines()
    values = tomllib.loads("\n".join(lines))
    assert set(values) == set(DeviceConfig.model_fields) - {"home"}
    for before, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith("#"):
            assert before.startswith("# ") and len(before) > 10, line


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("partition = 0", "partition = 1", "partition must be below partitions"),
        ("threads = 1", "threads = 0", "threads"),
        ("threads = 1", "treads = 1", "did you mean 'limits.threads'"),
        ('hours = ""', 'hours = "22-6"', "22:00-06:00"),
        ('hours = ""', 'hours = "08:00-08:00"', "no length"),
        ('address = "localhost:9443"', 'address = "localhost"', "HOST:PORT"),
        ('address = "localhost:9443"', 'address = "--root-certificates:1"', "HOST:PORT"),
        ('name = "edge"', 'name = "../edge"', "is no name"),
        ("llm_models = []", 'llm_models = ["--host"]', "no name of a model"),
        ("[server]", "[server", "TOML"),
        ("[limits]", "[limit]", "unknown key 'limit'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place_and_a_remedy(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_device_config(changed(tmp_path, old, new))
    assert says in str(refused.value)
    assert CONFIG_FILE in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_no_home_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="edgeduet-client enroll"):
        load_device_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("fl.example.org:9443", ("fl.example.org", 9443)), ("[2001:db8::1]:80", ("2001:db8::1", 80)), ("a:1", ("a", 1))],
)
def test_addresses_are_split(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", "a", ":1", "a:", "a:0", "a:65536", "a:1a", "::1:80", "a b:1", "u@h:1", "h/p:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|port"):
        split_address(text)


# -- when to train -------------------------------------------------------------------------------------


@given(MINUTES, MINUTES, MINUTES)
def test_every_minute_is_in_the_hours_or_in_those_of_the_rest_of_the_day(begin: int, end: int, now: int) -> None:
    if begin == end:
        return
    first, last, moment = (time(minute // 60, minute % 60) for minute in (begin, end, now))
    assert within((first, last), moment) != within((last, first), moment)
    assert within((first, last), first) and not within((first, last), last)


@given(MINUTES, MINUTES)
def test_hours_are_read_as_they_are_written(begin: int, end: int) -> None:
    if begin == end:
        return
    text = f"{begin // 60:02}:{begin % 60:02}-{end // 60:02}:{end % 60:02}"
    hours = parse_hours(text)
    assert hours == (time(begin // 60, begin % 60), time(end // 60, end % 60))


def around(*, now: datetime = NOON, on_battery: bool = False, metered: bool = False) -> Surroundings:
    return Surroundings(now, on_battery, metered)


@pytest.mark.parametrize(
    ("limits", "surroundings", "says"),
    [
        ({}, around(), None),
        ({"train": False}, around(), "switched off"),
        ({"hours": "22:00-06:00"}, around(), "22:00-06:00"),
        ({"hours": "22:00-06:00"}, around(now=datetime(2026, 12, 1, 23, 59)), None),
        ({"hours": "22:00-06:00"}, around(now=datetime(2026, 12, 1, 6, 0)), "22:00-06:00"),
        ({}, around(on_battery=True), "battery"),
        ({"train_on_battery": True}, around(on_battery=True), None),
        ({}, around(metered=True), "metered"),
        ({"train_on_metered": True}, around(metered=True), None),
    ],
)
def test_a_device_trains_only_where_nothing_speaks_against_it(
    limits: dict[str, object], surroundings: Surroundings, says: str | None
) -> None:
    why = why_not_train(LimitsSection.model_validate(limits), surroundings)
    assert why is None if says is None else says in (why or "")


def test_only_connected_metered_links_count() -> None:
    idle = "GENERAL.STATE:30 (disconnected)\nGENERAL.METERED:yes"
    wired = "GENERAL.STATE:100 (connected)\nGENERAL.METERED:no (guessed)"
    phone = "GENERAL.STATE:100 (connected)\nGENERAL.METERED:yes (guessed)"
    assert not metered_in("\n\n".join([idle, wired]))
    assert metered_in("\n\n".join([wired, phone]))
    assert not metered_in("")
