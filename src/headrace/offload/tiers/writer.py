"""A thread that writes to one tier, behind a queue that is bounded in bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import NamedTuple

from headrace.offload.tiers.base import BlobParts, Tier

log = logging.getLogger(__name__)


class Write(NamedTuple):
    name: bytes
    tenant: bytes
    parts: BlobParts
    size: int


class Writer:
    """Writes what it is given, in order. Invariant: _bytes = sum of the sizes of _names' writes <= queue_bytes; a write
    counts until the tier has taken or refused it, because until then it holds its memory."""

    def __init__(self, tier: Tier, queue_bytes: int) -> None:
        self.tier, self.queue_bytes = tier, queue_bytes
        self._queue: deque[Write] = deque()
        self._names: set[bytes] = set()
        self._bytes = 0
        self._dropped = 0
        self._closed = False
        self._stalled = False  # an offer waited in vain, and no write has ended since
        self._told: set[str] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"headrace-{tier.kind}-writer", daemon=True)
        self._thread.start()

    def offer(self, write: Write, timeout_s: float) -> bool:
        """Whether it waits to be written, or another write of that name does. Waits for room at most timeout_s,
        and not at all where the last one to wait has waited in vain and no write has ended since."""
        with self._changed:
            if write.size > self.queue_bytes:
                return self._refuse(
                    "size",
                    f"a write of {write.size} bytes does not fit its queue of {self.queue_bytes}: "
                    "raise --kv-offload-queue-mb",
                )
            self._changed.wait_for(lambda: self._settled(write), 0.0 if self._stalled else timeout_s)
            if write.name in self._names:
                return True
            if self._closed or self._bytes + write.size > self.queue_bytes:
                self._stalled = True
                return self._refuse("full", "writes are dropped: it takes them more slowly than they come")
            self._names.add(write.name)
            self._bytes += write.size
            self._queue.append(write)
            self._changed.notify_all()
            return True

    def _settled(self, write: Write) -> bool:
        return self._closed or write.name in self._names or self._bytes + write.size <= self.queue_bytes

    def _refuse(self, kind: str, reason: str) -> bool:
        """Counts a dropped write; the first of each kind is logged."""
        self._dropped += 1
        if not self._closed and kind not in self._told:
            self._told.add(kind)
            log.warning("the %s tier: %s", self.tier.kind, reason)
        return False

    def pending(self, name: bytes) -> bool:
        with self._changed:
            return name in self._names

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return self._bytes

    @property
    def queued_blobs(self) -> int:
        with self._changed:
            return len(self._names)

    @property
    def dropped(self) -> int:
        """Writes that were not given to the tier, which counts those that it refuses."""
        with self._changed:
            return self._dropped

    def flush(self, deadline: float) -> bool:
        """Waits until nothing is queued or written; False if that is not so by the deadline (time.monotonic)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._names, max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Drops what waits; the thread ends after the write under way. Offers are refused from now on."""
        with self._changed:
            self._closed = True
            self._dropped += len(self._queue)
            while self._queue:
                self._forget(self._queue.popleft())
            self._changed.notify_all()

    def join(self, deadline: float) -> bool:
        """After stop(): whether the thread has ended by the deadline."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _forget(self, write: Write) -> None:
        self._names.discard(write.name)
        self._bytes -= write.size

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                write = self._queue.popleft()
            self._write(write)
            with self._changed:
                self._forget(write)
                self._stalled = False
                self._changed.notify_all()
            del write  # its memory is not held until the next one comes

    def _write(self, write: Write) -> None:
        try:
            self.tier.put(write.name, write.tenant, write.parts)
        except Exception:  # a tier's defect; the thread must live on for the writes that wait
            log.exception("the %s tier failed in a way it should not", self.tier.kind)
            with self._changed:
                self._dropped += 1
