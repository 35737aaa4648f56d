"""Figures that follow what is observed: of a transfer, of a projection, of a step of prefill.

Robust on purpose: a single outlier changes nothing, and a change that lasts is believed within a few observations.
"""

from __future__ import annotations

import statistics
from collections import deque

import numpy as np
from numpy.typing import NDArray

from headrace.planner.machine import Machine, ModelShape, PieceRate

FloatArray = NDArray[np.float64]

LATEST = 3
"""An observation counts by the median of so many latest: a single outlier changes nothing."""
MOST_LOST = 4.0
"""Bound of the contention that is believed."""
WEIGHT = 0.6
"""Of a figure by itself: share of the way to that median, in the logarithm."""
CLASSES = 32
MANY = 256
"""Tokens of a step from which on its time is that of its products."""


class Smoothed:
    """A positive figure that follows its observations."""

    def __init__(self, value: float, weight: float = WEIGHT) -> None:
        self.value, self.weight = value, weight
        self._latest: deque[float] = deque([value] * (LATEST - 1), maxlen=LATEST)

    def observe(self, value: float) -> None:
        self._latest.append(value)
        toward = statistics.median(self._latest)
        self.value *= (toward / self.value) ** self.weight


class RateFit:
    """seconds = figures[0] * a + figures[1] * b, both figures at least 0, fitted to the latest observations of (a, b).

    Weighted least squares of the relative errors: older observations count less, and so do those that are far from what
    the latest say as a whole (outliers, and all that was seen before a change). What these leave open is filled in by
    the figures so far at two typical `points`, scaled as the latest say: both alike where they change `together`, as
    with the cores' clock, else the one that makes up most of the latest times.
    """

    def __init__(self, figures: tuple[float, float], points: tuple[tuple[float, float], ...], together: bool) -> None:
        self.figures = np.array(figures)
        self._points, self._together = np.array(points), together
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=24)
        self.observed = 0

    def observe(self, a: float, b: float, seconds: float) -> FloatArray:
        """Refits; returns for each of the latest observations (a, b, log of seconds over what is fitted)."""
        self.observed += 1
        self._latest.append((a, b, seconds))
        seen = np.array(self._latest)
        rows, times = seen[:, :2], seen[:, 2]
        found = before = self._scaled(rows, _recent(np.log(times / (rows @ self.figures))))
        filled = self._points / (self._points @ before)[:, None]
        for _ in range(3 if len(seen) >= LATEST else 0):
            off = np.log(times / (rows @ found))
            odd = np.maximum(np.abs(off - _recent(off)), 1e-9)
            weights = 0.75 ** np.arange(len(seen))[::-1] * np.minimum(1.0, 0.2 / odd) ** 2
            found = _least_squares(np.vstack([rows / times[:, None], filled]), np.append(weights, (0.02, 0.02)))
        self.figures = found
        return np.asarray(np.column_stack([rows, np.log(times / (rows @ found))]))

    def _scaled(self, rows: FloatArray, recent: float) -> FloatArray:
        """The figures so that the latest times become exp(recent) times what they are by them."""
        change = np.exp(recent)
        if self._together:
            return np.asarray(self.figures * change)
        parts = np.sum(rows[-LATEST:] * self.figures, axis=0)
        mostly, scaled = int(np.argmax(parts)), self.figures.copy()
        scaled[mostly] *= max(1.0 + (change - 1.0) * parts.sum() / parts[mostly], 0.5 * change)
        return scaled


def _recent(off: FloatArray) -> float:
    """Median of the latest; what is not there yet was as expected."""
    return float(statistics.median([0.0] * max(LATEST - len(off), 0) + off[-LATEST:].tolist()))


