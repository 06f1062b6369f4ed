"""Commands of ``edgeduet-client`` that make, run and look after a device."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edgeduet_client.device.device_config import DeviceConfig
    from edgeduet_client.device.enrolment import Enrolment

device_app = typer.Typer(rich_markup_mode="markdown")

Home = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the device, made by `edgeduet-client enroll`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PROGRAMS = ("device", "supernode", "classify", "llm")


@device_app.command(
    epilog="Example: edgeduet-client enroll /srv/edge --server fl.example.org:9443 --ca ca.crt --name edge-7"
)
def enroll(
    home: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make the device in.")],
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server, as in its certificate.")] = "",
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's pki/ca.crt.")] = None,
    name: Annotated[str, typer.Option(help="Name of this device, for the operator.")] = "",
    partition: Annotated[int, typer.Option(min=0, help="Which share of a run's data is this device's.")] = 0,
    partitions: Annotated[int, typer.Option(min=1, help="Number of shares, the runs' number of clients.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Another request with the identity there is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make an identity for this device and print what the operator needs to let it in.

    The request may travel by any way. Tell the operator the code by another one: it shows that the request was not
    exchanged for somebody else's.
    """
    from edgeduet_client.device.enrolment import enrol, enrol_again
    from edgeduet_shared.errors import ConfigError

    if again:
        if server or ca or name:
            raise ConfigError("--again uses the identity there is; leave --server, --ca and --name out")
        _print_enrolment(enrol_again(home), home, as_json)
        return
    missing = [option for option, value in (("--server", server), ("--ca", ca), ("--name", name)) if not value]
    if missing or ca is None:
        raise ConfigError(f"{', '.join(missing)} missing; see `edgeduet-client enroll --help`")
    _print_enrolment(enrol(home, server, ca, name, partition=partition, partitions=partitions), home, as_json)


@device_app.command(epilog="Example: edgeduet-client start /srv/edge        (systemd: deploy/systemd)")
def start(home: Home) -> None:
    """Run the device in the foreground until Ctrl-C or SIGTERM: training when it may, inference always."""
    from edgeduet_client.device.supervisor import KIND, Supervisor
    from edgeduet_shared.supervision.log_files import start_logging

    config = _config(home)
    start_logging(config.folder("logs"), KIND, config.logs)
    supervisor = Supervisor(config)
    signal.signal(signal.SIGTERM, supervisor.stop)
    signal.signal(signal.SIGINT, supervisor.stop)
    supervisor.run()


@device_app.command(epilog="Example: edgeduet-client stop /srv/edge")
def stop(home: Home) -> None:
    """Stop the device that runs in DIR. What it learned stays."""
    from edgeduet_client.device.supervisor import KIND
    from edgeduet_shared.supervision.running_state import RunningState

    config = _config(home)
    print("stopped" if RunningState(config.home, KIND).stop() else f"no device runs in {config.home}")


@device_app.command(epilog="Example: edgeduet-client status /srv/edge --json")
def status(home: Home, as_json: AsJson = False) -> None:
    """Say what the device does and what is wrong; exit code 1 if it does not run or something is wrong."""
    from edgeduet_client.device.supervisor import KIND
    from edgeduet_shared.supervision.running_state import RunningState

    config = _config(home)
    state = RunningState(config.home, KIND).read()
    classifier = _classifier(config)
    if as_json:
        print(json.dumps({"running": state is not None, "classifier": classifier, **(state or {})}))
    else:
        _print_status(config, state, classifier)
    if state is None or state["complaints"]:
        raise typer.Exit(1)


