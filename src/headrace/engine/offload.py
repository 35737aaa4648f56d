"""What lies below the pool, as the scheduler and the engine see it (scheduler.Below).

A prompt that begins with stored chunks goes through these states; at each it may be forgotten, if its sequence leaves:

    looking     a thread asks the tiers which chunks they have
    coming      the lane brings chunks; the engine computes those before them from tokens, as in any prefill
    attached    the chunks are the table's; the step that computes what follows waits for them, layer by layer
    settled     nothing (more) comes: they were confirmed, or there were none, or something was wrong with them
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node
from headrace.offload.chunk_codec import ChunkCodec
from headrace.offload.copy_streams import CopyStream
from headrace.offload.restore.rates import Rates
from headrace.offload.restore.solver import Prediction, Run, Split, predict, restore_split
from headrace.offload.restore.transfer import Restore, Wanted
from headrace.offload.ticket import Ticket
from headrace.offload.tiers.base import Kind, TierStats, name_of
from headrace.offload.tiers.stack import Tiers
from headrace.offload.writeback import Writeback
from headrace.types import CHUNK, chunks_for

log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""So long may it take to store what is not stored yet when the engine ends."""

Choose = Callable[[Run, Rates, int], Split]
"""(run, rates, most tokens of a step) -> Split: see offload.restore.solver.restore_split."""


@dataclass(slots=True)
class Counters:
    """Since the engine began. Tokens by how they came back; failures: restores that lost a chunk; link_s: the lane was
    at work for restores, of which the engine waited waited_s."""

    restores: int = 0
    loaded_tokens: int = 0
    projected_tokens: int = 0
    recomputed_tokens: int = 0
    restore_s: float = 0.0
    link_s: float = 0.0
    waited_s: float = 0.0
    failures: int = 0


@dataclass(slots=True, eq=False)
class _Found:
    """A stored chunk: its name and the tiers that have its K and V, and its activations."""

    digest: bytes
    kv: int
    x: int | None


