"""Prefills on several ranks by strategy: what the planner predicts, corrected by what they were seen to take.

A restore needs two of them: the part that is computed again, before what is loaded, and the step that computes the new
tokens, layer by layer as the stored ones arrive. What both together take longer is observed.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from headrace.planner.choice import Estimate, Pace
from headrace.planner.estimators import LATEST, MANY, WEIGHT, FloatArray, Smoothed

Predict = Callable[[int, int, tuple[float, ...], tuple[int, ...]], Mapping[str, Estimate]]
"""(new tokens, cached tokens, of these on each rank, ranks that load) -> what each strategy that may be used takes."""

POINTS = ((64, 0), (512, 0), (4096, 0), (512, 4096), (4096, 4096))
"""(tokens, cached ones) of the prefills from which a strategy's curve is made."""
BOUND = 0.5
"""Share of a restore that the engine waited, from which on what was mispredicted is laid on arrivals."""
TIE = 0.04
"""Several ranks must be predicted to gain this much on one: what is seen of a strategy varies about as much."""
LEAST_SCALE = 0.2
"""Of what was believed of a strategy, what a single restore may leave."""
ASKED = 64
"""Predictions that are kept: of one restore each is asked for again."""
GENTLY = 0.3
"""Share of the way from what was believed of a strategy to what is seen: one that is not used is not corrected."""


class Closing(NamedTuple):
    """How the step that computes the new tokens may be computed. strategy: "" where there is one rank. seconds: with
    all chunks there; beside_s: how much longer it takes (or less, below 0) where chunks arrive meanwhile. paces: of
    ranks that load."""

    strategy: str
    seconds: float
    beside_s: float = 0.0
    paces: Mapping[int, Pace] = {}

    def pace(self, rank: int, layers: int) -> Pace:
        """Where it is not told, that of a rank which computes everything."""
        return self.paces.get(rank) or Pace(self.seconds, self.seconds / layers, self.seconds / layers)


class Kind(NamedTuple):
    """Steps that are corrected together: of MANY tokens or few, on cached ones of one rank or of several."""

    strategy: str
    many: bool
    spread: bool = False

    def __str__(self) -> str:
        return f"{self.strategy}_{'many' if self.many else 'few'}{'_spread' if self.spread else ''}"


class Offset:
    """Seconds that follow the median of the latest, from nothing on: the first observation counts half."""

    def __init__(self) -> None:
        self.value = 0.0
        self._latest: deque[float] = deque([0.0], maxlen=LATEST)

    def observe(self, seconds: float) -> None:
        self._latest.append(seconds)
        self.value += WEIGHT * (statistics.median(self._latest) - self.value)


