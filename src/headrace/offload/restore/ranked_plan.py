"""How a run of stored chunks comes back over several ranks: who loads what, and which strategies compute.

The solver (restore.solver) finds the best split and the strategy of the suffix for each placement of the chunks on
ranks; here the best placement is taken, and told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.offload.restore.run_costs import StoredRun
from headrace.offload.restore.solver import LEAST_GAIN, Split
from headrace.planner.choice import seconds_text
from headrace.planner.machine import count_of
from headrace.planner.profile import Profile
from headrace.types import CHUNK


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """Strategies that belong to a restore: `front` of the tokens before `until`, which are computed again, `closing` of
    the step that begins at `at`, behind what is loaded. "": as the planner chooses then."""

    until: int
    front: str
    at: int
    closing: str

    def strategy(self, start: int) -> str:
        """Of a slice that begins there."""
        return self.front if start < self.until else self.closing if start == self.at else ""


def best_way(chosen: Sequence[tuple[Split, StoredRun]]) -> int:
    """The placement of least predicted time; the first wins what another would not gain LEAST_GAIN on."""
    best = min(range(len(chosen)), key=lambda way: chosen[way][0].predicted_s)
    return 0 if chosen[0][0].predicted_s * (1 - LEAST_GAIN) <= chosen[best][0].predicted_s else best


def planned(split: Split, run: StoredRun, profile: Profile) -> PlannedPrefill | None:
    """The strategies of a split; None with one rank, which has no choice."""
    if profile.by_strategy is None:
        return None
    first, at = run.first * CHUNK, (run.first + run.chunks) * CHUNK
    if split.tokens == run.chunks:
        return PlannedPrefill(at, profile.by_strategy.best(first, run.chunks * CHUNK + run.suffix), at, "")
    front = profile.by_strategy.best(first, split.tokens * CHUNK) if split.tokens else ""
    return PlannedPrefill(first + split.tokens * CHUNK, front, at, split.closing)


def told(split: Split, run: StoredRun, plan: PlannedPrefill, one_s: float | None) -> Split:
    """With a reason that names ranks, tiers and strategies. one_s: predicted for restoring on one rank, None where no
    rank can."""
    loaders, names = set(run.ranks[split.tokens :]), " and ".join(sorted(set(run.tier_of[split.tokens :])))
    parts = [f"load {split.load} chunks on {count_of(len(loaders), 'rank')} from {names}"] if split.load else []
    parts += [f"recompute {split.tokens} by {plan.front}"] if split.tokens else []
    parts += [f"rest by {plan.closing}"] if plan.closing else []
    others = [f"one rank restoring {seconds_text(one_s)}"] if one_s is not None else []
    others += [f"all recomputing {seconds_text(split.all_s)}"] if split.load else []
    head = f"{', '.join(parts)}: {seconds_text(split.predicted_s)} s"
    return split._replace(reason="; ".join([head, ", ".join(others)]) if others else head)
