"""How a run of stored chunks comes back soonest: which of it to recompute, which to project, which to load.

What a split takes: restore.run_costs. Here the best one is searched, and the strategy of its suffix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.offload.restore.run_costs import Costs, CostTables, Ints, Prediction, Splits, StoredRun
from headrace.planner.strategy_rates import TIE

Range = tuple[int, int]

EXACT, EXACT_X = 128, 32
"""Chunks of a run up to which every split is tried, without and with activations; longer ones are searched coarse to
fine."""
POINTS = 32
"""Of the coarsest grid, along each of its sides; a finer one lies around the best, FINER times as fine."""
FINER = 8
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
    search = _Search(tables)
    found = [_closed(search, each.strategy, least_gain, caution) for each in tables.closings]
    best = min(found, key=lambda split: split.predicted_s)
    if found[0].predicted_s * (1 - tie) <= best.predicted_s:
        best = found[0]
    if tables.all_s - best.predicted_s < least_gain * tables.all_s:
        reason = (
            f"recompute all {run.chunks} chunks: {_ms(tables.all_s)}; the best restore takes {_ms(best.predicted_s)}"
        )
        return Split(run.chunks, 0, 0, tables.all_s, reason, all_s=tables.all_s)
    return best


def _closed(search: _Search, strategy: str, least_gain: float, caution: float) -> Split:
    """The best split with this strategy of the suffix."""
    tables, chunks = search.tables, search.tables.run.chunks
    tables.close_by(strategy)
    tokens, x, seconds = search.best()
    all_loaded, taken_share = search.all_loaded()
    if all_loaded - seconds < max(least_gain, caution * taken_share) * all_loaded:
        tokens, x, seconds = 0, 0, all_loaded
    load = chunks - tokens - x
    reason = (
        f"recompute {tokens}, project {x}, load {load} of {chunks} chunks: {_ms(seconds)} "
        f"(loading all {_ms(all_loaded)}, recomputing all {_ms(tables.all_s)})"
    )
    return Split(tokens, x, load, seconds, reason, strategy, tables.all_s)


def predict(
    run: StoredRun, costs: Costs, tokens: int, x: int, max_batch_tokens: int = 2048, closing: str = ""
) -> Prediction:
    """What a split of the run takes; closing: Split.closing. Raises ValueError where the run has no such split."""
    inside = min(tokens, x) >= 0 and tokens + x <= run.chunks
    if not (inside and run.projects(np.array([tokens]), np.array([x])).all()):
        raise ValueError(f"no such split of {run.chunks} chunks (x_bytes {run.x_bytes}): {tokens} tokens, {x} x")
    tables = CostTables(run, costs, max_batch_tokens)
    tables.close_by(closing)
    found = [float(each[0]) for each in tables.predict(tables.splits(np.array([tokens]), np.array([x])))]
    return Prediction(found[0], found[1], found[2], found[3], tables.closing.seconds)


class _Search:
    """For the best split of a run, by one strategy of its suffix after the other: grids are looked at by several."""

    def __init__(self, tables: CostTables) -> None:
        self.tables, self._grids = tables, dict[tuple[Range, Range, int], Splits]()
        chunks, exact = tables.run.chunks, EXACT if tables.run.x_bytes is None else EXACT_X
        self._grain = 1 if chunks <= exact else 1 << (chunks // POINTS).bit_length()

    def best(self) -> tuple[int, int, float]:
        """Tokens, x and seconds."""
        chunks, grain = self.tables.run.chunks, self._grain
        best = self._least((0, chunks), (0, chunks), grain)
        while grain > 1:
            around = [(max(0, at - 2 * grain), min(chunks, at + 2 * grain)) for at in best[:2]]
            grain = max(1, grain // FINER)
            best = min(best, self._least(around[0], around[1], grain), key=lambda found: found[2])
        return best

    def all_loaded(self) -> tuple[float, float]:
        """Seconds where everything is loaded, and the share of its time in which the copy stream takes the cores."""
        splits = self._on((0, 0), (0, 0), 1)
        busy_s = float(splits.busy_s[0])
        return float(self.tables.predict(splits)[0][0]), min(1.0, float(splits.taken_s[0]) / busy_s) if busy_s else 0.0

    def _least(self, tokens: Range, x: Range, grain: int) -> tuple[int, int, float]:
        splits = self._on(tokens, x, grain)
        seconds = self.tables.predict(splits)[0]
        at = int(np.argmin(seconds))
        return int(splits.tokens[at]), int(splits.x[at]), float(seconds[at])

    def _on(self, tokens: Range, x: Range, grain: int) -> Splits:
        at = tokens, x, grain
        if at not in self._grids:
            self._grids[at] = self.tables.splits(*_grid(self.tables.run, *at))
        return self._grids[at]


def _grid(run: StoredRun, tokens: Range, x: Range, grain: int) -> tuple[Ints, Ints]:
    """Splits whose tokens and x lie in these ranges, ends included, `grain` apart, and for each of these tokens the one
    that loads no K and V, unless x is to be 0; tokens rising, then x."""
    some = np.unique(np.append(np.arange(tokens[0], tokens[1] + 1, grain), tokens[1]))
    if run.x_bytes is None or not x[1]:
        return some, np.zeros_like(some)
    others = np.append(np.arange(x[0], x[1] + 1, grain), (x[1], run.chunks))
    t, p = np.meshgrid(some, np.unique(others), indexing="ij")
    p = np.minimum(p, run.chunks - t)
    can = run.projects(t, p)
    return t[can], p[can]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
