"""The cost model's own best partition of a chain: the seed of a search, and what is used where nothing was searched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from headrace.planner import cost
from headrace.planner.machine import LayerTimes, Machine, ModelShape
from headrace.planner.partition import Fractions, bounds_of, causal_pairs, cut, fractions_of
from headrace.planner.partition_search import PartitionSearch
from headrace.types import CHUNK

LAYERS = (8, 12)
"""Of a deeper model so many layers are looked at: the chain has filled by then, and the time of further ones is that
between the two. The fill and the last layer so keep the shares that they have in the whole model."""

STEPS = 16
"""Token counts in an octave for which fractions are computed anew: they change little from one to the next."""


def balanced(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int = 0, steps: int = 40, grain: int = 1
) -> Fractions:
    """Fractions with which the slowest stage of the chain (a rank's layer, or a link's) is as fast as can be.

    The steady state of a chain of many layers (KV-Runahead, section 4.1): time per layer is that of its slowest stage,
    where a stage is the mean over the model's layers, of the last of which only the projections count. Found by `steps`
    bisections over that time; each rank then takes as many rows as it can compute in it, by the `grain`.
    """
    if ranks > T:
        return (1 / ranks,) * ranks
    times = LayerTimes(machine, shape)
    low, high = 0.0, _stage(times, P, P, P + T, last=True)
    for _ in range(steps):
        middle = (low + high) / 2
        if sum(_fill(times, ranks, T, P, middle, grain)) >= T:
            high = middle
        else:
            low = middle
    return fractions_of(bounds_of(_fill(times, ranks, T, P, high, grain)))


def _fill(times: LayerTimes, ranks: int, T: int, P: int, seconds: float, grain: int) -> list[int]:
    """Rows that each rank can take when no stage may last longer than `seconds`; at most T in all. All but the last
    take a multiple of `grain`."""
    sizes: list[int] = []
    for rank in range(ranks):
        begin, left, last = P + sum(sizes), T - sum(sizes), rank == ranks - 1
        low, high = 0, -(-left // grain)
        while low < high:
            middle = (low + high + 1) // 2
            if _stage(times, P, begin, begin + min(middle * grain, left), last=last) <= seconds:
                low = middle
            else:
                high = middle - 1
        sizes.append(min(low * grain, left))
    return sizes


def _stage(times: LayerTimes, P: int, begin: int, end: int, *, last: bool) -> float:
    """One layer of the rows begin .. end-1, a mean of all: to compute it, or to hand over the new K and V up to them.

    The last rank also copies all new K and V to where they are kept.
    """
    rows, shape = end - begin, times.shape
    after = times.attend(rows, causal_pairs((begin, end), (0, end)), end) + times.rest(rows)
    passed = ((begin - P) + (0 if last else end - P)) * shape.kv_bytes
    compute = times.qkv(rows) + after * (shape.layers - 1) / shape.layers + passed * times.machine.link_cpu_s_per_byte
    if last:
        return compute + times.copy(end - P)
    return max(compute, (end - P) * shape.kv_bytes / times.machine.link_bytes_s)


def best_chain(
    machine: Machine,
    shape: ModelShape,
    ranks: int,
    T: int,
    P: int = 0,
    cached_on: Sequence[float] | None = None,
    unit: int = CHUNK,
) -> tuple[int, ...]:
    """Bounds of P .. P+T that the cost model finds fastest for a chain; inner ones on multiples of `unit`.

    Searched once for token counts that are nearly the same, then scaled: fractions change slowly with length (KVR-P).
    """
    lies = None if cached_on is None or not P else tuple(cached_on)
    fractions = _best_fractions(machine, shape, ranks, _rounded(T), _rounded(P), lies)
    return cut(fractions, T, P, unit)


def _rounded(tokens: int) -> int:
    """The nearest of STEPS token counts per octave; 0 stays 0."""
    step = max(1, (1 << max(tokens, 1).bit_length() - 1) // STEPS)
    return (tokens + step // 2) // step * step


@lru_cache(maxsize=1024)
def _best_fractions(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int, lies: tuple[float, ...] | None
) -> Fractions:
    seed = balanced(machine, shape, ranks, T, P)
    stride = max(1, T // (256 if ranks == 2 else 128))
    if ranks * stride > T or ranks == 1:
        return seed

    def measure(bounds: Sequence[int]) -> float:
        return _seconds(machine, shape, [P + bound for bound in bounds], P, lies)

    return fractions_of(PartitionSearch(T, ranks, measure, seed=cut(seed, T), stride=stride, full_grid=1).run())


def _seconds(
    machine: Machine, shape: ModelShape, bounds: Sequence[int], P: int, lies: tuple[float, ...] | None
) -> float:
    """Time of a chain, that of a deep model extrapolated from two shallow ones: see LAYERS."""

    def walk(layers: int) -> float:
        deep = msgspec.structs.replace(shape, layers=layers)
        return cost.chain(machine, deep, len(bounds) - 1, bounds, P, lies).ttft_s

    few, more = LAYERS
    if shape.layers <= more:
        return walk(shape.layers)
    longer = walk(more)
    return longer + (longer - walk(few)) * (shape.layers - more) / (more - few)
