"""`headrace bench choice`: what the planner picks for T new tokens on P cached ones, beside the best measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.bench.prefill import Plan, check_table, in_turns, limited, set_link
from headrace.bench.prefill_testbed import Bed, open_bed
from headrace.config import StrategyRule
from headrace.console import err
from headrace.planner.choice import StrategyChoice, choose, shards_for
from headrace.strategies import OFFERED

Case = dict[str, Any]


@dataclass(slots=True)
class ChoiceBench:
    """The cells of a plan (its strategies, repeats in turn; not its searches), cached chunks placed alike for all.

    rule: see planner.choice.choose. profile: figures of the machine, by ranks, once measured.
    """

    plan: Plan
    rule: StrategyRule = "cost"
    profile: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> Iterator[Case]:
        plan = self.plan
        for ranks in plan.ranks:
            with open_bed(plan.config(ranks), netns=plan.netns) as bed:
                self.profile[f"profile_{ranks}_ranks"] = msgspec.to_builtins(bed.machine)
                check_table(plan.table, bed)
                for link in plan.links:
                    set_link(bed, link)
                    yield from (self._cell(bed, T, P) for P in plan.cached for T in plan.tokens)

    def _cell(self, bed: Bed, T: int, P: int) -> Case:
        err.print(f"{bed.size} ranks, {T} tokens on {P}, link {bed.link}", style="dim")
        plan, machine = self.plan, limited(bed.machine, self.plan.table, bed.link)
        held = bed.cached_on("ring-kv", P, plan.placement)
        choice = choose(machine, bed.shape, bed.size, T, P, held, plan.table, rule=self.rule)
        cuts = {name: shards_for(name, machine, bed.shape, bed.size, T, P, held, plan.table) for name in OFFERED}
        runs = bed.runs(cuts, P, plan.placement)
        found = {name: [run.seconds for run in each] for name, each in in_turns(runs, plan.repeats).items()}
        return _case(bed, T, P, choice, found)


def _case(bed: Bed, T: int, P: int, choice: StrategyChoice, found: dict[str, list[float]]) -> Case:
    measured = {name: statistics.median(times) for name, times in found.items()}
    best = min(measured, key=measured.__getitem__)
    return {
        "tokens": T, "cached": P, "ranks": bed.size, "bandwidth_gbps": bed.link.bandwidth_gbps,
        "latency_ms": bed.link.latency_s * 1e3, "chosen": choice.strategy, "best": best,
        "over_best": measured[choice.strategy] / measured[best], "tie": tie(found[choice.strategy], found[best]),
        "pass_q_wins": measured["ring-q"] < measured["ring-kv"], "measured_s": measured,
        "predicted_s": dict(choice.predicted_s), "ttfts": found, "reason": choice.reason,
    }  # fmt: skip


def tie(chosen: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the middle halves of the two overlap: the repetitions do not tell which is faster."""

    def quartile(times: Sequence[float], share: float) -> float:
        ordered = sorted(times)
        return ordered[round(share * (len(ordered) - 1))]

    return quartile(chosen, 0.25) <= quartile(best, 0.75)


def line(case: Case) -> str:
    """A cell for people."""
    times = ", ".join(f"{name} {seconds:.4f}" for name, seconds in sorted(case["measured_s"].items(), key=_second))
    lost = f"{100 * (case['over_best'] - 1):.1f}% slower than {case['best']}{', a tie' if case['tie'] else ''}"
    how = "the best" if case["chosen"] == case["best"] else lost
    return f"  {case['chosen']}: {how}  ({times} s)"


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def summary(cases: Sequence[Case]) -> str:
    """Markdown: how far the choice is off, and up to which share of new tokens pass-Q beats pass-KV."""
    lines = [
        "| ranks | GB/s | cached | worst choice, ties left out | pass-Q wins up to | T / (T + P) |",
        "|---" * 6 + "|",
    ]
    keys = dict.fromkeys((case["ranks"], case["bandwidth_gbps"], case["cached"]) for case in cases)
    for key in keys:
        cells = [case for case in cases if (case["ranks"], case["bandwidth_gbps"], case["cached"]) == key]
        worst = max((case["over_best"] for case in cells if not case["tie"]), default=1.0)
        wins = pass_q_until(cells)
        until = ["never", "-"] if wins is None else [f"{wins} new tokens", f"{wins / (wins + key[2]):.4f}"]
        link = "none" if key[1] is None else f"{key[1]:g}"
        lines.append("| " + " | ".join([str(key[0]), link, str(key[2]), f"{100 * (worst - 1):.1f}%", *until]) + " |")
    return "\n".join(lines)


def pass_q_until(cells: Sequence[Case]) -> int | None:
    """Of one number of cached tokens: the most new ones up to which pass-Q was faster in every cell; None: never."""
    wins = None
    for case in sorted(cells, key=lambda case: case["tokens"]):
        if not case["pass_q_wins"]:
            break
        wins = case["tokens"]
    return wins
