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

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.bench.prefill_links import Link
from headrace.bench.prefill_testbed import Bed, Placement, Run, median, open_bed
from headrace.bench.shapes import SHAPES
from headrace.config import EngineConfig
from headrace.console import err
from headrace.engine.capacity import model_folder
from headrace.engine.ranks import stamp
from headrace.planner import tuned_table as planner_table
from headrace.planner.choice import Layout, layout
from headrace.planner.machine import Machine
from headrace.planner.partition import Bounds, align, even
from headrace.planner.search import Search
from headrace.planner.tuned_table import TunedTable
from headrace.types import CHUNK

STRATEGIES = ("single", "gather", "gather-full", "chain-even", "chain", "chain-searched", "ring-kv", "ring-q")
DEFAULT = tuple(name for name in STRATEGIES if name != "chain-searched")
CHAINS = ("chain-even", "chain", "chain-searched")

FINALISTS, FINALS = 4, 3
"""So many points of a search are measured again, so many times each."""

Case = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. Raises ValueError naming the option for what cannot be."""

    model: str
    ranks: tuple[int, ...] = (2,)
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    cached: tuple[int, ...] = (0,)
    strategies: tuple[str, ...] = DEFAULT
    links: tuple[Link, ...] = (Link(),)
    repeats: int = 5
    threads: int = 1
    dtype: str = "auto"
    netns: bool = False
    table: TunedTable | None = None
    search: bool = True
    stride: int = CHUNK
    search_repeats: int = 2
    placement: Placement = "own"

    def __post_init__(self) -> None:
        for name, low in (("ranks", 2), ("tokens", 1), ("cached", 0)):
            given = getattr(self, name)
            if not given or min(given) < low:
                raise ValueError(f"{name} must be one or more integers of at least {low}, got {list(given)}")
        odd = [count for count in self.cached if count % CHUNK]
        if odd:
            raise ValueError(f"cached must be multiples of {CHUNK}, the length of a chunk, got {odd[0]}")
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        if unknown or not self.strategies:
            raise ValueError(f"strategies must be some of {', '.join(STRATEGIES)}, got {', '.join(unknown)!r}")
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")

    @property
    def longest(self) -> int:
        return max(self.tokens) + max(self.cached)

    def config(self, ranks: int) -> EngineConfig:
        return settings(self.model, ranks, self.longest, self.threads, self.dtype)


def settings(model: str, ranks: int, longest: int, threads: int | None, dtype: str = "auto") -> EngineConfig:
    """For a bed: `model` a folder, 'tiny', or a random-weight shape. Raises ValueError where prompts are too long."""
    from headrace.models.config import read_config

    if model in SHAPES and not Path(model).is_dir():
        from headrace.bench.engine import checkpoint

        model = str(checkpoint(model))
    context = read_config(model_folder(model)).max_model_len
    if longest > context:
        raise ValueError(f"tokens and cached make {longest} together, the model's context is {context}: ask for less")
    whole = -(-longest // CHUNK) * CHUNK
    return EngineConfig(
        model=model,
        context_parallel_size=ranks,
        kv_cache_tokens=whole,
        threads=threads,
        dtype=dtype,
    )


def numbers(name: str, text: str) -> tuple[int, ...]:
    """Integers by commas. Raises ValueError naming the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be integers by commas, got {text!r}") from None


def links(bandwidths: str, latency_ms: float, jitter: float, seed: int = 0) -> tuple[Link, ...]:
    """A link per bandwidth: GB/s by commas, 'none' for unlimited. Raises ValueError naming the option."""
    found = []
    for text in bandwidths.split(","):
        try:
            value = None if text.strip() == "none" else float(text)
        except ValueError:
            raise ValueError(f"bandwidth must be GB/s by commas, or 'none', got {text!r}") from None
        found.append(Link(value, latency_ms / 1e3, jitter, seed))
    return tuple(found)


