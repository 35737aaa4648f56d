"""What loading, projecting and prefilling take here and now: first guesses, then what is observed while running.

The paper profiles once, when it starts, and names that as a limit (KVPR, limitations): a link that others use, or a
clock that falls, makes its split wrong from then on. Here every transfer and every step is an observation.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.planner.machine import LayerTimes, Machine, ModelShape
from headrace.planner.partition import causal_pairs

Floats = NDArray[np.float64]

LATEST = 3
"""An observation counts by the median of so many latest: a single outlier changes nothing."""
MOST_LOST, LEAST_SHARED = 4.0, 0.1
"""Bound of the contention that is believed, and the share of a restore from which it tells of contention."""
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


class Fit:
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

    def observe(self, a: float, b: float, seconds: float) -> Floats:
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
        return np.column_stack([rows, np.log(times / (rows @ found))])

    def _scaled(self, rows: Floats, recent: float) -> Floats:
        """The figures so that the latest times become exp(recent) times what they are by them."""
        change = np.exp(recent)
        if self._together:
            return self.figures * change
        parts = np.sum(rows[-LATEST:] * self.figures, axis=0)
        mostly, scaled = int(np.argmax(parts)), self.figures.copy()
        scaled[mostly] *= max(1.0 + (change - 1.0) * parts.sum() / parts[mostly], 0.5 * change)
        return scaled


def _recent(off: Floats) -> float:
    """Median of the latest; what is not there yet was as expected."""
    return statistics.median([0.0] * max(LATEST - len(off), 0) + off[-LATEST:].tolist())


def _least_squares(rows: Floats, weights: Floats) -> Floats:
    """The two figures of at least 0 for which rows @ figures is nearest to 1."""
    heavy = np.sqrt(weights)
    found = np.linalg.lstsq(rows * heavy[:, None], heavy, rcond=None)[0]
    for zero, other in ((0, 1), (1, 0)):
        if found[zero] <= 0:
            column = rows[:, other]
            found[other], found[zero] = (weights * column).sum() / (weights * column**2).sum(), 0.0
    return np.maximum(found, 1e-15)


def size_class(units: Floats) -> NDArray[np.int64]:
    """Powers of four: 0 for 1 to 3, 1 for 4 to 15, and so on."""
    return np.clip(np.log2(np.maximum(units, 1.0)) // 2, 0, CLASSES - 1).astype(np.int64)


class Line:
    """Seconds of so many units in one go: (fixed_s + units * unit_s) * the factor of the size class + pieces * piece_s.

    A change of the rate holds for every size at once; what a size has of its own stays in its class's factor.
    """

    def __init__(self, unit_s: float, fixed_s: float = 0.0, piece_s: float = 0.0, typical: float = 1e6) -> None:
        if not unit_s > 0 or not (fixed_s >= 0 and piece_s >= 0):
            raise ValueError(
                f"a rate needs unit_s above 0 and fixed times of at least 0: {unit_s}, {fixed_s}, {piece_s}"
            )
        self.piece_s = piece_s
        self._fit = Fit((max(fixed_s, 1e-9), unit_s), ((1.0, typical / 16), (1.0, typical * 16)), together=False)
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

    def seconds(self, units: Floats, pieces: Floats | float = 1.0) -> Floats:
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
        self._fit = Fit((token_s, max(pair_s, 1e-15)), points, together=True)
        self.observed = 0

    @classmethod
    def of(cls, times: LayerTimes) -> PrefillRate:
        """By a profile of the machine."""
        layers, rows = times.shape.layers, 512
        linear = times.qkv(rows) + times.rest(rows)
        near, far = (times.attend(rows, causal_pairs((at, at + rows), (0, at + rows)), at + rows) for at in (0, 8192))
        pair = max((far - near) / (rows * 8192), 0.0)
        return cls(layers * (times.qkv(1) + times.rest(1)), layers * linear / rows, layers * pair)

    @property
    def token_s(self) -> float:
        return float(self._fit.figures[0])

    @property
    def pair_s(self) -> float:
        return float(self._fit.figures[1])

    def seconds(self, start: Floats, count: Floats) -> Floats:
        """Elementwise; 0 for no tokens."""
        factors = np.ones(CLASSES)
        for size, factor in self._factors.items():
            factors[size] = factor.value
        counts = np.asarray(count, np.float64)
        of = np.where(counts < MANY, factors[size_class(counts)], 1.0)
        return np.where(counts > 0, self._base(start, counts) * of, 0.0)

    def _base(self, start: Floats | float, count: Floats) -> Floats:
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


GUESSES = {"host": (0.125e-9, 20e-6), "disk": (1e-9, 200e-6), "remote": (2e-9, 1e-3), "link": (0.125e-9, 20e-6)}
"""Seconds of a byte and of a transfer, where nothing was measured yet."""


class Rates:
    """Costs of a restore (restore.solver). Safe to call from several threads; each observation holds from then on."""

    def __init__(
        self,
        layers: int,
        project: Line,
        prefill: PrefillRate,
        tiers: Mapping[str, Line] | None = None,
        cpu_s_per_byte: Mapping[str, float] | None = None,
    ) -> None:
        self.layers = layers
        self._project, self._prefill = project, prefill
        self._tiers = {tier: Line(*guess) for tier, guess in GUESSES.items()} | dict(tiers or {})
        self._cpu = {tier: Smoothed(max(taken, 1e-15)) for tier, taken in (cpu_s_per_byte or {}).items()}
        self._contention = {loading: Contention() for loading in (False, True)}
        self._lock = threading.Lock()

    def transfer(self, tier: str, size: Floats | float, pieces: Floats | float = 1.0) -> Floats:
        """Seconds of `size` bytes in `pieces` pieces (chunks) in one go. Raises ValueError for an unknown tier."""
        with self._lock:
            return self._line(tier).seconds(np.asarray(size, np.float64), pieces)

    def contention(self, loading: bool) -> float:
        """Seconds lost for each second that lane and engine compete for the cores: see restore.solver. Never less
        for a split than for loading everything: what was seen of the one would drive the solver to the unknown other.
        """
        least = self._contention[True].value
        return least if loading else max(least, self._contention[False].value)

    def observe_restore(self, seconds: float, predicted_s: float, shared_s: float, loading: bool) -> None:
        """A restore with nothing beside it took `seconds`; predicted were predicted_s, of which lane and engine would
        compete for shared_s. What was mispredicted is laid on that, where it is a good part of the whole. loading:
        all chunks were loaded."""
        if shared_s < LEAST_SHARED * predicted_s:
            return
        with self._lock:
            self._contention[loading].observe(self.contention(loading) + (seconds - predicted_s) / shared_s)

    def cpu_s_per_byte(self, tier: str) -> float:
        """What a byte from there takes from the computing cores: as from another tier where it was never measured."""
        if tier in self._cpu:
            return self._cpu[tier].value
        return max((taken.value for taken in self._cpu.values()), default=0.0)

    def project(self, tokens: Floats | float) -> Floats:
        """One layer's projection of so many tokens."""
        with self._lock:
            return self._project.seconds(np.asarray(tokens, np.float64))

    def project_all(self, tokens: Floats | float) -> Floats:
        """That of all layers."""
        return self.layers * self.project(tokens)

    def prefill(self, start: Floats | float, count: Floats | float) -> Floats:
        """One step of `count` tokens after `start` others, all layers."""
        with self._lock:
            return self._prefill.seconds(np.asarray(start, np.float64), np.asarray(count, np.float64))

    def suffix(self, start: Floats | float, count: Floats | float) -> Floats:
        """One layer of it."""
        return self.prefill(start, count) / self.layers

    def behind(self, bytes_s: float | None, latency_s: float = 0.0) -> Rates:
        """The same with all tiers beyond a link, which takes its time while they take theirs (offload.copy_streams)."""
        least_s = 1.0 / bytes_s if bytes_s else 0.0
        with self._lock:
            self._tiers = {
                tier: Line(max(line.unit_s, least_s), line.fixed_s + latency_s, line.piece_s)
                for tier, line in self._tiers.items()
            }
        return self

    def observe_load(self, tier: str, size: float, pieces: float, seconds: float, cpu_s: float | None = None) -> None:
        """A transfer was seen to take `seconds` (the lane's, waiting in its queue not counted), of which it took cpu_s
        from the computing cores."""
        with self._lock:
            self._line(tier).observe(size, seconds, pieces)
            if cpu_s is not None and cpu_s > 0 and size > 0:
                self._cpu.setdefault(tier, Smoothed(cpu_s / size)).observe(cpu_s / size)

    def scale_prefill(self, start: float, count: float, seconds: float) -> None:
        """What a step took when nothing else was known: a better guess, not an observation."""
        with self._lock:
            self._prefill.scale(start, count, seconds)

    def observe_project(self, tokens: float, seconds: float) -> None:
        """One layer's. Only what ran with no transfer beside it should be told, here and for observe_prefill."""
        with self._lock:
            self._project.observe(tokens, seconds)

    def observe_prefill(self, start: float, count: float, seconds: float) -> None:
        """One step, of one sequence."""
        with self._lock:
            self._prefill.observe(start, count, seconds)

    def as_dict(self) -> dict[str, Any]:
        """For logs: bytes a second and seconds."""
        with self._lock:
            tiers = {
                f"{tier}_{name}": value
                for tier, line in self._tiers.items()
                if line.observed or tier in self._cpu
                for name, value in (
                    ("bytes_s", 1 / line.unit_s), ("latency_s", line.fixed_s), ("observed", line.observed),
                    ("cpu_s_per_byte", self._cpu[tier].value if tier in self._cpu else 0.0),
                )
            }  # fmt: skip
            project = {"project_token_s": self._project.unit_s, "project_observed": self._project.observed}
            return tiers | project | {f"prefill_{name}": value for name, value in self._prefill.as_dict().items()}

    def _line(self, tier: str) -> Line:
        if tier not in self._tiers:
            raise ValueError(f"no rate of a tier called {tier!r}: known are {', '.join(self._tiers)}")
        return self._tiers[tier]


