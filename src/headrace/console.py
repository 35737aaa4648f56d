"""Terminal output: answers and results on stdout, everything else on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


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


@contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Gives a function that says what is being done: a line that changes on a terminal, lines elsewhere."""
    if not err.is_terminal:
        yield lambda text: err.print(text, style="dim")
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
