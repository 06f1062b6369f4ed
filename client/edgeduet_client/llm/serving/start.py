"""Starting a server: who may ask, loading the models, saying where it listens."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.serving.access import AccessError, access_for, is_loopback, open_to_all, read_token
from edgeduet_client.llm.serving.engine import Engine
from edgeduet_client.llm.serving.event_log import event, log_to_stderr
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from edgeduet_client.llm.serving.server import Address, Certificate, Server
from edgeduet_client.llm.speculation.options import SpeculationOptions

log = logging.getLogger(__name__)


def serve_models(
    models: Sequence[str],
    limits: ServingLimits,
    *,
    host: str,
    http_port: int,
    grpc_port: int | None,
    token_file: Path | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    root: Path | None = None,
    threads: int | None = None,
    speculation: SpeculationOptions | None = None,
    verbose: bool = False,
) -> int:
    """Load ``models`` and serve them until a signal; return the exit code.

    Standard output gets the addresses once they answer: as one line of JSON, or in words on a terminal.

    Raises:
        AccessError: other machines could ask without a token, or the token cannot be used.
        AddressError: an address cannot be listened on.
        ModelError: a model cannot be loaded.
    """
    log_to_stderr(verbose)
    # What is cheap to refuse comes before the models are loaded.
    access = access_for(host, read_token(token_file))
    pair = _certificate(certificate, key)
    if token_file is not None and open_to_all(token_file):
        log.warning("every user of this machine can read the token file", extra={"fields": {"file": str(token_file)}})
    if access.needs_token and pair is None and not is_loopback(host):
        log.warning("tokens and texts travel unencrypted; give --certificate and --key, or put a TLS proxy before it")
    folders = [ModelFolder.open(model, root) for model in models]
    if len({folder.name for folder in folders}) < len(folders):
        raise ModelError("two of the models have the same name; serve one of them, or import one under another --name")
    metrics = Metrics()
    engines = {}
    for folder in folders:
        model = LocalModel.open(folder, threads=threads, speculation=speculation)
        engines[folder.name] = Engine(folder, model, limits, metrics)
        event(log, "loaded", model=folder.name, memory_bytes=folder.manifest.memory_weights)
        if model.speculator is not None:
            event(log, "speculates", model=folder.name, **model.speculator.description())
    server = Server(
        engines, Address(host, http_port, grpc_port), access, limits, metrics, certificate=pair, announce=_announce
    )
    return server.run()


def _announce(addresses: dict[str, str]) -> None:
    if not sys.stdout.isatty():
        print(json.dumps({"event": "ready", **addresses}), flush=True)
        return
    print(f"OpenAI's API: {addresses['http']}/v1")
    if "grpc" in addresses:
        print(f"gRPC:         {addresses['grpc']}")
    print("Ctrl-C ends it after what was accepted is answered", flush=True)


def _certificate(chain: Path | None, key: Path | None) -> Certificate | None:
    if (chain is None) != (key is None):
        raise AccessError("--certificate and --key go together; give both or neither")
    if chain is None or key is None:
        return None
    for file in (chain, key):
        if not file.is_file():
            raise AccessError(f"{file} does not exist; give PEM files")
    return Certificate(chain, key)
