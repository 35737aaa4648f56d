"""What computing, links and tiers take here and now: the profile as measured, then what is observed while running.

The choice of a strategy and the solver of restores both ask here, and what things took is told here alone. KVPR
profiles once, when it starts, and names that as a limit: a link that others use, or a clock that falls, makes its split
wrong from then on. Here every transfer and every step is an observation.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headrace.config.ranks import StrategyRule
from headrace.planner.choice import Estimate, StrategyChoice, choose, estimates
from headrace.planner.estimators import Contention, FloatArray, LinearRate, PrefillRate, Smoothed
from headrace.planner.machine import Machine, ModelShape, PieceRate, TierLink
from headrace.planner.shards import Prefill
from headrace.planner.strategy_rates import Closing, StrategyRates
from headrace.planner.tuned_table import TunedTable
from headrace.strategies import OFFERED

LEAST_SHARED = 0.1
"""Share of a restore's time in which copy stream and engine compete, from which on it tells of contention."""

HELD_UP = 1.3
"""Ranks that load at the same time and take so many times what one of them takes alone hold up each other."""

STEPS = 24
"""Steps that are remembered until they are taken in: no more are fitted (estimators.RateFit)."""

PROJECTED = 256.0
"""A usual number of tokens to project."""

UNUSED = PieceRate(1e-6)
"""A token's projection where no activations are kept, so that none is ever asked for."""


class Profile:
    """A machine, what it is seen to take, and the model that it computes on so many context ranks. Safe to call from
    several threads; each observation holds from then on.

    table: a tuned one, of this machine. allowed: strategies that may be used. by_strategy: prefills of several ranks,
    None with one.
    """

    def __init__(
        self,
        machine: Machine,
        shape: ModelShape,
        ranks: int = 1,
        table: TunedTable | None = None,
        allowed: Collection[str] = OFFERED,
    ) -> None:
        self.shape, self.ranks = shape, ranks
        self._table, self._allowed = table, tuple(allowed)
        self._prefill = PrefillRate.of(machine, shape)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._contention = {loading: Contention() for loading in (False, True)}
        self._together: dict[str, float] = {}
        self._lock = threading.Lock()
        self.machine = machine
        self.complete(machine.tiers, machine.project)
        self.by_strategy = StrategyRates(self._estimated, ranks) if ranks > 1 else None

    def complete(self, tiers: Sequence[TierLink], project: PieceRate | None) -> None:
        """Takes in links to tiers and the projection, which are measured when the tiers are opened."""
        self.machine = msgspec.structs.replace(self.machine, tiers=tuple(tiers), project=project)
        self._project = LinearRate(project or UNUSED, PROJECTED)
        self._tiers = {each.kind: LinearRate(each.rate) for each in tiers}
        measured = {each.kind: each.cpu_s_per_byte for each in tiers if each.cpu_s_per_byte is not None}
        self._cpu = {kind: Smoothed(max(taken, 1e-15)) for kind, taken in measured.items()}

    def _of(self, T: int, P: int, cached_on: Sequence[float] | None, seen: Mapping[str, float]) -> Prefill:
        return Prefill(self.machine, self.shape, self.ranks, T, P, cached_on, self._table, seen=seen)

    def _estimated(self, T: int, P: int, cached_on: Sequence[float], loads: Collection[int]) -> Mapping[str, Estimate]:
        return estimates(self._of(T, P, cached_on, {}), self._allowed, loads)

    def choose(
        self, T: int, P: int, cached_on: Sequence[float], allowed: Collection[str], rule: StrategyRule = "cost"
    ) -> StrategyChoice:
        """How to compute T new tokens on P cached ones: planner.choice.choose, by what is seen of the strategies."""
        seen = self.by_strategy.seen(T, cached_on) if self.by_strategy is not None else {}
        return choose(self._of(T, P, cached_on, seen), rule=rule, allowed=allowed)

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
        """One step of `count` tokens after `start` others, all layers; of several ranks by the best strategy."""
        if self.by_strategy is not None:
            return self.by_strategy.seconds(start, count)
        with self._lock:
            self._fit_prefill()
            return self._prefill.seconds(np.asarray(start, np.float64), np.asarray(count, np.float64))

    def closings(self, opening: int, end: int, lies: Sequence[float], loads: Collection[int]) -> Sequence[Closing]:
        """Ways to compute `opening` new tokens after `end` others, which lie on the ranks like that once the ranks
        `loads` have loaded."""
        if self.by_strategy is None or not opening:
            return [Closing("", float(self.prefill(end, opening)))]
        on_all = [*lies, *[0.0] * (self.ranks - len(lies))]
        return self.by_strategy.closings(opening, end, on_all, loads)

    def together_s_per_byte(self, tier: str) -> float:
        """What a byte takes where several ranks load from the tier at the same time; 0.0: no longer than alone."""
        return self._together.get(tier, 0.0)

    def observe_together(self, tier: str, loads: Sequence[tuple[float, float]]) -> None:
        """Ranks loaded so many bytes in so many seconds, each, at the same time. Where that takes all of them longer
        than one alone it says what the tier gives to all, else what it gives to one."""
        if not loads:
            return
        size, longest = max(loads)[0], max(seconds for _, seconds in loads)
        if len(loads) > 1 and longest > HELD_UP * float(self.transfer(tier, size)):
            self._together[tier] = longest / sum(each for each, _ in loads)
            return
        self._together.pop(tier, None)
        for each, seconds in loads:
            self.observe_load(tier, each, 1, seconds)

    def behind(self, bytes_s: float | None, latency_s: float = 0.0) -> None:
        """All tiers lie beyond a link from now on, which takes its time while they take theirs: EmulatedLink."""
        found = []
        for each in self.machine.tiers:
            line = self._tiers[each.kind]
            rate = PieceRate(line.unit_s, line.fixed_s, line.piece_s).behind(bytes_s, latency_s)
            found.append(msgspec.structs.replace(each, rate=rate))
        self.complete(found, self.machine.project)

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

    def observe_prefill(self, start: float, count: float, seconds: float, strategy: str = "") -> None:
        """One step, of one sequence. Of several ranks: by this strategy, and at a prompt's beginning alone, since
        nobody tells where cached tokens lay."""
        if self.by_strategy is not None:
            if not start:
                self.by_strategy.observe(strategy, start, count, seconds)
            return
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
            together = {f"{tier}_together_bytes_s": 1 / each for tier, each in self._together.items()}
            project |= together | (self.by_strategy.as_dict() if self.by_strategy else {})
            return tiers | project | {f"prefill_{name}": value for name, value in self._prefill.as_dict().items()}

    def _line(self, tier: str) -> LinearRate:
        if tier not in self._tiers:
            raise ValueError(f"no rate of a tier called {tier!r}: known are {', '.join(self._tiers)}")
        return self._tiers[tier]