def _least_squares(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """The two figures of at least 0 for which rows @ figures is nearest to 1."""
    heavy = np.sqrt(weights)
    found = np.linalg.lstsq(rows * heavy[:, None], heavy, rcond=None)[0]
    for zero, other in ((0, 1), (1, 0)):
        if found[zero] <= 0:
            column = rows[:, other]
            found[other], found[zero] = (weights * column).sum() / (weights * column**2).sum(), 0.0
    return np.asarray(np.maximum(found, 1e-15))


def size_class(units: FloatArray) -> NDArray[np.int64]:
    """Powers of four: 0 for 1 to 3, 1 for 4 to 15, and so on."""
    return np.asarray(np.clip(np.log2(np.maximum(units, 1.0)) // 2, 0, CLASSES - 1), np.int64)


class LinearRate:
    """Seconds of so many units in one go: (fixed_s + units * unit_s) * the factor of the size class + pieces * piece_s.

    A change of the rate holds for every size at once; what a size has of its own stays in its class's factor. It
    begins as the profile says.
    """

    def __init__(self, first: PieceRate, typical: float = 1e6) -> None:
        self.piece_s = first.piece_s
        points = ((1.0, typical / 16), (1.0, typical * 16))
        self._fit = RateFit((max(first.fixed_s, 1e-9), first.unit_s), points, together=False)
        self._factors = np.ones(CLASSES)

    @property
    def unit_s(self) -> float:
        return float(self._fit.figures[1])

    @property
    def fixed_s(self) -> float:
        return float(self._fit.figures[0])

    @property
    def observed(self) -> int:
        return self._fit.observed

    def seconds(self, units: FloatArray, pieces: FloatArray | float = 1.0) -> FloatArray:
        """Elementwise; 0 for no units."""
        units = np.asarray(units, np.float64)
        line = (self.fixed_s + units * self.unit_s) * self._factors[size_class(units)]
        return np.where(units > 0, line + pieces * self.piece_s, 0.0)

    def observe(self, units: float, seconds: float, pieces: float = 1.0) -> None:
        """An observation of nothing, or of no time, says nothing."""
        if not units > 0 or not seconds > 0:
            return
        off = self._fit.observe(1.0, units, max(seconds - pieces * self.piece_s, 0.05 * seconds))
        classes, near = size_class(off[:, 1]), np.abs(off[:, 2]) < 1.0
        of = int(classes[-1])
        own = off[(classes == of) & near, 2]
        if len(own) >= LATEST:
            self._factors[of] = np.exp(np.median(own))


class Contention:
    """Seconds lost for each second of competing: follows the median of the latest, from nothing on."""

    def __init__(self) -> None:
        self.value = 0.0
        self._latest: deque[float] = deque([0.0] * (LATEST - 1), maxlen=LATEST)

    def observe(self, lost: float) -> None:
        """So much was lost for each second."""
        self._latest.append(lost)
        toward = min(max(statistics.median(self._latest), 0.0), MOST_LOST)
        self.value += WEIGHT * (toward - self.value)


class PrefillRate:
    """Seconds of one step of `count` tokens after `start` others, all layers:

        (max(floor_s, token_s * count) + pair_s * count * (start + count / 2)) * the factor of the count's size class

    floor_s: reading the weights once. Steps of fewer than MANY tokens are slower than their share of a large one, each
    size in its own way: they move their class's factor alone, steps of MANY and more the two rates.
    """

    def __init__(self, floor_s: float, token_s: float, pair_s: float) -> None:
        if not token_s > 0 or not (floor_s >= 0 and pair_s >= 0):
            raise ValueError(
                f"a prefill rate needs token_s above 0, the rest at least 0: {token_s}, {floor_s}, {pair_s}"
            )
        self.floor_s = max(floor_s, 1e-9)
        self._factors = {int(size_class(np.array(float(4**k)))): Smoothed(1.0) for k in range(5) if 4**k < MANY}
        points = ((512.0, 512.0 * 256), (512.0, 512.0 * 16640))
        self._fit = RateFit((token_s, max(pair_s, 1e-15)), points, together=True)
        self.observed = 0

    @classmethod
    def of(cls, machine: Machine, shape: ModelShape) -> PrefillRate:
        """As the profile says of one rank."""
        weights = shape.layers * (shape.qkv_weights + shape.rest_weights) * shape.element_bytes
        pair_s = shape.layers * shape.pair_flops / machine.attention_flops_s[-1][1]
        return cls(weights / machine.memory_bytes_s, shape.linear_flops / machine.linear_flops_s, pair_s)

    @property
    def token_s(self) -> float:
        return float(self._fit.figures[0])

    @property
    def pair_s(self) -> float:
        return float(self._fit.figures[1])

    def seconds(self, start: FloatArray, count: FloatArray) -> FloatArray:
        """Elementwise; 0 for no tokens."""
        factors = np.ones(CLASSES)
        for size, factor in self._factors.items():
            factors[size] = factor.value
        counts = np.asarray(count, np.float64)
        of = np.where(counts < MANY, factors[size_class(counts)], 1.0)
        return np.where(counts > 0, self._base(start, counts) * of, 0.0)

    def _base(self, start: FloatArray | float, count: FloatArray) -> FloatArray:
        return np.maximum(self.token_s * count, self.floor_s) + self.pair_s * count * (start + count / 2)

    def observe(self, start: float, count: float, seconds: float) -> None:
        """One step; of no tokens or no time it says nothing."""
        if not count > 0 or not seconds > 0:
            return
        self.observed += 1
        if count >= MANY:
            self._fit.observe(count, count * (start + count / 2), seconds)
            return
        base = float(self._base(start, np.array(float(count))))
        self._factors[int(size_class(np.array(float(count))))].observe(seconds / base)

    def scale(self, start: float, count: float, seconds: float) -> None:
        """Makes the first guess such that this step takes so long; observations count for more."""
        at = np.array(float(count))
        if count >= MANY:
            self._fit.figures = self._fit.figures * (seconds / float(self._base(start, at)))
        else:
            self._factors[int(size_class(at))] = Smoothed(seconds / float(self._base(start, at)))

    def as_dict(self) -> dict[str, float]:
        return {"floor_s": self.floor_s, "token_s": self.token_s, "pair_s": self.pair_s, "observed": self.observed}
