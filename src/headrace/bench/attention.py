"""`headrace bench attention`: its options; attention_cases.py measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace import cores
from headrace.bench.benchmark import Benchmark, Case, flat, option
from headrace.console import out, working


@dataclass
class AttentionBench(Benchmark):
    """Attention and linear kernels beside torch's and the limits.

    Also beside no sharing; the limits are those of the machine.
    """

    name = "attention"
    thread_count: int | None = option(
        "Threads. Default: decode on one and on all, the rest on all.", None, flags=("--threads",), min=1
    )
    chosen: str = option("Only cases whose names begin so, by commas: decode_,prefill_gqa.", "", flags=("--cases",))
    quick: bool = option("Tiny sizes, one repetition: shows that it runs, measures nothing.", False)

    def cases(self) -> Iterator[Case]:
        from headrace.bench.attention_cases import QUICK, AttentionCases, Sizes

        counts = [self.thread_count] if self.thread_count else sorted({1, cores.usable()})
        measured = AttentionCases(QUICK if self.quick else Sizes(), counts)
        with working("measuring the machine"):
            self.machine |= measured.machine()
        out.print(flat(self.machine), soft_wrap=True)
        yield from measured.cases(self.chosen)
