"""Whether a device may train now: hours, battery, metered link."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime, time

import psutil

from edgeduet_client.device.device_config import LimitsSection, parse_hours

# NetworkManager answers in milliseconds, or hangs with its bus.
_ASK_LIMIT = 5.0


@dataclass(frozen=True)
class Surroundings:
    """What a device knows of itself at one moment.

    Attributes:
        now: local time.
        on_battery: no mains power; ``False`` where there is no battery.
        metered: the link is paid by volume.
    """

    now: datetime
    on_battery: bool
    metered: bool


def look_around(limits: LimitsSection) -> Surroundings:
    """Return how things are now."""
    return Surroundings(datetime.now(), _on_battery(), limits.metered == "yes" or _asked_metered(limits))


def why_not_train(limits: LimitsSection, around: Surroundings) -> str | None:
    """Return why a device does not train now, or ``None`` if it may."""
    if not limits.train:
        return "training is switched off ([limits] train)"
    hours = parse_hours(limits.hours)
    if hours is not None and not within(hours, around.now.time()):
        return f"it is outside the hours for training, {limits.hours}"
    if around.on_battery and not limits.train_on_battery:
        return "it runs on battery ([limits] train_on_battery)"
    if around.metered and not limits.train_on_metered:
        return "the link is metered ([limits] train_on_metered)"
    return None


def within(hours: tuple[time, time], now: time) -> bool:
    """Whether ``now`` is in ``[begin, end)``, which may go over midnight."""
    begin, end = hours
    if begin < end:
        return begin <= now < end
    return now >= begin or now < end


def _on_battery() -> bool:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and battery.power_plugged is False


def _asked_metered(limits: LimitsSection) -> bool:
    if limits.metered != "auto" or shutil.which("nmcli") is None:
        return False
    try:
        done = subprocess.run(
            ["nmcli", "--terse", "--fields", "GENERAL.STATE,GENERAL.METERED", "device", "show"],
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return metered_in(done.stdout)


def metered_in(answer: str) -> bool:
    """Whether a connected device of NetworkManager's is metered, in the answer of ``nmcli device show``."""
    for device in answer.split("\n\n"):
        facts = dict(line.partition(":")[::2] for line in device.splitlines())
        connected = facts.get("GENERAL.STATE", "").startswith("100")
        if connected and facts.get("GENERAL.METERED", "").startswith("yes"):
            return True
    return False