SIZES = (1 << 18, 1 << 23)
"""Bytes of the transfers that `measure` times."""
ROWS = (64, 1024)
"""Tokens of the projections that it times."""
TOKENS = 256.0
"""A usual number of tokens to project."""
ATTENTION = 0.8
"""Rate of the attention as a share of that of the linear layers, where no profile says."""
MEMORY_BYTES_S = 30e9
LEAST_CALLS, MOST_CALLS, CALLS_S = 3, 15, 0.02
"""Calls that are timed, and the seconds after which those above the least are left out: something that takes the cores
for a moment then spoils the first rates of nothing, and what it spoiled would last until steps of that size came."""


def measure(
    shape: ModelShape,
    project: Callable[[int], object],
    reads: Mapping[str, Callable[[int], object]] | None = None,
    machine: Machine | None = None,
    *,
    prefill: PrefillRate | None = None,
    shares_cores: bool = True,
) -> Rates:
    """First guesses, in less than a second on any model: a few real calls. restore.profile makes them of a model.

    project(tokens): K and V of so many tokens of one layer, from X, with the model's own weights. reads[tier](size):
    a read of about so many bytes, as restores read them. machine: a profile, where one is at hand; with neither it nor
    `prefill`, the prefill's rate is taken from the projection's. shares_cores: reads run on the cores that compute.
    """
    few, many = (seconds(lambda rows=rows: project(rows)) for rows in ROWS)  # type: ignore[misc]
    token_s = max((many - few) / (ROWS[1] - ROWS[0]), 0.1 * many / ROWS[1])
    line = Line(token_s, max(few - token_s * ROWS[0], 0.0), typical=TOKENS)
    tiers, cpu = {}, {}
    for tier, read in (reads or {}).items():
        tiers[tier], cpu[tier] = _measure_reads(read)
    return Rates(shape.layers, line, prefill or _guess(shape, machine, token_s), tiers, cpu if shares_cores else None)


