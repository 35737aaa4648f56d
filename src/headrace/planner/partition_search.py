"""KVR-S: the partition of a chain with the least time to first token, found by measuring it.

KV-Runahead (arXiv 2405.05329), section 4.2 and appendix D: two ranks by a ternary search over the one free bound,
more by a grid of five values per free bound whose stride halves from level to level. `measure` is any callable: a real
prefill (give the median of several runs; the best measured point wins), or the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from headrace.planner.partition import Bounds, align, even

MOVES = (-2, -1, 0, 1, 2)
"""Strides by which a bound is moved: five values."""

Measure = Callable[[Bounds], float]
FULL_GRID = 3
"""Free bounds up to which every combination of the five values is measured (125 of them)."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """One measured point: how many so far, at which stride; the best of all measured, this one included."""

    measured: int
    stride: int
    bounds: Bounds
    seconds: float
    best: Bounds
    best_s: float


class PartitionSearch:
    """One search: iterate over it to run it, and read `best` and `best_s` at any time.

    tokens: of the prompt, all new. stride: the least distance between two bounds tried, in tokens (a multiple of the
    chunk length, 64, where cached chunks matter). seed: bounds to begin at (the cost model's optimum), else even ones.
    measured: points known from before, which are not measured again; new ones are put into it. Interrupted, it is
    resumed by a new PartitionSearch with the same `measured`. full_grid: with more free bounds than this, tokens
    are moved between two shards at a time instead (five values for each pair), which needs a good seed.
    Raises ValueError for fewer tokens than `ranks` strides, or a seed that does not cut 0 .. tokens.
    """

    def __init__(
        self,
        tokens: int,
        ranks: int,
        measure: Measure,
        *,
        seed: Sequence[int] | None = None,
        stride: int = 64,
        measured: MutableMapping[Bounds, float] | None = None,
        full_grid: int = FULL_GRID,
    ) -> None:
        if ranks < 1 or stride < 1 or tokens < ranks * stride:
            raise ValueError(
                f"cannot search a partition of {tokens} tokens on {ranks} ranks in strides of {stride}: "
                f"it takes at least {max(ranks, 1) * max(stride, 1)} tokens"
            )
        self.tokens, self.ranks, self.stride = tokens, ranks, stride
        self.measure, self.full_grid = measure, full_grid
        self.measured: MutableMapping[Bounds, float] = {} if measured is None else measured
        start = self._legal(even(tokens, ranks) if seed is None else seed)
        if start is None:
            raise ValueError(f"seed must be {ranks + 1} bounds from 0 to {tokens}, got {seed}")
        self.seed, self.count = start, 0
        legal = [bounds for bounds in self.measured if bounds == self._legal(bounds)]
        self._known = min(legal, key=self.measured.__getitem__, default=None)
        self._here: Bounds | None = None

    @property
    def best(self) -> Bounds:
        """The fastest point measured so far; of equals the first. Raises ValueError before the first."""
        found = [bounds for bounds in (self._here, self._known) if bounds is not None]
        if not found:
            raise ValueError("nothing measured yet: iterate over the search first")
        return min(found, key=self.measured.__getitem__)

    @property
    def best_s(self) -> float:
        return self.measured[self.best]

    def run(self) -> Bounds:
        """The whole search; returns the best bounds."""
        for _ in self:
            pass
        return self.best

    def __iter__(self) -> Iterator[SearchProgress]:
        yield from self._try([self.seed], self.stride)
        if self.ranks == 2:
            yield from self._ternary()
        elif self.ranks > 2:
            yield from self._grid()

    def _legal(self, bounds: Sequence[int]) -> Bounds | None:
        """The bounds on multiples of the stride with no empty shard; None where they are for something else."""
        if len(bounds) != self.ranks + 1 or (bounds[0], bounds[-1]) != (0, self.tokens):
            return None
        inner: list[int] = []
        for i, bound in enumerate(align(bounds, self.stride)[1:-1]):
            low = (inner[-1] if inner else 0) + self.stride
            high = (self.tokens - 1) // self.stride * self.stride - (self.ranks - 2 - i) * self.stride
            inner.append(min(max(bound, low), high))
        return (0, *inner, self.tokens)

    def _try(self, points: Sequence[Bounds], stride: int) -> Iterator[SearchProgress]:
        """Visits the points, measures those that are new and keeps the best visited one in `_here`.

        What was measured before but not visited does not steer: a resumed search takes the same way again.
        """
        for bounds in points:
            new = bounds not in self.measured
            if new:
                self.measured[bounds] = self.measure(bounds)
                self.count += 1
            if self._here is None or self.measured[bounds] < self.measured[self._here]:
                self._here = bounds
            if new:
                yield SearchProgress(self.count, stride, bounds, self.measured[bounds], self.best, self.best_s)

    @property
    def _centre(self) -> Bounds:
        return self.seed if self._here is None else self._here

    def _ternary(self) -> Iterator[SearchProgress]:
        """Two ranks: brackets the optimum round the seed, then drops the worse third until nothing is left between."""
        unit, top = self.stride, (self.tokens - 1) // self.stride
        middle = self._centre[1] // unit
        reach = max(1, top // 8)
        low, high = max(1, middle - reach), min(top, middle + reach)
        while True:  # until the best lies inside the bracket, or at an end of what is possible
            yield from self._try([self._at(low), self._at(high)], reach * unit)
            best = self._centre[1] // unit
            if best == low > 1:
                low = max(1, low - 2 * reach)
            elif best == high < top:
                high = min(top, high + 2 * reach)
            else:
                break
        while high - low > 2:
            third = max(1, (high - low) // 3)
            left, right = low + third, high - third
            yield from self._try([self._at(left), self._at(right)], third * unit)
            if self.measured[self._at(left)] <= self.measured[self._at(right)]:
                high = right
            else:
                low = left
        yield from self._try([self._at(i) for i in range(low, high + 1)], unit)

    def _at(self, units: int) -> Bounds:
        return (0, units * self.stride, self.tokens)

    def _grid(self) -> Iterator[SearchProgress]:
        """More ranks: five values per free bound round the best point, the stride halved when it stays the best."""
        stride = self.stride
        while stride * 2 <= self.tokens // (4 * self.ranks):
            stride *= 2
        while stride >= self.stride:
            centre = self._centre
            if self.ranks - 1 <= self.full_grid:
                yield from self._try(self._all_around(centre, stride), stride)
            else:
                for first, last in combinations(range(self.ranks), 2):
                    yield from self._try(self._around(self._centre, stride, first, last), stride)
            if self._centre == centre:
                stride //= 2

    def _all_around(self, centre: Bounds, stride: int) -> list[Bounds]:
        """The points with every free bound at five values round the centre."""
        return self._moved(centre, stride, product(MOVES, repeat=self.ranks - 1))

    def _around(self, centre: Bounds, stride: int, first: int, last: int) -> list[Bounds]:
        """Up to two strides moved from one shard to another: all bounds between them move together."""
        moves = [[move if first <= bound < last else 0 for bound in range(self.ranks - 1)] for move in MOVES]
        return self._moved(centre, stride, moves)

    def _moved(self, centre: Bounds, stride: int, moves: Iterable[Sequence[int]]) -> list[Bounds]:
        """Legal points, each once."""
        points: dict[Bounds, None] = {}
        for steps in moves:
            inner = (bound + step * stride for bound, step in zip(centre[1:-1], steps, strict=True))
            moved = (0, *inner, self.tokens)
            legal = self._legal(moved) if all(a < b for a, b in pairwise(moved)) else None
            if legal is not None:
                points[legal] = None
        return list(points)
