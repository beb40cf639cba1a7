"""Structured logs over the standard library's logging: one event a line, with its fields, for people or as JSON.

Code says ``log.info("region opened", extra={"region": name})`` with a logger of its own module. The composition
roots call `configure` once; libraries never do. Secrets (tokens, salts) are never given to a log.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from common.errors import UserError

LEVEL_VARIABLE = "ENTRESOL_LOG_LEVEL"
FORMAT_VARIABLE = "ENTRESOL_LOG_FORMAT"
_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("human", "json")
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_QUOTED = frozenset(' ="')


@dataclass(frozen=True)
class LogSettings:
    """The `log` section of every configuration file; the environment's ENTRESOL_LOG_LEVEL and _FORMAT win."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["human", "json"] = "human"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class HumanFormatter(logging.Formatter):
    """``2026-01-31T10:00:00.000Z INFO  dpu_app.supervisor: region opened region=r0 slots=1024``"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname:<7} {record.name}: {record.getMessage()}"
        for name, value in _fields(record).items():
            text = str(value)
            plain = text.isprintable() and bool(text) and _QUOTED.isdisjoint(text)
            line += f" {name}={text if plain else json.dumps(text)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, event, pid, the event's own fields, and `traceback` if any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "pid": record.process,
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure(
    settings: LogSettings, stream: TextIO | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Send this process's logs to `stream` (standard error). Replaces what was configured before.

    Raises UserError for a bad value in the environment.
    """
    environment = os.environ if environment is None else environment
    level = environment.get(LEVEL_VARIABLE, settings.level)
    form = environment.get(FORMAT_VARIABLE, settings.format)
    if level not in _LEVELS:
        raise UserError(f"{LEVEL_VARIABLE}={level!r} is none of {', '.join(_LEVELS)}")
    if form not in _FORMATS:
        raise UserError(f"{FORMAT_VARIABLE}={form!r} is none of {', '.join(_FORMATS)}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
