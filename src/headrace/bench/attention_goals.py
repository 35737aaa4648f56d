"""What the cases of `headrace bench attention` are measured by, and the goals that were set for them on Zen 5 (see
bench/notes/zen5.md), before anything was measured."""

from __future__ import annotations

import re

from headrace.bench.benchmark import Case

GAINS = {"mha": {1024: 9.0, 2048: 11.0, 4096: 12.0, 8192: 13.0}, "gqa": {1024: 3.5, 2048: 4.0, 4096: 4.0, 8192: 4.0}}
"""Times as fast as on private copies, by heads and length of the shared prefix."""


def judged(case: Case) -> tuple[str, float | None]:
    """What a case is compared to, and how many times that it is."""
    name = case["name"]
    if name.startswith("decode_shared_tree"):
        return "predicted", case["of_model"]
    if name.endswith("chunk_first"):
        return "peak", case["of_peak"]
    if name.startswith("decode_shared"):
        return "no sharing", case["gain"]
    if name.startswith("decode"):
        return "read rate", case["of_bandwidth"]
    if name.startswith("prefill"):
        return "GEMM", case["of_gemm"]
    if _rows(name) >= 64:
        return "torch", case["torch_ms"] / case["ours_ms"] if case["ours_ms"] else None
    return "read rate", case["of_bandwidth"]


def goal(case: Case) -> float | None:
    """The least that `judged` should be; None where no goal was set (int8 and int4)."""
    name = case["name"]
    if name.endswith(("_kv8", "_int8", "_int4")):
        return None
    if name.startswith("decode_shared"):
        return _shared_goal(name)
    if name.startswith("decode_mha"):
        return 0.92
    if name.startswith("decode"):
        return 0.80 if case["threads"] == 1 else 0.90
    if name.startswith("prefill"):
        return 0.80 if "_on_" in name or "h64" in name else 0.88
    return _linear_goal(_rows(name))


def _shared_goal(name: str) -> float | None:
    if name.startswith("decode_shared_tree"):
        return 0.90
    if name.endswith("chunk_first"):
        return 0.80
    heads, prefix = name.removeprefix("decode_shared_").split("_")
    return 0.97 if prefix == "0" else GAINS[heads].get(int(prefix))


def _linear_goal(rows: int) -> float:
    return 1.0 if rows >= 64 else 0.85 if rows >= 16 else 0.95


def _rows(name: str) -> int:
    found = re.match(r"linear_(\d+)x", name)
    return int(found[1]) if found else 0
