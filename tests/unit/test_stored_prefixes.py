"""A stored prefix on its way back: its states, without a model, tiers or threads. The tests say what comes when."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.stored_prefixes import Attached, Coming, Looking, Settled, StoredPrefixes
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.offload.ranked.words import ChunksBrought
from headrace.offload.restore.report import RestoreReport
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split
from headrace.planner.machine import PieceRate
from headrace.types import CHUNK, Request, SamplingParams
from tests.support.profiles import profile_of

pytestmark = pytest.mark.unit

STORED = 6
"""Chunks of every prompt that are stored."""


class FakeRestore:
    """A transfer that ends when the test says so."""

    def __init__(self, count: int, projected: int, slots: Sequence[int]) -> None:
        kinds: Any = ["x"] * projected + ["k"] * (count - projected)
        self.report, self.slots = RestoreReport(kinds, "host", {0: list(range(count))}), slots
        self.finished = 0

    def cancel(self) -> None:
        self.report.cancelled = True

    def finish(self) -> None:
        self.finished += 1

    def end(self, good: int | None = None) -> None:
        good = len(self.slots) if good is None else good
        self.report.add(0, ChunksBrought(0, good, f"chunk {good} is gone", 0.0, 0.0, []))


class FakeSource:
    """Finds the first STORED chunks of any prompt, once `looked`."""

    def __init__(self) -> None:
        self.lookups: list[SimpleNamespace] = []
        self.restores: list[FakeRestore] = []

    def look(self, digests: Sequence[bytes], first: int) -> SimpleNamespace:
        found = [SimpleNamespace(digest=digest, rank=0) for digest in digests[:STORED]]
        self.lookups.append(SimpleNamespace(done=False, found=found))
        return self.lookups[-1]

    def ways(self, table: ChunkTable, first: int, found: list[Any]) -> list[list[Any]]:
        return [found]

    def as_run(self, found: list[Any], first: int, suffix: int) -> StoredRun:
        return StoredRun(first, len(found), suffix, kv_bytes=1e3, x_bytes=1e3, layers=1, tiers="host")

    def bring(self, found: list[Any], first: int, slots: Sequence[int], projected: int, prompt_len: int) -> FakeRestore:
        self.restores.append(FakeRestore(len(found), projected, slots))
        return self.restores[-1]


class FakeWriteback:
    unstored = 0

    offers_again = False

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.parked: list[ChunkTable] = []

    def park(self, table: ChunkTable) -> None:
        self.parked.append(table)
        self.cache.close(table)

    def make_room(self) -> None: ...

    def settle(self) -> None: ...


class Harness:
    """A scheduler over stored prefixes. split: (chunks recomputed, projected) of each restore."""

    def __init__(self, split: tuple[int, int] = (2, 0), chunks: int = 40) -> None:
        self.cache, self.source = KVCache(chunks), FakeSource()
        profile = profile_of(1, (0.0, 1e-5, 0.0), {"host": PieceRate(1e-9)})
        writeback: Any = FakeWriteback(self.cache)
        source: Any = self.source
        tiers: Any = SimpleNamespace(queued_blobs=0)
        self.below = StoredPrefixes(self.cache, source, profile, writeback, tiers, 10_000)
        self.below.choose = lambda run, *_: Split(split[0], split[1], run.chunks - sum(split), 0.0, "forced")
        self.scheduler = Scheduler(self.cache, lambda s: self.cache.open(s.tokens, reusable=s.reusable), 10_000, 8)
        self.scheduler.below = self.below

    def add(self, order: int = 0, tokens: int = 500, start: int = 0) -> SequenceState:
        request = Request(str(order), list(range(start, start + tokens)), SamplingParams())
        sequence = SequenceState(request, 0, order)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[list[Slice], set[SequenceState]]:
        """Slices of the step, and the sequences whose rows were void."""
        self.below.settle()
        slices = self.scheduler.schedule()
        return slices, self.finish(slices)

    def finish(self, slices: list[Slice]) -> set[SequenceState]:
        """After the arithmetic of a step; what has been computed up to its newest token gets one more."""
        void = self.below.confirm(slices)
        self.cache.commit()
        for part in slices:
            if part.samples and part.sequence not in void:
                part.sequence.tokens.append(0)
        self.scheduler.check()
        return void

    def state(self, sequence: SequenceState) -> Any:
        return self.below._states.get(sequence)

    def coming(self) -> SequenceState:
        """A sequence whose chunks are coming, with those before them computed."""
        sequence = self.add(len(self.scheduler.running))
        self.step()
        self.source.lookups[-1].done = True
        self.step()
        return sequence

    def end(self, sequence: SequenceState) -> None:
        """All chunks are free afterwards, but for those that the tree keeps."""
        self.scheduler.remove(sequence)
        self.below.settle()
        self.scheduler.check()
        assert not self.cache.loose and not self.below._states and not self.below._arriving


def spans(slices: list[Slice]) -> list[tuple[int, int]]:
    return [(part.start, part.length) for part in slices]


def test_from_the_tier_into_the_tree() -> None:
    here = Harness()
    sequence = here.add()
    assert here.step()[0] == [] and isinstance(here.state(sequence), Looking), "computed before the tiers have answered"
    here.source.lookups[0].done = True
    slices, _ = here.step()
    assert spans(slices) == [(0, 2 * CHUNK)] and isinstance(here.state(sequence), Coming)
    assert sequence.table is not None and sequence.table.coming == 4
    slices = here.scheduler.schedule()  # alone: the step waits for the chunks, layer by layer
    assert spans(slices) == [(6 * CHUNK, 500 - 6 * CHUNK)] and isinstance(here.state(sequence), Attached)
    assert here.below.coming(sequence) == 4 * CHUNK and not here.source.restores[0].finished
    here.source.restores[0].end()
    assert here.finish(slices) == set() and isinstance(here.state(sequence), Settled)
    counters = here.below.counters
    assert here.source.restores[0].finished == 1
    assert (counters.restores, counters.loaded_tokens, counters.recomputed_tokens) == (1, 4 * CHUNK, 2 * CHUNK)
    assert sequence.restored_tokens == sequence.cached_tokens == 4 * CHUNK and counters.failures == 0
    assert all(node.stored for node in sequence.table.nodes[2:6])
    here.end(sequence)
    table = here.cache.open(sequence.tokens)
    assert here.cache.reuse(table)[0] == 7 * CHUNK, "confirmed chunks have no names"


def test_what_has_come_before_the_step_is_confirmed_without_waiting() -> None:
    here = Harness()
    sequence = here.coming()
    here.source.restores[0].end()
    slices, _ = here.step()
    assert spans(slices) == [(6 * CHUNK, 500 - 6 * CHUNK)] and isinstance(here.state(sequence), Settled)
    assert here.below.coming(sequence) == 0 and sequence.restored_tokens == 4 * CHUNK
    here.end(sequence)


def test_what_the_engine_projects_is_waited_for_even_if_it_has_come() -> None:
    here = Harness(split=(0, 3))
    sequence = here.add()
    here.step()
    here.source.lookups[0].done = True
    here.below.choose = lambda run, *_: Split(0, 3, 3, 0.0, "forced")
    assert sequence.table is not None
    slices = here.scheduler.schedule()
    here.source.restores[0].end()
    assert here.below.coming(sequence) == 6 * CHUNK
    assert [node.activations for node in sequence.table.nodes[:6]] == [True] * 3 + [False] * 3
    here.finish(slices)
    assert here.below.counters.projected_tokens == 3 * CHUNK
    here.end(sequence)


@pytest.mark.parametrize("good", [0, 3])
def test_lost_chunks_void_the_step_that_waited_for_them(good: int) -> None:
    here = Harness()
    sequence = here.coming()
    slices = here.scheduler.schedule()
    assert isinstance(here.state(sequence), Attached)
    here.source.restores[0].end(good)
    assert here.finish(slices) == {sequence} and isinstance(here.state(sequence), Settled)
    assert here.below.counters.failures == 1 and sequence.restored_tokens == good * CHUNK
    slices, void = here.step()
    assert spans(slices) == [((2 + good) * CHUNK, 500 - (2 + good) * CHUNK)] and not void, "computed again from there"
    here.end(sequence)


def test_all_lost_before_the_step() -> None:
    here = Harness()
    sequence = here.coming()
    here.source.restores[0].end(good=0)
    slices, _ = here.step()
    assert spans(slices) == [(2 * CHUNK, 500 - 2 * CHUNK)] and isinstance(here.state(sequence), Settled)
    assert here.below.counters.failures == 1 and here.source.restores[0].report.cancelled
    here.end(sequence)


def test_nothing_is_worth_bringing() -> None:
    here = Harness()
    here.below.choose = lambda run, *_: Split(run.chunks, 0, 0, 0.0, "recompute all")
    sequence = here.coming()
    assert sequence.computed == 500 and isinstance(here.state(sequence), Settled) and not here.source.restores
    assert sequence.restore_reason == "recompute all"


def test_a_pool_that_is_too_full() -> None:
    here = Harness(chunks=8)
    other = here.add(0, 3 * CHUNK)
    other.reports_from = 0  # it is not looked up
    here.step()
    sequence = here.add(1, 8 * CHUNK - 1, start=1000)
    sequence.table = here.cache.open(sequence.tokens)
    assert here.below.until(sequence, alone=False) == 0
    here.source.lookups[0].done = True
    assert here.below.until(sequence, alone=False) == 8 * CHUNK - 1 and isinstance(here.state(sequence), Settled)
    assert not here.source.restores


def test_another_that_needs_the_same_waits_and_shares() -> None:
    here = Harness(split=(0, 3))
    first, second = here.add(0), here.add(1)
    here.step()
    for lookup in here.source.lookups:
        lookup.done = True
    assert here.step()[0] == [] and isinstance(here.state(first), Coming) and isinstance(here.state(second), Looking)
    here.source.restores[0].end()
    assert [part.sequence for part in here.step()[0]] == [first]
    here.step()
    assert len(here.source.restores) == 1 and second.cached_tokens == 7 * CHUNK, "it was brought twice"


def test_with_others_it_waits_and_is_no_measure_of_the_solver() -> None:
    here = Harness()
    other = here.add(0, 70, start=1000)
    other.reports_from = 0
    here.step()
    sequence = here.coming()
    assert here.state(sequence).expected is not None
    assert [part.sequence for part in here.step()[0]] == [other]
    assert isinstance(here.state(sequence), Coming) and here.state(sequence).expected is None
    here.source.restores[0].end()
    assert len(here.step()[0]) == 2 and isinstance(here.state(sequence), Settled)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("state", [Looking, Coming, Attached])
def test_leaving_in_any_state(state: type, ended: bool) -> None:
    here = Harness()
    sequence = here.add()
    here.step()
    if state is not Looking:
        here.source.lookups[0].done = True
        here.step()
    if state is Attached:
        here.scheduler.schedule()
    assert isinstance(here.state(sequence), state)
    table, here.cache._names._filled = sequence.table, []
    assert table is not None
    here.scheduler.running.remove(sequence)
    sequence.table = None
    here.below.leave(sequence, table, ended)
    assert here.below.writeback.parked == ([table] if ended else [])  # type: ignore[attr-defined]
    assert bool(here.cache.loose) == (state is not Looking), "slots are free while bytes are still written into them"
    assert here.below.pending == (state is not Looking)
    for restore in here.source.restores:
        assert restore.report.cancelled
        restore.end()
    here.below.settle()
    here.cache.check()
    assert not here.cache.loose and not here.below.pending and not here.below._arriving