class StrategyRates:
    """Safe to call from several threads. Strategies that need cached tokens compute none that come first."""

    def __init__(self, predict: Predict, ranks: int) -> None:
        self.ranks = ranks
        self._predict = lru_cache(ASKED)(predict)
        found = [
            {name: each.seconds for name, each in predict(count, cached, (cached / ranks,) * ranks, ()).items()}
            for count, cached in POINTS
        ]
        usual = [min(each.values()) for each in found]  # for a point at which a strategy is not used
        self._curves = {
            name: _curve([each.get(name, least) for each, least in zip(found, usual, strict=True)]) for name in found[0]
        }
        self._scale: dict[Kind, Smoothed] = {}
        self._beside: dict[Kind, Offset] = {}
        self._lock = threading.Lock()

    def _scaled(self, kind: Kind) -> float:
        found = self._scale.get(kind)
        return found.value if found else 1.0

    def by_strategy(self, start: FloatArray | float, count: FloatArray | float) -> dict[str, FloatArray]:
        """Seconds of one step of `count` tokens after `start` others, elementwise; 0 for none."""
        counts, starts = np.asarray(count, np.float64), np.asarray(start, np.float64)
        terms = np.stack(np.broadcast_arrays(np.sign(counts), counts, counts * (starts + counts / 2)), axis=-1)
        with self._lock:
            few, many = ([self._scaled(Kind(name, long)) for name in self._curves] for long in (False, True))
        found = terms @ np.stack(list(self._curves.values()), axis=-1)
        found = found * np.where(counts[..., None] < MANY, few, many)
        return {name: found[..., at] for at, name in enumerate(self._curves)}

    def seconds(self, start: FloatArray | float, count: FloatArray | float) -> FloatArray:
        """By the best strategy, elementwise."""
        return np.asarray(np.min(np.stack(list(self.by_strategy(start, count).values())), axis=0))

    def best(self, start: int, count: int) -> str:
        """The strategy of a step; one rank wins what several would not gain TIE on."""
        return _least({name: float(each) for name, each in self.by_strategy(start, count).items()})

    def closings(self, opening: int, end: int, lies: Sequence[float], loads: Collection[int]) -> list[Closing]:
        """For `opening` new tokens after `end` others, which lie on the ranks like that once the ranks `loads` have
        loaded; the likeliest first."""
        predicted = self._predict(opening, end, tuple(lies), tuple(sorted(loads)))
        with self._lock:
            found = [self._closing(Kind(name, opening >= MANY, _spread(lies)), predicted[name]) for name in predicted]
        first = _least({each.strategy: each.seconds for each in found})
        return sorted(found, key=lambda each: (each.strategy != first, each.seconds))

    def seen(self, count: int, lies: Sequence[float]) -> dict[str, float]:
        """By strategy, what steps of `count` tokens were seen to take over what is predicted."""
        with self._lock:
            return {name: self._scaled(Kind(name, count >= MANY, _spread(lies))) for name in self._curves}

    def _closing(self, kind: Kind, predicted: Estimate) -> Closing:
        scale, beside = self._scaled(kind), self._beside.get(kind)
        paces = {rank: pace.scaled(scale) for rank, pace in predicted.paces.items()}
        return Closing(kind.strategy, predicted.seconds * scale, beside.value if beside else 0.0, paces)

    def observe(self, strategy: str, start: float, count: float, seconds: float) -> None:
        """A step with nothing on its way meanwhile."""
        known = self.by_strategy(start, count)
        if strategy not in known or not (seconds > 0 and count > 0):
            return
        self._correct(Kind(strategy, count >= MANY), seconds / float(known[strategy]))

    def observe_closing(
        self, kind: Kind, seconds: float, predicted_s: float, waited_s: float, closing_s: float
    ) -> None:
        """A restore with nothing beside it and nothing computed again took `seconds`; `predicted_s` were predicted, of
        which the engine would wait waited_s, and closing_s of the step by itself. What a long step was mispredicted is
        laid on the strategy unless it waits for arrivals most of the time; a few tokens take a time of their own."""
        off = seconds - predicted_s
        if kind.many and waited_s < BOUND * predicted_s:
            self._correct(kind, max(1 + off / closing_s, LEAST_SCALE))
            return
        with self._lock:
            lost = self._beside.setdefault(kind, Offset())
            lost.observe(lost.value + off)

    def _correct(self, kind: Kind, off: float) -> None:
        with self._lock:
            found = self._scale.setdefault(kind, Smoothed(1.0, GENTLY))
            found.observe(found.value * off)

    def as_dict(self) -> dict[str, float]:
        """For logs."""
        with self._lock:
            scales = {f"prefill_{kind}": scale.value for kind, scale in self._scale.items()}
            return scales | {f"beside_{kind}_s": lost.value for kind, lost in self._beside.items()}


def _spread(lies: Sequence[float]) -> bool:
    """Whether several ranks have cached tokens."""
    return sum(tokens > 0 for tokens in lies) > 1


def _curve(seconds: Sequence[float]) -> FloatArray:
    """Fixed time, seconds a token and a pair, none below 0, that are relatively nearest to these at POINTS."""
    rows = np.array([(1.0, count, count * (cached + count / 2)) for count, cached in POINTS])
    weighted = rows / np.array(seconds)[:, None]
    scales = np.abs(weighted).max(axis=0)
    found = np.linalg.lstsq(weighted / scales, np.ones(len(rows)), rcond=None)[0] / scales
    return np.asarray(np.maximum(found, 0.0))


def _least(seconds: Mapping[str, float]) -> str:
    best = min(seconds, key=seconds.__getitem__)
    return "single" if seconds.get("single", float("inf")) * (1 - TIE) <= seconds[best] else best
