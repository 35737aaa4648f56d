"""What the machine can do at best, measured in the process that compares itself to it.

A shared machine drifts by a third within minutes, so limits are sampled next to every figure, never remembered.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from headrace.kernels import cpu, probe
from headrace.memory import zeros

READ_BYTES = 256 << 20
GEMM_SIZE = 2048
PEAK_ROUNDS = 100_000

TimedCall = Callable[[], object]


def seconds(run: TimedCall) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternate(runs: dict[str, TimedCall], repeats: int) -> dict[str, float]:
    """Median seconds of each, called in turn after one call each to warm up, every round in another order: whatever
    drifts, and what the run before leaves in the caches, meets all of them alike.
    """
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffled = random.Random(0)
    for _ in range(repeats):
        for name in shuffled.sample(list(runs), len(runs)):
            times[name].append(seconds(runs[name]))
    return {name: statistics.median(values) for name, values in times.items()}


class threads:
    """torch, and the kernels with it, on that many threads inside a `with` block."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self.count)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._before)


def product_type(size: int = 512) -> torch.dtype:
    """bf16, or fp32 where torch multiplies that faster: on some processors bf16 takes a hundred times as long."""

    def product(dtype: torch.dtype) -> TimedCall:
        square = torch.randn(size, size).to(dtype)
        return lambda: square @ square

    times = alternate({str(dtype): product(dtype) for dtype in (torch.bfloat16, torch.float32)}, 3)
    return torch.float32 if times[str(torch.float32)] < times[str(torch.bfloat16)] else torch.bfloat16


class Limits:
    """Plain read over a buffer far above the last-level cache, torch's matrix product in the type that it multiplies
    faster (`type`: bf16 or fp32), and the multiply-adds of our instruction set on registers (vdpbf16ps where there is
    one).

    Several ways of reading are tried and the fastest one per thread count is the limit. `read`, `gemm` and `peak` are
    calls to time; `gbps`, `gflops` and `peak_gflops` turn their seconds into rates.
    """

    def __init__(self, read_bytes: int = READ_BYTES, gemm_size: int = GEMM_SIZE) -> None:
        self.read_bytes, self.gemm_size = read_bytes, gemm_size
        self._buffer = zeros((read_bytes // 4,), torch.float32).fill_(1.0)
        self.type = product_type()
        self._a, self._b = (torch.randn(gemm_size, gemm_size).to(self.type) for _ in range(2))
        self._best: dict[int, str] = {}

    def ways(self, count: int) -> dict[str, TimedCall]:
        """Ways to read the whole buffer on `count` threads."""
        words = self._buffer.view(torch.int32)
        ours: dict[str, TimedCall] = {"plain loop": lambda: probe.read(self._buffer, count)} if cpu.available() else {}
        return ours | {
            "sum of float32": self._buffer.sum,
            "sum of int32": lambda: words.sum(dtype=torch.int32),
            "sums of rows": lambda: self._buffer.view(-1, 4096).sum(-1),
            "greatest of int32": words.amax,
            "memchr": self._memchr(count),
        }

    def _memchr(self, count: int) -> TimedCall:
        """libc's search for a byte that is not there, a share of the buffer per thread."""
        find = ctypes.CDLL(None).memchr
        find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        part = self.read_bytes // count
        starts = [self._buffer.data_ptr() + index * part for index in range(count)]
        if count == 1:
            return lambda: find(starts[0], 7, part)
        pool = ThreadPoolExecutor(count)
        return lambda: list(pool.map(lambda start: find(start, 7, part), starts))

    def best_way(self, count: int, repeats: int = 7) -> str:
        """The fastest way to read on `count` threads, found once."""
        if count not in self._best:
            with threads(count):
                times = alternate(self.ways(count), repeats)
            self._best[count] = min(times, key=times.__getitem__)
        return self._best[count]

    def read(self, count: int) -> TimedCall:
        return self.ways(count)[self.best_way(count)]

    def read_rate(self, count: int) -> float:
        """GB/s of the plain read on `count` threads at this moment."""
        with threads(count):
            return self.gbps(min(seconds(self.read(count)) for _ in range(3)))

    def gemm(self) -> object:
        return self._a @ self._b

    def peak(self, count: int) -> TimedCall:
        """Multiply-adds on `count` threads; without the C++ kernels, torch's product stands for them."""
        return (lambda: probe.multiply(PEAK_ROUNDS, count)) if cpu.available() else self.gemm

    def peak_gflops(self, duration: float, count: int) -> float:
        return probe.multiply(PEAK_ROUNDS, count) / duration / 1e9 if cpu.available() else self.gflops(duration)

    def gbps(self, duration: float) -> float:
        return self.read_bytes / duration / 1e9

    def gflops(self, duration: float) -> float:
        return 2 * self.gemm_size**3 / duration / 1e9

    def figures(self, counts: list[int], repeats: int) -> dict[str, object]:
        """The machine's limits: for the greatest number of threads under the plain names, per count besides."""
        found: dict[str, object] = {}
        for count in counts:
            with threads(count):
                runs: dict[str, TimedCall] = {"read": self.read(count), "gemm": self.gemm, "peak": self.peak(count)}
                times = alternate(runs, repeats)
            found[f"read_gbps_{count}"] = round(self.gbps(times["read"]), 1)
            found[f"gemm_gflops_{count}"] = round(self.gflops(times["gemm"]), 1)
            found[f"peak_gflops_{count}"] = round(self.peak_gflops(times["peak"], count), 1)
            found[f"read_by_{count}"] = self.best_way(count)
        last = counts[-1]
        handover = probe.handover_ns() if cpu.available() and last > 1 else None
        plain = {name: found[f"{name}_{last}"] for name in ("read_gbps", "gemm_gflops", "peak_gflops")}
        handover = None if handover is None else round(handover, 1)
        return {**plain, "gemm_type": str(self.type).removeprefix("torch."), "handover_ns": handover, **found}
