"""What a soak watches: descriptors, threads and memory of the server and of its processes; whether they stay flat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

MIB = 2**20
WARM_UP = 0.25
"""This share of the samples, the first ones, is left out: caches fill, allocators settle."""

TOLERANCES = {"descriptors": (0.1, 8.0), "threads": (0.0, 2.0), "memory_mib": (0.06, 8.0)}
"""So much may the late median be above the early one: a share of it, and an amount."""

Sample = dict[str, dict[str, float]]
"""Role of a process ('server', 'engine', 'templates') -> figure -> value."""


@dataclass(frozen=True)
class Check:
    """Medians of a figure in the first and in the last third of the samples after the warm-up."""

    name: str
    early: float
    late: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.late <= self.limit

    def told(self) -> str:
        verdict = "ok" if self.ok else "GROWS"
        return f"{self.name:24} {self.early:9.1f} -> {self.late:9.1f}  (up to {self.limit:.1f})  {verdict}"

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def sampled(server: psutil.Process) -> Sample:
    """Descriptors, threads and private memory, now. A process that ends meanwhile is left out."""
    found: Sample = {}
    for process in [server, *server.children(recursive=True)]:
        try:
            role = "server" if process.pid == server.pid else role_of(process.cmdline())
            figures = {
                "descriptors": float(process.num_fds()),
                "threads": float(process.num_threads()),
                "memory_mib": process.memory_full_info().uss / MIB,
            }
        except psutil.Error:
            continue
        before = found.setdefault(role, dict.fromkeys(figures, 0.0))
        for name, value in figures.items():
            before[name] += value
    return found


def role_of(command: Sequence[str]) -> str:
    if "headrace.engine.worker" in command:
        return "engine"
    if "headrace.engine.structured.shape_worker" in command:
        return "shapes"
    return "templates" if "headrace.engine.template_worker" in command else "others"


def checks(samples: Sequence[Sample]) -> list[Check]:
    """Of every process and figure. Raises ValueError for fewer than 12 samples."""
    kept = samples[int(len(samples) * WARM_UP) :]
    if len(samples) < 12:
        raise ValueError(f"{len(samples)} samples are too few to compare; soak for longer")
    third = len(kept) // 3
    out = []
    for role in sorted({role for sample in kept for role in sample}):
        for figure, (share, amount) in TOLERANCES.items():
            early, late = (
                statistics.median([sample[role][figure] if role in sample else 0.0 for sample in part])
                for part in (kept[:third], kept[-third:])
            )
            out.append(Check(f"{role} {figure}", early, late, early * (1 + share) + amount))
    return out