@dataclass(slots=True)
class PrefillBench:
    """All cases of a plan. profile: figures of the machine and the ranks' own link, by ranks, once measured."""

    plan: Plan
    profile: dict[str, Any] = field(default_factory=dict)

    def cases(self) -> Iterator[Case]:
        """Cell by cell: the strategies of one (ranks, link, tokens, cached) are measured in turns."""
        plan = self.plan
        for ranks in plan.ranks:
            with open_bed(plan.config(ranks), netns=plan.netns) as bed:
                self._note(bed)
                check_table(plan.table, bed)
                for link in plan.links:
                    set_link(bed, link)
                    for tokens in plan.tokens:
                        for cached in plan.cached:
                            yield from self._cell(bed, tokens, cached)

    def _note(self, bed: Bed) -> None:
        figures = msgspec.to_builtins(bed.machine)
        self.profile[f"profile_{bed.size}_ranks"] = figures
        self.profile["link"] = "netns" if self.plan.netns else "limited"
        self.profile["threads_per_rank"] = figures["cores"]
        self.profile["latency_ms"] = self.plan.links[0].latency_s * 1e3
        self.profile["jitter"] = self.plan.links[0].jitter

    def _cell(self, bed: Bed, T: int, P: int) -> Iterator[Case]:
        err.print(f"{bed.size} ranks, {T} tokens on {P}, link {bed.link}", style="dim")
        cuts = {name: self._cut(bed, name, T, P) for name in self.plan.strategies}
        runs = {name: self._timed(bed, name, cut, P) for name, cut in cuts.items()}
        for name, found in in_turns(runs, self.plan.repeats).items():
            yield self._case(bed, name, T, P, cuts[name], found)

    def _timed(self, bed: Bed, name: str, cut: Layout, P: int) -> Callable[[], Run]:
        if name == "single":
            return lambda: bed.alone(cut.bounds[-1] - P, P)
        strategy = "chain" if name in CHAINS else name
        return lambda: bed.run(strategy, cut, P, self.plan.placement)

    def _case(self, bed: Bed, name: str, T: int, P: int, cut: Layout, found: list[Run]) -> Case:
        middle = median(found)
        return {
            "strategy": name, "ranks": 1 if name == "single" else bed.size, "tokens": T, "cached": P,
            "bandwidth_gbps": bed.link.bandwidth_gbps, "ttft_s": middle.seconds, "partition": list(cut.bounds),
            "wait_s": list(middle.wait_s), "bytes_sent": list(middle.bytes_sent),
            "ttfts": [run.seconds for run in found],
        }  # fmt: skip

    def _cut(self, bed: Bed, name: str, T: int, P: int) -> Layout:
        plan = self.plan
        if name == "single":
            return Layout((P, P + T), (0,))
        if name == "chain-even":
            return Layout(align([P + bound for bound in even(T, bed.size)], CHUNK), tuple(range(bed.size)))
        held = bed.cached_on("chain" if name in CHAINS else name, P, plan.placement)
        strategy, tuned = "chain" if name in CHAINS else name, plan.table if name == "chain" else None
        cut = layout(strategy, limited(bed.machine, tuned, bed.link), bed.shape, bed.size, T, P, held, tuned)
        given = name == "chain" and (plan.table is not None or not plan.search)
        if strategy != "chain" or given or bed.size * plan.stride > T:
            return cut
        return Layout(self._searched(bed, cut.bounds, P), cut.ranks)

    def _searched(self, bed: Bed, seed: Bounds, P: int) -> Bounds:
        """KVR-S, begun at the cost model's bounds."""
        found = search(bed, seed, P, self.plan.stride, self.plan.search_repeats, self.plan.placement)
        for point in found:
            err.print(f"  search: {point.measured} measured, best {list(point.best)} {point.best_s:.4f} s", style="dim")
        best, seconds = confirmed(bed, found, P, self.plan.placement)
        err.print(f"  search: measured again, best {list(best)} {seconds:.4f} s", style="dim")
        return tuple(P + bound for bound in best)


def search(
    bed: Bed,
    seed: Sequence[int],
    P: int,
    stride: int,
    repeats: int,
    placement: Placement = "own",
    measured: dict[Bounds, float] | None = None,
) -> Search:
    """A search for the chain's bounds by prefills on the bed; its own bounds begin at 0. Nothing is measured cold."""
    order = tuple(range(bed.size))

    warm = False

    def measure(bounds: Bounds) -> float:
        nonlocal warm
        cut = Layout(tuple(P + bound for bound in bounds), order)
        if not warm:
            bed.run("chain", cut, P, placement)
            warm = True
        return median([bed.run("chain", cut, P, placement) for _ in range(repeats)]).seconds

    start = [bound - P for bound in seed]
    return Search(start[-1], bed.size, measure, seed=start, stride=stride, measured=measured)


def confirmed(bed: Bed, found: Search, P: int, placement: Placement = "own") -> tuple[Bounds, float]:
    """Best bounds of a search and their time: its fastest points are measured again in turns, so none wins by luck.

    Takes FINALISTS * (1 + FINALS) prefills.
    """
    order = tuple(range(bed.size))
    finalists = sorted(found.measured, key=found.measured.__getitem__)[:FINALISTS]
    runs = {
        bounds: partial(bed.run, "chain", Layout(tuple(P + bound for bound in bounds), order), P, placement)
        for bounds in finalists
    }
    times = {bounds: median(again).seconds for bounds, again in in_turns(runs, FINALS).items()}
    best = min(times, key=times.__getitem__)
    return best, times[best]


Name = TypeVar("Name", bound=Hashable)


def in_turns(runs: Mapping[Name, Callable[[], Run]], repeats: int) -> dict[Name, list[Run]]:
    """A B A B ..: what drifts meets all alike. Each runs once before, uncounted."""
    for run in runs.values():
        run()
    found: dict[Name, list[Run]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return found


def set_link(bed: Bed, link: Link) -> None:
    """Sets it, and says where the ranks' own link is too slow for what is asked."""
    bed.set_link(link)
    if not link.imitable(bed.machine.link_bytes_s):
        err.print(
            f"the ranks' own link carries {bed.machine.link_bytes_s / 1e9:.2f} GB/s: {link} is not reached",
            style="yellow",
        )


def check_table(table: TunedTable | None, bed: Bed) -> None:
    """Raises ValueError for a table of another machine, model or group; that it is for another link is said only."""
    if table is None:
        return
    here = stamp(bed.config, bed.shape, bed.machine)
    table.check(msgspec.structs.replace(here, link=table.stamp.link))
    if table.stamp.link != here.link:
        err.print(f"the table was tuned on another link: {table.stamp.link}", style="yellow")


def load_table(path: Path | None) -> TunedTable | None:
    """Raises ValueError where there is no table in it."""
    return None if path is None else planner_table.load(path)


def line(case: Case) -> str:
    """A case for people."""
    cut = "" if case["ranks"] == 1 else f"  bounds {case['partition']}"
    waits = "/".join(f"{wait:.3f}" for wait in case["wait_s"])
    return f"  {case['strategy']:<14} {case['ttft_s']:8.4f} s  waiting {waits} s  sent {case['bytes_sent']}{cut}"


def limited(machine: Machine, table: TunedTable | None, link: Link) -> Machine:
    """What the planner goes by: the table's profile, else the measured one, behind the link."""
    return link.profile(machine if table is None else table.machine)
