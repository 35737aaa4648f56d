"""`headrace bench restore`: a stored prompt comes back over links from slow to fast.

restore_splits.py measures one link, restore_report.py shows what was found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench import report
from headrace.bench.benchmark import MODELS_FLAGS, Benchmark, Case, option, token_count, words
from headrace.bench.shapes import SHAPES
from headrace.bench.table import Column
from headrace.console import err
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.bench.restore_testbed import RestoreTestbed


def percents(name: str, text: str) -> tuple[int, ...]:
    """Whole percents by commas. Raises ValueError."""
    found = tuple(int(part) if part.isdigit() else -1 for part in text.split(","))
    if not all(0 <= each <= 100 for each in found):
        raise ValueError(f"{name} must be percents from 0 to 100, by commas, got {text!r}")
    return found


def link_rates(name: str, text: str) -> tuple[float | None, ...]:
    """GB/s by commas, 'balance' as None. Raises ValueError."""
    try:
        return tuple(None if part == "balance" else float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be GB/s above 0 or 'balance', by commas, got {text!r}") from None


COLUMNS = (
    Column("model", width=len("model")),
    Column("link", "link_gbps", "GB/s", ",.3g", width=6),
    Column("chunks", lambda case: f"{case['tokens']} + {case['x']} + {case['load']}", "split", width=12),
    Column("chosen", "chosen_s", "s", ",.4f"),
    Column("predicted", "predicted_s", "s", ",.4f", optional=True),
    Column("load all", "load_all_s", "s", ",.4f"),
    Column("recompute", "recompute_all_s", "all, s", ",.4f", optional=True),
    Column("best", "best_s", "s", ",.4f", optional=True),
    Column("of best", "to_best", "times", ",.3f", limit=1.03, bound="at most"),
    Column("gain", unit="times", form=",.2f", optional=True),
    Column("overlap", form=",.2f", optional=True),
)
"""Chunks: recomputed + projected + loaded. The solver's split is to be within 3 % of the best one."""

RANKED_COLUMNS = (
    Column("model", width=len("model")),
    Column("link", "link_gbps", "GB/s", ",.3g", width=6),
    Column("stored", unit="tokens", form=",d"),
    Column("chosen", "chosen_s", "s", ",.4f"),
    Column("strategy", width=len("ring-kv")),
    Column("one rank", "one_s", "restores, s", ",.4f", optional=True),
    Column("all", "all_s", "recompute, s", ",.4f", optional=True),
    Column("of best", "to_best", "times", ",.3f", limit=1.05, bound="at most"),
    Column("of ends", "to_ends", "times", ",.3f", optional=True),
)
"""Several ranks: of best, beside all other ways; of ends, beside the better of one rank that restores and of all that
recompute."""


@dataclass
class RestoreBench(Benchmark):
    """A stored prompt comes back: the solver's split beside others.

    Others are loading all, recomputing all, and every split between them.
    """

    name = "restore"
    models: tuple[str, ...] = option(
        "Random-weight shapes, by commas: S1 (GQA), S2 (MHA), S3.", "S2,S1", parse=words, flags=MODELS_FLAGS
    )
    links: tuple[float | None, ...] = option(
        "GB/s of the emulated link, by commas; balance: loading all as slow as recomputing.",
        "0.1,0.3,1,3,10,30,balance",
        parse=link_rates,
    )
    tokens: int = option("Stored tokens: a multiple of 64.", 4096, parse=token_count)
    suffix: int = option("New tokens after them.", 32)
    latency_ms: float = option("Milliseconds that each transfer takes longer.", 0.0, min=0.0)
    stride: int = option("Chunks of 64 tokens between two splits of the sweep.", 8)
    repeats: int = option("Repetitions of the splits that matter, in turns.", 5)
    threads: int | None = option("Threads of the engine. Default: all cores.", None, min=1)
    ranks: int = option("Context ranks that restore together, on the cores of this machine.", 1, min=1)
    stored: tuple[int, ...] = option(
        "With several ranks: percent of the tokens that are stored, by commas.", "0,25,50,75,100", parse=percents
    )
    plot: Path | None = option("PNG that takes a plot.", None)

    def __post_init__(self) -> None:
        """Raises ValueError naming the option."""
        if self.plot is not None:
            report.plotter()
        for name in self.models:
            if name not in SHAPES:
                raise ValueError(f"models must be of {', '.join(SHAPES)}, got {name!r}")
        if self.tokens < CHUNK or self.tokens % CHUNK:
            raise ValueError(f"tokens must be a multiple of {CHUNK}, got {self.tokens}")
        if not self.links or any(gbps is not None and not gbps > 0 for gbps in self.links):
            raise ValueError(f"links must be GB/s above 0 or 'balance', by commas, got {list(self.links)}")
        if self.ranks > 1 and None in self.links:
            raise ValueError("links of several ranks must be GB/s: 'balance' is of one rank")
        for name in ("suffix", "stride", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def cases(self) -> Iterator[Case]:
        """A case per model and link; with several ranks, one per share that is stored."""
        if self.ranks > 1:
            yield from self._ranked()
            return
        from headrace.bench.restore_splits import balance, measured

        with tempfile.TemporaryDirectory() as folder:
            for model in self.models:
                opened = partial(self._opened, model, Path(folder) / model)
                for asked in self.links:
                    link = "balance" if asked is None else f"{asked:g} GB/s"
                    self.progress(f"{model}, {self.tokens:,} tokens, link {link}")
                    gbps = balance(opened) if asked is None else asked
                    testbed = opened(gbps)
                    try:
                        where = {"model": model, "link_gbps": gbps, "balanced": asked is None}
                        yield where | {"latency_ms": self.latency_ms} | measured(testbed, self.stride, self.repeats)
                    finally:
                        testbed.close()

    def _ranked(self) -> Iterator[Case]:
        from headrace.bench.ranked_restore import RankedTestbed, measured

        with tempfile.TemporaryDirectory() as folder:
            for model, gbps in product(self.models, self.links):
                where = {"model": model, "link_gbps": gbps, "ranks": self.ranks, "latency_ms": self.latency_ms}
                testbed: RankedTestbed | None = None
                try:
                    for percent in sorted(self.stored, reverse=True):  # what is no longer asked for may be evicted
                        stored = self.tokens * percent // 100 // CHUNK * CHUNK
                        self.progress(f"{model}, {stored:,} of {self.tokens:,} tokens stored, link {gbps:g} GB/s")
                        testbed = testbed or RankedTestbed(
                            SHAPES[model], Path(folder) / model, self.ranks, gbps, self.tokens, self.latency_ms
                        )
                        testbed.store(stored)
                        yield where | measured(testbed, self.repeats)
                finally:
                    if testbed is not None:
                        testbed.close()

    def _opened(self, model: str, folder: Path, gbps: float | None) -> RestoreTestbed:
        from headrace.bench.restore_testbed import RestoreTestbed

        chunks = self.tokens // CHUNK
        return RestoreTestbed(SHAPES[model], folder, gbps, chunks, self.suffix, self.latency_ms, self.threads)

    def case_count(self) -> int:
        return len(self.models) * len(self.links) * (len(self.stored) if self.ranks > 1 else 1)

    def columns(self) -> tuple[Column, ...]:
        return RANKED_COLUMNS if self.ranks > 1 else COLUMNS

    def finish(self, done: list[Case]) -> None:
        if self.plot is not None:
            from headrace.bench import restore_report

            restore_report.plot(done, self.plot)
            err.print(f"wrote {self.plot}", style="dim")
