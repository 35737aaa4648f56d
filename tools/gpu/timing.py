"""Times of kernels by CUDA events, and the card's own limits: what it reads and multiplies at best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from statistics import median

import torch
from torch import Tensor

CUDA = torch.device("cuda", 0)
Run = Callable[[], object]
_BUSY_CYCLES = 400_000
"""Of sleep that the device gets first, so that launches wait behind it and no gap between two is timed."""


@cache
def _flush() -> Tensor:
    """More than any L2 cache holds."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)


def event_ms(run: Run, flush: bool = True) -> float:
    """Milliseconds of one run on the device, with empty caches unless flush is False."""
    if flush:
        _flush().zero_()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_BUSY_CYCLES)
    began.record()
    run()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended)


def in_turns(runs: Mapping[str, Run], rounds: int = 9, flush: bool = True) -> dict[str, float]:
    """Median milliseconds of each run, the runs taking turns; two rounds warm them up."""
    for run in runs.values():
        run()
        run()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(event_ms(run, flush))
    return {name: median(times) for name, times in found.items()}


def timed(run: Run, rounds: int = 9) -> float:
    """Median milliseconds of one run."""
    return in_turns({"run": run}, rounds)["run"]


@cache
def read_gbps() -> float:
    """GB/s at which the card reads: 2 GiB summed."""
    data = torch.randn(1 << 29, device=CUDA)
    return data.nbytes / timed(data.sum) / 1e6


@cache
def gemm_tflops(size: int = 8192) -> float:
    """TFLOP/s of cuBLAS in bf16."""
    a, b = (torch.randn(size, size, device=CUDA).bfloat16() for _ in range(2))
    return 2 * size**3 / timed(lambda: a @ b) / 1e9
