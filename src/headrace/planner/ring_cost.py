"""How long a prefill takes by the two rings of context parallelism (arXiv 2411.01783): see planner.cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from headrace.planner.machine import LayerTimes, Machine, ModelShape, shares
from headrace.planner.partition import causal_pairs, zigzag_ranks
from headrace.planner.schedule import (
    Range,
    last_row,
    length,
    placed,
    ranges_of,
    ring_hops,
    ring_next,
    ring_origin,
)
from headrace.planner.timeline import NO_LOADS, Cost, Loads, Timeline, check_bounds

Ranges = tuple[tuple[Range, ...], ...]


@dataclass(frozen=True)
class _RingShards:
    """Which new tokens each rank has as rows, which as keys, and how many cached tokens lie on it."""

    P: int
    lies: tuple[float, ...]
    rows_on: Ranges
    keys_on: Ranges

    @classmethod
    def cut(cls, ranks: int, bounds: Sequence[int], P: int, cached_on: Sequence[float] | None) -> _RingShards:
        """Zigzag shards; each rank's keys are those of its rows."""
        check_bounds(bounds, 2 * ranks, P)
        return _zigzag(ranks, tuple(bounds), P, shares(cached_on, ranks))

    @property
    def ranks(self) -> int:
        return len(self.rows_on)

    @property
    def last(self) -> int:
        """The rank that has the last row."""
        return last_row(self.rows_on)[0]

    @cached_property
    def tail(self) -> _RingShards:
        """The same keys, but no row except the last."""
        return replace(self, rows_on=last_row(self.rows_on)[1])

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(sum(map(length, mine)) for mine in self.rows_on)

    @cached_property
    def keys(self) -> tuple[float, ...]:
        """Cached and new keys on each rank."""
        return tuple(sum(map(length, mine)) + self._cached(rank) for rank, mine in enumerate(self.keys_on))

    def _cached(self, rank: int) -> float:
        return self.P * self.lies[rank]

    @cached_property
    def pairs(self) -> list[list[int]]:
        """[a][b]: unmasked pairs of a's rows with b's keys."""
        return [[self._pairs(a, b) for b in range(self.ranks)] for a in range(self.ranks)]

    def _pairs(self, rows_of: int, keys_of: int) -> int:
        new = sum(causal_pairs(rows, keys) for rows in self.rows_on[rows_of] for keys in self.keys_on[keys_of])
        return new + round(self.rows[rows_of] * self._cached(keys_of))

    @cached_property
    def stored(self) -> _RingShards:
        """The same rows, with new keys on the ranks that keep them."""
        return replace(
            self, keys_on=placed(self.ranks, self.P, max(shard[1] for mine in self.rows_on for shard in mine))
        )

    def states(self, fold: int | None) -> list[list[float]]:
        """[a][b]: states of one row each that a's rows have over b's keys, when `fold` tokens go into one."""
        return [[self._states(a, b, fold) for b in range(self.ranks)] for a in range(self.ranks)]

    def _states(self, rows_of: int, keys_of: int, fold: int | None) -> float:
        if not self.pairs[rows_of][keys_of]:
            return 0
        if fold is None:
            return self.rows[rows_of]
        total = self.rows[rows_of] * -(-self._cached(keys_of) // fold)
        for begin, end in self.rows_on[rows_of]:
            met = [_blocks(keys, end, fold) for keys in self.keys_on[keys_of]]
            total += (end - begin) * sum(met)
        return total

    def moved(self) -> list[tuple[int, int, int]]:
        """(from, to, tokens) of new keys that lie on another rank than their rows."""
        found = []
        for home, rows in enumerate(self.rows_on):
            for owner, keys in enumerate(self.keys_on):
                tokens = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in rows for b in keys)
                if home != owner and tokens:
                    found.append((home, owner, tokens))
        return found

    def hops(self) -> list[int]:
        """How far round the ring each rank's queries have to go to meet all of their keys."""
        met = [[b for b in range(self.ranks) if row[b]] for row in self.pairs]
        return [ring_hops(a, visited, self.ranks) for a, visited in enumerate(met)]


@lru_cache(maxsize=16)
def _zigzag(ranks: int, bounds: tuple[int, ...], P: int, lies: tuple[float, ...]) -> _RingShards:
    """Kept for a moment: the same shards are asked for with more layers, or fewer."""
    mine = tuple(tuple(ranges_of(bounds, zigzag_ranks(ranks), rank)) for rank in range(ranks))
    return _RingShards(P, lies, mine, mine)


def _blocks(keys: Range, end: int, fold: int) -> int:
    """Blocks of `fold` tokens in which rows before `end` meet keys of this range."""
    first, last = keys[0], min(keys[1], end)
    return (last - 1) // fold - first // fold + 1 if last > first else 0


