"""The supervisor's own log: one JSON object per line, rotated; the same on the terminal as text."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from datetime import UTC, datetime
from pathlib import Path

from edgeduet_server.deployment.server_config import LogConfig

LOG_FILE = "server.log"


class JsonLines(logging.Formatter):
    """One event, its fields. JSON escapes control characters, so that no message can forge a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def start_logging(folder: Path, config: LogConfig) -> None:
    """Send ``edgeduet`` logs to ``server.log`` in ``folder`` and to standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.handlers.RotatingFileHandler(
        folder / LOG_FILE, maxBytes=config.max_bytes, backupCount=config.kept, encoding="utf-8"
    )
    file.setFormatter(JsonLines())
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("edgeduet")
    logger.setLevel(config.level)
    logger.handlers = [file, terminal]
    logger.propagate = False
