"""How a run of stored chunks comes back soonest: which of it to recompute, which to project, which to load.

    chunk   0          tokens        tokens + x              chunks
            | recomputed | projected   | loaded as K and V     |  then the suffix: new tokens
            | from tokens| from stored X                       |

The copy stream carries, layer after layer, X of the layer and then its K and V, from the beginning on and without a
pause. The engine first prefills the recomputed part (all layers), then takes the layers in turn: waits for X, projects,
waits for K and V, computes the suffix rows. With X and KV its seconds of one layer, P the projection, S the
suffix rows of one layer and C the prefill, layer j = 0 .. L-1 cannot project before j (X + KV) + X, nor take its
suffix rows before (j + 1) (X + KV). What ends last is the longest of the paths that start with C or with one of these;
the starts of the layers are evenly spaced, so only the first and the last layer's can be the longest:

    end = max(C + L (P + S),  X + L (P + S),  X + KV + (L - 1) (P + S) + S,        first layer
              (L - 1) (X + KV) + X + P + S,  L (X + KV) + S)                       last layer

Moving bytes takes a share f of the computing cores while the copy stream is busy. Computing then advances by 1 - f a
second until that ends and by 1 a second after it; measured in work that could have been done, the formula stays as it
is. What threads that meet after every product lose beyond that, and the copy stream to them, is observed:
Costs.contention.

Of several ranks each loads its own chunks, all at the same time: X and KV are those of the rank that has most, or what
their tier gives to all of them together. C and S depend on the strategies; the end never rises where one of them falls,
so the best of each can be taken by itself, C at each split and S by trying all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.offload.restore.estimators import FloatArray
from headrace.offload.restore.strategy_rates import TIE, Closing
from headrace.types import CHUNK

Ints = NDArray[np.int64]

EXACT = 256
"""Chunks of a run up to which every split is tried; longer ones are searched coarse to fine."""
LEAST_GAIN = 0.02
"""A restore that saves less than this share of recomputing everything is not worth its reads, and a split that saves
less than it of loading everything not worth the cores."""
CAUTION = 0.2
"""Where the copy stream takes part of the cores even to load everything, computing beside it must promise to save this
share of that part: what each loses to the other is the least certain of all figures."""
MOST_TAKEN = 0.95
"""Share of the computing cores that a copy stream can take at most."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of stored chunks: the first `first` chunks of the prompt are resident, `chunks` are stored, and `suffix`
    new tokens follow. kv_bytes, x_bytes: a chunk's stored bytes over all `layers` (x_bytes None: no activations are
    stored). has_x: of which chunks they are; none given: of all. tiers: where it is stored; of several, one per chunk.
    ranks: who brings each chunk, all at the same time (projecting costs as if one did it all); none: one rank. held:
    resident chunks of each of several ranks. Raises ValueError.
    """

    first: int
    chunks: int
    suffix: int
    kv_bytes: float
    x_bytes: float | None
    layers: int
    tiers: str | tuple[str, ...]
    ranks: tuple[int, ...] = ()
    has_x: tuple[bool, ...] = ()
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.first, self.chunks, self.suffix) < 0 or self.layers < 1 or not self.kv_bytes > 0:
            raise ValueError(f"a run needs counts of at least 0, and layers and kv_bytes above 0: {self}")
        if self.x_bytes is not None and not self.x_bytes > 0:
            raise ValueError(f"a run's x_bytes must be above 0, or None for none; got {self.x_bytes}")
        if not isinstance(self.tiers, str) and len(self.tiers) != self.chunks:
            raise ValueError(f"a run of {self.chunks} chunks needs as many tiers, got {len(self.tiers)}")
        if any(each and len(each) != self.chunks for each in (self.ranks, self.has_x)):
            raise ValueError(f"a run of {self.chunks} chunks needs as many ranks, or has_x")

    def projects(self, tokens: Ints, x: Ints) -> NDArray[np.bool_]:
        """Whether each of the chunks that these splits project has activations, elementwise."""
        if self.x_bytes is None or not self.has_x:
            return np.logical_or(x == 0, self.x_bytes is not None)
        without = np.concatenate([[0], np.cumsum(np.logical_not(self.has_x))])
        return np.equal(without[tokens + x], without[tokens])

    @property
    def tier_of(self) -> tuple[str, ...]:
        """Where each chunk is stored."""
        return (self.tiers,) * self.chunks if isinstance(self.tiers, str) else self.tiers

    @property
    def by_place(self) -> dict[tuple[int, str], Ints]:
        """(rank, tier) -> how many of the chunks before each bound 0 .. chunks come that way."""
        if isinstance(self.tiers, str) and not self.ranks:
            return {(0, self.tiers): np.arange(self.chunks + 1)}
        places = list(zip(self.ranks or (0,) * self.chunks, self.tier_of, strict=True))
        marks = {place: [here == place for here in places] for place in dict.fromkeys(places)}
        return {place: np.concatenate([[0], np.cumsum(mark)]).astype(np.int64) for place, mark in marks.items()}

    def lies(self, ranks: int) -> list[float]:
        """Tokens on each of so many ranks once all is loaded."""
        held = self.held or (0,) * ranks
        return [float(CHUNK * (held[rank] + self.ranks.count(rank))) for rank in range(ranks)]


class Costs(Protocol):
    """Seconds of the pieces, elementwise over arrays; see offload.restore.rates."""

    def transfer(self, tier: str, size: FloatArray, pieces: FloatArray) -> FloatArray:
        """`size` bytes in `pieces` pieces (chunks) from a tier, in one go; 0 for none."""

    def contention(self, loading: bool) -> float:
        """Seconds lost for each second that copy stream and engine compete for the cores, beyond those it takes:
        where nothing but the new tokens is computed beside `loading`, and where more is."""

    def cpu_s_per_byte(self, tier: str) -> float:
        """Seconds that a byte from the tier takes from the computing cores."""

    def project(self, tokens: FloatArray) -> FloatArray:
        """K and V of so many tokens from X, in one layer; 0 for none."""

    def together_s_per_byte(self, tier: str) -> float:
        """What a byte takes where several ranks load from the tier at the same time; 0.0: they do not hold up each
        other."""

    def prefill(self, start: FloatArray, count: FloatArray) -> FloatArray:
        """One step of `count` tokens after `start` others, all layers; 0 for none. By the best strategy."""

    def closings(self, run: StoredRun, opening: int) -> Sequence[Closing]:
        """Ways to compute the first `opening` tokens of the suffix, at least one."""


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


class Prediction(NamedTuple):
    """seconds: until the suffix is computed; link_s: the copy stream is at work; waited_s: of these the engine waits;
    shared_s: copy stream and engine compete for the cores. closing_s: the suffix takes by itself."""

    seconds: float
    link_s: float
    waited_s: float
    shared_s: float = 0.0
    closing_s: float = 0.0


class CostTables:
    """What the pieces of a run cost, by how many chunks they take (arrays over 0 .. chunks)."""

    def __init__(self, run: StoredRun, costs: Costs, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise ValueError(f"max_batch_tokens must be at least 1, got {max_batch_tokens}")
        self.run, self.costs = run, costs
        counts = np.arange(run.chunks + 1, dtype=np.float64)
        self.places = run.by_place
        tiers = {tier for _, tier in self.places}
        self.kv_s = {tier: self._transfers(tier, run.kv_bytes, counts) for tier in tiers}
        self.x_s = {tier: self._transfers(tier, run.x_bytes or 0.0, counts) for tier in tiers}
        self.project_s = costs.project(counts * CHUNK)
        self.prefill_s = prefill(costs, run.first * CHUNK, counts * CHUNK, max_batch_tokens)
        end = (run.first + run.chunks) * CHUNK
        opening = min(run.suffix, max_batch_tokens)
        rest = prefill(costs, end + opening, np.array([float(run.suffix - opening)]), max_batch_tokens)
        self.closings = costs.closings(run, opening)
        self.closing = self.closings[0]
        self.after_s = float(rest[0])
        tokens = np.array([float(run.chunks * CHUNK + run.suffix)])
        self.all_s = float(prefill(costs, run.first * CHUNK, tokens, max_batch_tokens)[0])

    def close_by(self, strategy: str) -> None:
        """Predicts from now on with this strategy of the suffix; "": with the likeliest. Raises ValueError."""
        found = [each for each in self.closings if strategy in ("", each.strategy)]
        if not found:
            raise ValueError(f"the suffix cannot be computed by {strategy!r}: {[e.strategy for e in self.closings]}")
        self.closing = found[0]

    def _transfers(self, tier: str, size: float, counts: FloatArray) -> FloatArray:
        return self.costs.transfer(tier, counts * size / self.run.layers, counts) if size else np.zeros(len(counts))

    @property
    def taken_share(self) -> float:
        """Share of its time in which the copy stream takes the cores, where it loads everything."""
        none = np.zeros(1, dtype=np.int64)
        _, kv, taken = self._carried(none, none)
        busy_s = self.run.layers * float(kv[0])
        return min(1.0, float(taken[0]) / busy_s) if busy_s else 0.0

    def _carried(self, tokens: Ints, x: Ints) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Of the splits: seconds of a layer's X and of its K and V on the copy stream, and seconds that all layers take
        from the cores. Ranks load at the same time: of the one that has most of each, or what a tier gives to all."""
        found: dict[int, FloatArray] = {}
        given, run_bytes = np.zeros(tokens.shape), self.run.kv_bytes / self.run.layers
        for (rank, tier), before in self.places.items():
            projected = before[tokens + x] - before[tokens]
            loaded = before[-1] - before[tokens + x]
            size = projected * (self.run.x_bytes or 0.0) + loaded * self.run.kv_bytes
            own = np.stack([self.x_s[tier][projected], self.kv_s[tier][loaded], size * self.costs.cpu_s_per_byte(tier)])
            found[rank] = found[rank] + own if rank in found else own
            given = given + loaded * run_bytes * self.costs.together_s_per_byte(tier)
        if not found:
            return np.zeros(tokens.shape), np.zeros(tokens.shape), np.zeros(tokens.shape)
        x_link, kv, taken = np.max(np.stack(list(found.values())), axis=0)
        return x_link, np.maximum(kv, given) if len(found) > 1 else kv, taken

    def predict(self, tokens: Ints, x: Ints) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The figures of Prediction for the splits (tokens, x), elementwise."""
        layers, run = self.run.layers, self.run
        x_link, kv, taken = self._carried(tokens, x)
        layer_s = x_link + kv
        busy_s = layers * layer_s
        free = 1.0 - np.minimum(taken / np.maximum(busy_s, 1e-12), MOST_TAKEN)
        project, suffix_s = self.project_s[x], self.closing.seconds / layers
        work = project + suffix_s
        prefix = self.prefill_s[tokens]
        # In work that could have been done: a moment m of the copy stream is m * free.
        end = np.maximum(prefix, x_link * free) + layers * work
        end = np.maximum(end, layer_s * free + layers * work - project)
        end = np.maximum(end, ((layers - 1) * layer_s + x_link) * free + work)
        end = np.maximum(end, busy_s * free + suffix_s)
        idle = np.clip((end - prefix - layers * work) / free, 0.0, busy_s)
        shared = np.minimum(taken, prefix + layers * work)
        seconds = np.where(end <= busy_s * free, end / free, end + busy_s * (1.0 - free)) + self.after_s
        lost = np.where(tokens + x == 0, self.costs.contention(loading=True), self.costs.contention(loading=False))
        seconds = seconds + lost * shared + self.closing.beside_s
        all_tokens = tokens == run.chunks
        return np.where(all_tokens, self.all_s, seconds), busy_s, np.where(all_tokens, 0.0, idle), shared


def prefill(costs: Costs, start: float, counts: FloatArray, max_batch_tokens: int) -> FloatArray:
    """Seconds of prefilling so many tokens after `start` others in steps of max_batch_tokens, elementwise."""
    steps = counts // max_batch_tokens
    whole = np.arange(int(steps.max(initial=0)), dtype=np.float64)
    full = costs.prefill(start + whole * max_batch_tokens, np.full(len(whole), float(max_batch_tokens)))
    through = np.concatenate([[0.0], np.cumsum(full)])[steps.astype(np.int64)]
    return through + costs.prefill(start + steps * max_batch_tokens, counts - steps * max_batch_tokens)


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

    Every split is tried up to EXACT chunks; beyond, splits on a grid, and all those around the best of it. Where the
    best saves less than `least_gain` of recomputing everything, everything is recomputed; where it saves less than that
    of loading everything, or less than `caution` asks for, everything is loaded. The likeliest strategy is taken unless
    another gains more than `tie`. Raises ValueError.
    """
    tables = CostTables(run, costs, max_batch_tokens)
    found = [_closed(tables, each.strategy, least_gain, caution) for each in tables.closings]
    best = min(found, key=lambda split: split.predicted_s)
    if found[0].predicted_s * (1 - tie) <= best.predicted_s:
        best = found[0]
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
    loaded = _predicted(tables, 0, 0).seconds + state_s
    told = f"{run.chunks} chunks with the state behind them: {_ms(loaded)} (recomputing all {_ms(tables.all_s)})"
    if tables.all_s - loaded < LEAST_GAIN * tables.all_s:
        return Split(run.chunks, 0, 0, tables.all_s, f"recompute {told}", all_s=tables.all_s)
    return Split(0, 0, run.chunks, loaded, f"load {told}", all_s=tables.all_s)


