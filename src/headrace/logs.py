"""One record, one line in the log, as text for people or as JSON for machines.

`shown` is for text from outside where it enters a message. The formatters are the last door: they escape what a message
still holds, so that nobody outside can write a line that looks like one of ours. What a machine should find is given as
fields beside the message: log.info("...", extra=fields(request_id=...)).
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

MOST_SHOWN = 200
"""Characters of one foreign text in a message."""
MOST_IN_LINE = 4000
"""Characters of one line of the log."""

NAMES = {logging.DEBUG: "DEBUG", logging.INFO: "INFO", logging.WARNING: "WARN", logging.ERROR: "ERROR"}

SERVED_ID = re.compile(r"(?:[a-z]+[-_])([0-9a-f]{8})[0-9a-f]{24}(-\d+)?")

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """str(value) on one line: control, format and other unprintable characters as escapes, the end cut off beyond
    `most` characters."""
    text = str(value)
    kept = text[:most]
    if not kept.isprintable():
        kept = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in kept)[:most]
    return kept if len(text) <= most else f"{kept}... ({len(text):,} characters)"


def short_id(request_id: str) -> str:
    """The first 8 characters of a server's request id, and the number of its prompt where it has several; other ids as
    they are. In full it is the field request_id."""
    served = SERVED_ID.fullmatch(request_id)
    return served[1] + (served[2] or "") if served else shown(request_id, 40)


def fields(**named: Any) -> dict[str, Any]:
    """The argument `extra` of a logging call: fields of the JSON object, which the line of text leaves out."""
    return {"fields": named}


class LineFormatter(logging.Formatter):
    """logging.Formatter with one line per message; the lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(name_of_level)-5s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message, MOST_IN_LINE)
        record.name_of_level = NAMES.get(record.levelno, record.levelname)
        return super().formatMessage(record)

    def formatException(self, ei: ExcInfo) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {shown(line, MOST_IN_LINE)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, in ASCII: time (UTC), level, logger, pid, message, the record's fields, exception."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        told: dict[str, Any] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": " ".join(record.getMessage().split()).replace("( ", "(")[:MOST_IN_LINE],  # columns of text
        }
        told |= {name: value for name, value in getattr(record, "fields", {}).items() if name not in told}
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def level_of(name: str, default: int) -> int:
    """logging's number of a level of config.server.log_level; `default` for 'auto'."""
    return default if name == "auto" else int(getattr(logging, name.upper()))


def to_stderr(level: int = logging.INFO, form: str = "text") -> None:
    """Headrace's records from `level` on, and other libraries' warnings, to standard error; form: 'text' or 'json'. A
    later call changes both. Without effect if a program that uses Headrace has set up logging itself."""
    root = logging.getLogger()
    ours = next((h for h in root.handlers if isinstance(h.formatter, LineFormatter | JsonFormatter)), None)
    if ours is None:
        if root.handlers:
            return
        ours = logging.StreamHandler(sys.stderr)
        root.addHandler(ours)
    ours.setFormatter(JsonFormatter() if form == "json" else LineFormatter())
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("headrace").setLevel(level)
