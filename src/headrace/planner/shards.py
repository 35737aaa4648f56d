"""The shards of each strategy: how it cuts new tokens, and which ranks compute them (see headrace.strategies).

Inner bounds are multiples of the prefill's `unit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.planner.chain_partition import balanced, best_chain
from headrace.planner.cost import home
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.partition import align, cut, even, zigzag, zigzag_ranks
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable
from headrace.types import CHUNK

STEPS, GRAINS = 12, 64
"""Bisections of a partition that is not searched, and into how many grains its rows are cut: to a hundredth."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """T new tokens on P cached ones, to be computed on so many ranks.

    cached_on: any measure of the cached tokens on each rank; None: spread evenly. table: a tuned one, checked by the
    caller. unit: inner bounds are its multiples. search: for the cost model's best partition, otherwise closed forms
    do. seen: by strategy, what it was seen to take over what is predicted.
    """

    machine: Machine
    shape: ModelShape
    ranks: int
    T: int
    P: int = 0
    cached_on: Sequence[float] | None = None
    table: TunedTable | None = None
    unit: int = CHUNK
    search: bool = True
    seen: Mapping[str, float] = field(default_factory=dict)

    def corrected(self, strategy: str, seconds: float) -> float:
        """Predicted seconds, corrected by what was measured and seen of the strategy."""
        tuned = self.table.corrections.get(strategy, 1.0) if self.table else 1.0
        return seconds * tuned * self.seen.get(strategy, 1.0)


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
        bounds = cut(
            balanced(prefill.machine, prefill.shape, prefill.ranks, T, P, STEPS, max(1, T // GRAINS)), T, P, unit
        )
    else:
        bounds = best_chain(prefill.machine, prefill.shape, prefill.ranks, T, P, prefill.cached_on, unit)
    return Shards(bounds, tuple(range(prefill.ranks)))


def in_zigzag(prefill: Prefill) -> Shards:
    return Shards(zigzag(prefill.T, prefill.ranks, prefill.unit, prefill.P), zigzag_ranks(prefill.ranks))