@dataclass(slots=True, eq=False)
class _Back:
    """A prompt on its way back. first: the chunk that the restore's first node will be; looked: the first chunk that
    was asked for; expected: what the solver predicted, None where others compute beside it."""

    state: Literal["looking", "coming", "attached", "settled"] = "settled"
    looked: int = 0
    ticket: Ticket | None = None
    found: list[_Found] = field(default_factory=list)
    restore: Restore | None = None
    split: Split | None = None
    expected: Prediction | None = None
    first: int = 0
    nodes: list[Node] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Offload:
    """choose: the solver; may be set to force a split, for tests and benchmarks."""

    cache: KVCache
    tiers: Tiers
    shelf: ChunkCodec
    lane: CopyStream
    looking: CopyStream
    rates: Rates
    writeback: Writeback
    max_batch_tokens: int
    choose: Choose = restore_split
    counters: Counters = field(default_factory=Counters)
    _backs: dict[SequenceState, _Back] = field(default_factory=dict)
    _coming: dict[bytes, _Back] = field(default_factory=dict)
    _leaving: list[tuple[Restore, list[Node]]] = field(default_factory=list)

    # -- scheduler.Below

    def until(self, sequence: SequenceState, alone: bool) -> int:
        table = sequence.table
        assert table is not None, "a scheduled sequence has a table"
        back = self._backs.get(sequence)
        if back is None:
            back = self._backs[sequence] = self._look(table)
        if back.state == "looking":
            if (back.ticket is not None and not back.ticket.done) or self._others(table, back):
                return table.length
            self._plan(sequence, table, back)
        if back.state == "coming":
            if table.length < back.first * CHUNK:
                return back.first * CHUNK
            if back.restore is not None and not (alone or back.restore.done):
                back.expected = None  # others compute meanwhile
                return table.length
            self._attach(sequence, table, back)
        return len(sequence.tokens)

    def leave(self, sequence: SequenceState, table: ChunkTable, ended: bool) -> None:
        back = self._backs.pop(sequence, None)
        if back is not None and back.state in ("coming", "attached"):
            if back.state == "attached":
                back.nodes = self.cache.detach(table, back.first, len(back.nodes))
            self._abandon(table, back)
        if ended and table.shares:
            self.writeback.park(table)
        else:
            self.cache.close(table)

    def make_room(self) -> None:
        self.writeback.make_room()

    # -- the states

    def _look(self, table: ChunkTable) -> _Back:
        first, last = table.length // CHUNK, (len(table.tokens) - 1) // CHUNK
        if not table.shares or first >= last or table.length % CHUNK:
            return _Back()
        digests = [table.digest(chunk) for chunk in range(first, last)]
        back = _Back("looking", first)
        back.ticket = self.looking.submit(lambda: back.found.extend(self._stored(digests)), 0, "look")
        return back

    def _stored(self, digests: list[bytes]) -> list[_Found]:
        """The chunks that the tiers have, up to the first one that none has. On a thread."""
        kv = self.tiers.find([name_of(digest, "k") for digest in digests])
        count = next((i for i, tier in enumerate(kv) if tier is None), len(kv))
        x: Sequence[int | None] = [None] * count
        if self.shelf.keeps_activations:
            x = self.tiers.find([name_of(digest, "x") for digest in digests[:count]])
        return [_Found(digest, tier, other) for digest, tier, other in zip(digests, kv, x, strict=False)
                if tier is not None]  # fmt: skip

    def _others(self, table: ChunkTable, back: _Back) -> bool:
        """Whether another sequence is being brought what this one needs next."""
        skipped = table.length // CHUNK - back.looked
        found = back.found[skipped:]
        return bool(found) and found[0].digest in self._coming

    def _plan(self, sequence: SequenceState, table: ChunkTable, back: _Back) -> None:
        back.state, first = "settled", table.length // CHUNK
        found = back.found[first - back.looked :]
        need = chunks_for(len(table.tokens)) - first
        if not found or table.length % CHUNK:
            return
        if need > self.cache.available:
            self.make_room()
        if need > self.cache.available:
            log.info("%s: %d chunks are stored, but the pool is too full", sequence.request.request_id, len(found))
            return
        run = self._run_of(found, first, len(table.tokens) - (first + len(found)) * CHUNK)
        split = self.choose(run, self.rates, self.max_batch_tokens)
        log.info("%s: %s", sequence.request.request_id, split.reason)
        sequence.restore_reason = split.reason
        if split.tokens < len(found):
            if run.suffix <= self.max_batch_tokens:
                back.expected = predict(run, self.rates, split.tokens, split.x, self.max_batch_tokens)
            self._start(sequence, table, back, found, split)

    def _run_of(self, found: list[_Found], first: int, suffix: int) -> Run:
        form = self.tiers.format(found[0].kv)
        has_x = all(each.x is not None for each in found)
        return Run(
            first=first,
            chunks=len(found),
            suffix=suffix,
            kv_bytes=self.shelf.blob_bytes("k", form),
            x_bytes=self.shelf.blob_bytes("x", form) if has_x else None,
            layers=self.shelf.spec.layers,
            tiers=tuple(self.tiers.kind(each.kv) for each in found),
        )

    def _start(
        self, sequence: SequenceState, table: ChunkTable, back: _Back, found: list[_Found], split: Split
    ) -> None:
        nodes = self.cache.take_loose(len(found) - split.tokens)
        assert nodes is not None, "available promised them"
        back.first = table.length // CHUNK + split.tokens
        wanted = []
        for i, (node, each) in enumerate(zip(nodes, found[split.tokens :], strict=True)):
            kind: Kind = "x" if i < split.x else "k"
            tier = each.x if kind == "x" and each.x is not None else each.kv
            node.activations = kind == "x"
            wanted.append(Wanted(back.first + i, each.digest, node.slot, kind, tier))
        back.state, back.nodes, back.split = "coming", nodes, split
        back.restore = Restore(self.shelf, self.tiers, wanted, sequence.prompt_len)
        table.coming = len(nodes)
        self._coming |= {each.digest: back for each in found[split.tokens :]}
        self.counters.restores += 1
        back.restore.start(self.lane)

    def _attach(self, sequence: SequenceState, table: ChunkTable, back: _Back) -> None:
        restore = back.restore
        assert restore is not None
        if table.length > back.first * CHUNK or restore.good == 0:  # others have computed it meanwhile, or it is lost
            self._count_failure(sequence, restore)
            self._abandon(table, back)
            return
        table.coming = 0
        self.cache.attach(table, back.nodes)
        back.state = "attached"
        if restore.done and not restore.projects:
            self._confirm(sequence, table, back)

    def _abandon(self, table: ChunkTable, back: _Back) -> None:
        assert back.restore is not None
        back.restore.cancel()
        table.coming = 0
        self._leaving.append((back.restore, back.nodes))
        self._settled(back)

    def _settled(self, back: _Back) -> None:
        back.state, back.nodes, back.restore = "settled", [], None
        for digest in [digest for digest, other in self._coming.items() if other is back]:
            del self._coming[digest]

    def _confirm(self, sequence: SequenceState, table: ChunkTable, back: _Back) -> bool:
        """After all of it has come: whether it is as it should be. What is not is given up."""
        restore = back.restore
        assert restore is not None and restore.done
        good = restore.good
        for node in back.nodes[:good]:
            node.stored = True
        if good < len(back.nodes):
            self.cache.truncate(table, back.first + good)
        self.cache.confirm(table, back.first, good)
        if back.expected is not None and not restore.failed:
            seconds = time.perf_counter() - restore.start_s
            loading = back.split is not None and back.split.tokens + back.split.x == 0
            self.rates.observe_restore(seconds, back.expected.seconds, back.expected.shared_s, loading)
        self._count(sequence, restore, back.split)
        self._count_failure(sequence, restore)
        self._settled(back)
        return not restore.failed

    def _count(self, sequence: SequenceState, restore: Restore, split: Split | None) -> None:
        projected = sum(w.kind == "x" for w in restore.chunks[: restore.good]) * CHUNK
        brought = restore.good * CHUNK
        self.counters.projected_tokens += projected
        self.counters.loaded_tokens += brought - projected
        self.counters.recomputed_tokens += split.tokens * CHUNK if split else 0
        self.counters.restore_s += time.perf_counter() - restore.start_s
        self.counters.link_s += restore.link_s
        self.counters.waited_s += restore.waited_s
        sequence.restored_tokens += brought
        if not sequence.preemptions:
            sequence.cached_tokens += brought
        self._observe(restore)

    def _observe(self, restore: Restore) -> None:
        """What it tells of the lane and of projecting. Beside the lane the engine has what is left of the cores."""
        if restore.failed:
            return
        taken = min(restore.cpu_s / restore.link_s, 1.0) if restore.link_s else 0.0
        for size, seconds in restore.layer_transfers:
            self.rates.observe_load(restore.tier_kind, size, 1, seconds, taken * seconds)
        if restore.projected:
            tokens = restore.projected[0][0]
            times = [seconds * max(1.0 - taken, 0.05) if busy else seconds for _, seconds, busy in restore.projected]
            self.rates.observe_project(tokens, statistics.median(times))

    def _count_failure(self, sequence: SequenceState, restore: Restore) -> None:
        if restore.good < len(restore.chunks):
            self.counters.failures += 1
            log.warning("%s: %s; it and what follows is computed again", sequence.request.request_id, restore.reason)

    # -- around a step

    def settle(self) -> None:
        """Between steps: what threads have ended."""
        self.writeback.settle()
        for restore, nodes in self._leaving:
            if restore.done:
                self.cache.free_loose(nodes)
        self._leaving = [(restore, nodes) for restore, nodes in self._leaving if not restore.done]

    def closing(self, slices: Sequence[Slice]) -> list[Restore]:
        """Restores that the step of these slices has to wait for, layer by layer."""
        backs = [self._backs.get(part.sequence) for part in slices]
        return [back.restore for back in backs if back is not None and back.state == "attached" and back.restore]

    def confirm(self, slices: Sequence[Slice]) -> set[SequenceState]:
        """After the step, before KVCache.commit: the sequences whose rows are void, since chunks that they needed did
        not come. They are computed again from there."""
        void = set()
        for part in slices:
            back, table = self._backs.get(part.sequence), part.sequence.table
            if back is None or table is None or back.state != "attached":
                continue
            if not self._confirm(part.sequence, table, back):
                void.add(part.sequence)
        return void

    def observe(self, slices: Sequence[Slice], seconds: float) -> None:
        """A step that computed one prompt, with nothing on the lane meanwhile, tells how fast prefill is."""
        if len(slices) == 1 and slices[0].length > 1 and not (self._coming or self._leaving):
            self.rates.observe_prefill(slices[0].start, slices[0].length, seconds)

    def wait(self) -> None:
        """A moment, where no sequence can go on: threads are at work for all of them."""
        time.sleep(0.0005)

    @property
    def pending(self) -> bool:
        """Whether threads have work that `settle` will have to end."""
        return bool(self._leaving or self.writeback.unstored or self.tiers.queued_blobs)

    def stats(self) -> dict[str, TierStats]:
        return self.tiers.stats()

    def close(self) -> None:
        """Stores what is not stored yet, for at most CLOSE_S, and ends all threads. May be called again."""
        end = time.monotonic() + CLOSE_S
        self.writeback.close(CLOSE_S)
        self.lane.close()
        self.looking.close()
        self.tiers.close(max(0.1, end - time.monotonic()))
