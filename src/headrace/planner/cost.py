"""How long a prefill takes by each strategy: T new tokens on P cached ones, layer by layer, links as a resource.

Each function walks the layers of all ranks once and books every message on the ports of the two ranks it joins: a small
recurrence, not a closed form, so that pipelines that fill, waits and slow links come out by themselves. It counts what
the strategies do, in causal pairs (gather_full: in rectangles):

  single     one rank has all rows, and its host's cores; cached K, V that lie elsewhere are fetched.
  gather     even contiguous rows; every layer waits for everybody's K, V (TSP, KV-Runahead's baseline).
  chain      contiguous blocks; K, V of all earlier blocks are relayed from rank to rank; the local block is attended
             while they are awaited; all but the last rank end after the last layer's projections (KV-Runahead).
  ring_kv    zigzag shards; K, V go round in N - 1 transfers under the attention (context parallelism, Algorithm 2).
  ring_q     zigzag shards; Q goes round, states come home and are folded (Algorithm 3).

The rings are in planner.ring_cost. Positions 0 .. P-1 are cached: `cached_on` says which share of them lies on each
rank. Bounds cut P .. P+T.

In the last layer the projections of all rows are computed and K, V exchanged, then the last row's attention, output
projection and MLP alone, on the rank that has it. The others wait there for K, V only if they keep some of it (gather:
in any case). `full_last_layer`: the last layer is as the others, as in the papers.

Beside that: what goes between the pools and the workspace is read and written once (cached tokens by their holders, a
layer ahead; new tokens by those who keep them: the last rank of a chain all, else blocks in turn), and a link may take
time from the ranks' cores. Cached tokens may still be on their way from the tiers (`loads`), layer by layer, each
rank's on a link of its own: who needs them waits, and what goes to other ranks leaves when it has come.

Left out: that new chunks go to whoever has most room, that a workspace has three layers (nobody runs further ahead),
chunks that two ranks fill, slices of a prompt that end before its last token (of which the last layer computes no row),
and sliding windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

from headrace.planner.machine import LayerTimes, Machine, ModelShape, shares
from headrace.planner.partition import causal_pairs
from headrace.planner.schedule import Range, chain_next, last_row, length, placed
from headrace.planner.timeline import NO_LOADS, Cost, Loads, Timeline, check_bounds


def single(
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
    """All rows on the rank that holds most of the cached tokens (`home`), which fetches the others' K and V.

    Where it holds all of them, nothing goes through the workspace. It has the cores of all ranks of its host, where it
    may use them.
    """
    check_bounds(bounds, 1, P)
    times, T, end = LayerTimes(machine.alone, shape), bounds[-1] - P, bounds[-1]
    run, rank, lies = Timeline(times, ranks, full_last_layer, loads), home(cached_on, ranks), shares(cached_on, ranks)
    copied = P > 0 and lies[rank] < 1
    holders = lies if copied else ()
    fetched = _ahead(run, [rank], P, holders)
    for more, tail in run.layers():
        cached = fetched
        run.work(rank, times.qkv(T))
        if more:
            fetched = _ahead(run, [rank], P, holders)
        _later(run, cached, P, holders)
        run.until(rank, max(run.there(rank), _latest(cached[rank])))
        rows = (end - 1, end) if tail else (P, end)
        run.work(rank, times.attend(length(rows), causal_pairs(rows, (0, end)), end) + times.rest(length(rows)))
        run.work(rank, times.copy(T if copied else 0))
    return run.cost(rank, alone=True)


def home(cached_on: Sequence[float] | None, ranks: int) -> int:
    """The rank that computes a `single` prefill: the one with most of the cached tokens, of equals the first."""
    lies = shares(cached_on, ranks)
    return lies.index(max(lies))


def _ahead(
    run: Timeline, readers: Sequence[int], P: int, lies: Sequence[float]
) -> dict[int, list[tuple[float, float]]]:
    """Cached K and V of the next layer on their way to every reader: see Timeline.fetch."""
    run.load(P, lies)
    return {rank: run.fetch(rank, P, lies, ahead=1) for rank in readers}


def _later(run: Timeline, fetched: dict[int, list[tuple[float, float]]], P: int, lies: Sequence[float]) -> None:
    """What of this layer is projected, or comes only now, goes to every reader, too."""
    run.project()
    for rank, parts in fetched.items():
        parts += run.fetch(rank, P, lies, ahead=0)


def _latest(parts: Sequence[tuple[float, float]]) -> float:
    return max((here for here, _ in parts), default=0.0)


def gather(
    machine: Machine,
    shape: ModelShape,
    ranks: int,
    bounds: Sequence[int],
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    *,
    full: bool = False,
    loads: Mapping[int, Loads] = NO_LOADS,
    full_last_layer: bool = False,
) -> Cost:
    """TSP: everybody's new K and V to everybody after the projections, cached ones a layer ahead.

    `full`: the paper's form, which computes the masked products too.
    """
    check_bounds(bounds, ranks, P)
    times, lies, end = LayerTimes(machine, shape), shares(cached_on, ranks), bounds[-1]
    run, blocks = Timeline(times, ranks, full_last_layer, loads), list(pairwise(bounds))
    last, tails = last_row([[block] for block in blocks])
    kept = [sum(map(length, mine)) for mine in placed(ranks, P, end)]
    readers = [rank for rank in range(ranks) if length(blocks[rank])]
    fetched = _ahead(run, readers, P, lies)
    for more, tail in run.layers():
        cached = fetched
        for rank in range(ranks):
            run.work(rank, times.qkv(length(blocks[rank])))
        if more:
            fetched = _ahead(run, readers, P, lies)
        arrived = _everybody_to_everybody(run, [length(block) * shape.kv_bytes for block in blocks])
        _later(run, cached, P, lies)
        for rank in range(ranks):
            run.until(rank, max(arrived[rank], _latest(cached.get(rank, []))))
            for rows in tails[rank] if tail else [blocks[rank]]:
                pairs = length(rows) * end if full else causal_pairs(rows, (0, end))
                run.work(rank, times.attend(length(rows), pairs, end if full else rows[1]) + times.rest(length(rows)))
            run.work(rank, times.copy(kept[rank]))
    return run.cost(last)


gather_full = partial(gather, full=True)


def _everybody_to_everybody(run: Timeline, sizes: Sequence[float]) -> list[float]:
    """Books the all-gather; returns when each rank has all."""
    ready, arrived = list(run.clock), [0.0] * run.ranks
    for step in range(1, run.ranks):
        for source in range(run.ranks):
            to = (source + step) % run.ranks
            here = run.send(source, to, sizes[source], ready[source])
            arrived[to] = max(arrived[to], here if sizes[source] else 0.0)
    return arrived


def chain(
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
    """KV-Runahead with any contiguous partition of P .. P+T, one shard per rank, some of which may be empty.

    Cached K and V go from where they lie to every rank that has rows and lacks them, one layer ahead. The last rank
    keeps all new ones, whether it has rows or not. Ranks are counted along the chain; that rank 0 of the group,
    wherever it stands, has to be through as well is left out.
    """
    check_bounds(bounds, ranks, P)
    times, lies, blocks = LayerTimes(machine, shape), shares(cached_on, ranks), list(pairwise(bounds))
    run = Timeline(times, ranks, full_last_layer, loads)
    last, tails = last_row([[block] for block in blocks])
    sizes = [length(block) * shape.kv_bytes for block in blocks]
    readers = [rank for rank in range(ranks) if length(blocks[rank])]
    fetched = _ahead(run, readers, P, lies)
    for more, tail in run.layers():
        cached = fetched
        for rank in range(ranks):
            run.work(rank, times.qkv(length(blocks[rank])))
        if more:
            fetched = _ahead(run, readers, P, lies)
        relayed = _relayed(run, sizes)
        _later(run, cached, P, lies)
        for rank in range(ranks):
            if more or rank == last:
                earlier = [(here, length(blocks[block])) for here, block in relayed[rank]]
                rows = tails[rank][0] if tail else blocks[rank]
                _attend_chain(run, rank, rows, blocks[rank], [*cached.get(rank, []), *earlier])
        run.until(ranks - 1, _latest(relayed[ranks - 1]))
        run.work(ranks - 1, times.copy(bounds[-1] - P))
    return run.cost(last)


def _relayed(run: Timeline, sizes: Sequence[float]) -> list[list[tuple[float, int]]]:
    """Books the way of each rank's new K and V, of so many bytes, along the chain. Returns for each rank when the
    blocks before its own are there, and whose they are."""
    found: list[list[tuple[float, int]]] = [[] for _ in sizes]
    for rank in range(run.ranks):
        to = chain_next(rank, run.ranks)
        if to is not None:
            passed = sorted([*found[rank], (run.clock[rank], rank)])
            found[to] = [(run.send(rank, to, sizes[block], ready), block) for ready, block in passed]
    return found


def _attend_chain(run: Timeline, rank: int, rows: Range, block: Range, pieces: Sequence[tuple[float, float]]) -> None:
    """Rows of a rank's block attend to it, then to the pieces (arrival, tokens) as they come; the rest of the layer."""
    count, times = length(rows), run.times
    if not count:
        return
    run.work(rank, times.attend(count, causal_pairs(rows, block), length(block)))
    for here, tokens in sorted(pieces):
        run.until(rank, here)
        run.work(rank, times.attend(count, round(count * tokens), round(tokens)))
    run.work(rank, times.rest(count))
