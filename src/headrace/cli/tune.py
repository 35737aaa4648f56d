"""`headrace tune`: measures what the planner goes by on this machine, and writes it as a table (planner.tuned_table).

For each token count the chain's blocks are searched by prefills (KVR-S). Then, with those, how far the cost model is
off is measured for each strategy; with --heuristic also where pass-Q beats pass-KV. The file is written after each
measured point, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from headrace.bench.prefill import confirmed, in_turns, search, set_link, settings
from headrace.bench.prefill_links import Link
from headrace.bench.prefill_testbed import Bed, median, open_bed
from headrace.config import EngineConfig
from headrace.console import err, loading, out
from headrace.engine.ranks import stamp
from headrace.planner.chain_partition import best_chain
from headrace.planner.choice import predict, shards_for
from headrace.planner.heuristic import fit_heuristic
from headrace.planner.tuned_table import TableStamp, TunedTable, load_table
from headrace.strategies import OFFERED, STRATEGIES
from headrace.types import CHUNK

SHARES = (64, 32, 16, 8, 4, 2)
"""h(T, P) is fitted where T is one of these parts of T + P."""

CACHED_SHARE = 8
"""Besides full prefills, corrections are measured where T is this part of T + P."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is asked for. Raises ValueError naming the option."""

    model: str
    path: Path
    ranks: int = 2
    tokens: tuple[int, ...] = (2048, 8192, 16384)
    repeats: int = 2
    stride: int = CHUNK
    threads: int | None = None
    dtype: str = "auto"
    heuristic: bool = False
    link: Link = Link()

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}: one rank has nothing to tune")
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1, got {self.stride}")
        least = self.ranks * max(self.stride, CHUNK)
        if not self.tokens or min(self.tokens) < least:
            raise ValueError(f"tokens must be at least {least} for {self.ranks} ranks, got {list(self.tokens)}")
        if self.path.is_dir():
            raise ValueError(f"out must be a file, {self.path} is a folder")

    def config(self) -> EngineConfig:
        return settings(self.model, self.ranks, max(self.tokens), self.threads, self.dtype)


def run(tuning: Tuning) -> TunedTable:
    """Measures what is missing in the table and saves it. Raises ValueError for a table of something else."""
    config = tuning.config()
    known = load_table(tuning.path) if tuning.path.exists() else None
    with ExitStack() as opened:
        with loading(tuning.model) as progress:
            bed = opened.enter_context(open_bed(config, progress=progress))
        set_link(bed, tuning.link)
        table = _begin(tuning, bed, known)
        with _progress() as say:
            new = [tokens for tokens in tuning.tokens if tokens not in table.entries]
            for tokens in new:
                _search(tuning, bed, table, tokens, say)
            if new or not table.corrections:
                table.corrections = _corrections(tuning, bed, table, say)
                table.save(tuning.path)
            if tuning.heuristic and table.heuristic is None:
                table.heuristic = fit_heuristic(_samples(tuning, bed, table, say))
                table.save(tuning.path)
    _tell(table, tuning.path)
    return table


def table_stamp(bed: Bed, link: Link) -> TableStamp:
    """What the engine would ask for; a link that was limited here is another one."""
    here = stamp(bed.config, bed.shape, bed.machine)
    return here if link == Link() else msgspec.structs.replace(here, link=f"{here.link}, limited to {link}")


def _begin(tuning: Tuning, bed: Bed, known: TunedTable | None) -> TunedTable:
    here = table_stamp(bed, tuning.link)
    if known is None:
        return TunedTable(stamp=here, machine=tuning.link.profile(bed.machine))
    try:
        known.check(here)
    except ValueError as error:
        raise ValueError(f"{tuning.path}: {error}, into another --out, or remove that file") from None
    done, begun = sorted(known.entries), sum(len(points) for points in known.measured.values())
    err.print(f"going on with {tuning.path}: entries for {done}, {begun} points of a search", style="dim")
    return known


