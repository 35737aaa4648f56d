"""What loading, projecting and prefilling take here and now: first guesses, then what is observed while running.

KVPR profiles once, when it starts, and names that as a limit: a link that others use, or a clock that falls, makes its
split wrong from then on. Here every transfer and every step is an observation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.offload.restore.estimators import Contention, FloatArray, LinearRate, PrefillRate, Smoothed

LEAST_SHARED = 0.1
"""Share of a restore's time in which copy stream and engine compete, from which on it tells of contention."""

STEPS = 24
"""Steps that are remembered until they are taken in: no more are fitted (estimators.RateFit)."""


class Rates:
    """Costs of a restore (restore.solver). Safe to call from several threads; each observation holds from then on."""

    def __init__(
        self,
        layers: int,
        project: LinearRate,
        prefill: PrefillRate,
        tiers: Mapping[str, LinearRate],
        cpu_s_per_byte: Mapping[str, float] | None = None,
    ) -> None:
        """tiers: kind of a tier -> rate of its reads, guessed or measured. cpu_s_per_byte: where that was measured."""
        self.layers = layers
        self._project, self._prefill = project, prefill
        self._tiers = dict(tiers)
        self._cpu = {tier: Smoothed(max(taken, 1e-15)) for tier, taken in (cpu_s_per_byte or {}).items()}
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._contention = {loading: Contention() for loading in (False, True)}
        self._lock = threading.Lock()

    def transfer(self, tier: str, size: FloatArray | float, pieces: FloatArray | float = 1.0) -> FloatArray:
        """Seconds of `size` bytes in `pieces` pieces (chunks) in one go. Raises ValueError for an unknown tier."""
        with self._lock:
            return self._line(tier).seconds(np.asarray(size, np.float64), pieces)

    def contention(self, loading: bool) -> float:
        """Seconds lost for each second that copy stream and engine compete for the cores (restore.solver). Never less
        for a split than for loading everything: what was seen of the one would drive the solver to the unknown other.
        """
        least = self._contention[True].value
        return least if loading else max(least, self._contention[False].value)

    def observe_restore(self, seconds: float, predicted_s: float, shared_s: float, loading: bool) -> None:
        """A restore with nothing beside it took `seconds`; predicted were predicted_s, of which copy stream and engine
        would compete for shared_s. What was mispredicted is laid on that, where it is a good part of the whole.
        loading: all chunks were loaded."""
        if shared_s < LEAST_SHARED * predicted_s:
            return
        with self._lock:
            self._contention[loading].observe(self.contention(loading) + (seconds - predicted_s) / shared_s)

    def cpu_s_per_byte(self, tier: str) -> float:
        """What a byte from there takes from the computing cores: as from another tier where it was never measured."""
        if tier in self._cpu:
            return self._cpu[tier].value
        return max((taken.value for taken in self._cpu.values()), default=0.0)

    def project(self, tokens: FloatArray | float) -> FloatArray:
        """K and V of so many tokens from X, in one layer."""
        with self._lock:
            return self._project.seconds(np.asarray(tokens, np.float64))

    def prefill(self, start: FloatArray | float, count: FloatArray | float) -> FloatArray:
        """One step of `count` tokens after `start` others, all layers."""
        with self._lock:
            self._fit_prefill()
            return self._prefill.seconds(np.asarray(start, np.float64), np.asarray(count, np.float64))

    def behind(self, bytes_s: float | None, latency_s: float = 0.0) -> Rates:
        """The same with all tiers beyond a link, which takes its time while they take theirs: EmulatedLink."""
        least_s = 1.0 / bytes_s if bytes_s else 0.0
        with self._lock:
            self._tiers = {
                tier: LinearRate(max(line.unit_s, least_s), line.fixed_s + latency_s, line.piece_s)
                for tier, line in self._tiers.items()
            }
        return self

    def observe_load(self, tier: str, size: float, pieces: float, seconds: float, cpu_s: float | None = None) -> None:
        """A transfer was seen to take `seconds` on the copy stream (waiting in its queue not counted), of which it took
        cpu_s from the computing cores."""
        with self._lock:
            self._line(tier).observe(size, seconds, pieces)
            if cpu_s is not None and cpu_s > 0 and size > 0:
                self._cpu.setdefault(tier, Smoothed(cpu_s / size)).observe(cpu_s / size)

    def scale_prefill(self, start: float, count: float, seconds: float) -> None:
        """What a step took when nothing else was known: a better guess, not an observation."""
        with self._lock:
            self._fit_prefill()
            self._prefill.scale(start, count, seconds)

    def observe_project(self, tokens: float, seconds: float) -> None:
        """One layer's. Only what ran with no transfer beside it should be told, here and for observe_prefill."""
        with self._lock:
            self._project.observe(tokens, seconds)

    def observe_prefill(self, start: float, count: float, seconds: float) -> None:
        """One step, of one sequence."""
        with self._lock:
            self._steps.append((start, count, seconds))

    def catch_up(self) -> None:
        """Takes in the steps that were observed, which takes some 0.3 ms each: else done when a restore asks. No step's
        tokens need wait for it."""
        with self._lock:
            self._fit_prefill()

    def _fit_prefill(self) -> None:
        while self._steps:
            self._prefill.observe(*self._steps.popleft())

    def as_dict(self) -> dict[str, Any]:
        """For logs: bytes a second and seconds."""
        with self._lock:
            self._fit_prefill()
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

    def _line(self, tier: str) -> LinearRate:
        if tier not in self._tiers:
            raise ValueError(f"no rate of a tier called {tier!r}: known are {', '.join(self._tiers)}")
        return self._tiers[tier]
