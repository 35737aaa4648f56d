"""Host memory as a tier: each blob in one buffer.

Buffers of blobs that went are used again: fresh memory costs a page fault for every 4 KB, which on some machines takes
longer than the copy. They count as used room of the budget until they do.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.config.offload import OffloadSettings
from headrace.config.tiers import HostTierSettings
from headrace.offload.tiers.base import BlobFormat, BlobParts, Part, Read, TierStats, flat
from headrace.offload.tiers.index import BlobEntry, Index, put_quota
from headrace.planner.machine import PieceRate

log = logging.getLogger(__name__)

GIB = 1 << 30
HostBuffer = NDArray[np.uint8]
Allocate = Callable[[int], HostBuffer]


def empty(size: int) -> HostBuffer:
    return np.empty(size, dtype=np.uint8)


class HostTier:
    """base.Tier in memory of this process.

    quota: share of the budget that no other tenant can take from one. allocate: gives a buffer of so many bytes.
    Invariant: bytes of blobs, being written ones included, and of free buffers are never above the budget. Buffers
    that went while a read copies from them are freed when it ends and are not counted.
    """

    kind = "host"
    in_memory = True
    read_guess = PieceRate(0.125e-9, 20e-6)

    def __init__(
        self,
        budget_bytes: int,
        format: BlobFormat = "raw",
        quota: float = 0.25,
        allocate: Allocate = empty,
    ) -> None:
        self.format: BlobFormat = format
        self._allocate = allocate
        self._quotas: dict[bytes, float] = {}
        self._index = Index(":memory:", budget_bytes, quota, timeout_s=60.0, own=self._quotas)
        self._lock = threading.Lock()  # of all below; never held while a blob is copied
        self._buffers: dict[bytes, HostBuffer] = {}
        self._readers: defaultdict[bytes, int] = defaultdict(int)
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self._free_bytes = 0
        self._stats = TierStats(budget_bytes=budget_bytes)
        self._closed = False

    def has(self, names: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [False] * len(names) if self._closed else self._index.has(names)

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        with self._lock:
            put_quota(self._quotas, tenant, share)

    def put(self, name: bytes, tenant: bytes, parts: BlobParts) -> bool:
        views = [flat(part) for part in parts]
        entry = BlobEntry(name, tenant, sum(map(len, views)))
        with self._lock:
            if self._closed:
                return False
            room = self._index.reserve(*entry)
            if not room.granted:
                self._stats.dropped += not room.present
                return room.present
            self._stats.evictions += len(room.victims)
            self._forget(room.victims)
            buffer = self._take(entry.size)
        if buffer is not None:
            fill(buffer, views)
        with self._lock:
            return self._finish(entry, buffer)

    def _finish(self, entry: BlobEntry, buffer: HostBuffer | None) -> bool:
        if buffer is None or self._closed:
            if not self._closed:
                self._index.cancel([entry.name])
            self._stats.dropped += 1
            return False
        self._buffers[entry.name] = buffer
        self._index.commit(entry)
        self._stats.writes += 1
        self._stats.written_bytes += entry.size
        return True

    def _take(self, size: int) -> HostBuffer | None:
        """A buffer, for which the index has made room; None where the system has no memory."""
        if self._free[size]:
            self._free_bytes -= size
            return self._free[size].pop()
        used, _ = self._index.total()
        while used + self._free_bytes > self._index.budget:
            self._discard()
        try:
            return self._allocate(size)
        except MemoryError:
            self._stats.errors += 1
            if self._stats.errors == 1:
                log.warning("the host memory tier: no memory for %d bytes more; lower kv_offloading_size", size)
            return None

    def _discard(self) -> None:
        """Gives a free buffer, of the size that most bytes are free of, back to the system."""
        size = max(self._free, key=lambda size: size * len(self._free[size]))
        self._free[size].pop()
        self._free_bytes -= size

    def _forget(self, entries: Iterable[BlobEntry]) -> None:
        for entry in entries:
            buffer = self._buffers.pop(entry.name)
            if entry.name not in self._readers:
                self._free[entry.size].append(buffer)
                self._free_bytes += entry.size

    def read(self, reads: Sequence[Read]) -> list[bool]:
        with self._lock:
            held = {read.name: self._buffers[read.name] for read in reads if read.name in self._buffers}
            for name in held:
                self._readers[name] += 1
        try:
            done = [read.name in held and copy(held[read.name], read) for read in reads]
        finally:
            with self._lock:
                self._release(held)
        with self._lock:
            self._stats.reads += sum(done)
            self._stats.read_bytes += sum(len(read.into) for read, ok in zip(reads, done, strict=True) if ok)
            self._stats.misses += len(done) - sum(done)
        return done

    def lend(self, parts: Sequence[Part]) -> list[memoryview | None]:
        with self._lock:
            found = [self._lent(part) for part in parts]
            there = [part for part, view in zip(parts, found, strict=True) if view is not None]
            self._stats.reads += len(there)
            self._stats.read_bytes += sum(part.size for part in there)
            self._stats.misses += len(parts) - len(there)
        return found

    def _lent(self, part: Part) -> memoryview | None:
        buffer = self._buffers.get(part.name)
        if buffer is None or part.offset + part.size > len(buffer):
            return None
        self._readers[part.name] += 1
        return buffer.data[part.offset : part.offset + part.size]

    def give_back(self, names: Sequence[bytes]) -> None:
        with self._lock:
            self._release(names)

    def _release(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._readers[name] -= 1
            if not self._readers[name]:
                del self._readers[name]

    def drop(self, names: Sequence[bytes]) -> None:
        with self._lock:
            if not self._closed:
                gone = self._index.remove(names)
                self._stats.bad += len(gone)
                self._forget(gone)

    def stats(self) -> TierStats:
        with self._lock:
            if self._closed:
                return replace(self._stats)
            used, blobs = self._index.total()
            return replace(self._stats, used_bytes=used, blobs=blobs)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._index.close()
                self._buffers.clear()
                self._free.clear()
                self._free_bytes = 0


def open_tier(own: HostTierSettings, shared: OffloadSettings, allocate: Allocate = empty) -> HostTier:
    return HostTier(int(own.size * GIB), own.format, shared.tenant_quota, allocate)


def findings(own: HostTierSettings, shared: OffloadSettings, free_memory: int) -> dict[str, Any]:
    """Whether the memory is there."""
    room = "" if own.size * GIB < free_memory else ": MORE THAN IS FREE"
    return {"host memory": f"{own.size:g} of {free_memory / GIB:,.1f} GiB free{room}"}


def fill(buffer: HostBuffer, parts: Iterable[memoryview]) -> None:
    """NumPy copies without holding the interpreter's lock."""
    start = 0
    for part in parts:
        buffer[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
        start += len(part)


def copy(buffer: HostBuffer, read: Read) -> bool:
    """Whether the blob reaches as far as is asked for; then it is in `into`."""
    end = read.offset + len(read.into)
    if not 0 <= read.offset <= end <= len(buffer):
        return False
    np.frombuffer(read.into, dtype=np.uint8)[:] = buffer[read.offset : end]
    return True
