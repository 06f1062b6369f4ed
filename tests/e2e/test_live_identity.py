"""Devices that may not come in: wrong authority, key never let in, revoked key, a clock that is off.

Each is a real device against a live server. The device itself says why and what to do; so does
``edgeduet-admin status``, although Flower tells nobody.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeduet_server.deployment.pki import Pki
from edgeduet_server.deployment.proxy import find_nginx
from edgeduet_shared.errors import EdgeDuetError
from live_deployment import Deployment, LiveDevice, deployed, wait

pytestmark = [pytest.mark.e2e, pytest.mark.long]

# Shows a process another time of day and leaves everything else as it is. libfaketime 0.9.10 does not: under it
# Python's time.sleep fails or never returns.
CLOCK = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = syscall(SYS_clock_gettime, clock, now);
    const char *off = getenv("CLOCK_OFF_BY");
    if (result == 0 && off && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += atol(off);
    return (int)result;
}
time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *into, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    try:
        find_nginx()
    except EdgeDuetError as error:
        pytest.skip(str(error))
    with deployed(tmp_path_factory.mktemp("identity"), devices=1) as made:
        yield made


@pytest.fixture(autouse=True)
def logs_of_a_failure(request: pytest.FixtureRequest, system: Deployment) -> Iterator[None]:
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        print(system.logs())


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that shifts the time of day of whom it is loaded into."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build another clock with (apt install gcc)")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(CLOCK)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", folder / "clock.so", folder / "clock.c"], check=True)
    return folder / "clock.so"


def turned_away(system: Deployment, device: LiveDevice, cause: str, seen: str) -> None:
    """Wait until device and operator know why; the device is then ended."""
    try:
        wait(lambda: device.cause() == cause, f"{device.name} to say {cause}; it says '{device.cause()}'")
        wait(lambda: re.search(seen, system.status()[1]), f"the operator to see '{seen}'", every=3)
        assert not device.connected()
    finally:
        device.end()


def test_a_device_with_another_authority_does_not_talk_to_the_server(system: Deployment, tmp_path: Path) -> None:
    stranger = Pki(tmp_path / "pki")
    stranger.create(["localhost"])
    device = system.enrol("misled", ca=stranger.ca_certificate)
    system.approve(device)
    device.start()
    turned_away(system, device, "wrong-ca", r"127.0.0.1 does not accept this server's certificate \(unknown ca")


def test_a_key_that_nobody_let_in_stays_out_until_somebody_does(system: Deployment) -> None:
    device = system.enrol("newcomer")
    device.start()
    seen = "a device that was never let in tries to connect from 127.0.0.1"
    wait(lambda: device.cause() == "not-registered", "the device to say so")
    assert "clients approve" in device.command("status", code=1)
    wait(lambda: seen in system.status()[1], "the operator to see it", every=3)
    system.approve(device)
    wait(device.connected, "the device that was let in")
    assert "newcomer" not in system.status()[1]
    wait(lambda: seen not in system.status()[1], "nobody to knock", every=3)
    device.end()


def test_a_device_with_the_key_of_another_file_than_the_one_let_in_stays_out(system: Deployment) -> None:
    device, other = system.enrol("swapped"), system.enrol("donor")
    system.approve(device)
    for name in ("node_key", "node_key.pub"):
        (device.home / "identity" / name).write_bytes((other.home / "identity" / name).read_bytes())
    device.start()
    turned_away(system, device, "not-registered", "a device that was never let in tries to connect from 127.0.0.1")
    assert system.json("clients", "show", "swapped")["connection"] == "registered"


@pytest.mark.parametrize(
    ("seconds", "seen"),
    [
        (60, r"its clock is \d+ s ahead of this server's"),
        (-1200, r"its clock is \d+ s behind this server's"),
        # The certificate is not valid yet by that clock: the device does not get as far as its key.
        (-100_000, r"does not accept this server's certificate"),
    ],
)
def test_a_device_whose_clock_is_off_stays_out_until_it_is_set(
    system: Deployment, clock: Path, seconds: int, seen: str
) -> None:
    device = system.enrol(f"clock{abs(seconds)}")
    system.approve(device)
    device.start({"LD_PRELOAD": str(clock), "CLOCK_OFF_BY": str(seconds)})
    turned_away(system, device, "clock", seen)
    if "its clock" in seen:
        assert re.search(seen, system.json("clients", "show", device.name)["refused"])
        assert re.search(seen, system.admin("clients", "list"))
    device.start()
    wait(device.connected, "the device with its clock set")
    device.end()


def test_a_revoked_device_is_thrown_out_and_never_comes_back(system: Deployment) -> None:
    device = system.devices[0]
    system.json("clients", "revoke", device.name, "--yes")
    turned_away(system, device, "not-registered", f"device {device.name} at 127.0.0.1 is refused: it was revoked")
    shown = system.json("clients", "show", device.name)
    assert shown["status"] == "revoked" and "enrol it again with a new key" in shown["refused"]
    device.start()
    wait(lambda: device.cause() == "not-registered", "the device to be refused again")
    assert "--identity" in device.command("status", code=1)
    device.end()
