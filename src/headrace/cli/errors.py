"""An error as one line and an exit code, and what --debug shows instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from headrace import logs
from headrace.console import err

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

_debug = False


def set_debug(on: bool) -> None:
    global _debug
    _debug = on


def log_to_stderr(level: int = logging.INFO) -> None:
    logs.to_stderr(logging.DEBUG if _debug else level)
    for noisy in ("asyncio", "httpx", "httpcore", "httpx2", "openai"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an exception into one line and an exit code: 2 for bad input, 1 for a failure. --debug shows it whole."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if _debug:
            raise
        told = logs.shown(" ".join(str(error).split()) or type(error).__name__, logs.MOST_IN_LINE)
        err.print(f"headrace: {told}", style="red", markup=False)
        raise typer.Exit(BAD_INPUT if isinstance(error, ValueError) else FAILURE) from None
