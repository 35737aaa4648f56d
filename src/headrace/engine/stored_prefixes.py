"""Stored prefixes on their way back into the pool, as the scheduler and the engine see them (engine.below).

A prompt that begins with stored chunks goes through these states, forwards only. Its sequence may leave at any of them.

    Looking    a thread asks the tiers which chunks they have
               -> Coming, or Settled if no chunk is worth bringing
    Coming     a copy stream brings chunks; the engine computes those before them from tokens, as in any prefill
               -> Attached, or Settled if all were lost, or others have computed them meanwhile
    Attached   the chunks are the table's; the step that computes what follows waits for them, layer by layer
               -> Settled, confirmed as far as they came
    Settled    nothing (more) comes

No tensors here: what moves bytes is behind offload.restore.source and offload.writeback.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headrace.engine.adapters import NO_ADAPTER
from headrace.engine.below import Below
from headrace.engine.sequence import SequenceState, Slice
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node
from headrace.logs import short_id
from headrace.offload.ranked.words import Prompt
from headrace.offload.restore.ranked_plan import best_way, planned, told
from headrace.offload.restore.report import RestoreCounters, RestoreReport
from headrace.offload.restore.run_costs import Prediction, StoredRun
from headrace.offload.restore.solver import Split, predict, restore_split, whole_split
from headrace.planner.estimators import MANY
from headrace.planner.profile import Profile
from headrace.planner.strategy_rates import Kind
from headrace.stats import EngineStats
from headrace.types import CHUNK, chunks_for

if TYPE_CHECKING:  # these need torch
    from headrace.offload.ranked.storing import AllTiers
    from headrace.offload.restore.source import FoundChunk, Lookup, Restore, StoredChunks
    from headrace.offload.stored_states import StoredStates
    from headrace.offload.writeback import Writeback

log = logging.getLogger(__name__)

TIERS_S = 0.2
"""Between two looks at the tiers' counters."""
WAIT_S = 0.0005
CLOSE_S, IDLE_CLOSE_S = 30.0, 5.0
"""So long may storing what is not stored yet take when the engine ends; the second for tiers that are written while
idle."""

Choose = Callable[[StoredRun, Profile, int], Split]
"""(run, profile, most tokens of a step) -> Split: see offload.restore.solver.restore_split."""


@dataclass(frozen=True, slots=True, eq=False)
class Looking:
    """first: number of the first chunk that was asked for."""

    first: int
    lookup: Lookup

    def found_from(self, chunk: int) -> list[FoundChunk]:
        """What was found from chunk number `chunk` on."""
        return self.lookup.found[chunk - self.first :]


@dataclass(frozen=True, slots=True, eq=False)
class _Restoring:
    """first: number of the chunk that the first of `nodes` is. expected: what the solver predicted; None where others
    compute beside it. tiers: where each node comes from."""

    first: int
    nodes: list[Node]
    restore: Restore
    split: Split
    tiers: Sequence[str]
    expected: Prediction | None


class Coming(_Restoring):
    """The nodes are loose: no table has them."""

    __slots__ = ()


class Attached(_Restoring):
    """The nodes are the table's, without names until they are confirmed."""

    __slots__ = ()


class Settled:
    __slots__ = ()


State = Looking | Coming | Attached | Settled
SETTLED = Settled()