def _pass_on(run: Timeline, here: Sequence[float], sizes: Sequence[float], step: int) -> list[float]:
    """Every rank sends what it has to the next one; returns when each has received. The last step sends nothing."""
    if step == run.ranks - 1:
        return list(here)
    arrived = [0.0] * run.ranks
    for rank in range(run.ranks):
        to = ring_next(rank, run.ranks)
        arrived[to] = run.send(rank, to, sizes[rank], here[rank])
    return arrived


def ring_kv(
    machine: Machine,
    shape: ModelShape,
    ranks: int,
    bounds: Sequence[int],
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    loads: Mapping[int, Loads] = NO_LOADS,
    full_last_layer: bool = False,
) -> Cost:
    """Ring pass-KV: each rank's K and V, cached and new, go round and are sent on when they arrive.

    A rank waits for what arrives if it has rows to attend to it or keeps some of the new tokens.
    """
    times = LayerTimes(machine, shape)
    run, ring = Timeline(times, ranks, full_last_layer, loads), _RingShards.cut(ranks, bounds, P, cached_on)
    last, kept = ring.tail, [sum(map(length, mine)) for mine in placed(ranks, P, bounds[-1])]
    run.load(P, ring.lies)
    for more, tail in run.layers():
        for rank in range(ranks):
            run.work(rank, times.qkv(ring.rows[rank]))
        run.project()
        if more:
            run.load(P, ring.lies)
        now, here = last if tail else ring, [max(run.clock[rank], run.there(rank)) for rank in range(ranks)]
        for step in range(ranks):
            origins = [ring_origin(rank, step, ranks) for rank in range(ranks)]
            after = _pass_on(run, here, [ring.keys[shard] * shape.kv_bytes for shard in origins], step)
            for rank, shard in enumerate(origins):
                if now.rows[rank] or kept[rank]:
                    run.until(rank, here[rank])
                run.work(rank, times.attend(now.rows[rank], now.pairs[rank][shard], round(ring.keys[shard])))
            here = after
        for rank in range(ranks):
            run.work(rank, times.copy(kept[rank]) + times.rest(now.rows[rank]))
    return run.cost(ring.last)


def ring_q(
    machine: Machine,
    shape: ModelShape,
    ranks: int,
    bounds: Sequence[int],
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    fold: int | None = 0,
    loads: Mapping[int, Loads] = NO_LOADS,
    full_last_layer: bool = False,
) -> Cost:
    """Ring pass-Q: Q goes round; a rank sends the states of others' rows home as soon as it has them.

    New keys go first to the ranks that keep them. `fold`: tokens that go into one state, 0: as many as on the
    machine; None: one state of a row per rank, and keys stay with their rows, as in the paper.
    """
    fold = machine.fold_tokens if fold == 0 else fold
    times = LayerTimes(machine, shape)
    run, ring = Timeline(times, ranks, full_last_layer, loads), _RingShards.cut(ranks, bounds, P, cached_on)
    if fold is not None:
        ring = ring.stored
    moved, every, last = ring.moved(), _QueryRound.of(ring, fold), _QueryRound.of(ring.tail, fold)
    for _, tail in run.layers():
        for rank in range(ranks):
            run.work(rank, times.qkv(ring.rows[rank]))
        ready = list(run.clock)
        run.project()
        stored = [max(run.clock[rank], run.there(rank)) for rank in range(ranks)]
        for home, owner, tokens in moved:
            stored[owner] = max(stored[owner], run.send(home, owner, tokens * shape.kv_bytes, ready[home]))
        (last if tail else every).book(run, ready, stored)
    return run.cost(ring.last)


@dataclass(frozen=True, slots=True)
class _QueryRound:
    """The rows of a ring that go round: how far, and how many states come of it."""

    ring: _RingShards
    hops: list[int]
    states: list[list[float]]

    @classmethod
    def of(cls, ring: _RingShards, fold: int | None) -> _QueryRound:
        return cls(ring, ring.hops(), ring.states(fold))

    def book(self, run: Timeline, ready: list[float], stored: Sequence[float]) -> None:
        """One layer after its projections: queries leave at `ready`, a rank attends once its keys are `stored`."""
        ring, times, ranks = self.ring, run.times, run.ranks
        here, back = ready, [0.0] * ranks
        for step in range(ranks):
            homes = [ring_origin(rank, step, ranks) for rank in range(ranks)]
            sizes = [ring.rows[home] * times.shape.q_bytes if step < self.hops[home] else 0 for home in homes]
            after = _pass_on(run, here, sizes, step)
            for rank, home in enumerate(homes):
                if not step:
                    run.until(rank, stored[rank])
                if not ring.pairs[home][rank]:
                    continue
                run.until(rank, here[rank])
                run.work(rank, times.attend(ring.rows[home], ring.pairs[home][rank], round(ring.keys[rank])))
                if step:
                    size = self.states[home][rank] * times.shape.state_bytes
                    back[home] = max(back[home], run.send(rank, home, size, run.clock[rank]))
            here = after
        for rank in range(ranks):
            run.until(rank, back[rank])
            run.work(rank, times.fold(round(sum(self.states[rank]))) + times.rest(ring.rows[rank]))
