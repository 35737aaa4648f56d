"""Figures of the papers and the toy model that reproduces them, for tests of the planner.

KV-Runahead's calibration is a fit to its table 3, one GPU (Llama 7B on A100): residuals below 1%.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.planner.choice import choose
from headrace.planner.heuristic import Heuristic
from headrace.planner.machine import Machine, ModelShape
from headrace.planner.partition import even, sizes_of
from headrace.planner.shards import Prefill
from headrace.types import CHUNK

A, B = 7.67e-5, 1.985e-8
"""Seconds per token, and per row and column of the attention's rectangle."""

KV_BYTES = 2**19
"""K and V of one token in all layers of Llama 7B in fp16."""

TABLE_3_SINGLE = {1024: 0.10, 2048: 0.24, 4096: 0.65, 8192: 1.95, 12288: 3.95}
"""KV-Runahead, table 3: TTFT on one GPU."""

TABLE_4 = (
    (1280, 1023.39, 898.71), (3200, 1110.18, 1046.43), (4160, 1298.92, 1280.10), (6400, 1305.56, 1302.01),
    (12800, 2080.67, 2205.27), (25600, 3353.02, 3617.02), (38400, 4629.23, 4922.52), (51200, 5745.08, 6217.83),
    (64000, 6845.21, 7367.99), (76800, 7890.35, 8468.66), (89600, 8697.27, 9666.62), (102400, 10105.78, 10652.39),
    (115200, 11136.40, 11571.62), (128000, 11462.15, 12360.57),
)  # fmt: skip
"""Context parallelism, table 4: (T, pass-KV ms, pass-Q ms) with T + P = 128,000 on four hosts."""


@dataclass(frozen=True)
class Toy:
    """t_i = a c_i + b c_i (S_i + c_i): the steady state of the chain, and of the gather, in seconds."""

    bandwidth: float | None = None

    def chain(self, bounds: Sequence[int]) -> float:
        compute = max(A * (r - left) + B * (r - left) * r for left, r in pairwise(bounds))
        return compute if self.bandwidth is None else max(compute, max(bounds[1:-1]) * KV_BYTES / self.bandwidth)

    def gather(self, tokens: int, ranks: int) -> float:
        return max((A + B * tokens) * (r - left) for left, r in pairwise(even(tokens, ranks)))


def toy_fractions(tokens: int, ranks: int, b: float = B) -> tuple[float, ...]:
    """The partition with which all ranks take the same time, by bisection: each block solves a quadratic."""
    low, high = 0.0, A * tokens + b * tokens**2
    for _ in range(60):
        seconds, sizes = (low + high) / 2, []
        for _ in range(ranks):
            linear = A + b * sum(sizes)
            sizes.append((-linear + math.sqrt(linear**2 + 4 * b * seconds)) / (2 * b))
        low, high = (low, seconds) if sum(sizes) > tokens else (seconds, high)
    return tuple(size / sum(sizes) for size in sizes)


def gather_entries(bounds: Sequence[int]) -> int:
    """Equations 4 and 5: entries that an all-gather moves in one layer, (p - 1) C for every partition."""
    return sum(bounds[-1] - bounds[0] - size for size in sizes_of(bounds))


def chain_entries(bounds: Sequence[int]) -> int:
    """Equations 6 and 7: entries that the chain hands over in one layer; (p - 1) C / 2 for an even partition."""
    return sum(bound - bounds[0] for bound in bounds[1:-1])


def gather_products(bounds: Sequence[int]) -> tuple[int, ...]:
    """Products of each rank in the paper's gather: its rows times all tokens, masked ones included (figure 4)."""
    return tuple(size * (bounds[-1] - bounds[0]) for size in sizes_of(bounds))


def chain_products(bounds: Sequence[int]) -> tuple[int, ...]:
    """Products of each rank in the paper's chain: its rows times all tokens up to its last (figure 5)."""
    return tuple((right - left) * (right - bounds[0]) for left, right in pairwise(bounds))


PRINTED = Heuristic(-1.059, 1.145, 12.112)
"""The paper's coefficients, which contradict its own table 4."""


def break_even(
    machine: Machine, shape: ModelShape, ranks: int, P: int = 0, cached_on: Sequence[float] | None = None
) -> int | None:
    """New tokens from which several ranks are worth it, to a chunk; None where they are not below a million."""
    low, high = 0, CHUNK
    while choose(Prefill(machine, shape, ranks, high, P, cached_on)).strategy == "single":
        low, high = high, 2 * high
        if high > 2**20:
            return None
    while high - low > CHUNK:
        middle = (low + high) // 2 // CHUNK * CHUNK
        if choose(Prefill(machine, shape, ranks, middle, P, cached_on)).strategy == "single":
            low = middle
        else:
            high = middle
    return high


def crossover(
    machine: Machine, shape: ModelShape, ranks: int, total: int, cached_on: Sequence[float] | None = None
) -> int | None:
    """Of `total` = T + P tokens, the most new ones with which pass-Q is predicted to beat pass-KV; None: never.

    Looked up at four token counts per octave, whole chunks each.
    """
    counts = sorted({int(total / 2 ** (i / 4)) // CHUNK * CHUNK for i in range(1, 49)} - {0})
    rings = ("ring-kv", "ring-q")
    wins = [
        T
        for T in counts
        if choose(Prefill(machine, shape, ranks, T, total - T, cached_on), allowed=rings).strategy == "ring-q"
    ]
    return max(wins, default=None)


MACHINE = Machine(
    name="test box", cores=2, isa="avx512bf16", date="2025-01-01", linear_flops_s=500e9,
    attention_flops_s=((16, 400e9), (64, 480e9)), memory_bytes_s=25e9, link_bytes_s=3e9, latency_s=2e-4,
    attention_call_s=2e-5, layer_s=1e-4,
)  # fmt: skip
"""About what one core of a Zen 5 attains."""

S2 = ModelShape(hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, mlp=2816, vocab=32_000)
GQA = ModelShape(hidden=1024, layers=16, heads=16, kv_heads=4, head_dim=64, mlp=2816, vocab=32_000)

H100 = Machine(
    name="H100", cores=1, isa="cuda", date="2024-11-01", linear_flops_s=540e12, attention_flops_s=((1, 515e12),),
    memory_bytes_s=2.4e12, link_bytes_s=26e9,
)  # fmt: skip
"""One GPU of the context parallelism paper, with the rates that its table 5 implies."""

LLAMA_405B_TP8 = ModelShape(
    layers=126, hidden=16384, heads=16, kv_heads=1, head_dim=128, mlp=53248 // 8, vocab=128_256 // 8
)  # fmt: skip
"""Table 9, an eighth of it (eight tensor ranks)."""
