"""The shards of each strategy: how it cuts new tokens, and which ranks compute them (see headrace.strategies).

Inner bounds are multiples of the prefill's `unit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planner.chain_partition import balanced, best_chain
from headrace.planner.cost import home
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.partition import align, cut, even, zigzag, zigzag_ranks
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable
from headrace.types import CHUNK


@dataclass(frozen=True, slots=True)
class Prefill:
    """T new tokens on P cached ones. cached_on: any measure of the latter on each rank; None: spread evenly. search:
    otherwise closed forms do."""

    machine: Machine
    shape: ModelShape
    ranks: int
    T: int
    P: int = 0
    cached_on: Sequence[float] | None = None
    table: TunedTable | None = None
    unit: int = CHUNK
    search: bool = True


def alone(prefill: Prefill) -> Shards:
    """All tokens on the rank that holds most of the cached ones."""
    return Shards((prefill.P, prefill.P + prefill.T), (home(prefill.cached_on, prefill.ranks),))


def evenly(prefill: Prefill) -> Shards:
    bounds = tuple(prefill.P + bound for bound in even(prefill.T, prefill.ranks))
    return Shards(align(bounds, prefill.unit), tuple(range(prefill.ranks)))


def searched(prefill: Prefill) -> Shards:
    """From the tuned table where nothing is cached, else the cost model's best, or its closed form's."""
    table, T, P, unit = prefill.table, prefill.T, prefill.P, prefill.unit
    if table is not None and table.entries and P == 0:
        bounds = table.lookup(T, P, unit)
    elif not prefill.search:
        bounds = cut(balanced(prefill.machine, prefill.shape, prefill.ranks, T, P), T, P, unit)
    else:
        bounds = best_chain(prefill.machine, prefill.shape, prefill.ranks, T, P, prefill.cached_on, unit)
    return Shards(bounds, tuple(range(prefill.ranks)))


def in_zigzag(prefill: Prefill) -> Shards:
    return Shards(zigzag(prefill.T, prefill.ranks, prefill.unit, prefill.P), zigzag_ranks(prefill.ranks))
