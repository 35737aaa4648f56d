"""`headrace tune`: measures partitions and corrections for the planner, and writes a table (planner.tuned_table).

For each token count the chain's blocks are searched by prefills (KVR-S). Then, with those, how far the cost model is
off is measured for each strategy; with --heuristic also where pass-Q beats pass-KV. The file is written after each
measured point, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from headrace.bench.prefill_links import RankLink
from headrace.bench.prefill_search import confirmed, in_turns, search
from headrace.bench.prefill_testbed import PrefillTestbed, median, open_testbed
from headrace.bench.table import Column, show
from headrace.bench.tuning import Tuning
from headrace.console import err, loading, out, telling
from headrace.engine.ranks import stamp
from headrace.planner.chain_partition import best_chain
from headrace.planner.choice import predict, shards_for
from headrace.planner.heuristic import fit_heuristic
from headrace.planner.shards import Prefill
from headrace.planner.tuned_table import TableStamp, TunedTable, load_table
from headrace.strategies import OFFERED, STRATEGIES
from headrace.types import CHUNK

SHARES = (64, 32, 16, 8, 4, 2)
"""h(T, P) is fitted where T is one of these parts of T + P."""

CACHED_SHARE = 8
"""Besides full prefills, corrections are measured where T is this part of T + P."""

Say = Callable[[str], None]


def run(tuning: Tuning) -> TunedTable:
    """Measures what is missing in the table and saves it. Raises ValueError for a table of something else."""
    config = tuning.config()
    known = _known(tuning.path)
    with ExitStack() as opened:
        with loading(tuning.model) as progress:
            testbed = opened.enter_context(open_testbed(config, progress=progress))
        testbed.set_link(tuning.link)
        table = _begin(tuning, testbed, known)
        with telling() as say:
            new = [tokens for tokens in tuning.tokens if tokens not in table.entries]
            for tokens in new:
                _search(tuning, testbed, table, tokens, say)
            if new or not table.corrections:
                table.corrections = _corrections(tuning, testbed, table, say)
                table.save(tuning.path)
            if tuning.heuristic and table.heuristic is None:
                table.heuristic = fit_heuristic(_samples(tuning, testbed, table, say))
                table.save(tuning.path)
    _tell(table, tuning.path)
    return table


def _known(path: Path) -> TunedTable | None:
    """A table that is gone on with; None: there is none. Raises ValueError for another file."""
    if not path.exists():
        return None
    try:
        return load_table(path)
    except ValueError as error:
        cause = error.__cause__ or error
        raise ValueError(f"--out {path} is no table to go on with ({cause}): name another, or remove it") from None


def table_stamp(testbed: PrefillTestbed, link: RankLink) -> TableStamp:
    """What the engine would ask for; a link that was limited here is another one."""
    here = stamp(testbed.config, testbed.shape, testbed.machine)
    return here if link == RankLink() else msgspec.structs.replace(here, link=f"{here.link}, limited to {link}")


def _begin(tuning: Tuning, testbed: PrefillTestbed, known: TunedTable | None) -> TunedTable:
    here = table_stamp(testbed, tuning.link)
    if known is None:
        return TunedTable(stamp=here, machine=tuning.link.profile(testbed.machine))
    try:
        known.check(here)
    except ValueError as error:
        raise ValueError(f"{tuning.path}: {error}, into another --out, or remove that file") from None
    done, begun = sorted(known.entries), sum(len(points) for points in known.measured.values())
    err.print(f"going on with {tuning.path}: entries for {done}, {begun} points of a search", style="dim")
    return known


def _search(tuning: Tuning, testbed: PrefillTestbed, table: TunedTable, tokens: int, say: Say) -> None:
    """One entry, by KVR-S."""
    seed = best_chain(table.machine, table.stamp.shape, testbed.size, tokens)
    measured = table.points(tokens)
    found = search(testbed, seed, 0, tuning.stride, tuning.repeats, measured=measured)
    say(f"{tokens} tokens: begins at {list(found.seed)}")
    for point in found:
        table.keep(tokens, measured)
        table.save(tuning.path)
        best = f"best {list(point.best)} {point.best_s:.4f} s"
        say(f"{tokens} tokens: {len(measured)} points, {list(point.bounds)} {point.seconds:.4f} s, {best}")
    say(f"{tokens} tokens: the fastest points again")
    table.finish(tokens, *confirmed(testbed, found, 0))
    table.save(tuning.path)


def _corrections(tuning: Tuning, testbed: PrefillTestbed, table: TunedTable, say: Say) -> dict[str, float]:
    """By strategy the geometric mean of measured over predicted time, over full and partial prefills."""
    factors: dict[str, list[float]] = {}
    for T, P in _cells(tuning.tokens):
        say(f"corrections: {T} tokens on {P}")
        names = [name for name in OFFERED if P or not STRATEGIES[name].needs_cached]
        for name, (seconds, predicted) in _against_model(tuning, testbed, table, names, T, P).items():
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
    tuning: Tuning, testbed: PrefillTestbed, table: TunedTable, names: list[str], T: int, P: int
) -> dict[str, tuple[float, float]]:
    """(measured, predicted) seconds; cached chunks lie on the ranks in turn."""
    held = testbed.cached_on("ring-kv", P, "round")
    prefill = Prefill(table.machine, testbed.shape, testbed.size, T, P, held, table)
    cuts = {name: shards_for(name, prefill) for name in names}
    found = in_turns(testbed.runs(cuts, P, "round"), tuning.repeats)
    return {
        name: (
            median(found[name]).seconds,
            predict(name, table.machine, testbed.shape, testbed.size, cut.bounds, P, held).ttft_s,
        )
        for name, cut in cuts.items()
    }


def _samples(
    tuning: Tuning, testbed: PrefillTestbed, table: TunedTable, say: Say
) -> list[tuple[int, int, float, float]]:
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
        found = _against_model(tuning, testbed, table, ["ring-kv", "ring-q"], T, P)
        samples.append((T, P, found["ring-kv"][0], found["ring-q"][0]))
    return samples


COLUMNS = (
    Column("prompt", "tokens", "tokens", ","),
    Column("first token", "ttft_s", "s", ",.4f"),
    Column("shares of the ranks", "shares"),
)


def _tell(table: TunedTable, path: Path) -> None:
    rows = [
        {"tokens": tokens, "shares": " ".join(f"{share:.4f}" for share in entry.fractions), "ttft_s": entry.ttft_s}
        for tokens, entry in sorted(table.entries.items())
    ]
    show(COLUMNS, rows, out)
    corrections = ", ".join(f"{name} {value:.2f}" for name, value in table.corrections.items())
    out.print(f"\nmeasured over predicted: {corrections}")
    if table.heuristic is not None:
        h = table.heuristic
        out.print(f"h(T, P) = {h.alpha:.4g} log T {h.beta:+.4g} log(T / (T + P)) {h.gamma:+.4g}")
    out.print(f"wrote {path}: serve with --context-parallel-size {table.stamp.ranks} --parallel-table {path}")