def _search(tuning: Tuning, bed: Bed, table: TunedTable, tokens: int, say: Say) -> None:
    """One entry, by KVR-S."""
    seed = best_chain(table.machine, table.stamp.shape, bed.size, tokens)
    measured = table.points(tokens)
    found = search(bed, seed, 0, tuning.stride, tuning.repeats, measured=measured)
    say(f"{tokens} tokens: begins at {list(found.seed)}")
    for point in found:
        table.keep(tokens, measured)
        table.save(tuning.path)
        best = f"best {list(point.best)} {point.best_s:.4f} s"
        say(f"{tokens} tokens: {len(measured)} points, {list(point.bounds)} {point.seconds:.4f} s, {best}")
    say(f"{tokens} tokens: the fastest points again")
    table.finish(tokens, *confirmed(bed, found, 0))
    table.save(tuning.path)


def _corrections(tuning: Tuning, bed: Bed, table: TunedTable, say: Say) -> dict[str, float]:
    """By strategy the geometric mean of measured over predicted time, over full and partial prefills."""
    factors: dict[str, list[float]] = {}
    for T, P in _cells(tuning.tokens):
        say(f"corrections: {T} tokens on {P}")
        names = [name for name in OFFERED if P or not STRATEGIES[name].needs_cached]
        for name, (seconds, predicted) in _against_model(tuning, bed, table, names, T, P).items():
            factors.setdefault(name, []).append(seconds / predicted)
    return {name: statistics.geometric_mean(values) for name, values in factors.items()}


def _cells(tokens: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(T, P) of the corrections."""
    for total in tokens:
        yield total, 0
        new = total // CACHED_SHARE // CHUNK * CHUNK
        cached = (total - new) // CHUNK * CHUNK
        if new and cached:
            yield new, cached


def _against_model(
    tuning: Tuning, bed: Bed, table: TunedTable, names: list[str], T: int, P: int
) -> dict[str, tuple[float, float]]:
    """(measured, predicted) seconds; cached chunks lie on the ranks in turn."""
    held = bed.cached_on("ring-kv", P, "round")
    cuts = {name: shards_for(name, table.machine, bed.shape, bed.size, T, P, held, table) for name in names}
    found = in_turns(bed.runs(cuts, P, "round"), tuning.repeats)
    return {
        name: (
            median(found[name]).seconds,
            predict(name, table.machine, bed.shape, bed.size, cut.bounds, P, held).ttft_s,
        )
        for name, cut in cuts.items()
    }


def _samples(tuning: Tuning, bed: Bed, table: TunedTable, say: Say) -> list[tuple[int, int, float, float]]:
    """(T, P, seconds of pass-KV, seconds of pass-Q)."""
    cells = {
        (new, (total - new) // CHUNK * CHUNK)
        for total in tuning.tokens
        for new in (total // share // CHUNK * CHUNK for share in SHARES)
        if new
    }
    samples = []
    for number, (T, P) in enumerate(sorted(cells), 1):
        say(f"h(T, P): {T} tokens on {P} ({number} of {len(cells)})")
        found = _against_model(tuning, bed, table, ["ring-kv", "ring-q"], T, P)
        samples.append((T, P, found["ring-kv"][0], found["ring-q"][0]))
    return samples


@contextmanager
def _progress() -> Iterator[Say]:
    """What is being measured: a line that changes on a terminal, lines elsewhere."""
    if not err.is_terminal:
        yield lambda text: err.print(text, style="dim")
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)


def _tell(table: TunedTable, path: Path) -> None:
    out.print("| tokens | shares of the ranks | time to first token |\n|---|---|---|")
    for tokens, entry in sorted(table.entries.items()):
        out.print(f"| {tokens} | {', '.join(f'{share:.4f}' for share in entry.fractions)} | {entry.ttft_s:.4f} s |")
    corrections = ", ".join(f"{name} {value:.2f}" for name, value in table.corrections.items())
    out.print(f"\nmeasured over predicted: {corrections}")
    if table.heuristic is not None:
        h = table.heuristic
        out.print(f"h(T, P) = {h.alpha:.4g} log T {h.beta:+.4g} log(T / (T + P)) {h.gamma:+.4g}")
    out.print(f"wrote {path}: serve with --context-parallel-size {table.stamp.ranks} --parallel-table {path}")
