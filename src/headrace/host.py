"""Facts of this host, as the system tells them: its processor and its memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

GIB = 2**30


def fields(path: Path) -> dict[str, str]:
    """'name: value' lines of a file of /proc, the first of each name; empty where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def processor() -> dict[str, str]:
    """What /proc/cpuinfo says of the first core."""
    return fields(Path("/proc/cpuinfo"))


def processor_name() -> str:
    return processor().get("model name", platform.processor() or platform.machine())


def memory_total() -> int:
    """Bytes of memory of the machine; 0 where the system does not tell."""
    return _memory("MemTotal")


def memory_available() -> int:
    """Bytes of memory that can be had without swapping."""
    return _memory("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _memory(name: str) -> int:
    return int(fields(Path("/proc/meminfo")).get(name, "0 kB").split()[0]) * 1024
