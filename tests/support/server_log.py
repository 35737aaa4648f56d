"""What the server logs, for tests."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from headrace import logs


@contextmanager
def logged(form: str = "text", level: int = logging.INFO) -> Iterator[io.StringIO]:
    """What the server's logger writes meanwhile; times are left out of text."""
    out, log = io.StringIO(), logging.getLogger("headrace.server")
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonFormatter() if form == "json" else logs.LineFormatter())
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield out
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
