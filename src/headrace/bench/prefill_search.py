"""Searches the chain's blocks by prefills on a testbed (KVR-S), and runs ways to prefill in turns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from headrace.bench.prefill_testbed import CachedPlacement, PrefillRun, PrefillTestbed, median
from headrace.planner.partition import Bounds
from headrace.planner.partition_search import PartitionSearch
from headrace.planner.schedule import Shards

FINALISTS, FINALS = 4, 3
"""So many points of a search are measured again, so many times each."""


def search(
    testbed: PrefillTestbed,
    seed: Sequence[int],
    P: int,
    stride: int,
    repeats: int,
    placement: CachedPlacement = "own",
    measured: dict[Bounds, float] | None = None,
) -> PartitionSearch:
    """A search for the chain's bounds by prefills; its own bounds begin at 0. Nothing is measured cold."""
    order = tuple(range(testbed.size))

    warm = False

    def measure(bounds: Bounds) -> float:
        nonlocal warm
        cut = Shards(tuple(P + bound for bound in bounds), order)
        if not warm:
            testbed.run("chain", cut, P, placement)
            warm = True
        return median([testbed.run("chain", cut, P, placement) for _ in range(repeats)]).seconds

    start = [bound - P for bound in seed]
    return PartitionSearch(start[-1], testbed.size, measure, seed=start, stride=stride, measured=measured)


def confirmed(
    testbed: PrefillTestbed, found: PartitionSearch, P: int, placement: CachedPlacement = "own"
) -> tuple[Bounds, float]:
    """Best bounds of a search and their time: its fastest points are measured again in turns, so none wins by luck.

    Takes FINALISTS * (1 + FINALS) prefills.
    """
    order = tuple(range(testbed.size))
    finalists = sorted(found.measured, key=found.measured.__getitem__)[:FINALISTS]
    runs = {
        bounds: partial(testbed.run, "chain", Shards(tuple(P + bound for bound in bounds), order), P, placement)
        for bounds in finalists
    }
    times = {bounds: median(again).seconds for bounds, again in in_turns(runs, FINALS).items()}
    best = min(times, key=times.__getitem__)
    return best, times[best]


Name = TypeVar("Name", bound=Hashable)


def in_turns(runs: Mapping[Name, Callable[[], PrefillRun]], repeats: int) -> dict[Name, list[PrefillRun]]:
    """Runs A B A B .., so that drift of the machine meets all alike. Each runs once before, uncounted."""
    for run in runs.values():
        run()
    found: dict[Name, list[PrefillRun]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return found
