"""`headrace bench attention`: its options; attention_cases.py measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace import cores
from headrace.bench.attention_goals import goal, judged
from headrace.bench.benchmark import Benchmark, Case, option
from headrace.bench.table import Column
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
        out.print(limits_text(self.machine, counts[-1]))
        self.progress.steps = sum(1 for _ in measured.chosen(self.chosen))
        yield from measured.cases(self.chosen, self.progress)

    def quick_lengths(self) -> dict[int, int]:
        from headrace.bench.attention_cases import QUICK

        return {length: QUICK.short(length) for length in (1024, 2048, 4096, 8192)} if self.quick else {}

    def columns(self) -> tuple[Column, ...]:
        limit = None if self.quick else goal
        return (
            Column("case", "name", width=len("decode_shared_mha_8192_chunk_first")),
            Column("threads", form="d", optional=True),
            Column("ours", "ours_ms", "ms", ",.3f"),
            Column("torch", lambda case: case.get("torch_ms") or case["sdpa_ms"], "ms", ",.3f", optional=True),
            Column("read", "gbps", "GB/s", ",.1f", optional=True),
            Column("limit", "read_gbps", "GB/s", ",.1f", optional=True),
            Column("computed", "gflops", "GFLOP/s", ",.0f", optional=True),
            Column("limit", "gemm_gflops", "GFLOP/s", ",.0f", optional=True),
            Column("share of", lambda case: judged(case)[0], width=len("no sharing")),
            Column("", lambda case: judged(case)[1], "times", ".2f", limit=limit, width=5),
        )


def limits_text(machine: dict[str, Any], threads: int) -> str:
    """'this machine: reads 48.1 GB/s, multiplies 831 (torch, bfloat16) and 940 GFLOP/s (registers), 2 threads'."""
    return (
        f"this machine: reads {machine['read_gbps']:,.1f} GB/s, multiplies {machine['gemm_gflops']:,.0f} "
        f"(torch, {machine['gemm_type']}) and {machine['peak_gflops']:,.0f} GFLOP/s (registers) on {threads} "
        f"thread{'s' * (threads != 1)}; attention by {machine['backend']}"
    )