def _closed(tables: CostTables, strategy: str, least_gain: float, caution: float) -> Split:
    """The best split with this strategy of the suffix."""
    tables.close_by(strategy)
    tokens, x, seconds = _best(tables)
    all_loaded = _predicted(tables, 0, 0).seconds
    if all_loaded - seconds < max(least_gain, caution * tables.taken_share) * all_loaded:
        tokens, x, seconds = 0, 0, all_loaded
    chunks = tables.run.chunks
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
    return _predicted(tables, tokens, x)


def _predicted(tables: CostTables, tokens: int, x: int) -> Prediction:
    found = [float(each[0]) for each in tables.predict(np.array([tokens]), np.array([x]))]
    return Prediction(found[0], found[1], found[2], found[3], tables.closing.seconds)


def _best(tables: CostTables) -> tuple[int, int, float]:
    """Tokens, x and seconds."""
    run = tables.run
    grain = 1 if run.x_bytes is None else max(1, -(-run.chunks // EXACT)) ** 2
    best = _least(tables, *_grid(run, (0, run.chunks), (0, run.chunks), grain))
    while grain > 1:
        fine = max(1, grain // 16)
        tokens, x, _ = best
        wide = [(max(0, at - 2 * grain), min(run.chunks, at + 2 * grain)) for at in (tokens, x)]
        best = min(best, _least(tables, *_grid(run, wide[0], wide[1], fine)), key=lambda found: found[2])
        grain = fine
    return best


def _grid(run: StoredRun, tokens: tuple[int, int], x: tuple[int, int], grain: int) -> tuple[Ints, Ints]:
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


def _least(tables: CostTables, tokens: Ints, x: Ints) -> tuple[int, int, float]:
    seconds = tables.predict(tokens, x)[0]
    at = int(np.argmin(seconds))
    return int(tokens[at]), int(x[at]), float(seconds[at])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
