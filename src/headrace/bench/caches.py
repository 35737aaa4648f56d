"""Where benchmarks keep what they make: checkpoints, and what peers convert them to."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "HEADRACE_CACHE_DIR"


def cache_folder() -> Path:
    """HEADRACE_CACHE_DIR, else headrace in the user's cache directory (XDG_CACHE_HOME, by default ~/.cache)."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    user = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(user) if Path(user).is_absolute() else Path.home() / ".cache") / "headrace"  # others are invalid (XDG)


def notice(what: str, size: int, folder: Path) -> str:
    """'writing S1, random weights (0.40 GiB) to ~/.cache/headrace/bench/S1, once; HEADRACE_CACHE_DIR ...'."""
    place, home = str(folder), str(Path.home())
    shown = "~" + place.removeprefix(home) if place.startswith(home + os.sep) else place
    return f"writing {what} ({size / 2**30:.2f} GiB) to {shown}, once; {VARIABLE} puts it elsewhere"
