"""One line of JSON per event on standard error: what happened, and its fields. Never a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

ROOT = "edgeduet_client.llm.serving"


class JsonLines(logging.Formatter):
    """Writes a record, with the ``fields`` given by ``extra``, as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(verbose: bool) -> None:
    """Send the events of serving to standard error: warnings and the life of the server, or also every request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in (ROOT, "uvicorn", "grpc", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    # It warns whenever a client leaves in the middle of a stream, which is the client's right.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger(ROOT).setLevel(logging.DEBUG if verbose else logging.INFO)


def event(logger: logging.Logger, what: str, **fields: Any) -> None:
    """Log that ``what`` happened."""
    logger.info(what, extra={"fields": fields})