@device_app.command(epilog="Example: edgeduet-client logs /srv/edge --program supernode --follow")
def logs(
    home: Home,
    program: Annotated[str, typer.Option("--program", "-p", metavar="|".join(PROGRAMS), help="Whose log.")] = "device",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last lines.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the log of the device, or of one of its programs."""
    from edgeduet_client.device.log_view import follow_file, last_lines
    from edgeduet_shared.errors import ConfigError, nearest

    config = _config(home)
    if program not in PROGRAMS:
        raise ConfigError(f"--program {program}: there is no such program{nearest(program, PROGRAMS)}")
    file = config.folder("logs") / f"{program}.log"
    if not file.is_file():
        raise ConfigError(f"{file} is not there; has the device been started?")
    for line in last_lines(file, lines):
        print(line)
    if follow:
        try:
            for line in follow_file(file):
                print(line, flush=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@device_app.command(epilog="Example: edgeduet-client doctor /srv/edge")
def doctor(home: Home, as_json: AsJson = False) -> None:
    """Check settings, clock, certificate, versions, folder, disk, memory, server and key; exit code 2 on a problem."""
    from edgeduet_client.device.doctor import examine

    findings = examine(_config(home))
    if as_json:
        print(json.dumps([{"what": f.what, "detail": f.detail, "problem": f.problem} for f in findings]))
    else:
        for finding in findings:
            verdict = "problem" if finding.problem else "ok"
            print(f"{verdict:<8} {finding.what:<18} {finding.problem or finding.detail}".rstrip())
    if any(finding.problem for finding in findings):
        raise typer.Exit(2)


@device_app.command(epilog="Example: edgeduet-client reset /srv/edge")
def reset(
    home: Home,
    identity: Annotated[
        bool, typer.Option("--identity", help="Also the key and device.toml: the device must be enrolled anew.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove what the device has learned: personal state, classifier, caches. It cannot be brought back."""
    from edgeduet_client.device.reset import remove_learned, what_is_removed

    home = home.expanduser().resolve()
    paths = what_is_removed(home, identity=identity)
    if not yes:
        _confirm(paths)
    for path in remove_learned(home, paths):
        print(f"removed {path}")


@device_app.command(epilog="Example: edgeduet-client classify /srv/edge photo.jpg --json")
def classify(
    home: Home,
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures.", show_default=False)],
    top: Annotated[int, typer.Option(min=1, help="How many of the likeliest classes.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Say what is in pictures, with this device's personal classifier. Needs no server and no torch."""
    from edgeduet_client.classifier.classifier_folder import ClassifierFolder
    from edgeduet_client.classifier.classifying import Classifier, open_image

    config = _config(home)
    pictures = [open_image(path, str(path)) for path in images]
    classifier = Classifier(ClassifierFolder(config.folder("classifier")), threads=config.limits.threads)
    for path, picture in zip(images, pictures, strict=True):
        # One at a time: a thousand pictures take the memory of one.
        (answer,) = classifier.classify([picture], top=top)
        pairs = list(zip(answer.classes, answer.probabilities, strict=True))
        if as_json:
            found = [{"class": name, "probability": probability} for name, probability in pairs]
            print(json.dumps({"image": str(path), "answers": found}))
        else:
            print(f"{path}  " + "  ".join(f"{name} {probability:.1%}" for name, probability in pairs))


@device_app.command(epilog="Example: edgeduet-client adopt /srv/edge current.safetensors")
def adopt(
    home: Home,
    model: Annotated[Path, typer.Argument(metavar="FILE", help="From `edgeduet-admin models export --promoted`.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Also where the device answers with a model of its own training.")
    ] = False,
) -> None:
    """Answer with a global model of the server's, until the device has a personal one from its own training.

    Needs what training needs (torch). A device without it gets the folder `classifier` copied from one that has it.
    """
    from edgeduet_client.classifier.adopting import adopt_model

    facts = adopt_model(_config(home).folder("classifier"), model, replace=replace)
    print(f"in use: the global model of run {facts.run}, stage {facts.stage + 1}, {len(facts.seen)} classes")


def _config(home: Path) -> DeviceConfig:
    from edgeduet_client.device.device_config import load_device_config

    return load_device_config(home)


def _print_enrolment(made: Enrolment, home: Path, as_json: bool) -> None:
    if as_json:
        facts = {"name": made.name, "public_key": made.public_key, "request": made.request, "code": made.code}
        print(json.dumps(facts))
        return
    print(f"public key of {made.name}:\n{made.public_key}\n")
    print(f"request, for the operator, good for 24 hours:\n{made.request}\n")
    print(f"code, by another way (by voice):  {made.code}\n")
    print(f"the operator runs   edgeduet-admin clients approve REQUEST --code {made.code}")
    print(f"then here           edgeduet-client start {home}")


def _classifier(config: DeviceConfig) -> dict[str, Any] | None:
    from edgeduet_client.classifier.classifier_folder import ClassifierFolder

    found = ClassifierFolder(config.folder("classifier")).current()
    return None if found is None else {"run": found[1].run, "stage": found[1].stage}


def _print_status(config: DeviceConfig, state: dict[str, Any] | None, classifier: dict[str, Any] | None) -> None:
    if state is None:
        print(f"no device runs in {config.home}; start it with: edgeduet-client start {config.home}")
    else:
        print(f"{config.server.name}: training {state['training']}, pid {state['pid']}")
        if state["why"]:
            print(f"  {state['why']}")
        for name, facts in state["programs"].items():
            condition = f"pid {facts['pid']}" if facts["pid"] else f"down, last exit code {facts['last_exit']}"
            print(f"  {name:<10} {condition}, {facts['restarts']} restarts; log: {config.folder('logs') / name}.log")
        for complaint in state["complaints"]:
            print(f"  ! {complaint}")
    made = "none yet" if classifier is None else f"of run {classifier['run']}, stage {classifier['stage']}"
    print(f"classifier: {made}")


def _confirm(paths: list[Path]) -> None:
    from edgeduet_shared.errors import ConfigError

    if not paths:
        return
    if not sys.stdin.isatty():
        raise ConfigError("reset asks before it removes anything; where nobody can answer, give --yes")
    for path in paths:
        print(path)
    if not typer.confirm("Remove all of this for ever?"):
        raise typer.Exit(1)
