"""First rates by a few real calls: how long they take, and what follows from it. Less than a second on any model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

from headrace.device import Device
from headrace.planner.machine import PieceRate, TierLink

SIZES = (1 << 18, 1 << 23)
"""Bytes of the transfers that are timed."""
ROWS = (64, 1024)
"""Tokens of the projections that are timed."""
LEAST_CALLS, MOST_CALLS, CALLS_S = 3, 15, 0.02
"""Calls that are timed, and the seconds after which those above the least are left out: something that takes the cores
for a moment then spoils the first rates of nothing, and what it spoiled would last until steps of that size came."""


class Seconds(Protocol):
    """How long a call takes: call_seconds or brief_seconds."""

    def __call__(self, work: Callable[[], object], most_s: float = 0.05) -> float: ...


def call_seconds(work: Callable[[], object], most_s: float = 0.05) -> float:
    """Median time of a few calls after one that does not count, of short ones more; of a slow call, that one alone."""
    began = time.perf_counter()
    work()
    first = time.perf_counter() - began
    if first > most_s:
        return first
    times: list[float] = []
    while len(times) < LEAST_CALLS or (len(times) < MOST_CALLS and sum(times) < CALLS_S):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def brief_seconds(work: Callable[[], object], most_s: float = 0.05) -> float:
    """Of the second call, or of the first alone if that was slow: where little depends on it yet."""
    for _ in range(2):
        began = time.perf_counter()
        work()
        taken = time.perf_counter() - began
        if taken > most_s:
            break
    return taken


def synchronised(seconds: Seconds, device: Device) -> Seconds:
    """The same of work that a device does: until it is done."""

    def timed(work: Callable[[], object], most_s: float = 0.05) -> float:
        def done() -> None:
            work()
            device.synchronize()

        return seconds(done, most_s)

    return timed


def projection_rate(project: Callable[[int], object], seconds: Seconds = call_seconds) -> PieceRate:
    """project(tokens): K and V of so many tokens of one layer, from X, with the model's own weights."""
    few, many = (seconds(lambda rows=rows: project(rows)) for rows in ROWS)  # type: ignore[misc]
    token_s = max((many - few) / (ROWS[1] - ROWS[0]), 0.1 * many / ROWS[1])
    return PieceRate(token_s, max(few - token_s * ROWS[0], 0.0))


def read_rate(
    kind: str, read: Callable[[int], object], seconds: Seconds = call_seconds, shares_cores: bool = True
) -> TierLink:
    """read(size): a read of about so many bytes from a tier of this kind, as restores do it. shares_cores: with the
    computation."""
    small, large = (seconds(lambda size=size: read(size)) for size in SIZES)  # type: ignore[misc]
    began = time.thread_time()
    read(SIZES[1])
    taken = (time.thread_time() - began) / SIZES[1] if shares_cores else 0.0
    byte_s = max((large - small) / (SIZES[1] - SIZES[0]), 0.1 * large / SIZES[1])
    rate = PieceRate(byte_s, max(small - byte_s * SIZES[0], 0.0))
    return TierLink(kind=kind, rate=rate, cpu_s_per_byte=min(taken, byte_s))
