"""Check a device without changing anything: every finding says what is in order, or what to do."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec

import psutil

from edgeduet_client.classifier.classifier_folder import ERROR_FILE, ClassifierFolder
from edgeduet_client.device.device_config import DeviceConfig
from edgeduet_client.device.enrolment import AUTHORITY, NODE_KEY, PUBLIC_KEY, read_authority, read_key
from edgeduet_client.device.exit_reasons import explain_exit
from edgeduet_client.device.server_probe import ServerAnswer, ask_server, judge_clock, unverified_skew
from edgeduet_client.device.supervisor import CONNECTED, KIND, free_port, supernode_command, supernode_environment
from edgeduet_shared.atomic_files import atomic_write_bytes
from edgeduet_shared.data.own_images import count_images
from edgeduet_shared.enrolment import public_key_text
from edgeduet_shared.errors import ConfigError, EdgeDuetError, FederationError, StateError
from edgeduet_shared.supervision.child import end_family
from edgeduet_shared.supervision.programs import program
from edgeduet_shared.supervision.running_state import RunningState
from edgeduet_shared.versions import installed_versions, misfits, versions_text

# What a round needs: a ClientApp with torch (measured 0.4 GB), and room for states and features.
LEAST_MEMORY = 500_000_000
LEAST_DISK = 500_000_000
_RENEW_BEFORE = timedelta(days=14)
_PROBE_S = 90.0


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: in order, or a problem with its remedy.

    Attributes:
        detail: what was found where it is in order.
    """

    what: str
    detail: str = ""
    problem: str = ""


def examine(config: DeviceConfig) -> list[Finding]:
    """Check everything a device needs, the near things first."""
    findings = [
        _tried("state folder", lambda: _writable(config)),
        _tried("free disk", lambda: _free_disk(config)),
        _tried("free memory", _free_memory),
        _tried("identity", lambda: _identity(config)),
        _tried("authority", lambda: _authority(config)),
        _tried("programs", lambda: _programs(config)),
        _tried("classifier", lambda: _classifier(config)),
        _tried("own images", lambda: _own_images(config)),
    ]
    return [*findings, *_about_server(config)]


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, check())
    except EdgeDuetError as error:
        return Finding(what, problem=str(error))


def _about_server(config: DeviceConfig) -> list[Finding]:
    answers: list[ServerAnswer] = []

    def reach() -> str:
        answers.append(ask_server(config))
        return f"{config.server.address} answers over TLS"

    findings = [_tried("server", reach)]
    if not answers:
        skew = unverified_skew(config)
        return findings if skew is None else [*findings, _tried("clock", lambda: judge_clock(skew))]
    answer = answers[0]
    findings += [
        _tried("server certificate", lambda: _judge_certificate(answer.certificate_ends)),
        _tried("clock", lambda: judge_clock(answer.skew)),
        _tried("versions", lambda: judge_versions(answer.versions)),
    ]
    if config.limits.train and not any(finding.problem for finding in findings):
        findings.append(_tried("key registered", lambda: _registered(config)))
    return findings


# -- near ----------------------------------------------------------------------------------------------


def _writable(config: DeviceConfig) -> str:
    for name in ("personal", "cache", "classifier", "flwr", "logs"):
        probe = config.folder(name) / ".doctor"
        atomic_write_bytes(probe, b"ok")
        probe.unlink()
    return str(config.home)


def _free_disk(config: DeviceConfig) -> str:
    free = shutil.disk_usage(config.home).free
    if free < LEAST_DISK:
        raise StateError(f"{config.home}: {free / 1e6:.0f} MB are free, {LEAST_DISK / 1e6:.0f} are needed; free some")
    return f"{free / 1e9:.1f} GB"


def _free_memory() -> str:
    available = int(psutil.virtual_memory().available)
    if available < LEAST_MEMORY:
        raise StateError(
            f"{available / 1e6:.0f} MB are available, training needs {LEAST_MEMORY / 1e6:.0f}; end other programs"
        )
    return f"{available / 1e9:.1f} GB"


def _own_images(config: DeviceConfig) -> str:
    found = config.own_images()
    if found is None:
        return "none; runs with data.source = 'device' are refused"
    counts = count_images(*found)
    shown = ", ".join(f"{name} ({count})" for name, count in list(counts.items())[:6])
    more = f" and {len(counts) - 6} more" if len(counts) > 6 else ""
    return f"{sum(counts.values())} in {found[0]}: {shown}{more}"


