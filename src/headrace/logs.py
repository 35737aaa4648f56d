"""One record, one line in the log, whatever text from a client, a server or a file is in it.

`shown` is for text from outside where it enters a message. `LineFormatter` is the last door: it escapes what a message
still holds and indents tracebacks, so that nobody outside can write a line that looks like one of ours.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

MOST_SHOWN = 200
"""Characters of one foreign text in a message."""
MOST_IN_LINE = 4000
"""Characters of one line of the log."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def shown(value: object, most: int = MOST_SHOWN) -> str:
    """str(value) on one line: control, format and other unprintable characters as escapes, the end cut off beyond
    `most` characters."""
    text = str(value)
    kept = text[:most]
    if not kept.isprintable():
        kept = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in kept)[:most]
    return kept if len(text) <= most else f"{kept}... ({len(text):,} characters)"


class LineFormatter(logging.Formatter):
    """logging.Formatter with one line per message; the lines of a traceback are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message, MOST_IN_LINE)
        return super().formatMessage(record)

    def formatException(self, ei: ExcInfo) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {shown(line, MOST_IN_LINE)}" for line in lines)


def to_stderr(level: int = logging.INFO) -> None:
    """All of this process's records from `level` on, to standard error. Without effect if logging is set up already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler])