@dataclass(slots=True, eq=False)
class StoredPrefixes(Below):
    """choose: the solver; may be set to force a split, for tests and benchmarks. states: of a model with recurrent
    layers, whose runs come whole, up to a stored state, before anything behind them is computed."""

    cache: KVCache
    source: StoredChunks
    profile: Profile
    writeback: Writeback
    tiers: AllTiers
    max_batch_tokens: int
    choose: Choose = restore_split
    states: StoredStates | None = None
    counters: RestoreCounters = field(default_factory=RestoreCounters)
    _states: dict[SequenceState, State] = field(default_factory=dict)
    _arriving: dict[bytes, Restore] = field(default_factory=dict)
    _leaving: list[tuple[Restore, list[Node]]] = field(default_factory=list)
    _ask_tiers_s: float = 0.0

    # -- for the scheduler

    def until(self, sequence: SequenceState, alone: bool) -> int:
        table = sequence.table
        assert table is not None, "a scheduled sequence has a table"
        state = self._next(sequence, table, alone)
        self._states[sequence] = state
        match state:
            case Looking():
                return table.length
            case Coming():
                return max(table.length, state.first * CHUNK)
            case _:
                return len(sequence.tokens)

    def leave(self, sequence: SequenceState, table: ChunkTable, ended: bool) -> None:
        sequence.planned = None
        match self._states.pop(sequence, SETTLED):
            case Coming() as state:
                self._abandon(table, state, state.nodes)
            case Attached() as state:
                self._abandon(table, state, self.cache.detach(table, state.first, len(state.nodes)))
        if ended and table.shares:
            self.writeback.park(table)
        else:
            self.cache.close(table)

    def make_room(self) -> None:
        self.writeback.make_room()

    # -- transitions, each of which returns the state after it

    def _next(self, sequence: SequenceState, table: ChunkTable, alone: bool) -> State:
        """Takes all transitions that are possible now."""
        state = self._states.get(sequence) or self._look(table)
        if isinstance(state, Looking) and state.lookup.done and not self._arrives_for_another(table, state):
            state = self._plan(sequence, table, state)
        if isinstance(state, Coming) and table.length >= state.first * CHUNK:
            if state.restore.report.done or (alone and self.states is None):
                return self._attach(sequence, table, state)
            return replace(state, expected=None)  # others compute meanwhile
        return state

    def _look(self, table: ChunkTable) -> State:
        first, last = table.length // CHUNK, table.reusable_chunks
        if not table.shares or first >= last or table.length % CHUNK:
            return SETTLED
        return Looking(first, self.source.look([table.digest(chunk) for chunk in range(first, last)], first))

    def _arrives_for_another(self, table: ChunkTable, state: Looking) -> bool:
        """Whether another sequence is being brought what this one needs next."""
        found = state.found_from(table.length // CHUNK)
        return bool(found) and found[0].digest in self._arriving

    def _plan(self, sequence: SequenceState, table: ChunkTable, state: Looking) -> State:
        first = table.length // CHUNK
        found, need = self._with_state(state.found_from(first)), chunks_for(len(table.tokens)) - first
        if not found or table.length % CHUNK:
            return SETTLED
        name = short_id(sequence.request.request_id)
        if need > self.cache.available_for(table.account):
            self.make_room()
        if need > self.cache.available_for(table.account):
            log.debug("%-8s  %d chunks are stored, but the pool is too full", name, len(found))
            return SETTLED
        ways = [way for each in self.source.ways(table, first, found) if (way := self._with_state(each))]
        if not ways:
            return SETTLED
        chosen = [self._choose(table, first, way) for way in ways]
        best = best_way(chosen)
        (split, run), found = chosen[best], ways[best]
        sequence.planned = planned(split, run, self.profile)
        if sequence.planned is not None:
            alone = [each.predicted_s for each, way in chosen if len(set(way.ranks)) == 1]
            split = told(split, run, sequence.planned, min(alone, default=None))
        log.debug("%-8s  %s", name, split.reason)
        sequence.restore_reason = split.reason
        self.counters.note(split)
        if split.tokens >= len(found):
            return SETTLED
        expected = None
        if run.suffix <= self.max_batch_tokens and self.states is None:
            expected = predict(run, self.profile, split.tokens, split.x, self.max_batch_tokens, split.closing)
        tiers = run.tier_of[split.tokens :]
        return self._bring(sequence, table, found[split.tokens :], split, tiers, expected)

    def _with_state(self, found: list[FoundChunk]) -> list[FoundChunk]:
        """The found chunks as far as they are of use."""
        if self.states is None or not found:
            return found
        there = self.states.find([each.digest for each in found])
        return found[: max((i + 1 for i, tier in enumerate(there) if tier is not None), default=0)]

    def _choose(self, table: ChunkTable, first: int, way: list[FoundChunk]) -> tuple[Split, StoredRun]:
        run = self.source.as_run(way, first, len(table.tokens) - (first + len(way)) * CHUNK)
        if run.ranks:
            held = Counter(table.owner(chunk) for chunk in range(first))
            run = replace(run, held=tuple(held[rank] for rank in range(self.cache.ranks)))
        if self.states is not None and self.choose is restore_split:
            size = float(self.states.codec.blob_bytes)
            state_s = float(self.profile.transfer(run.tier_of[-1], size, 1.0))
            return whole_split(run, self.profile, state_s, self.max_batch_tokens), run
        return self.choose(run, self.profile, self.max_batch_tokens), run

    def _bring(
        self, sequence: SequenceState, table: ChunkTable, found: list[FoundChunk], split: Split,
        tiers: Sequence[str], expected: Prediction | None,
    ) -> State:  # fmt: skip
        nodes = self.cache.take_loose([each.rank for each in found], table.account)
        assert nodes is not None, "available promised them"
        for i, node in enumerate(nodes):
            node.activations = i < split.x
        first = table.length // CHUNK + split.tokens
        prompt = Prompt(sequence.prompt_len, *(sequence.adapter or NO_ADAPTER))
        restore = self.source.bring(found, first, [node.slot for node in nodes], split.x, prompt)
        table.coming, table.joins = len(nodes), (first, found[0].rank)
        self._arriving |= {each.digest: restore for each in found}
        self.counters.restores += 1
        return Coming(first, nodes, restore, split, tiers, expected)

    def _attach(self, sequence: SequenceState, table: ChunkTable, state: Coming) -> State:
        report = state.restore.report
        if table.length > state.first * CHUNK or report.good == 0:  # others have computed it meanwhile, or it is lost
            self._count_failure(sequence, report)
            return self._abandon(table, state, state.nodes)
        slot = None if self.states is None else self._load_state(sequence, table, state)
        if self.states is not None and slot is None:
            return self._abandon(table, state, state.nodes)
        table.coming, table.joins = 0, None
        self.cache.attach(table, state.nodes)
        if self.states is not None and slot is not None:
            self.states.cache.adopt(table, slot)
        attached = Attached(state.first, state.nodes, state.restore, state.split, state.tiers, state.expected)
        if report.done and not report.projects:
            return self._settle(sequence, table, attached)
        return attached

    def _load_state(self, sequence: SequenceState, table: ChunkTable, state: Coming) -> int | None:
        """The slot of the state behind the last chunk, if all chunks and the state came."""
        assert self.states is not None
        report, cache = state.restore.report, self.states.cache
        if report.good == len(state.nodes) and (slot := cache.borrow()) is not None:
            why = self.states.load(table.digest(state.first + len(state.nodes) - 1), slot)
            if not why:
                return slot
            report.lose(0, why)
            cache.give_back(slot)
        self._count_failure(sequence, report)
        return None

    def _abandon(self, table: ChunkTable, state: Coming | Attached, nodes: list[Node]) -> State:
        """The loose nodes are free once the copy stream is done with them (`settle`)."""
        state.restore.cancel()
        table.coming, table.joins = 0, None
        self._leaving.append((state.restore, nodes))
        return self._arrived(state)

    def _settle(self, sequence: SequenceState, table: ChunkTable, state: Attached) -> State:
        """After all of it has come: confirms what is as it should be; what is not is given up."""
        report = state.restore.report
        state.restore.finish()
        assert report.done
        for node in state.nodes[: report.good]:
            node.stored = not self.writeback.offers_again
        if report.lost:
            self.cache.truncate(table, state.first + report.good)
        self.cache.confirm(table, state.first, report.good)
        if state.expected is not None and not report.failed:
            self._observe_restore(sequence, state, state.expected)
        self.counters.add(report, state.split.tokens * CHUNK, state.tiers)
        sequence.restored_tokens += report.tokens
        if not sequence.preemptions:
            sequence.cached_tokens += report.tokens
        report.tell(self.profile)
        self._count_failure(sequence, report)
        return self._arrived(state)

    def _observe_restore(self, sequence: SequenceState, state: Coming | Attached, expected: Prediction) -> None:
        """A restore with nothing beside it says what computing and arrivals take from each other."""
        seconds, loading = state.restore.report.seconds, state.split.tokens + state.split.x == 0
        if self.profile.by_strategy is None:
            self.profile.observe_restore(seconds, expected.seconds, expected.shared_s, loading)
        elif loading and sequence.strategy == state.split.closing:
            end, table = state.first + len(state.nodes), sequence.table
            assert table is not None, "its step was computed"
            spread = len({table.owner(chunk) for chunk in range(end)}) > 1
            kind = Kind(sequence.strategy, len(sequence.tokens) - end * CHUNK >= MANY, spread)
            self.profile.by_strategy.observe_closing(
                kind, seconds, expected.seconds, expected.waited_s, expected.closing_s
            )

    def _arrived(self, state: Coming | Attached) -> State:
        self._arriving = {digest: other for digest, other in self._arriving.items() if other is not state.restore}
        return SETTLED

    def _count_failure(self, sequence: SequenceState, report: RestoreReport) -> None:
        if report.lost:
            sequence.planned = None
            self.counters.failures += 1
            name = short_id(sequence.request.request_id)
            log.warning("%-8s  %s; it and what follows is computed again", name, report.reason)

    # -- around a step

    def settle(self) -> None:
        """Between steps: what threads have ended."""
        self.writeback.settle()
        for restore, nodes in self._leaving:
            if restore.report.done:
                self.cache.free_loose(nodes)
        self._leaving = [(restore, nodes) for restore, nodes in self._leaving if not restore.report.done]

    def coming(self, sequence: SequenceState) -> int:
        """Tokens of its table whose chunks are still on their way."""
        state = self._states.get(sequence)
        return len(state.nodes) * CHUNK if isinstance(state, Attached) else 0

    def settled(self, sequence: SequenceState) -> bool:
        return isinstance(self._states.get(sequence), Settled)

    def confirm(self, slices: Sequence[Slice]) -> set[SequenceState]:
        """After the step, before KVCache.commit: the sequences whose rows are void, since chunks that they needed did
        not come. They are computed again from there."""
        void = set()
        for part in slices:
            state, table = self._states.get(part.sequence), part.sequence.table
            if isinstance(state, Attached) and table is not None:
                self._states[part.sequence] = self._settle(part.sequence, table, state)
                if state.restore.report.failed:
                    void.add(part.sequence)
        return void

    def observe(self, slices: Sequence[Slice], seconds: float) -> None:
        """A step that computed one prompt, with nothing on its way meanwhile, tells how fast prefill is."""
        if len(slices) == 1 and slices[0].length > 1 and not (slices[0].decodes or self._arriving or self._leaving):
            part = slices[0]
            self.profile.observe_prefill(part.start, part.length, seconds, part.sequence.strategy)

    def wait(self) -> None:
        """Sleeps for a moment, as every sequence waits for a thread, or until one has been looked up."""
        looking = (state.lookup for state in self._states.values() if isinstance(state, Looking))
        lookup = next((each for each in looking if not each.done), None)
        if lookup is None:
            time.sleep(WAIT_S)
        else:
            lookup.wait_briefly(WAIT_S)

    @property
    def pending(self) -> bool:
        """Whether threads have work that `settle` will have to end."""
        return bool(self._leaving or self.writeback.unstored or self.tiers.queued_blobs)

    def store_idle(self) -> bool:
        self.profile.catch_up()
        return self.writeback.store_idle() or (self.states is not None and self.states.store_idle())

    def add_stats(self, stats: EngineStats) -> None:
        """Tiers are asked now and then only, since they look up what they tell, and when all is stored."""
        own, told, now, before = self.counters, stats.restore, time.monotonic(), stats.restore.unstored
        told.restores, told.failures, told.seconds = own.restores, own.failures, own.restore_s
        told.loaded_tokens, told.projected_tokens = own.loaded_tokens, own.projected_tokens
        told.recomputed_tokens, told.link_s, told.waited_s = own.recomputed_tokens, own.link_s, own.waited_s
        told.loaded_from, told.plans = dict(own.loaded_from), dict(own.plans)
        told.unstored = self.writeback.unstored + self.writeback.let_go + self.tiers.queued_blobs
        if now >= self._ask_tiers_s or (before and not told.unstored):
            stats.tiers, self._ask_tiers_s = self.tiers.stats(), now + TIERS_S

    def close(self) -> None:
        """Stores what is not stored yet, within CLOSE_S or IDLE_CLOSE_S, and ends all threads. May be called again."""
        seconds = IDLE_CLOSE_S if self.writeback.only_idle else CLOSE_S
        end = time.monotonic() + seconds
        self.writeback.close(seconds)
        if self.states is not None and not self.tiers.peers.closed:
            self.states.store_all(max(0.1, end - time.monotonic()))
        self.tiers.close(max(0.1, end - time.monotonic()))
