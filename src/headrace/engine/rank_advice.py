"""Whether ranks are worth it where they run: what is said when several of them share one machine."""

from __future__ import annotations

from headrace.config import EngineConfig
from headrace.planner.choice import choose, one_engine_s, seconds_text
from headrace.planner.machine import Machine, ModelShape, count_of
from headrace.planner.shards import Prefill
from headrace.strategies import OFFERED

TOKENS = 2048
"""Of the prompt for which times are told."""
WORTH = 0.15
"""Ranks that share a machine must be predicted to gain so much: that far off may predictions be, and decoding loses."""


def advice(
    config: EngineConfig,
    here: int,
    threads: int,
    usable: int,
    machine: Machine | None = None,
    shape: ModelShape | None = None,
) -> tuple[str, bool] | None:
    """What to tell about ranks that share this machine, and whether it is a warning. None if they do not.

    here: ranks on this machine; threads: of each; usable: cores. machine, shape: what predictions are made by; without
    them there are none.
    """
    if here < 2:
        return None
    begin = _share(config.ranks.count, here, threads, usable)
    if here < config.ranks.count:
        return f"{begin}. Start one rank a machine, with all its cores (torchrun --nproc-per-node 1)", True
    one = f"one engine with all {count_of(min(usable, threads * here), 'core')}"
    better = "decodes faster" + (" and holds the weights once" if config.ranks.context > 1 else "")
    predicted = _predicted(config.ranks.context, machine, shape)
    if predicted is None:
        return f"{begin}: {one} {better}. {_remedy(config)}", True
    ranks_s, engine_s = predicted
    times = f"predicted for {TOKENS:,} tokens: {seconds_text(ranks_s)} s, by {one} {seconds_text(engine_s)} s"
    if ranks_s < engine_s * (1 - WORTH):
        return f"{begin} ({times}). One engine {better}", threads * here > usable
    also = "Ranks gain less than predictions may be off, and one engine" if ranks_s < engine_s else "One engine also"
    return f"{begin} ({times}). {also} {better}. {_remedy(config)}", True


def _remedy(config: EngineConfig) -> str:
    sizes = {"--context-parallel-size (-cp)": config.ranks.context, "--tensor-parallel-size (-tp)": config.ranks.tensor}
    given = " and ".join(flag for flag, size in sizes.items() if size > 1)
    return f"Ranks on one machine hold no longer context. Leave out {given}, or give each rank a machine of its own"


def _share(count: int, here: int, threads: int, usable: int) -> str:
    some, cores = count_of(here, "rank"), count_of(usable, "core")
    some = some if here == count else f"{here} of {count_of(count, 'rank')}"
    if threads * here > usable:
        return f"{some} of {count_of(threads, 'thread')} exceed the {cores} of this machine and take turns on them"
    if threads * here < usable:
        return f"{some} of {count_of(threads, 'thread')} share this machine"
    return f"{some} share the {cores} of this machine"


def _predicted(ranks: int, machine: Machine | None, shape: ModelShape | None) -> tuple[float, float] | None:
    """Seconds of the ranks, by the strategy that is predicted to be their fastest, and of one engine."""
    if machine is None or shape is None or ranks < 2:
        return None
    engine_s = one_engine_s(machine, shape, TOKENS)
    if engine_s is None:
        return None
    several = tuple(name for name in OFFERED if name != "single")
    found = choose(Prefill(machine, shape, ranks, TOKENS), allowed=several)
    return found.predicted_s[found.strategy], engine_s
