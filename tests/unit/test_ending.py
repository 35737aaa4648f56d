"""An engine that nobody closes: it ends once, whatever comes first, and in a thread that can wait for its own."""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine import ending
from headrace.engine.ending import Ending, collect_ended

pytestmark = pytest.mark.unit


class Loaded:
    """Notes which thread closes it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.done = threading.Event()

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)
        self.done.set()


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has 10 bytes."""
    monkeypatch.setattr(ending, "memory_of", lambda loaded: 10)


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """What would be called as the process ends."""
    called: list[Callable[[], Any]] = []
    monkeypatch.setattr(atexit, "register", called.append)
    monkeypatch.setattr(atexit, "unregister", called.remove)
    return called


def test_it_ends_with_the_process(at_exit: list[Callable[[], Any]]) -> None:
    loaded = Loaded()
    Ending(loaded)  # type: ignore[arg-type]
    [ends] = at_exit
    ends()
    assert loaded.closed == ["MainThread"]


def test_it_ends_once(at_exit: list[Callable[[], Any]]) -> None:
    loaded = Loaded()
    ends = Ending(loaded)  # type: ignore[arg-type]
    ends()
    ends()
    ends.of_one_that_was_dropped()
    assert loaded.closed == ["MainThread"] and at_exit == []


def test_garbage_that_another_thread_collects_is_closed_in_one_of_its_own(at_exit: list[Callable[[], Any]]) -> None:
    loaded = Loaded()
    ends = Ending(loaded)  # type: ignore[arg-type]
    threading.Thread(target=ends.of_one_that_was_dropped, name="tier").start()
    assert loaded.done.wait(10) and loaded.closed == ["headrace-end"]


def test_a_forked_process_ends_nothing(at_exit: list[Callable[[], Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded()
    ends = Ending(loaded)  # type: ignore[arg-type]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    ends()
    assert loaded.closed == []


def test_python_looks_for_the_garbage_of_large_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or of many small ones; once."""
    looked: list[int] = []
    monkeypatch.setattr(ending, "_ended", [])
    monkeypatch.setattr(ending, "WORTH_COLLECTING", 25)
    monkeypatch.setattr(gc, "collect", lambda: looked.append(1))
    for expected in (0, 0, 1, 1):
        Ending(Loaded())()  # type: ignore[arg-type]
        collect_ended()
        collect_ended()
        assert len(looked) == expected
