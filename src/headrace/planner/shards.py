"""The shards of each strategy: how it cuts T new tokens on P cached ones, and which ranks compute them.

Inner bounds are multiples of `unit`. See headrace.strategies.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.planner.chain_partition import best_chain
from headrace.planner.cost import home
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.partition import align, even, zigzag, zigzag_ranks
from headrace.planner.schedule import Shards
from headrace.planner.tuned_table import TunedTable

Figures = Sequence[float] | None
"""Any measure of the cached tokens on each rank; None: spread evenly."""


def alone(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int, on: Figures, table: TunedTable | None, unit: int
) -> Shards:
    return Shards((P, P + T), (home(on, ranks),))


def evenly(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int, on: Figures, table: TunedTable | None, unit: int
) -> Shards:
    return Shards(align(tuple(P + bound for bound in even(T, ranks)), unit), tuple(range(ranks)))


def searched(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int, on: Figures, table: TunedTable | None, unit: int
) -> Shards:
    """From the table where nothing is cached, else the cost model's best."""
    if table is not None and table.entries and P == 0:
        return Shards(table.lookup(T, P, unit), tuple(range(ranks)))
    return Shards(best_chain(machine, shape, ranks, T, P, on, unit), tuple(range(ranks)))


def in_zigzag(
    machine: Machine, shape: ModelShape, ranks: int, T: int, P: int, on: Figures, table: TunedTable | None, unit: int
) -> Shards:
    return Shards(zigzag(T, ranks, unit, P), zigzag_ranks(ranks))
