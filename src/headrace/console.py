"""Terminal output: answers on stdout, everything else on stderr; one clear line for an error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace import logs

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

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


@contextmanager
def working(what: str, every_s: float = 4.0) -> Iterator[None]:
    """Says that something takes a while: a spinner on a terminal, elsewhere a line now and then."""
    if err.is_terminal:
        with err.status(what):
            yield
        return
    began, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(every_s):
            err.print(f"{what}: {time.monotonic() - began:.0f} s")

    err.print(what)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


@contextmanager
def loading(model: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of loading; gives the callback for AsyncLLM.start."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(f"loading {model}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
