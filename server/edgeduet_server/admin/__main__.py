"""``python -m edgeduet_server.admin HOME``: the admin service of a server home, until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from edgeduet_server.admin.server import AdminServer
from edgeduet_server.deployment.server_config import load_server_config
from edgeduet_server.deployment.superlink_client import SuperLinkClient
from edgeduet_server.registry.store import Registry
from edgeduet_shared.errors import EdgeDuetError


def main(home: Path) -> int:
    """Serve until told to stop; return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        config = load_server_config(home)
        logging.basicConfig(level=config.logs.level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        logging.getLogger("alembic").setLevel(logging.WARNING)
        registry = Registry.open(config.registry_url, backups=config.folder("backups"))
        server = AdminServer(config, registry, SuperLinkClient(config))
    except EdgeDuetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    server.start()
    stop.wait()
    server.stop()
    registry.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
