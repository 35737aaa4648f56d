"""Limits of the machine as the C++ kernels' instruction set meets them: what benchmarks compare themselves to."""

from __future__ import annotations

import time

from torch import Tensor

from headrace.kernels.extension import require


def read(buffer: Tensor, threads: int) -> None:
    """Reads a contiguous CPU tensor once, a share per thread. Raises ValueError without the C++ kernels."""
    require().probe_read(buffer.data_ptr(), buffer.numel() * buffer.element_size(), threads)


def multiply(rounds: int, threads: int) -> int:
    """Multiply-adds on registers, of bf16 pairs where the instruction set has them: the operations done."""
    return int(require().probe_multiply(rounds, threads))


def handover_ns(tries: int = 5, rounds: int = 200) -> float | None:
    """Nanoseconds that a word takes from one core to another, the least of some tries; None where only one thread can
    be had. (Few rounds: where something else holds a core, each takes a slice of its time.)"""
    times = []
    for _ in range(tries):
        began = time.perf_counter()
        if not require().probe_handover(rounds):
            return None
        times.append(time.perf_counter() - began)
    return min(times) / rounds / 2 * 1e9
