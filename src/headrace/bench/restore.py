"""`headrace bench restore`: a stored prompt comes back over links from slow to fast.

restore_splits.py measures one link, restore_report.py shows what was found.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench import report
from headrace.bench.benchmark import MODELS_FLAGS, Benchmark, Case, option, words
from headrace.bench.shapes import SHAPES
from headrace.console import err, out
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.bench.restore_testbed import RestoreTestbed


def link_rates(name: str, text: str) -> tuple[float | None, ...]:
    """GB/s by commas, 'balance' as None. Raises ValueError."""
    try:
        return tuple(None if part == "balance" else float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be GB/s above 0 or 'balance', by commas, got {text!r}") from None


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
    tokens: int = option("Stored tokens: a multiple of 64.", 4096)
    suffix: int = option("New tokens after them.", 32)
    latency_ms: float = option("Milliseconds that each transfer takes longer.", 0.0, min=0.0)
    stride: int = option("Chunks of 64 tokens between two splits of the sweep.", 8)
    repeats: int = option("Repetitions of the splits that matter, in turns.", 5)
    threads: int | None = option("Threads of the engine. Default: all cores.", None, min=1)
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
        for name in ("suffix", "stride", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def cases(self) -> Iterator[Case]:
        """A case per model and link."""
        from headrace.bench.restore_splits import balance, measured

        with tempfile.TemporaryDirectory() as folder:
            for model in self.models:
                opened = partial(self._opened, model, Path(folder) / model)
                for asked in self.links:
                    gbps = balance(opened) if asked is None else asked
                    err.print(f"{model}, {self.tokens} tokens, link {gbps:.3g} GB/s", style="dim")
                    testbed = opened(gbps)
                    try:
                        where = {"model": model, "link_gbps": gbps, "balanced": asked is None}
                        yield where | {"latency_ms": self.latency_ms} | measured(testbed, self.stride, self.repeats)
                    finally:
                        testbed.close()

    def _opened(self, model: str, folder: Path, gbps: float | None) -> RestoreTestbed:
        from headrace.bench.restore_testbed import RestoreTestbed

        chunks = self.tokens // CHUNK
        return RestoreTestbed(SHAPES[model], folder, gbps, chunks, self.suffix, self.latency_ms, self.threads)

    def line(self, case: Case) -> str:
        overlap = "-" if case["overlap"] is None else f"{case['overlap']:.2f}"
        return (
            f"  {case['link_gbps']:>6.3g} GB/s  recompute {case['tokens']}, project {case['x']}, load {case['load']}"
            f"  {case['chosen_s']:.4f} s (predicted {case['predicted_s']:.4f})  best {case['best_s']:.4f}"
            f"  load all {case['load_all_s']:.4f}  recompute all {case['recompute_all_s']:.4f}"
            f"  gain {case['gain']:.2f}  overlap {overlap}"
        )

    def finish(self, done: list[Case]) -> None:
        from headrace.bench import restore_report

        out.print(restore_report.table(done), soft_wrap=True)
        if self.plot is not None:
            restore_report.plot(done, self.plot)
            err.print(f"wrote {self.plot}", style="dim")
