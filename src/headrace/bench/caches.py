"""Where benchmarks keep what they make: checkpoints, and what peers convert them to."""

from __future__ import annotations

from pathlib import Path

from headrace.config.environment import CACHE_DIR, cache_folder, from_home

__all__ = ["cache_folder", "notice"]


def notice(what: str, size: int, folder: Path) -> str:
    """'writing S1, random weights (0.40 GiB) to ~/.cache/headrace/bench/S1, once; HEADRACE_CACHE_DIR ...'."""
    return f"writing {what} ({size / 2**30:.2f} GiB) to {from_home(folder)}, once; {CACHE_DIR} puts it elsewhere"
