"""How several ranks may compute a prompt: one entry per strategy, from which every list of strategies is made.

A new strategy is an entry here, its shards and its cost in headrace.planner, and the class that runs it in
headrace.parallel: docs/extending.md. An entry names functions instead of importing them, since settings are read before
torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True, slots=True)
class Strategy:
    """Functions are written 'module:name', the module without its 'headrace.'.

    summary: who computes what, in a few words, for help texts and docs/parallel.md.
    shards: who computes which new tokens, see planner.shards. cost: the predicted time, see planner.cost. runs: makes
    the Attend of one rank in one group from a parallel.group_context.GroupContext; None for a rank without part in it.
    keeps_all: the rank of the last shard keeps all new chunks; otherwise blocks go round the ranks.
    fused: several prompts are computed together; otherwise one after the other, so that their ranks overlap.
    offered: --prefill-strategy names it and the planner may choose it; otherwise it is a baseline for measurements.
    needs_cached: not used for a prompt without cached tokens (FALLBACK instead).
    recurrent: computes models with recurrent layers too: rows in their order, from rank to rank.
    sparse: computes prompts of models whose rows choose their keys too.
    """

    name: str
    summary: str
    shards: str
    cost: str
    runs: str
    keeps_all: bool = False
    fused: bool = False
    offered: bool = True
    needs_cached: bool = False
    recurrent: bool = False
    sparse: bool = True


_ENTRIES = (
    Strategy("single", "one rank all of it, with all cores of its host's ranks",
             "planner.shards:alone", "planner.cost:single", "parallel.single:make", keeps_all=True,
             recurrent=True),
    Strategy("gather", "even blocks, all-gather of K and V",
             "planner.shards:evenly", "planner.cost:gather", "parallel.gather:Gather", fused=True),
    Strategy("gather-full", "as gather, the masked half of the rectangle computed too",
             "planner.shards:evenly", "planner.cost:gather_full", "parallel.gather:GatherFull",
             fused=True, offered=False),
    Strategy("chain", "KV-Runahead: rank i the i-th block, later ones shorter",
             "planner.shards:searched", "planner.cost:chain", "parallel.chain:Chain", keeps_all=True,
             recurrent=True),
    Strategy("ring-kv", "ring pass-KV: two of 2N shards each, equal areas",
             "planner.shards:in_zigzag", "planner.ring_cost:ring_kv", "parallel.ring_kv:RingKV", fused=True),
    Strategy("ring-q", "ring pass-Q: as ring-kv, but keys stay",
             "planner.shards:in_zigzag", "planner.ring_cost:ring_q", "parallel.fetched_keys:ring_q",
             fused=True, needs_cached=True, sparse=False),
)  # fmt: skip

STRATEGIES = {strategy.name: strategy for strategy in _ENTRIES}

FALLBACK = "ring-kv"
"""In place of a strategy that cannot be used: it needs nothing cached and no rank with room for all new chunks."""

OFFERED = tuple(name for name, strategy in STRATEGIES.items() if strategy.offered)
KEEPS_ALL = tuple(name for name, strategy in STRATEGIES.items() if strategy.keeps_all)
SPARSE = tuple(name for name, strategy in STRATEGIES.items() if strategy.sparse and strategy.offered)
RECURRENT = tuple(name for name, strategy in STRATEGIES.items() if strategy.recurrent)

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
    """The function that an entry names."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"headrace.{module}"), name)
