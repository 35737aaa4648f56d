"""An error as one line and an exit code, and what --debug shows instead."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from headrace import logs
from headrace.config import EngineConfig
from headrace.console import err

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

_debug = False


def set_debug(on: bool) -> None:
    global _debug
    _debug = on


def log_as(config: EngineConfig, *, serving: bool) -> EngineConfig:
    """Sets up the log of this process. The settings with a level for the engine's processes: where they leave it open,
    a server has info (debug under --debug), any other command warning."""
    if serving and config.server.log_level == "auto":
        config = config.replace(log_level="debug" if _debug else "info")
    logs.to_stderr(logs.level_of(config.server.log_level, logging.WARNING), config.server.log_format)
    return config


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
