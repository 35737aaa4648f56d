"""How long a prefill takes by each strategy: T new tokens on P cached ones, layer by layer, links as a resource.

Each function walks the layers of all ranks once and books every message on the ports of the two ranks it joins: a small
recurrence, not a closed form, so that pipelines that fill, waits and slow links come out by themselves. It counts what
the strategies do, in causal pairs (gather_full: in rectangles):

  single     one rank has all rows; cached K, V that lie elsewhere are fetched.
  gather     even contiguous rows; every layer waits for everybody's K, V (TSP, KV-Runahead's baseline).
  chain      contiguous blocks; K, V of all earlier blocks are relayed from rank to rank; the local block is attended
             while they are awaited; all but the last rank end after the last layer's projections (KV-Runahead).
  ring_kv    zigzag shards; K, V go round in N - 1 transfers under the attention (context parallelism, Algorithm 2).
  ring_q     zigzag shards; Q goes round, states come home and are folded (Algorithm 3).

Positions 0 .. P-1 are cached: `cached_on` says which share of them lies on each rank. Bounds cut P .. P+T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from headrace.planner.machine import Machine, Shape, Times, shares
from headrace.planner.partition import causal_pairs, even, sizes_of, zigzag, zigzag_ranks
from headrace.types import BLOCK_CHUNKS, CHUNK

BLOCK = BLOCK_CHUNKS * CHUNK
"""Tokens whose states ring-q may fold before it sends them: the canonical order goes block by block."""

Range = tuple[int, int]


def _rows(block: Range) -> int:
    return block[1] - block[0]


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted time to first token; per rank the time spent waiting for messages and the bytes sent."""

    ttft_s: float
    wait_s: tuple[float, ...]
    bytes_sent: tuple[float, ...]


@dataclass(slots=True)
class _Run:
    """Clocks of the ranks, and of their ports: a rank sends one message at a time, and receives one at a time."""

    machine: Machine
    ranks: int
    clock: list[float] = field(init=False)
    wait: list[float] = field(init=False)
    sent: list[float] = field(init=False)
    out: list[float] = field(init=False)
    into: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.clock, self.wait, self.sent, self.out, self.into = ([0.0] * self.ranks for _ in range(5))

    def send(self, source: int, to: int, size: float, ready: float) -> float:
        """Books a message of `size` bytes that can leave at `ready`; returns when it has arrived."""
        if not size:
            return ready
        end = max(ready, self.out[source], self.into[to]) + size / self.machine.link_bytes_s
        self.out[source] = self.into[to] = end
        self.sent[source] += size
        return end + self.machine.latency_s

    def work(self, rank: int, seconds: float) -> None:
        self.clock[rank] += seconds

    def until(self, rank: int, moment: float) -> None:
        """The rank waits for what arrives at `moment`."""
        if moment > self.clock[rank]:
            self.wait[rank] += moment - self.clock[rank]
            self.clock[rank] = moment

    def cost(self, end: float, *, alone: bool = False) -> Cost:
        """`end` plus the way of the step to the ranks and of the hidden state back, where several compute it."""
        hops = 0.0 if alone or self.ranks == 1 else 2 * self.machine.latency_s
        return Cost(end + hops, tuple(self.wait), tuple(self.sent))


def _check(bounds: Sequence[int], ranks: int, start: int) -> None:
    if len(bounds) != ranks + 1 or bounds[0] != start or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(f"bounds must be {ranks + 1} rising positions from {start} on, got {tuple(bounds)}")


def single(
    machine: Machine, shape: Shape, ranks: int, T: int, P: int = 0, cached_on: Sequence[float] | None = None
) -> Cost:
    """All rows on the rank that holds most of the cached tokens (`home`), which fetches the others' K and V."""
    times, run = Times(machine, shape), _Run(machine, ranks)
    rank, lies = home(cached_on, ranks), shares(cached_on, ranks)
    pairs = causal_pairs((P, P + T), (0, P + T))
    fetched = _fetch(run, times, rank, P, lies)
    for layer in range(shape.layers):
        arrived = max((here for here, _ in fetched), default=0.0)
        run.work(rank, times.qkv(T))
        fetched = _fetch(run, times, rank, P, lies) if layer + 1 < shape.layers else []
        run.until(rank, arrived)
        run.work(rank, times.attend(T, pairs, P + T) + times.rest(T))
    return run.cost(run.clock[rank] + times.head(), alone=True)


def home(cached_on: Sequence[float] | None, ranks: int) -> int:
    """The rank that computes a `single` prefill: the one with most of the cached tokens, of equals the first."""
    lies = shares(cached_on, ranks)
    return lies.index(max(lies))


def _fetch(run: _Run, times: Times, rank: int, P: int, lies: Sequence[float]) -> list[tuple[float, float]]:
    """Books the way of all cached K and V of one layer to a rank, each from where its holder's clock stands.

    Returns (when it is there, how many tokens) for every holder of some. A layer's are sent one layer ahead: to be
    called after the projections of the layer before and before its new K and V are sent (a port serves messages in the
    order in which they are booked).
    """
    parts = []
    for holder, share in enumerate(lies):
        tokens, here = P * share, run.clock[holder]
        if holder != rank:
            here = run.send(holder, rank, tokens * times.shape.kv_bytes, here)
        if tokens:
            parts.append((here, tokens))
    return parts


