"""How a run of stored chunks comes back soonest: which of it to recompute, which to project, which to load.

What a split takes: restore.run_costs. Here the best one is searched, and the strategy of its suffix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.offload.restore.run_costs import Costs, CostTables, Ints, Prediction, Splits, StoredRun
from headrace.planner.estimators import FloatArray
from headrace.planner.strategy_rates import TIE

Range = tuple[int, int]

EXACT, EXACT_X = 128, 32
"""Chunks of a run up to which every split is tried, without and with activations; longer ones are searched coarse to
fine."""
POINTS = 32
"""Of the coarsest grid, along each of its sides; a finer one lies around the best, FINER times as fine."""
FINER = 4
LEAST_GAIN = 0.02
"""A restore that saves less than this share of recomputing everything is not worth its reads, and a split that saves
less than it of loading everything not worth the cores."""
CAUTION = 0.2
"""Where the copy stream takes part of the cores even to load everything, computing beside it must promise to save this
share of that part: what each loses to the other is the least certain of all figures."""


class Split(NamedTuple):
    """Chunks of a run by how they come back, in this order; the seconds predicted, and why. closing: the strategy of
    the step that computes the suffix; "": whichever. all_s: predicted for recomputing all."""

    tokens: int
    x: int
    load: int
    predicted_s: float
    reason: str
    closing: str = ""
    all_s: float = 0.0


def restore_split(
    run: StoredRun,
    costs: Costs,
    max_batch_tokens: int = 2048,
    least_gain: float = LEAST_GAIN,
    caution: float = CAUTION,
    tie: float = TIE,
) -> Split:
    """The split of least predicted time, and the strategy of its suffix; of equals the one that recomputes, then
    projects, least.

    Every split of a short run is tried; of a longer one splits on a grid, and on finer ones around the best. Where the
    best saves less than `least_gain` of recomputing everything, everything is recomputed; where it saves less than that
    of loading everything, or less than `caution` asks for, everything is loaded. The likeliest strategy is taken unless
    another gains more than `tie`. Raises ValueError.
    """
    tables = CostTables(run, costs, max_batch_tokens)
    found = [_worth(tables, each, least_gain, caution) for each in _searched(tables)]
    likeliest, best = found[0], min(found, key=lambda split: split.predicted_s)
    if likeliest.predicted_s * (1 - tie) <= best.predicted_s:
        best = likeliest
    if tables.all_s - best.predicted_s < least_gain * tables.all_s:
        reason = (
            f"recompute all {run.chunks} chunks: {_ms(tables.all_s)}; the best restore takes {_ms(best.predicted_s)}"
        )
        return Split(run.chunks, 0, 0, tables.all_s, reason, all_s=tables.all_s)
    return best


def whole_split(run: StoredRun, costs: Costs, state_s: float, max_batch_tokens: int = 2048) -> Split:
    """All of the run, or nothing: what a model with recurrent layers can take, since a state stands at the run's end
    alone. state_s: seconds that reading it takes when the chunks have come. Raises ValueError."""
    tables = CostTables(run, costs, max_batch_tokens)
    none = np.zeros(1, np.int64)
    loaded = float(tables.predict(tables.splits(none, none))[0][0, 0]) + state_s
    told = f"{run.chunks} chunks with the state behind them: {_ms(loaded)} (recomputing all {_ms(tables.all_s)})"
    if tables.all_s - loaded < LEAST_GAIN * tables.all_s:
        return Split(run.chunks, 0, 0, tables.all_s, f"recompute {told}", all_s=tables.all_s)
    return Split(0, 0, run.chunks, loaded, f"load {told}", all_s=tables.all_s)


class _Found(NamedTuple):
    """The best split with a strategy of the suffix, and beside it loading everything: its seconds, and the share of
    them in which the copy stream takes the cores."""

    closing: str
    tokens: int
    x: int
    seconds: float
    all_loaded_s: float
    taken_share: float


def _worth(tables: CostTables, found: _Found, least_gain: float, caution: float) -> Split:
    """The split, or loading everything where that is nearly as fast."""
    tokens, x, seconds, all_loaded = found.tokens, found.x, found.seconds, found.all_loaded_s
    if all_loaded - seconds < max(least_gain, caution * found.taken_share) * all_loaded:
        tokens, x, seconds = 0, 0, all_loaded
    chunks = tables.run.chunks
    load = chunks - tokens - x
    reason = (
        f"recompute {tokens}, project {x}, load {load} of {chunks} chunks: {_ms(seconds)} "
        f"(loading all {_ms(all_loaded)}, recomputing all {_ms(tables.all_s)})"
    )
    return Split(tokens, x, load, seconds, reason, found.closing, tables.all_s)


def predict(
    run: StoredRun, costs: Costs, tokens: int, x: int, max_batch_tokens: int = 2048, closing: str = ""
) -> Prediction:
    """What a split of the run takes; closing: Split.closing, "": the likeliest. Raises ValueError where the run has no
    such split, or its suffix no such strategy."""
    inside = min(tokens, x) >= 0 and tokens + x <= run.chunks
    if not (inside and run.projects(np.array([tokens]), np.array([x])).all()):
        raise ValueError(f"no such split of {run.chunks} chunks (x_bytes {run.x_bytes}): {tokens} tokens, {x} x")
    tables = CostTables(run, costs, max_batch_tokens)
    names = [each.strategy for each in tables.closings]
    if closing and closing not in names:
        raise ValueError(f"the suffix cannot be computed by {closing!r}: {names}")
    at = names.index(closing) if closing else 0
    found = tables.predict(tables.splits(np.array([tokens]), np.array([x])))
    seconds, link_s, waited_s, shared_s = (float(each[at, 0]) for each in found)
    return Prediction(seconds, link_s, waited_s, shared_s, tables.closings[at].seconds)


def _searched(tables: CostTables) -> list[_Found]:
    """The best split with each strategy of the suffix. Finer grids lie around the best of each."""
    run, ways = tables.run, range(len(tables.closings))
    exact = run.chunks <= (EXACT if run.x_bytes is None else EXACT_X)
    grain = 1 if exact else 1 << (run.chunks // POINTS).bit_length()
    splits = tables.splits(*_grid(run, (0, run.chunks), (0, run.chunks), grain))
    seconds = tables.predict(splits)[0]
    all_loaded, busy_s, taken_s = seconds[:, 0], float(splits.busy_s[0]), float(splits.taken_s[0])
    best = _least(splits, seconds)
    while grain > 1:
        around = {(_around(tokens, grain, run.chunks), _around(x, grain, run.chunks)) for tokens, x, _ in best}
        grain = max(1, grain // FINER)
        grids = [_grid(run, *each, grain) for each in sorted(around)]
        splits = tables.splits(*(np.concatenate(each) for each in zip(*grids, strict=True)))
        finer = _least(splits, tables.predict(splits)[0])
        best = [min(pair, key=lambda found: found[2]) for pair in zip(best, finer, strict=True)]
    taken = min(1.0, taken_s / busy_s) if busy_s else 0.0
    return [_Found(tables.closings[way].strategy, *best[way], float(all_loaded[way]), taken) for way in ways]


def _around(at: int, grain: int, most: int) -> Range:
    return max(0, at - 2 * grain), min(most, at + 2 * grain)


def _least(splits: Splits, seconds: FloatArray) -> list[tuple[int, int, float]]:
    """Tokens, x and seconds of the best split of each row."""
    return [
        (int(splits.tokens[at]), int(splits.x[at]), float(row[at]))
        for row, at in zip(seconds, np.argmin(seconds, axis=1), strict=True)
    ]


def _grid(run: StoredRun, tokens: Range, x: Range, grain: int) -> tuple[Ints, Ints]:
    """Splits whose tokens and x lie in these ranges, ends included, `grain` apart, and for each of these tokens the one
    that loads no K and V; tokens rising, then x."""
    some = np.unique(np.append(np.arange(tokens[0], tokens[1] + 1, grain), tokens[1]))
    if run.x_bytes is None:
        return some, np.zeros_like(some)
    others = np.append(np.arange(x[0], x[1] + 1, grain), (x[1], run.chunks))
    t, p = np.meshgrid(some, np.unique(others), indexing="ij")
    p = np.minimum(p, run.chunks - t)
    can = run.projects(t, p)
    return t[can], p[can]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
