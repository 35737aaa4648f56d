"""Foreign text in the log stays within its line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import logs
from headrace.logs import MOST_IN_LINE, LineFormatter, shown
from headrace.offload.tiers.breaker import Breaker
from headrace.offload.tiers.health import Health

pytestmark = pytest.mark.unit


def logged(message: str, *arguments: object, error: Exception | None = None) -> str:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter())
    handler.handle(logging.makeLogRecord({"msg": message, "args": arguments, "levelname": "INFO",
                                          "exc_info": error and (type(error), error, None)}))  # fmt: skip
    return out.getvalue()


@given(st.text(), st.integers(1, 300))
def test_shown_is_printable_and_short(text: str, most: int) -> None:
    told = shown(text, most)
    assert told.isprintable()
    assert told == text if text.isprintable() and len(text) <= most else len(told) <= most + 40


@pytest.mark.parametrize(
    "text", ["a\n12:00:00 INFO forged", "\x1b[2J", "\u202egnp.exe", "\u2028", "\r", "\ud800", "\x85"]
)
def test_a_message_is_one_line(text: str) -> None:
    line = logged("server said: %s", text)
    assert line.endswith("\n") and line[:-1].isprintable()


def test_a_long_message_is_cut() -> None:
    assert len(logged("%s", "x" * 10**6)) < MOST_IN_LINE + 100


def test_a_traceback_cannot_begin_a_line_of_ours() -> None:
    lines = logged("failed", error=ValueError("a\n12:00:00 INFO forged")).splitlines()
    assert lines[0].endswith("failed") and len(lines) > 1
    assert all(line.startswith("    ") for line in lines[1:])


def test_short_ids() -> None:
    name = "ed6062509bf84f6f9401fd1b57045b1a"
    assert logs.short_id(f"chatcmpl-{name}") == logs.short_id(f"cmpl-{name}") == "ed606250"
    assert logs.short_id(f"resp_{name}") == logs.short_id(f"msg_{name}") == "ed606250"
    assert logs.short_id(f"cmpl-{name}-12") == "ed606250-12"
    assert logs.short_id("offline-7") == "offline-7" and logs.short_id("a\nb") == "a\\nb"


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """The root logger of a program that has not set up logging."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    kept = root.handlers[:], root.level, ours.level
    root.handlers.clear()
    try:
        yield root
    finally:
        root.handlers[:], level, own = kept
        root.setLevel(level)
        ours.setLevel(own)


def test_level_and_form_may_change_and_are_headraces_own(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("headrace.server")
    with bare() as root:
        logs.to_stderr(logs.level_of("auto", logging.WARNING))
        log.info("unseen")
        logs.to_stderr(logs.level_of("debug", logging.WARNING), "json")
        log.debug("seen", extra=logs.fields(level=7, tokens=3))
        logging.getLogger("another.package").info("unseen")
        assert len(root.handlers) == 1
    (line,) = capsys.readouterr().err.splitlines()
    told = json.loads(line)
    assert (told["message"], told["level"], told["tokens"], next(iter(told))) == ("seen", "debug", 3, "time")


def test_a_program_with_logging_of_its_own_keeps_it() -> None:
    own = logging.NullHandler()
    with bare() as root:
        root.addHandler(own)
        before = logging.getLogger("headrace").level
        logs.to_stderr(logging.DEBUG)
        assert root.handlers == [own] and logging.getLogger("headrace").level == before


def test_what_a_server_said_is_one_line_wherever_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also where a program that uses Headrace as a library has a formatter of its own."""
    forged = "no\n12:00:00 INFO all is well\x1b[2J" + "x" * 10_000
    Breaker(1.0, "the remote tier").failed(forged)
    Health("the disk tier", 1, 1.0).tell("read", forged)
    assert len(caplog.messages) == 2
    assert all(message.isprintable() and len(message) < 1000 for message in caplog.messages)
