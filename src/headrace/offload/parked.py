"""Tables of ended sequences whose chunks are still to be stored (writeback)."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from headrace.kv.chunk_table import ChunkTable
from headrace.kv.tree import Node


@dataclass(slots=True, eq=False)
class Parked:
    """A parked table and those of its chunks that were not stored when it was parked. lock: held while one of them is
    read; none is once it is `revoked`."""

    table: ChunkTable
    nodes: list[Node]
    lock: threading.Lock
    revoked: bool = False