def gather(
    machine: Machine,
    shape: Shape,
    ranks: int,
    T: int,
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    bounds: Sequence[int] | None = None,
    full: bool = False,
) -> Cost:
    """TSP: everybody's new K and V to everybody after the projections, cached ones a layer ahead.

    `full`: the paper's form, which computes the masked products too. Even blocks unless `bounds` says otherwise.
    """
    bounds = tuple(P + bound for bound in even(T, ranks)) if bounds is None else tuple(bounds)
    _check(bounds, ranks, P)
    times, run, lies = Times(machine, shape), _Run(machine, ranks), shares(cached_on, ranks)
    sizes, end = sizes_of(bounds), P + T
    fetched = [_fetch(run, times, rank, P, lies) for rank in range(ranks)]
    for layer in range(shape.layers):
        arrived = [max((here for here, _ in parts), default=0.0) for parts in fetched]
        for rank in range(ranks):
            run.work(rank, times.qkv(sizes[rank]))
        if layer + 1 < shape.layers:
            fetched = [_fetch(run, times, rank, P, lies) for rank in range(ranks)]
        for step in range(1, ranks):
            for source in range(ranks):
                to = (source + step) % ranks
                here = run.send(source, to, sizes[source] * shape.kv_bytes, run.clock[source])
                arrived[to] = max(arrived[to], here if sizes[source] else 0.0)
        for rank, rows in enumerate(pairwise(bounds)):
            run.until(rank, arrived[rank])
            pairs = sizes[rank] * end if full else causal_pairs(rows, (0, end))
            run.work(rank, times.attend(sizes[rank], pairs, end if full else rows[1]) + times.rest(sizes[rank]))
    return run.cost(max(run.clock) + times.head())


def chain(
    machine: Machine,
    shape: Shape,
    bounds: Sequence[int],
    P: int = 0,
    cached_on: Sequence[float] | None = None,
) -> Cost:
    """KV-Runahead with any contiguous partition of P .. P+T, one shard per rank, some of which may be empty.

    Cached K and V go from where they lie to every rank that has rows and lacks them, one layer ahead.
    """
    ranks = len(bounds) - 1
    _check(bounds, ranks, P)
    times, run, lies = Times(machine, shape), _Run(machine, ranks), shares(cached_on, ranks)
    blocks = list(pairwise(bounds))
    last = max((rank for rank in range(ranks) if _rows(blocks[rank])), default=0)
    readers = [rank for rank in range(ranks) if _rows(blocks[rank])]
    fetched = {rank: _fetch(run, times, rank, P, lies) for rank in readers}
    for layer in range(shape.layers):
        cached = fetched
        for rank in range(ranks):
            run.work(rank, times.qkv(_rows(blocks[rank])))
        if layer + 1 < shape.layers:
            fetched = {rank: _fetch(run, times, rank, P, lies) for rank in readers}
        relayed: list[tuple[float, int]] = []  # when each earlier block is on this rank, and whose it is
        for rank in range(last + 1):
            final = layer == shape.layers - 1 and rank < last
            own = run.clock[rank]
            if not final:
                _attend_chain(run, times, rank, blocks, relayed, cached.get(rank, []))
            relayed = sorted([*relayed, (own, rank)])
            if rank < last:
                relayed = [
                    (run.send(rank, rank + 1, _rows(blocks[block]) * shape.kv_bytes, ready), block)
                    for ready, block in relayed
                ]
    return run.cost(run.clock[last] + times.head())


def _attend_chain(
    run: _Run,
    times: Times,
    rank: int,
    blocks: Sequence[Range],
    relayed: Sequence[tuple[float, int]],
    cached: Sequence[tuple[float, float]],
) -> None:
    """A rank's attention over its own block, then over the others as they arrive, and the rest of the layer."""
    begin, end = blocks[rank]
    rows = _rows(blocks[rank])
    if not rows:
        return
    run.work(rank, times.attend(rows, causal_pairs((begin, end), (begin, end)), rows))
    pieces = [*cached, *((here, _rows(blocks[block])) for here, block in relayed)]
    for here, tokens in sorted(pieces):
        run.until(rank, here)
        run.work(rank, times.attend(rows, round(rows * tokens), round(tokens)))
    run.work(rank, times.rest(rows))


