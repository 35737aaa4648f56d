"""Experts outside memory: a model larger than memory runs.

All lie in one mapped file without a name, each in whole pages, as the kernels read them. A step reads those that its
rows meet; what it read the system keeps as long as it has room. The most used are kept whatever else needs memory, up
to a budget: their pages of the mapping, which is private, are written with what they hold, which makes them this
process's own. Giving the pages back makes them the file's again. Steps may read them meanwhile: at every moment a page
holds the same bytes, so that nobody waits and no bit changes.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.kernels import ops
from headrace.kernels.experts import OUTSIDE, OutsideColumn
from headrace.memory import give_back
from headrace.models.layers import Layer
from headrace.models.slots import expected, expert_of
from headrace.models.spec import ModelConfig
from headrace.offload.weights.layers import on_tensors, tensors_of
from headrace.offload.weights.most_used import MostUsed
from headrace.stats import ExpertStats

PAGE = mmap.PAGESIZE
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""The mapping is private and may be larger than memory: the system is not to set memory aside for all of it."""
FLUSH = 32 << 20
"""Bytes that are written before they go to the disk, and out of memory."""
TRIM = 4 << 20
"""Bytes after which the C library gives back what packing left behind, which is several times as much."""
PERIOD_S = 1.0
"""Between two turns of what is kept."""
MOVED = 64 << 20
"""Bytes at most that a turn brings into memory."""