def _guess(shape: ModelShape, machine: Machine | None, token_s: float) -> PrefillRate:
    if machine is not None:
        return PrefillRate.of(LayerTimes(machine, shape))
    return prefill_rate(shape, 4 * shape.hidden * shape.kv_heads * shape.head_dim / token_s)


def prefill_rate(shape: ModelShape, flops_s: float, memory_bytes_s: float = MEMORY_BYTES_S) -> PrefillRate:
    """From the rate of the linear layers alone."""
    weights = shape.layers * (shape.qkv_weights + shape.rest_weights) * shape.element_bytes
    pair_s = shape.layers * shape.pair_flops / (ATTENTION * flops_s)
    return PrefillRate(weights / memory_bytes_s, shape.linear_flops / flops_s, pair_s)


def _measure_reads(read: Callable[[int], object]) -> tuple[Line, float]:
    """The rate, and the seconds of a core per byte."""
    small, large = (seconds(lambda size=size: read(size)) for size in SIZES)  # type: ignore[misc]
    began = time.thread_time()
    read(SIZES[1])
    taken = (time.thread_time() - began) / SIZES[1]
    byte_s = max((large - small) / (SIZES[1] - SIZES[0]), 0.1 * large / SIZES[1])
    return Line(byte_s, max(small - byte_s * SIZES[0], 0.0)), min(taken, byte_s)


def seconds(work: Callable[[], object], most_s: float = 0.05) -> float:
    """Median time of a few calls after one that does not count, of short ones more; of a slow call, that one alone."""
    began = time.perf_counter()
    work()
    first = time.perf_counter() - began
    if first > most_s:
        return first
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) < CALLS_S):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
