"""`headrace bench choice`: what the planner picks for T new tokens on P cached ones, beside the best measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.bench import prefill_grid
from headrace.bench.benchmark import MODEL_HELP, Case, a_model, integers, one_of, option, token_counts
from headrace.bench.prefill_grid import CELL, PrefillGrid, link_bandwidths
from headrace.bench.table import Column, show
from headrace.console import out

if TYPE_CHECKING:
    from headrace.bench.prefill_testbed import PrefillTestbed
    from headrace.planner.choice import StrategyChoice
    from headrace.planner.machine import Machine, ModelShape


ONE_ENGINE, ONE_RANK = "one engine, all cores", "one rank by itself"


@dataclass
class ChoiceBench(PrefillGrid):
    """What the planner picks beside the best of all strategies.

    All are measured, and where pass-Q starts to win.
    """

    name = "choice"
    model: str = option(MODEL_HELP, "tiny", argument=True, parse=a_model)
    ranks: tuple[int, ...] = option(prefill_grid.RANKS_HELP, "2", parse=integers)
    tokens: tuple[int, ...] = option(prefill_grid.TOKENS_HELP, "64,256,1024,4096", parse=token_counts)
    cached: tuple[int, ...] = option(prefill_grid.CACHED_HELP, "0,2048,8192", parse=token_counts)
    bandwidth: tuple[float | None, ...] = option(prefill_grid.BANDWIDTH_HELP, "0.1,1", parse=link_bandwidths)
    latency_ms: float = option(prefill_grid.LATENCY_HELP, 0.0)
    link: str = option(prefill_grid.LINK_HELP, "limited", parse=one_of("limited", "netns"))
    repeats: int = option("Repetitions of each cell, the strategies in turn.", 5, min=1)
    threads: int = option(prefill_grid.THREADS_HELP, 1, min=1)
    dtype: str = option(prefill_grid.DTYPE_HELP, "auto")
    table: Path | None = option("Table of `headrace tune`: blocks and corrections.", None)
    rule: Literal["cost", "alg1", "alg5", "heuristic"] = option(
        "How the planner chooses: cost, alg1, alg5, heuristic.",
        "cost",
        parse=one_of("cost", "alg1", "alg5", "heuristic"),
    )
    placement: Literal["round", "last"] = option(
        "Cached chunks: round (in turn) or last (on the last rank).", "round", parse=one_of("round", "last")
    )
    against_one_engine: bool = option(
        "Also measure one engine with the cores of all ranks, and one rank by itself.", False
    )

    def cases(self) -> Iterator[Case]:
        """Cell by cell; cached chunks are placed alike for all strategies."""
        for testbed in self.testbeds():
            yield from (self._cell(testbed, T, P) for P in self.cached for T in self.tokens)

    def columns(self) -> tuple[Column, ...]:
        return (
            *CELL,
            Column("chosen", width=len("ring-kv")),
            Column("best", width=len("ring-kv")),
            Column("slower by", lambda case: case["over_best"] - 1, "%", ",.1f", 100),
            Column("", lambda case: "a tie" if case["tie"] and case["chosen"] != case["best"] else "", width=5),
            Column("measured", _times, "s", optional=True),
        )

    def finish(self, done: list[Case]) -> None:
        out.print()
        show(SUMMARY, summary(done), out)
        if self.against_one_engine:
            out.print()
            show(PREDICTIONS, predictions(done), out)

    def _cell(self, testbed: PrefillTestbed, T: int, P: int) -> Case:
        from headrace.bench.prefill_search import in_turns
        from headrace.planner.choice import choose, shards_for
        from headrace.planner.shards import Prefill
        from headrace.strategies import OFFERED

        self.progress(f"{testbed.size} ranks, {T:,} tokens on {P:,}, link {testbed.link}")
        machine, held = testbed.planned_on(self.tuned), testbed.cached_on("ring-kv", P, self.placement)
        prefill = Prefill(machine, testbed.shape, testbed.size, T, P, held, self.tuned)
        choice = choose(prefill, rule=self.rule)
        runs = testbed.runs({name: shards_for(name, prefill) for name in OFFERED}, P, self.placement)
        if self.against_one_engine:
            runs |= {ONE_ENGINE: lambda: testbed.one_engine(T, P), ONE_RANK: lambda: testbed.alone(T, P)}
        found = {name: [run.seconds for run in each] for name, each in in_turns(runs, self.repeats).items()}
        beside = {name: found.pop(name) for name in (ONE_ENGINE, ONE_RANK) if name in found}
        case = _case(testbed, T, P, choice, found)
        if not beside:
            return case
        machines = {ONE_ENGINE: machine.alone, ONE_RANK: _by_itself(machine, testbed.crowding)}
        return case | {"beside": _beside(machines, testbed.shape, T, P, beside)}


def _case(testbed: PrefillTestbed, T: int, P: int, choice: StrategyChoice, found: dict[str, list[float]]) -> Case:
    measured = {name: statistics.median(times) for name, times in found.items()}
    best = min(measured, key=measured.__getitem__)
    return {
        "tokens": T, "cached": P, "ranks": testbed.size, "bandwidth_gbps": testbed.link.bandwidth_gbps,
        "latency_ms": testbed.link.latency_s * 1e3, "chosen": choice.strategy, "best": best,
        "over_best": measured[choice.strategy] / measured[best], "tie": tie(found[choice.strategy], found[best]),
        "pass_q_wins": measured["ring-q"] < measured["ring-kv"], "measured_s": measured,
        "predicted_s": dict(choice.predicted_s), "ttfts": found, "reason": choice.reason,
    }  # fmt: skip


def _by_itself(machine: Machine, crowding: float) -> Machine:
    """The profile of a rank that keeps to its share of the cores, but has turns on them with no other."""
    import msgspec

    return msgspec.structs.replace(
        machine, one_engine=None, linear_flops_s=machine.linear_flops_s * crowding,
        memory_bytes_s=machine.memory_bytes_s * crowding,
        attention_flops_s=tuple((rows, rate * crowding) for rows, rate in machine.attention_flops_s),
    )  # fmt: skip


def _beside(
    machines: dict[str, Machine], shape: ModelShape, T: int, P: int, found: dict[str, list[float]]
) -> dict[str, Any]:
    """Of what is not a strategy of the ranks: seconds measured and predicted."""
    from headrace.planner.choice import predict

    return {
        name: {
            "cores": machine.cores, "measured_s": statistics.median(found[name]), "times_s": found[name],
            "predicted_s": predict("single", machine, shape, 1, (P, P + T), P).ttft_s,
        }
        for name, machine in machines.items()
    }  # fmt: skip


def tie(chosen: Sequence[float], best: Sequence[float]) -> bool:
    """Whether the middle halves of the two overlap: the repetitions do not tell which is faster."""

    def quartile(times: Sequence[float], share: float) -> float:
        ordered = sorted(times)
        return ordered[round(share * (len(ordered) - 1))]

    return quartile(chosen, 0.25) <= quartile(best, 0.75)


def _times(case: Case) -> str:
    beside = {name: each["measured_s"] for name, each in case.get("beside", {}).items()}
    times = sorted((case["measured_s"] | beside).items(), key=lambda pair: pair[1])
    return ", ".join(f"{name} {seconds:.4f}" for name, seconds in times)


SUMMARY = (
    *CELL[:2], CELL[3],
    Column("worst choice", "worst", "%, no ties", ",.1f", 100),
    Column("pass-Q wins up to", "until", "new tokens", ","),
    Column("T / (T + P)", "share", form=".4f"),
)  # fmt: skip


def summary(cases: Sequence[Case]) -> list[Case]:
    """How far the choice is off, and up to which share of new tokens pass-Q beats pass-KV: None where it never does."""
    rows: list[Case] = []
    for ranks, gbps, cached in dict.fromkeys((case["ranks"], case["bandwidth_gbps"], case["cached"]) for case in cases):
        where = {"ranks": ranks, "bandwidth_gbps": gbps, "cached": cached}
        cells = [case for case in cases if all(case[name] == value for name, value in where.items())]
        worst = max((case["over_best"] for case in cells if not case["tie"]), default=1.0)
        wins = pass_q_until(cells)
        share = None if wins is None else wins / (wins + cached)
        rows.append(where | {"worst": worst - 1, "until": wins, "share": share})
    return rows


PREDICTIONS = (
    CELL[0], CELL[2], CELL[3],
    Column("way", width=len("one engine, all cores")),
    Column("measured", unit="s", form=",.3f"),
    Column("predicted", unit="s", form=",.3f"),
    Column("of measured", "ratio", "times", ".2f"),
)  # fmt: skip


def predictions(cases: Sequence[Case]) -> list[Case]:
    """Measured and predicted seconds of each way to compute a prompt, the fastest first."""
    rows: list[Case] = []
    for case in cases:
        pairs = {name: (seconds, case["predicted_s"].get(name)) for name, seconds in case["measured_s"].items()}
        pairs |= {name: (each["measured_s"], each["predicted_s"]) for name, each in case["beside"].items()}
        where = {name: case[name] for name in ("ranks", "tokens", "cached")}
        for name, (measured, predicted) in sorted(pairs.items(), key=lambda item: item[1][0]):
            if predicted is not None:
                figures = {"measured": measured, "predicted": predicted, "ratio": predicted / measured}
                rows.append({**where, "way": name, **figures})
    return rows


def pass_q_until(cells: Sequence[Case]) -> int | None:
    """Of one number of cached tokens: the most new ones up to which pass-Q was faster in every cell; None: never."""
    wins = None
    for case in sorted(cells, key=lambda case: case["tokens"]):
        if not case["pass_q_wins"]:
            break
        wins = case["tokens"]
    return wins