def _identity(config: DeviceConfig) -> str:
    key = read_key(config.home)
    path = config.home / NODE_KEY
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise StateError(f"{path} can be read by other users (mode {mode:o}); run `chmod 600 {path}`")
    if path.stat().st_uid != os.getuid():
        raise StateError(f"{path} belongs to another user; run as that user, or `chown` the whole home")
    public = config.home / PUBLIC_KEY
    if not public.is_file() or public.read_text("utf-8", errors="replace").strip() != public_key_text(key.public_key()):
        raise StateError(f"{public} does not belong to {path.name}; run `ssh-keygen -y -f {path} > {public}`")
    return config.server.name


def _authority(config: DeviceConfig) -> str:
    from cryptography import x509

    path = config.home / AUTHORITY
    ends = x509.load_pem_x509_certificate(read_authority(path)).not_valid_after_utc
    if ends < datetime.now(UTC):
        raise StateError(f"{path} ended on {ends:%Y-%m-%d}; get the server's new pki/ca.crt over a way you trust")
    return f"valid until {ends:%Y-%m-%d}"


def _programs(config: DeviceConfig) -> str:
    found = []
    if config.limits.train:
        program("flower-supernode")
        for module in ("torch", "onnxscript"):
            if find_spec(module) is None:
                raise FederationError(f"'{module}' is not installed; training needs it: pip install 'edgeduet[device]'")
        found.append("training")
    if config.inference.classify_port:
        if find_spec("onnxruntime") is None:
            raise FederationError("'onnxruntime' is not installed; classifying needs it: pip install 'edgeduet[llm]'")
        found.append("classifying")
    return ", ".join([*found, *config.inference.llm_models]) or "nothing to run: see [limits] and [inference]"


def _classifier(config: DeviceConfig) -> str:
    folder = config.folder("classifier")
    error = folder / ERROR_FILE
    if error.is_file():
        raise StateError(
            f"the last export failed ({error.read_text('utf-8', errors='replace').strip()}); the classifier before it "
            "is in use; it is tried again after the next stage"
        )
    found = ClassifierFolder(folder).current()
    if found is None:
        return "none yet; made after the first stage"
    return f"of run {found[1].run}, stage {found[1].stage}"


# -- far -----------------------------------------------------------------------------------------------


def _judge_certificate(ends: datetime) -> str:
    if ends - datetime.now(UTC) < _RENEW_BEFORE:
        raise ConfigError(
            f"the server's certificate ends on {ends:%Y-%m-%d}; on the server run `edgeduet-server certificate renew`"
        )
    return f"valid until {ends:%Y-%m-%d}"


def judge_versions(theirs: dict[str, str]) -> str:
    """Compare the server's versions with those installed here.

    Raises:
        StateError: they do not fit.
    """
    ours = installed_versions()
    if not theirs:
        return f"{versions_text(ours)}; the server does not tell its own"
    wrong = misfits(ours, theirs)
    if wrong:
        raise StateError(f"{'; '.join(wrong)} (the server): install the same release of edgeduet on both")
    return versions_text(ours)


def _registered(config: DeviceConfig) -> str:
    state = RunningState(config.home, KIND).read()
    if state is None:
        return probe_registration(config)
    if state["training"] == "connected":
        return "connected"
    if state["training"] == "paused":
        return f"not asked: training pauses, {state['why']}"
    raise FederationError(state["why"] or "the device runs, but is not connected yet; look again in a minute")


def probe_registration(config: DeviceConfig, *, limit: float = _PROBE_S) -> str:
    """Connect once as the SuperNode would, and leave.

    Raises:
        FederationError: the server does not accept this device's key.
    """
    process = subprocess.Popen(
        [*supernode_command(config, free_port()), "--max-retries", "1"],
        cwd=config.home,
        env=supernode_environment(config),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    # Ending the process ends the reading below.
    deadline = threading.Timer(limit, end_family, (process.pid,))
    deadline.start()
    assert process.stdout is not None
    text = ""
    try:
        for line in process.stdout:
            text += line
            if CONNECTED in line:
                return "the server accepts this device's key"
    finally:
        deadline.cancel()
        end_family(process.pid)
        process.stdout.close()
        process.wait()
    reason = explain_exit(text)
    last = text.strip().splitlines()[-1:] or ["no answer"]
    raise FederationError(reason.line if reason else f"the SuperNode ended before it was connected: {last[0].strip()}")
