"""How fast files in a directory are read when they are not in memory. No torch."""

from __future__ import annotations

import os
import tempfile
import time
from itertools import count

SAMPLE = 64 << 20
PIECE = 4 << 20


def read_rate(folder: str, sample: int = SAMPLE) -> float:
    """Bytes a second, of a file of `sample` bytes that is written for it. Raises OSError where that cannot be.

    What the system will not leave out of memory (a file system in memory) counts as fast as it is read.
    """
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        piece = os.urandom(PIECE)  # a disk may store zeros, or what it has already, for nothing
        for index in range(max(1, sample // PIECE)):
            file.write(index.to_bytes(8, "little") + piece[8:])
        file.flush()
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        for index in count():
            read = len(os.pread(file.fileno(), PIECE, index * PIECE))
            if read < PIECE:
                return index * PIECE / max(1e-9, time.perf_counter() - began)
    raise AssertionError("a file has an end")
