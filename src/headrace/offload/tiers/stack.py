"""The tiers in the order of their speed, and the queues of what is being written to them.

A tier in memory is written by the caller, which is a copy; each other one by a thread, behind a queue bounded in
bytes. A tier that is left alone after a failure needs no special case: it answers "not there" at once, and
one of the calls made here is its trial call after the cooldown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from headrace.offload.tiers.base import BlobFormat, BlobParts, Lender, OwnQuotas, Read, Tier, TierStats
from headrace.offload.tiers.writer import Write, Writer

log = logging.getLogger(__name__)

PROBED = ("reads", "read_bytes", "writes", "written_bytes", "dropped", "bad")
"""Counters that Tiers.leave_out resets; errors still count."""


class Tiers:
    """Safe to use from several threads. No call waits longer than timeout_s for a queue, besides what a tier takes."""

    def __init__(self, tiers: Sequence[Tier], queue_bytes: int, timeout_s: float) -> None:
        """tiers: fastest first, of different kinds. queue_bytes: of each tier's queue. Owns the tiers from now on."""
        kinds = [tier.kind for tier in tiers]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"tiers must be of different kinds, got {', '.join(kinds)}")
        if queue_bytes <= 0 or not 0 < timeout_s < float("inf"):
            raise ValueError(f"queue_bytes and timeout_s must be above 0, got {queue_bytes} and {timeout_s}")
        self.tiers, self.timeout_s = tuple(tiers), timeout_s
        self._writers = [None if tier.in_memory else Writer(tier, queue_bytes) for tier in tiers]
        self._probed = [TierStats() for _ in tiers]
        self._quotas: dict[bytes, float | None] = {}

    def format(self, index: int) -> BlobFormat:
        return self.tiers[index].format

    def kind(self, index: int) -> str:
        return self.tiers[index].kind

    def queues(self, index: int) -> bool:
        """Whether `offer` keeps the parts for later."""
        return self._writers[index] is not None

    def find(self, names: Sequence[bytes]) -> list[int | None]:
        """Index of the first tier that has each blob. A later tier is asked only for names still missing."""
        found: list[int | None] = [None] * len(names)
        missing = list(range(len(names)))
        for index, tier in enumerate(self.tiers):
            if not missing:
                break
            for at, there in zip(missing, tier.has([names[at] for at in missing]), strict=True):
                if there:
                    found[at] = index
            missing = [at for at in missing if found[at] is None]
        return found

    def lacking(self, name: bytes) -> list[int]:
        """The tiers that neither have a blob nor are about to be given it."""
        return [
            index for index, tier in enumerate(self.tiers) if not (self.pending(index, name) or tier.has([name])[0])
        ]

    def doubtful(self, name: bytes) -> list[int]:
        """The tiers that may lack a blob; only those in memory are asked. A put of one that is there does nothing."""
        return [
            index
            for index, tier in enumerate(self.tiers)
            if not (self.pending(index, name) if self.queues(index) else tier.has([name])[0])
        ]

    def pending(self, index: int, name: bytes) -> bool:
        """Whether a blob waits to be written to that tier."""
        writer = self._writers[index]
        return writer is not None and writer.pending(name)

    def read(self, index: int, reads: Sequence[Read]) -> list[bool]:
        """Tier.read of that tier."""
        return self.tiers[index].read(reads)

    def lender(self, index: int) -> Lender | None:
        """That tier, if it lends what it holds."""
        tier = self.tiers[index]
        return tier if isinstance(tier, Lender) else None

    def set_quota(self, tenant: bytes, share: float | None) -> None:
        """Of each tier's budget, that nobody else can take from a tenant; None: the common quota."""
        if self._quotas.get(tenant) == share:
            return
        self._quotas[tenant] = share
        for tier in self.tiers:
            if isinstance(tier, OwnQuotas):
                tier.set_quota(tenant, share)

    def offer(self, index: int, name: bytes, tenant: bytes, parts: BlobParts, size: int) -> bool:
        """Gives a blob of `size` bytes to that tier: written now (in memory) or queued. False: dropped, and counted.

        The parts must not change until the tier has them; the queue keeps them alive. Waits at most timeout_s where
        the queue is full.
        """
        writer = self._writers[index]
        if writer is None:
            return self.tiers[index].put(name, tenant, parts)
        return writer.offer(Write(name, tenant, parts, size), self.timeout_s)

    def drop(self, names: Sequence[bytes]) -> None:
        """Tier.drop of all tiers. What waits to be written is written: it was not read from anywhere."""
        for tier in self.tiers:
            tier.drop(names)

    def leave_out(self) -> None:
        """Excludes what was written, read and dropped so far from the counters: it was the probe of the tiers."""
        self._probed = [tier.stats() for tier in self.tiers]

    def stats(self) -> dict[str, TierStats]:
        """By kind; `dropped` includes writes that the queue refused."""
        all_stats = {}
        for tier, writer, probed in zip(self.tiers, self._writers, self._probed, strict=True):
            all_stats[tier.kind] = stats = tier.stats()
            for name in PROBED:
                setattr(stats, name, getattr(stats, name) - getattr(probed, name))
            if writer is not None:
                stats.queued_bytes = writer.queued_bytes
                stats.dropped += writer.dropped
        return all_stats

    @property
    def queued_blobs(self) -> int:
        """Blobs that wait to be written, or are being written."""
        return sum(writer.queued_blobs for writer in self._writers if writer is not None)

    @property
    def queued_bytes(self) -> int:
        """Of those."""
        return sum(writer.queued_bytes for writer in self._writers if writer is not None)

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything offered is written or refused; False if that is not so after timeout_s."""
        deadline = time.monotonic() + timeout_s
        return all([writer.flush(deadline) for writer in self._writers if writer is not None])

    def close(self, timeout_s: float) -> None:
        """Flushes within timeout_s, drops the rest, ends the threads (a write under way may take timeout_s of this
        object more) and closes the tiers. May be called again."""
        writers = [writer for writer in self._writers if writer is not None]
        self.flush(timeout_s)
        left = sum(writer.queued_bytes for writer in writers)
        if left:
            log.warning("%d bytes were not written within %.1f s; they will be computed again", left, timeout_s)
        for writer in writers:
            writer.stop()
        deadline = time.monotonic() + self.timeout_s
        for writer in writers:
            if not writer.join(deadline):
                log.warning("the %s tier does not end its write; it is left behind", writer.tier.kind)
        for tier in self.tiers:
            tier.close()
