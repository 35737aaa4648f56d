"""How an engine in this process ends when nobody closes it: a cell of a notebook that runs again makes another one."""

from __future__ import annotations

import atexit
import gc
import os
import threading

from headrace.engine.loader import Loaded
from headrace.models.sizes import compute_type, weight_bytes

WORTH_COLLECTING = 256 << 20
"""Bytes of ended engines for which Python looks through its heap: some tenths of a second in a large one."""
_ended: list[int] = []
"""Bytes of each engine that has ended since."""


def collect_ended() -> None:
    """Frees the memory of engines that have ended, before another one asks how much is free: their parts refer to each
    other, and would lie until Python next looks for such garbage, as those of small ones do."""
    if sum(_ended) >= WORTH_COLLECTING:
        _ended.clear()
        gc.collect()


def memory_of(loaded: Loaded) -> int:
    """Bytes of an engine's pool and weights, about."""
    model, capacity, facts = loaded.config.model, loaded.capacity, loaded.decoder.config
    pool = capacity.kv_cache_tokens // capacity.context_parallel_size * capacity.kv_bytes_per_token
    return pool + weight_bytes(facts, compute_type(facts, model.dtype), model.quantization)


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
        _ended.append(memory_of(loaded))

    def of_one_that_was_dropped(self) -> None:
        """Garbage is collected in any thread, one of those that end here too, which cannot wait for itself."""
        if threading.current_thread() is threading.main_thread():
            self()
        else:
            threading.Thread(target=self, name="headrace-end").start()
