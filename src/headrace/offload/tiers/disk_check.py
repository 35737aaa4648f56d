"""What can be said of a directory before anything is stored in it: its room, and how fast its disk is."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 1 << 30
PROBE_BYTES = 64 << 20
"""Written to the directory and read again, to see how fast its disk is."""


def check(folder: Path, gib: float) -> dict[str, Any]:
    """Room in the directory (or where it would be made) and the rates of its disk, by a file that is removed again."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        free = shutil.disk_usage(there).free
        room = "" if folder.exists() or free > gib * GIB else ": LESS THAN MAY BE USED"
        found = {"disk": f"{folder}, {'there' if folder.exists() else 'not there yet'}, may use {gib:g} GiB",
                 "disk free GiB": f"{free / GIB:,.1f}{room}"}  # fmt: skip
        if free < 2 * PROBE_BYTES:
            return {**found, "disk rates": "not measured: the disk is full"}
        write, read = rates(there)
    except OSError as error:
        return {"disk": f"{folder} CANNOT BE USED: {error.strerror or error}"}
    return {**found, "disk write, read GB/s": f"{write / 1e9:.2f}, {read / 1e9:.2f}"}


def rates(folder: Path) -> tuple[float, float]:
    """Bytes a second of writing until the disk has it, and of reading what the system has let go of. Raises OSError."""
    block = os.urandom(1 << 20)
    descriptor, name = tempfile.mkstemp(prefix=".headrace-doctor-", dir=folder)
    try:
        began = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.perf_counter() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(descriptor, len(block)):
            pass
        return PROBE_BYTES / written, PROBE_BYTES / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(name)
