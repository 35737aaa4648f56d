"""Ctrl-c, held back while ranks exchange: one that left a step in its middle would leave the others waiting in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Generator[None, None, None]:
    """Within, a first ctrl-c does what it does when the block has ended, and a second one at once. It reaches the main
    thread alone; elsewhere, and where SIGINT is ignored or not Python's, nothing is held back."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
