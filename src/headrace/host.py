"""Facts of this host, as the system tells them: its processor and its memory; how Python is started on it."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from headrace import cgroups

GIB = 2**30
NO_LIMIT = 2**60
"""Bytes; a group of the first version that has no limit says a number beyond."""
_IMPORTED_S = time.monotonic()


def told_signal(number: int) -> str:
    """The name of the signal that ended a process, and what may have sent it."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"{name} (out of memory? the kernel's log, `dmesg`, tells)" if number == signal.SIGKILL else name


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module in another process. Without -P the working directory would come before the
    standard library: a file there that is called logging.py, in the folder of a downloaded model say, would be run."""
    return [sys.executable, "-P", "-m", name, *arguments]


def open_streams() -> None:
    """Puts the null device in place of a standard stream without which the process was started (`>&-`, and some
    supervisors). Python has None there, and the next file or socket to be opened would get the stream's number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: the stream's own
            os.set_inheritable(null, True)
            setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115


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
    """Bytes of memory that can be had without swapping: of the machine, and within the limits of the control groups."""
    free = _memory("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min([free, *(max(0, limit - used) for limit, used in _limited())])


def memory_limit() -> int | None:
    """Bytes that the control groups of this process may use (`docker run --memory`); None: no limit."""
    return min((limit for limit, _ in _limited()), default=None)


def _limited() -> Iterator[tuple[int, int]]:
    """(Limit, bytes in use) of each group above this process that has a limit; the file cache counts as free."""
    for folder, version in cgroups.folders("memory"):
        limit = _number(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is not None and limit < NO_LIMIT:
            used = _number(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
            yield limit, max(0, used - _file_cache(folder / "memory.stat"))


def _number(path: Path) -> int | None:
    """What a file of a control group holds; None for 'max', and where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _file_cache(path: Path) -> int:
    """Bytes of files' pages that the system gives up when memory is asked for."""
    try:
        pairs = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    return int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))


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