class ExpertFile:
    """The experts of `config`, in a file in `folder`. budget: bytes of them to keep in memory. Raises ValueError where
    the directory cannot be written, and as the disk is full.

    `place` each of them, then call `settle`. Kept experts change in a thread of their own, until this is dropped.
    """

    def __init__(self, folder: str, config: ModelConfig, budget: int) -> None:
        assert config.experts is not None
        self.folder, self.budget = folder, budget
        self.bytes = self.moved = 0
        self._count = config.experts.count
        self._tables: dict[int, Tensor] = {}
        self._most_used = MostUsed(0, 0)
        self._met = np.zeros(0, np.int64)
        self._turning = threading.Lock()
        self._flushed = self._trimmed = 0
        room = _most_bytes(config)
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as it is mapped)
            os.ftruncate(self._file.fileno(), room)  # takes no disk before it is written
            self._map = mmap.mmap(self._file.fileno(), room, flags=mmap.MAP_PRIVATE | NO_RESERVE)
        except OSError as error:
            raise self._failed(error) from None

    def place(self, name: str, weight: ops.Weight) -> ops.Weight:
        """The matrix of an expert, in the file: of each expert up, then down. See models.packing.ExpertsPlace."""
        found = expert_of(name)
        assert found is not None
        layer, expert = found
        begin = self.bytes
        there = on_tensors(weight, {kind: self._written(x) for kind, x in tensors_of(weight).items()})
        row = self._table(layer)[expert]
        if not row[OutsideColumn.size]:
            row[OutsideColumn.begin] = self._address(begin)
        row[OutsideColumn.size] = self._address(self.bytes) - row[OutsideColumn.begin]
        return there

    def settle(self) -> dict[str, Tensor]:
        """All are placed: keeps as many as the budget holds, of all layers, and from now on those that are used.
        Returns the tables: see models.packing.ExpertsPlace."""
        self._flush()
        table = self._all()
        largest = int(table[:, OutsideColumn.size].max(initial=0))
        self._most_used = MostUsed(len(table), self.budget // largest if largest else 0)
        self._met = table[:, OutsideColumn.met].copy()
        for index in self._most_used.begin():
            self._keep(index)
        if 0 < self._most_used.fit < len(table):
            threading.Thread(target=_turns, args=(weakref.ref(self),), daemon=True, name="most used experts").start()
        return {f"layers.{layer}.{OUTSIDE}": table for layer, table in self._tables.items()}

    def serve(self, layers: Sequence[Layer], place: torch.device) -> None:
        """See models.packing.ExpertsPlace. The kernels of a CPU read the file's mapping."""

    def turn(self) -> int:
        """Keeps what was used since, in place of what was not. Returns how many came."""
        with self._turning:
            table = self._all()
            met = table[:, OutsideColumn.met]
            largest = int(table[:, OutsideColumn.size].max(initial=1))
            pairs = self._most_used.turn(met - self._met, max(1, MOVED // largest))
            self._met = met
            for old, new in pairs:
                self._give_up(old)
                self._keep(new)
            self.moved += len(pairs)
            return len(pairs)

    def stats(self) -> ExpertStats:
        """Counters and gauges as they stand."""
        table = self._all()
        met, hits, kept, size = (
            table[:, column]
            for column in (OutsideColumn.met, OutsideColumn.hits, OutsideColumn.kept, OutsideColumn.size)
        )
        return ExpertStats(
            outside_bytes=self.bytes, kept_bytes=int((kept * size).sum()), met=int(met.sum()), hits=int(hits.sum()),
            moved=self.moved,
        )  # fmt: skip

    def _all(self) -> np.ndarray:
        """The tables of all layers, one after another, as they stand."""
        if not self._tables:
            return np.zeros((0, len(OutsideColumn)), np.int64)
        return np.concatenate([table.numpy() for table in self._tables.values()])

    def _table(self, layer: int) -> Tensor:
        return self._tables.setdefault(layer, torch.zeros(self._count, len(OutsideColumn), dtype=torch.int64))

    def _row(self, index: int) -> Tensor:
        return list(self._tables.values())[index // self._count][index % self._count]

    def _pages(self, index: int) -> tuple[int, int]:
        """(Where an expert begins in the file, its bytes.)"""
        row = self._row(index)
        return int(row[OutsideColumn.begin]) - self._address(0), int(row[OutsideColumn.size])

    def _keep(self, index: int) -> None:
        begin, size = self._pages(index)
        if not size:
            return  # the checkpoint's own file has it
        pages = np.frombuffer(self._map, np.uint8, size, begin)[::PAGE]
        pages[:] = pages.copy()  # without the copy numpy would see that nothing changes, and write nothing
        self._drop(begin, size)
        self._row(index)[OutsideColumn.kept] = 1

    def _give_up(self, index: int) -> None:
        begin, size = self._pages(index)
        self._row(index)[OutsideColumn.kept] = 0
        if size:
            self._map.madvise(mmap.MADV_DONTNEED, begin, size)

    def _written(self, x: Tensor) -> Tensor:
        begin, data = self.bytes, memoryview(x.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done:], begin + done)
        except OSError as error:
            raise self._failed(error) from None
        self.bytes += -(-len(data) // PAGE) * PAGE
        if self.bytes - self._flushed >= FLUSH:
            self._flush()
        if self.bytes - self._trimmed >= TRIM:
            give_back()
            self._trimmed = self.bytes
        count = math.prod(x.shape)
        return torch.frombuffer(self._map, dtype=x.dtype, count=count, offset=begin).view(x.shape)

    def _flush(self) -> None:
        """What was written goes to the disk, and out of the system's memory."""
        os.fdatasync(self._file.fileno())
        self._drop(self._flushed, self.bytes - self._flushed)
        self._flushed = self.bytes

    def _drop(self, begin: int, size: int) -> None:
        """Advice: the system need not keep these pages of the file in memory."""
        os.posix_fadvise(self._file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)

    def _address(self, offset: int) -> int:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr() + offset

    def _failed(self, error: OSError) -> ValueError:
        return ValueError(
            f"expert_offload_path {self.folder}: the experts cannot be written there ({error.strerror}); make room, or "
            f"name another directory"
        )


def _most_bytes(config: ModelConfig) -> int:
    """More than the experts take in any form: addresses, of which only those in use take memory or disk."""
    slots = [slot for name, slot in expected(config).items() if expert_of(name) is not None]
    return sum(8 * -(-sum(slot.parts) // 64) * 64 * (slot.columns or 0) + 4 * PAGE for slot in slots)


def _turns(find: Callable[[], ExpertFile | None]) -> None:
    """Turns until the file is dropped."""
    pause = threading.Event()
    while not pause.wait(PERIOD_S):
        file = find()
        if file is None:
            return
        file.turn()
        del file
