"""Storing chunks below the pool: those of ended sequences by a thread, the others when they are evicted.

With `only_idle` nothing is given to disk or network while the engine computes: a chunk is stored when there is nothing
else to do, and one that is evicted before goes to tiers in memory alone. Otherwise:

A table whose sequence has ended is parked: it keeps holding its chunks, so that they stay unchanged, until the thread
has stored them. When the pool runs short, parked tables are closed at once; what was not stored yet is stored
when it is evicted or when there is nothing else to do, by the engine itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from dataclasses import dataclass, field

from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node
from headrace.offload.parked import Parked
from headrace.offload.ranked.storing import ChunkStorer

log = logging.getLogger(__name__)

NICE = 10

IDLE_S = 0.02
"""So long does an idle engine store chunks before it looks whether there is something to do."""

REST_S, REST_IDLE_S = 0.25, 0.01
"""With `only_idle`, so long must no sequence have ended before something is stored, and IDLE_S of it: who asks again at
once must not wait."""

IDLE_QUEUE = 8 << 20
"""Bytes that may wait for a tier when such an engine goes on storing: a request that comes meanwhile has to share the
cores with their writing."""


@dataclass(slots=True, eq=False)
class Writeback:
    """unstored: chunks that wait for the thread. let_go: chunks that no table holds and that are not stored, as far as
    is known. All methods are the engine's; the thread touches neither tree nor tables.
    """

    cache: KVCache
    storer: ChunkStorer
    only_idle: bool = False
    unstored: int = 0
    let_go: int = 0
    _queue: queue.SimpleQueue[Parked | None] = field(default_factory=queue.SimpleQueue)
    _ended: queue.SimpleQueue[Parked] = field(default_factory=queue.SimpleQueue)
    _parked: dict[ChunkTable, Parked] = field(default_factory=dict)
    _encoding: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread = field(init=False)
    _closed: bool = False
    _ended_s: float = 0.0  # when a sequence ended last

    def __post_init__(self) -> None:
        self.cache.tree.leaving = self._leaving
        self._thread = threading.Thread(target=self._run, name="headrace-writeback", daemon=True)
        self._thread.start()

    @property
    def offers_again(self) -> bool:
        """Whether what came back from a tier is offered to the others once more: it may have come from memory, where
        it went alone when it was evicted."""
        return self.only_idle and self.storer.in_memory

    def park(self, table: ChunkTable) -> None:
        """Instead of KVCache.close: what is not stored of the table's complete chunks will be."""
        self.cache.park(table)
        nodes = [node for node in table.nodes if not node.stored]
        if table not in self.cache.parked:
            return
        if self.only_idle:
            self.let_go, self._ended_s = self.let_go + len(nodes), time.monotonic()
        if self.only_idle or not nodes:
            self.cache.close(table)
            return
        parked = self._parked[table] = Parked(table, nodes, self._encoding)
        self.unstored += len(nodes)
        self._queue.put(parked)

    def settle(self) -> None:
        """Closes the tables whose chunks are stored."""
        while not self._ended.empty():
            self._close(self._ended.get())

    def _close(self, parked: Parked) -> None:
        if self._parked.pop(parked.table, None) is not None:
            self.unstored -= len(parked.nodes)
            self.cache.close(parked.table)

    def make_room(self) -> None:
        """Closes all parked tables, now."""
        self.settle()
        for parked in list(self._parked.values()):
            with self._encoding:
                parked.revoked = True
            self.let_go += sum(not node.stored for node in parked.nodes)
            self._close(parked)

    @property
    def _idle_s(self) -> float:
        return REST_IDLE_S if self.only_idle else IDLE_S

    def store_idle(self) -> bool:
        """Called by an idle engine: stores some chunks that no table holds any more and that were not stored; returns
        whether there were any."""
        now = time.monotonic()
        if self.only_idle and now < self._ended_s + REST_S:
            return self.let_go > 0
        left, end = [node for node in self.cache.tree.idle.values() if not node.stored], now + self._idle_s
        self.let_go = len(left)
        for batch in self.storer.batches(left):
            if time.monotonic() >= end or (self.only_idle and self.storer.queued_bytes > IDLE_QUEUE):
                break
            self.storer.store(batch)
            self.let_go -= len(batch)
        return bool(left)

    def _leaving(self, node: Node) -> None:
        """A chunk is evicted."""
        if not node.stored and node.digest is not None:
            self.storer.store([node], in_memory=self.only_idle)
            self.let_go -= int(self.let_go > 0)

    # -- also on the thread

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # computing comes first, where the system can be told so
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (parked := self._queue.get()) is not None:
            try:
                # From the end on, so that a prompt's start is what was used last.
                for batch in self.storer.batches(node for node in reversed(parked.nodes) if not node.stored):
                    if not parked.revoked:
                        self.storer.store(batch, parked)
            except Exception:
                log.exception("chunks could not be stored; they are computed again when they are needed")
            self._ended.put(parked)

    def close(self, timeout_s: float) -> bool:
        """Stores what waits, within that time; whether all of it was."""
        if self._closed:
            return True
        self._closed, end = True, time.monotonic() + timeout_s
        self.only_idle = False
        self._queue.put(None)
        self._thread.join(timeout_s)
        done = not self._thread.is_alive()
        self.settle()
        while done and self.store_idle():
            done = time.monotonic() < end
        if not done:
            left = self.unstored + self.let_go
            log.warning("%d chunks were not stored within %.0f s; they will be computed again", left, timeout_s)
        return done

    def wait(self, timeout_s: float) -> bool:
        """Until the thread has nothing to do, at most so long; whether that came. For tests and benchmarks."""
        end = time.monotonic() + timeout_s
        while self._parked and time.monotonic() < end:
            self.settle()
            time.sleep(0.001)
        self.settle()
        return not self._parked
