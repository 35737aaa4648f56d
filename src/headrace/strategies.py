"""How several ranks may compute a prompt: one entry per strategy, from which every list of strategies is made.

A new strategy is an entry here, its shards and its cost in headrace.planner, and the class that runs it in
headrace.parallel. An entry names functions instead of importing them, since settings are read before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True, slots=True)
class Strategy:
    """Functions are written 'module:name'.

    shards: who computes which new tokens, see planner.shards. cost: the predicted time, see planner.cost. runs: makes
    the Attend of one rank in one group from a parallel.group_context.GroupContext; None for a rank without part in it.
    keeps_all: the rank of the last shard keeps all new chunks; otherwise blocks go round the ranks.
    fused: several prompts are computed together; otherwise one after the other, so that their ranks overlap.
    offered: --prefill-strategy names it and the planner may choose it; otherwise it is a baseline for measurements.
    needs_cached: not used for a prompt without cached tokens (FALLBACK instead).
    """

    name: str
    shards: str
    cost: str
    runs: str
    keeps_all: bool = False
    fused: bool = False
    offered: bool = True
    needs_cached: bool = False


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy(
            "single",
            shards="headrace.planner.shards:alone",
            cost="headrace.planner.cost:single",
            runs="headrace.parallel.single:make",
            keeps_all=True,
        ),
        Strategy(
            "gather",
            shards="headrace.planner.shards:evenly",
            cost="headrace.planner.cost:gather",
            runs="headrace.parallel.gather:Gather",
            fused=True,
        ),
        Strategy(
            "gather-full",
            shards="headrace.planner.shards:evenly",
            cost="headrace.planner.cost:gather_full",
            runs="headrace.parallel.gather:GatherFull",
            fused=True,
            offered=False,
        ),
        Strategy(
            "chain",
            shards="headrace.planner.shards:searched",
            cost="headrace.planner.cost:chain",
            runs="headrace.parallel.chain:Chain",
            keeps_all=True,
        ),
        Strategy(
            "ring-kv",
            shards="headrace.planner.shards:in_zigzag",
            cost="headrace.planner.ring_cost:ring_kv",
            runs="headrace.parallel.ring_kv:RingKV",
            fused=True,
        ),
        Strategy(
            "ring-q",
            shards="headrace.planner.shards:in_zigzag",
            cost="headrace.planner.ring_cost:ring_q",
            runs="headrace.parallel.ring_q:RingQ",
            fused=True,
            needs_cached=True,
        ),
    )
}

FALLBACK = "ring-kv"
"""In place of a strategy that cannot be used: it needs nothing cached and no rank with room for all new chunks."""

OFFERED = tuple(name for name, strategy in STRATEGIES.items() if strategy.offered)
KEEPS_ALL = tuple(name for name, strategy in STRATEGIES.items() if strategy.keeps_all)

if TYPE_CHECKING:  # a type checker reads no computed Literal
    StrategyName = str
    PrefillStrategy = str
else:
    StrategyName = Literal[tuple(STRATEGIES)]
    PrefillStrategy = Literal["auto", *OFFERED]


def known(name: str) -> Strategy:
    """Raises ValueError for an unknown strategy."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


def load(function: str) -> Any:
    """What an entry names as 'module:name'."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)
