"""A supervisor's own log: one JSON object per line, rotated; the same on the terminal as text."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LogConfig(BaseModel):
    """Log files in ``logs/``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severity that is kept"
    )
    max_bytes: int = Field(default=10_000_000, ge=10_000, description="Size at which a log file is rotated")
    kept: int = Field(default=5, ge=1, le=100, description="Rotated files kept of each log")


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


def start_logging(folder: Path, name: str, config: LogConfig) -> None:
    """Send ``edgeduet`` logs to ``NAME.log`` in ``folder`` and to standard error."""
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.handlers.RotatingFileHandler(
        folder / f"{name}.log", maxBytes=config.max_bytes, backupCount=config.kept, encoding="utf-8"
    )
    file.setFormatter(JsonLines())
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("edgeduet")
    logger.setLevel(config.level)
    logger.handlers = [file, terminal]
    logger.propagate = False
