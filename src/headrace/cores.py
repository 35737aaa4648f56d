"""How many cores this process may use, and what its idle threads do."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from headrace import cgroups

SPINS = "20000"
"""Rounds of `pause`, 0.2 to 1 ms by processor, for which an idle thread of torch's OpenMP spins; 15 times as many by
default. 1,000 rounds cost a first token 3 % on an Intel. csrc/common/threads.cpp spins for 50 us."""


def let_idle_threads_sleep() -> None:
    """Of effect before torch is imported. What the environment says already holds."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def usable() -> int:
    """Cores in this process's affinity mask, but no more than the quota of its control groups allows, rounded up.
    If there were more threads, some would be paused, and all that wait for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = quota()
    return cores if limit is None else max(1, min(cores, math.ceil(limit)))


def quota() -> float | None:
    """Cores' worth of time that the control groups of this process allow it (`docker run --cpus`); None: no limit."""
    return min((limit for limit in _limits() if limit is not None), default=None)


def _limits() -> Iterator[float | None]:
    for folder, version in cgroups.folders("cpu"):
        if version == 2:
            yield _share(*_words(folder / "cpu.max"))
        else:
            yield _share(*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us"))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _share(*words: str) -> float | None:
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None  # 'max', -1, or no such file
    return int(words[0]) / int(words[1])
