"""The cost model's own best partition of a chain: the seed of a search, and what is used where nothing was searched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from headrace.planner import cost
from headrace.planner.machine import Machine, Shape, Times
from headrace.planner.partition import Fractions, bounds_of, causal_pairs, cut, fractions_of
from headrace.planner.search import Search
from headrace.types import CHUNK

LAYERS = 12
"""Of a deeper model so many layers are looked at: the chain has filled by then."""

STEPS = 16
"""Token counts in an octave for which fractions are computed anew: they change little from one to the next."""


def balanced(machine: Machine, shape: Shape, ranks: int, T: int, P: int = 0) -> Fractions:
    """Fractions with which the slowest stage of the chain (a rank's layer, or a link's) is as fast as can be.

    The steady state of a chain of many layers (KV-Runahead, section 4.1): time per layer is that of its slowest stage.
    Found by bisection over that time; each rank then takes as many rows as it can compute in it.
    """
    if ranks > T:
        return (1 / ranks,) * ranks
    times = Times(machine, shape)
    low, high = 0.0, _stage(times, P, P, P + T, last=True)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(_fill(times, ranks, T, P, middle)) >= T:
            high = middle
        else:
            low = middle
    return fractions_of(bounds_of(_fill(times, ranks, T, P, high)))


def _fill(times: Times, ranks: int, T: int, P: int, seconds: float) -> list[int]:
    """Rows that each rank can take when no stage may last longer than `seconds`; at most T in all."""
    sizes: list[int] = []
    for rank in range(ranks):
        begin, low, high = P + sum(sizes), 0, T - sum(sizes)
        while low < high:
            middle = (low + high + 1) // 2
            if _stage(times, P, begin, begin + middle, last=rank == ranks - 1) <= seconds:
                low = middle
            else:
                high = middle - 1
        sizes.append(low)
    return sizes


def _stage(times: Times, P: int, begin: int, end: int, *, last: bool) -> float:
    """One layer of the rows begin .. end-1: to compute it, or to hand over the new K and V up to them."""
    rows = end - begin
    compute = times.qkv(rows) + times.attend(rows, causal_pairs((begin, end), (0, end)), end) + times.rest(rows)
    link = 0.0 if last else (end - P) * times.shape.kv_bytes / times.machine.link_bytes_s
    return max(compute, link)


def best_chain(
    machine: Machine,
    shape: Shape,
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
    step = max(1, 2 ** (max(tokens, 1).bit_length() - 1) // STEPS)
    return (tokens + step // 2) // step * step


@lru_cache(maxsize=1024)
def _best_fractions(
    machine: Machine, shape: Shape, ranks: int, T: int, P: int, lies: tuple[float, ...] | None
) -> Fractions:
    seed = balanced(machine, shape, ranks, T, P)
    stride = max(1, T // (256 if ranks == 2 else 128))
    if ranks * stride > T or ranks == 1:
        return seed

    shallow = msgspec.structs.replace(shape, layers=min(shape.layers, LAYERS))

    def measure(bounds: Sequence[int]) -> float:
        return cost.chain(machine, shallow, [P + bound for bound in bounds], P, lies).ttft_s

    return fractions_of(Search(T, ranks, measure, seed=cut(seed, T), stride=stride, full_grid=1).run())