@dataclass(frozen=True, slots=True)
class _Zigzag:
    """The shards of a ring: which ranges of new tokens each rank has, and how many cached tokens lie on it."""

    P: int
    lies: tuple[float, ...]
    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def cut(
        cls, ranks: int, T: int, P: int, cached_on: Sequence[float] | None, bounds: Sequence[int] | None
    ) -> _Zigzag:
        bounds = zigzag(T, ranks, 1, P) if bounds is None else tuple(bounds)
        _check(bounds, 2 * ranks, P)
        owners, shards = zigzag_ranks(ranks), list(pairwise(bounds))
        mine = [tuple(shard for shard, owner in zip(shards, owners, strict=True) if owner == r) for r in range(ranks)]
        return cls(P, shares(cached_on, ranks), tuple(mine))

    def rows(self, rank: int) -> int:
        return sum(_rows(block) for block in self.ranges[rank])

    def cached(self, rank: int) -> float:
        return self.P * self.lies[rank]

    def keys(self, rank: int) -> float:
        return self.rows(rank) + self.cached(rank)

    def pairs(self, rows_of: int, keys_of: int) -> int:
        """Unmasked pairs of one rank's rows with another's keys."""
        new = sum(causal_pairs(rows, keys) for rows in self.ranges[rows_of] for keys in self.ranges[keys_of])
        return new + round(self.rows(rows_of) * self.cached(keys_of))

    def states(self, rows_of: int, keys_of: int, fold: int | None) -> float:
        """States of one row each that a rank's rows have over another's keys, when `fold` tokens go into one."""
        if not self.pairs(rows_of, keys_of):
            return 0
        if fold is None:
            return self.rows(rows_of)
        total = self.rows(rows_of) * -(-self.cached(keys_of) // fold)
        for begin, end in self.ranges[rows_of]:
            met = [_blocks(keys, end, fold) for keys in self.ranges[keys_of]]
            total += (end - begin) * sum(met)
        return total


def _blocks(keys: Range, end: int, fold: int) -> int:
    """Blocks of `fold` tokens in which rows before `end` meet keys of this range."""
    first, last = keys[0], min(keys[1], end)
    return (last - 1) // fold - first // fold + 1 if last > first else 0


def ring_kv(
    machine: Machine,
    shape: Shape,
    ranks: int,
    T: int,
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    bounds: Sequence[int] | None = None,
) -> Cost:
    """Ring pass-KV: each rank's K and V, cached and new, go round and are sent on when they arrive."""
    times, run = Times(machine, shape), _Run(machine, ranks)
    ring = _Zigzag.cut(ranks, T, P, cached_on, bounds)
    for _ in range(shape.layers):
        for rank in range(ranks):
            run.work(rank, times.qkv(ring.rows(rank)))
        here = list(run.clock)
        for step in range(ranks):
            after = _pass_on(run, here, [ring.keys((k - step) % ranks) * shape.kv_bytes for k in range(ranks)], step)
            for rank in range(ranks):
                run.until(rank, here[rank])
                shard = (rank - step) % ranks
                run.work(rank, times.attend(ring.rows(rank), ring.pairs(rank, shard), round(ring.keys(shard))))
            here = after
        for rank in range(ranks):
            run.work(rank, times.rest(ring.rows(rank)))
    return run.cost(max(run.clock) + times.head())


def _pass_on(run: _Run, here: Sequence[float], sizes: Sequence[float], step: int) -> list[float]:
    """Every rank sends what it has to the next one; returns when each has received. The last step sends nothing."""
    if step == run.ranks - 1:
        return list(here)
    arrived = [0.0] * run.ranks
    for rank in range(run.ranks):
        to = (rank + 1) % run.ranks
        arrived[to] = run.send(rank, to, sizes[rank], here[rank])
    return arrived


def ring_q(
    machine: Machine,
    shape: Shape,
    ranks: int,
    T: int,
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    bounds: Sequence[int] | None = None,
    fold: int | None = BLOCK,
) -> Cost:
    """Ring pass-Q: Q goes round; a rank sends the states of others' rows home as soon as it has them.

    `fold`: tokens that go into one state; None: one state of a row per rank, as in the paper.
    """
    times, run = Times(machine, shape), _Run(machine, ranks)
    ring = _Zigzag.cut(ranks, T, P, cached_on, bounds)
    for _ in range(shape.layers):
        for rank in range(ranks):
            run.work(rank, times.qkv(ring.rows(rank)))
        here, home_at, states = list(run.clock), [0.0] * ranks, [0.0] * ranks
        for step in range(ranks):
            after = _pass_on(run, here, [ring.rows((k - step) % ranks) * shape.q_bytes for k in range(ranks)], step)
            for rank in range(ranks):
                run.until(rank, here[rank])
                rows_of = (rank - step) % ranks
                run.work(rank, times.attend(ring.rows(rows_of), ring.pairs(rows_of, rank), round(ring.keys(rank))))
                found = ring.states(rows_of, rank, fold)
                states[rows_of] += found
                if rows_of != rank and found:
                    arrival = run.send(rank, rows_of, found * shape.state_bytes, run.clock[rank])
                    home_at[rows_of] = max(home_at[rows_of], arrival)
            here = after
        for rank in range(ranks):
            run.until(rank, home_at[rank])
            run.work(rank, times.fold(round(states[rank])) + times.rest(ring.rows(rank)))
    return run.cost(max(run.clock) + times.head())
