"""Facts of this host, as the system tells them: its processor and its memory."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

GIB = 2**30
_IMPORTED_S = time.monotonic()


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


def process_age_s() -> float:
    """Seconds since this process started; since this module was imported where the system does not tell."""
    try:
        stat = Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # proc_pid_stat(5): starttime, after the name's bracket
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED_S
