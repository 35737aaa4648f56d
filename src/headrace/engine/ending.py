"""How an engine in this process ends when nobody closes it: a cell of a notebook that runs again makes another one."""

from __future__ import annotations

import atexit
import gc
import os
import threading

from headrace.engine.loader import Loaded

_ended = threading.Event()


def collect_ended() -> None:
    """Frees the memory of engines that have ended, before another one asks how much is free: their parts refer to each
    other, and would lie until Python next looks for such garbage."""
    if _ended.is_set():
        _ended.clear()
        gc.collect()


class Ending:
    """Closes an engine once: as its LLM is closed, as that is dropped, or else as the process ends."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded: Loaded | None = loaded
        self._process = os.getpid()
        atexit.register(self)

    def __call__(self) -> None:
        if self._loaded is None or os.getpid() != self._process:
            return  # forked: ranks and tiers are those of the process that made them
        loaded, self._loaded = self._loaded, None
        atexit.unregister(self)
        loaded.close()
        _ended.set()

    def of_one_that_was_dropped(self) -> None:
        """Garbage is collected in any thread, one of those that end here too, which cannot wait for itself."""
        if threading.current_thread() is threading.main_thread():
            self()
        else:
            threading.Thread(target=self, name="headrace-end").start()
