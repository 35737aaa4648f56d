"""`headrace bench prefill`: time to the first token of one prompt by each strategy, beside one rank by itself.

Strategies as named here, and what they stand for:

    single          one rank, one process, no group
    gather          even blocks, all-gather of K and V, what the mask hides is skipped
    gather-full     the same, the full rectangle computed, as the paper's baseline does
    chain-even      the chain with even blocks (KVR-E)
    chain           the chain with the table's blocks (KVR-S and, between its entries, KVR-P); searched without one
    chain-searched  the chain with blocks searched here (KVR-S), a table or not
    ring-kv, ring-q zigzag blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace import strategies
from headrace.bench import prefill_grid, prefill_report, report
from headrace.bench.benchmark import MODEL_HELP, Case, a_model, integers, one_of, option, token_counts, words
from headrace.bench.prefill_grid import CELL, PrefillGrid, link_bandwidths
from headrace.bench.table import Column, show
from headrace.console import err, out
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.bench.prefill_testbed import PrefillRun, PrefillTestbed
    from headrace.planner.partition import Bounds
    from headrace.planner.schedule import Shards

CHAINS = ("chain-even", "chain", "chain-searched")
STRATEGIES = tuple(name for each in strategies.STRATEGIES for name in (CHAINS if each == "chain" else (each,)))


@dataclass
class PrefillBench(PrefillGrid):
    """Time to the first token of one prompt, by ranks and strategy.

    One rank by itself is measured beside them.
    """

    name = "prefill"
    model: str = option(MODEL_HELP, "tiny", argument=True, parse=a_model)
    ranks: tuple[int, ...] = option(prefill_grid.RANKS_HELP, "2", parse=integers)
    tokens: tuple[int, ...] = option(prefill_grid.TOKENS_HELP, "1024,2048,4096,8192,16384", parse=token_counts)
    cached: tuple[int, ...] = option(prefill_grid.CACHED_HELP, "0", parse=token_counts)
    strategies: tuple[str, ...] = option(
        "By commas. chain-even: even blocks; chain: the table's, searched without one; chain-searched: searched, a "
        "table or not.",
        "single,gather,gather-full,chain-even,chain,ring-kv,ring-q",
        parse=words,
    )
    bandwidth: tuple[float | None, ...] = option(prefill_grid.BANDWIDTH_HELP, "none", parse=link_bandwidths)
    latency_ms: float = option(prefill_grid.LATENCY_HELP, 0.0)
    jitter: float = option("Each message takes up to this share longer or shorter: 0.5.", 0.0)
    link: str = option(prefill_grid.LINK_HELP, "limited", parse=one_of("limited", "netns"))
    repeats: int = option("Repetitions of each case, the strategies in turn.", 5, min=1)
    threads: int = option(prefill_grid.THREADS_HELP, 1, min=1)
    dtype: str = option(prefill_grid.DTYPE_HELP, "auto")
    table: Path | None = option("Table of `headrace tune` for the chain's blocks.", None)
    search: bool = option("PartitionSearch the chain's blocks; else the cost model's.", True)
    stride: int = option("Tokens between two bounds that the search tries.", 64, min=1)
    search_repeats: int = option("Prefills of each searched point.", 2, min=1)
    placement: Literal["own", "round", "last"] = option(
        "Cached chunks: own (as the strategy places them), round (in turn), last (one rank).",
        "own",
        parse=one_of("own", "round", "last"),
    )
    plot: Path | None = option("PNG that takes a plot.", None)

    def __post_init__(self) -> None:
        if self.plot is not None:
            report.plotter()
        super().__post_init__()
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(f"strategies must be some of {', '.join(STRATEGIES)}, got {', '.join(unknown)!r}")
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")

    def cases(self) -> Iterator[Case]:
        """Cell by cell: the strategies of one (ranks, link, tokens, cached) are measured in turns."""
        for testbed in self.testbeds():
            for tokens in self.tokens:
                for cached in self.cached:
                    yield from self._cell(testbed, tokens, cached)

    def note(self, profile: dict[str, Any]) -> None:
        self.machine["link"] = self.link
        self.machine["threads_per_rank"] = profile["cores"]
        self.machine["latency_ms"] = self.links[0].latency_s * 1e3
        self.machine["jitter"] = self.jitter

    def columns(self) -> tuple[Column, ...]:
        return (
            *CELL,
            Column("strategy", width=len("chain-searched")),
            Column("first token", "ttft_s", "s", ",.4f"),
            Column("waiting", lambda case: " ".join(f"{wait:.3f}" for wait in case["wait_s"]), "s, by rank", width=12),
            Column("sent", lambda case: sum(case["bytes_sent"]), "MB", ",.1f", 1e-6, optional=True),
            Column("bounds", _bounds, optional=True),
        )

    def finish(self, done: list[Case]) -> None:
        out.print()
        show(*prefill_report.ratios(done), out)
        if self.plot is not None:
            prefill_report.plot(done, self.plot)
            err.print(f"wrote {self.plot}", style="dim")

    def _cell(self, testbed: PrefillTestbed, T: int, P: int) -> Iterator[Case]:
        from headrace.bench.prefill_search import in_turns

        self.progress(f"{testbed.size} ranks, {T:,} tokens on {P:,}, link {testbed.link}")
        cuts = {name: self._cut(testbed, name, T, P) for name in self.strategies}
        runs = {name: self._timed(testbed, name, cut, P) for name, cut in cuts.items()}
        for name, found in in_turns(runs, self.repeats).items():
            yield self._case(testbed, name, T, P, cuts[name], found)

    def _timed(self, testbed: PrefillTestbed, name: str, cut: Shards, P: int) -> Callable[[], PrefillRun]:
        if name == "single":
            return lambda: testbed.alone(cut.bounds[-1] - P, P)
        strategy = "chain" if name in CHAINS else name
        return lambda: testbed.run(strategy, cut, P, self.placement)

    def _case(self, testbed: PrefillTestbed, name: str, T: int, P: int, cut: Shards, found: list[PrefillRun]) -> Case:
        from headrace.bench.prefill_testbed import median

        middle = median(found)
        return {
            "strategy": name, "ranks": 1 if name == "single" else testbed.size, "tokens": T, "cached": P,
            "bandwidth_gbps": testbed.link.bandwidth_gbps, "ttft_s": middle.seconds, "partition": list(cut.bounds),
            "wait_s": list(middle.wait_s), "bytes_sent": list(middle.bytes_sent),
            "ttfts": [run.seconds for run in found],
        }  # fmt: skip

    def _cut(self, testbed: PrefillTestbed, name: str, T: int, P: int) -> Shards:
        from headrace.planner.choice import shards_for
        from headrace.planner.partition import align, even
        from headrace.planner.schedule import Shards
        from headrace.planner.shards import Prefill

        if name == "single":
            return Shards((P, P + T), (0,))
        if name == "chain-even":
            return Shards(align([P + bound for bound in even(T, testbed.size)], CHUNK), tuple(range(testbed.size)))
        strategy, tuned = "chain" if name in CHAINS else name, self.tuned if name == "chain" else None
        held = testbed.cached_on(strategy, P, self.placement)
        cut = shards_for(strategy, Prefill(testbed.planned_on(tuned), testbed.shape, testbed.size, T, P, held, tuned))
        given = name == "chain" and (self.tuned is not None or not self.search)
        if strategy != "chain" or given or testbed.size * self.stride > T:
            return cut
        return Shards(self._searched(testbed, cut.bounds, P), cut.ranks)

    def _searched(self, testbed: PrefillTestbed, seed: Bounds, P: int) -> Bounds:
        """KVR-S, begun at the cost model's bounds."""
        from headrace.bench.prefill_search import confirmed, search

        found = search(testbed, seed, P, self.stride, self.search_repeats, self.placement)
        for point in found:
            self.progress.detail(f"search, {point.measured} measured, best {list(point.best)} {point.best_s:.4f} s")
        best, seconds = confirmed(testbed, found, P, self.placement)
        self.progress.detail(f"search done, best {list(best)} {seconds:.4f} s")
        return tuple(P + bound for bound in best)


def _bounds(case: Case) -> str:
    return "" if case["ranks"] == 1 else " ".join(f"{bound:,}" for bound in case["partition"])
