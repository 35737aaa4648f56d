"""The solver's split of a restore beside all others, over one link.

A prompt is stored behind an emulated link and comes back by every split of a grid, by loading all of it, by recomputing
all of it, and by the split that the solver takes. The best of the grid, its neighbours, the solver's and the two ends
are then measured again in turns, so that none wins by luck and all meet the same drift of the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.bench.benchmark import Case
from headrace.bench.restore_testbed import SplitPoint, TimedRestore
from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import Split

FINALISTS = 4
"""So many splits of the grid are measured again."""
WARM = 3
"""Restores of each kind before the solver is asked: its rates follow what it sees."""


class SplitTestbed(Protocol):
    """What the benchmark drives: RestoreTestbed, or in tests something that costs nothing."""

    def time(self, at: SplitPoint) -> TimedRestore: ...
    def choice(self) -> tuple[StoredRun, Split]: ...
    def rates(self) -> dict[str, float]: ...
    def close(self) -> None: ...


def balance(opened: Callable[[float | None], SplitTestbed]) -> float:
    """GB/s of the link over which loading everything takes as long as recomputing everything."""
    testbed = opened(None)
    try:
        run, _ = testbed.choice()
        recomputed = statistics.median(testbed.time(SplitPoint(run.chunks, 0)).seconds for _ in range(WARM))
        closing = statistics.median(testbed.time(SplitPoint(0, 0)).seconds for _ in range(WARM))
        return run.chunks * run.kv_bytes / max(recomputed - closing, 0.1 * recomputed) / 1e9
    finally:
        testbed.close()


def measured(testbed: SplitTestbed, stride: int, repeats: int) -> Case:
    """One case: warm up, let the solver choose, sweep splits `stride` chunks apart, measure what matters again."""
    run, split = _warmed(testbed)
    chosen, loading, recomputing = SplitPoint(split.tokens, split.x), SplitPoint(0, 0), SplitPoint(run.chunks, 0)
    swept = {at: testbed.time(at).seconds for at in grid(run, stride)}
    first = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    near = around(run, first[0], max(1, stride // 2))
    swept |= {at: testbed.time(at).seconds for at in near if at not in swept}
    finalists = sorted(swept, key=swept.__getitem__)[:FINALISTS]
    found = in_turns(testbed.time, [*finalists, chosen, loading, recomputing], repeats)
    middle = {at: statistics.median(timed.seconds for timed in runs) for at, runs in found.items()}
    best = min(middle, key=middle.__getitem__)
    return summed(run, split, found[chosen], middle[loading], middle[recomputing], best, middle[best]) | {
        "swept": len(swept), "repeats": repeats, **testbed.rates(),
    }  # fmt: skip


def _warmed(testbed: SplitTestbed) -> tuple[StoredRun, Split]:
    """The run, and the solver's split once the rates have seen this link and this machine."""
    run, _ = testbed.choice()
    half = SplitPoint(run.chunks // 2, 0)
    ways = [SplitPoint(0, 0), half, SplitPoint(run.chunks, 0)]
    if run.x_bytes is not None:
        ways += [SplitPoint(0, run.chunks), SplitPoint(0, run.chunks // 2)]
    for _ in range(WARM):
        for at in ways:
            testbed.time(at)
    return testbed.choice()


def grid(run: StoredRun, stride: int) -> list[SplitPoint]:
    """Splits `stride` chunks apart, ends included."""
    steps = sorted({*range(0, run.chunks + 1, stride), run.chunks})
    other = steps if run.x_bytes is not None else [0]
    pairs = {SplitPoint(tokens, min(x, run.chunks - tokens)) for tokens in steps for x in other}
    return sorted(pairs)


def around(run: StoredRun, at: SplitPoint, reach: int) -> list[SplitPoint]:
    """Neighbours of a split."""
    some = [SplitPoint(at.tokens + dt, at.x + dx) for dt in (-reach, 0, reach) for dx in (-reach, 0, reach)]
    return [
        near for near in some
        if min(near) >= 0 and sum(near) <= run.chunks and (not near.x or run.x_bytes is not None) and near != at
    ]  # fmt: skip


def in_turns(
    measure: Callable[[SplitPoint], TimedRestore], splits: Sequence[SplitPoint], repeats: int
) -> dict[SplitPoint, list[TimedRestore]]:
    """Measures A B C A B C .., so that drift of the machine meets all alike."""
    found: dict[SplitPoint, list[TimedRestore]] = {at: [] for at in splits}
    for _ in range(repeats):
        for at in found:
            found[at].append(measure(at))
    return found


def summed(
    run: StoredRun,
    split: Split,
    chosen: Sequence[TimedRestore],
    load_s: float,
    recompute_s: float,
    best: SplitPoint,
    best_s: float,
) -> Case:
    """Flat: seconds are medians. to_best: chosen over best of all; gain: the better end over chosen."""
    seconds, predicted, link, waited, ttft = (
        statistics.median(figures)
        for figures in zip(*((t.seconds, t.predicted.seconds, t.link_s, t.waited_s, t.ttft_s) for t in chosen),
                           strict=True)
    )  # fmt: skip
    return {
        "chunks": run.chunks, "suffix": run.suffix, "kv_bytes": run.kv_bytes, "x_bytes": run.x_bytes,
        "tokens": split.tokens, "x": split.x, "load": split.load, "reason": split.reason,
        "chosen_s": seconds, "ttft_s": ttft, "predicted_s": predicted, "measured_to_predicted": seconds / predicted,
        "load_all_s": load_s, "recompute_all_s": recompute_s, "best_s": best_s, "best_tokens": best.tokens,
        "best_x": best.x, "to_best": seconds / best_s, "to_load_all": seconds / load_s,
        "to_recompute_all": seconds / recompute_s, "gain": min(load_s, recompute_s) / seconds,
        "balance": load_s / recompute_s, "link_s": link, "waited_s": waited,
        "overlap": 1.0 - waited / link if link else None, "chosen_times": [timed.seconds for timed in chosen],
    }  # fmt: skip
