"""A step's index data on the device: one block of int32, written on the host and carried over by one copy.

R: rows that there is room for. What a step does not take is padding: rows at position -1, in slot -1, with base -1, and
tasks beyond the counts. A block made for one plan has its sizes; one that outlives plans is what CUDA graphs read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.device import Device
from headrace.kernels.step_copies import Sending
from headrace.kernels.triton.tile_schedule import SPAN, SPAN_CHUNKS, Int32, Int64, TileSchedule
from headrace.types import CHUNK

ALIGN = 32
"""Numbers between whose multiples parts begin: the kernels' pointers are then all aligned alike."""
ROWS = ("tokens", "positions", "slots", "offsets", "adapters", "drawn")


class TaskSizes(NamedTuple):
    """Room for a schedule: tasks of each round, of flash, and items."""

    rounds: tuple[int, ...]
    flash: int
    items: int

    @classmethod
    def of(cls, done: TileSchedule) -> TaskSizes:
        """Just enough for it."""
        return cls(tuple(len(tasks) for tasks in done.rounds), len(done.flash), len(done.items))


class Part(NamedTuple):
    """The same numbers on the host and on the device."""

    host: NDArray[np.int32]
    there: Tensor


@dataclass(slots=True)
class TaskArena:
    """A schedule (tile_schedule.TileSchedule). counts [number of rounds + 2]: tasks of each round, rows that leave
    states, and tasks of flash; count_of: the same on the device, from each on. merged [R]: these rows. used: items in
    use; spans: see TileSchedule."""

    counts: Part
    bases: Part
    merged: Part
    rounds: list[Part]
    flash: Part
    items: Part
    used: int = 0
    spans: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    count_of: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.count_of = [self.counts.there[number:] for number in range(len(self.counts.host))]

    def fits(self, done: TileSchedule) -> bool:
        if len(done.rounds) > len(self.rounds) or len(done.flash) > len(self.flash.host):
            return False
        tasks = all(len(each) <= len(room.host) for each, room in zip(done.rounds, self.rounds, strict=False))
        return tasks and len(done.items) <= len(self.items.host) and len(done.bases) <= len(self.bases.host)

    def fill(self, done: TileSchedule) -> None:
        """Takes a schedule that fits."""
        self.counts.host[:] = 0
        for number, tasks in enumerate(done.rounds):
            self.counts.host[number] = len(tasks)
            self.rounds[number].host[: len(tasks)] = tasks
        kept = np.flatnonzero(done.bases >= 0)
        self.merged.host[: len(kept)] = kept
        self.counts.host[-2:] = len(kept), len(done.flash)
        self.flash.host[: len(done.flash)] = done.flash
        self.items.host[: len(done.items)] = done.items
        padded(self.bases.host, done.bases, -1)
        self.used, self.spans = len(done.items), done.spans

    def grow(self, row: int, slot: int, key: int) -> bool:
        """Takes a chunk that the row alone begins, behind all of its others. False, with nothing changed: there is no
        room for it."""
        new = (slot, key, row, row + 1)
        return self._in_new_span(row, new, key // SPAN) if key % SPAN == 0 else self._behind(row, new, key - CHUNK)

    def _behind(self, row: int, new: tuple[int, int, int, int], last: int) -> bool:
        """In the room behind the task whose newest chunk begins at key `last`."""
        for number, part in enumerate(self.rounds):
            tasks = part.host[: self.counts.host[number]]
            own = tasks[(tasks[:, 0] == row) & (tasks[:, 1] == row + 1)]
            ends = own[:, 2] + own[:, 3]
            found = np.flatnonzero(self.items.host[ends - 1, 1] == last)
            if len(found):
                self.items.host[ends[found[0]]] = new
                tasks[np.flatnonzero(tasks[:, 2] == own[found[0], 2])[0], 3] += 1
                return True
        return False

    def _in_new_span(self, row: int, new: tuple[int, int, int, int], span: int) -> bool:
        """As a task of its own, with room for the rest of the span."""
        count, first = int(self.counts.host[0]), self.used
        full = count == len(self.rounds[0].host) or first + SPAN_CHUNKS > len(self.items.host)
        if full or span >= self.spans[row]:
            return False
        self.items.host[first] = new
        self.rounds[0].host[count] = (row, row + 1, first, 1)
        self.counts.host[0] += 1
        self.used += SPAN_CHUNKS
        return True


class Arena:
    """tokens, positions, slots, offsets, adapters: [R] each; drawn: room for the numbers of rows that tokens are drawn
    from; tasks: of each window. pinned: it is written again and again."""

    def __init__(
        self,
        rows: int,
        tasks: Mapping[int | None, TaskSizes],
        device: Device,
        place: torch.device,
        pinned: bool,
        drawn: int = 0,
    ) -> None:
        self.rows = rows
        shapes: list[tuple[int, ...]] = [*[(rows,)] * (len(ROWS) - 1), (drawn,)]
        for sizes in tasks.values():
            shapes += [(len(sizes.rounds) + 2,), (rows,), (rows,), *((count, 4) for count in sizes.rounds)]
            shapes += [(sizes.flash, 4), (sizes.items, 4)]
        lengths = [-(-math.prod(shape) // ALIGN) * ALIGN for shape in shapes]
        ends = np.cumsum([0, *lengths]).tolist()
        whole = (ends[-1],)
        self._host = torch.zeros(whole, dtype=torch.int32)
        self._sending = Sending(whole, torch.int32, device) if pinned else None
        self._there = torch.zeros(whole, dtype=torch.int32, device=place)
        self._head = ends[len(ROWS)]
        parts = [self._part(begin, shape) for begin, shape in zip(ends, shapes, strict=False)]
        self.tokens, self.positions, self.slots, self.offsets, self.adapters, self.drawn = parts[: len(ROWS)]
        left = iter(parts[len(ROWS) :])
        self.tasks = {
            window: TaskArena(
                next(left), next(left), next(left), [next(left) for _ in sizes.rounds], next(left), next(left)
            )
            for window, sizes in tasks.items()
        }

    def fits(self, schedules: Mapping[int | None, TileSchedule]) -> bool:
        """Whether there is room for the schedules of all windows."""
        return all(self.tasks[window].fits(done) for window, done in schedules.items())

    def fill(self, schedules: Mapping[int | None, TileSchedule]) -> None:
        """Takes schedules that fit."""
        for window, done in schedules.items():
            self.tasks[window].fill(done)

    def grow(self, row: int, slot: int, key: int) -> bool:
        """Takes a chunk that the row alone begins (TaskArena.grow). False: there is no room, and what is here is of no
        use any more."""
        self.slots.host[row] = slot
        return all(each.grow(row, slot, key) for each in self.tasks.values())

    def _part(self, begin: int, shape: tuple[int, ...]) -> Part:
        end = begin + math.prod(shape)
        return Part(self._host[begin:end].numpy().reshape(shape), self._there[begin:end].view(shape))

    def move(self, positions: NDArray[np.int64], offsets: Int32) -> None:
        """Takes other places for the rows of a step; all others are padding."""
        padded(self.positions.host, positions, -1)
        padded(self.offsets.host, offsets, 0)

    @property
    def _end(self) -> int:
        """Behind the last item in use, of the last window."""
        last = next(reversed(self.tasks.values()))
        return int(last.items.there.storage_offset()) + 4 * last.used

    def send(self, tasks: bool = True) -> None:
        """Carries it to the device, in the order of the current stream; without `tasks` the rows alone. The host may
        write to it again at once (if pinned: see Sending)."""
        end = self._end if tasks else self._head
        if self._sending is None:
            self._there[:end].copy_(self._host[:end], non_blocking=True)
        else:
            self._sending.send(self._host[:end], self._there)


def padded(room: NDArray[np.int32], values: NDArray[np.int32] | NDArray[np.int64], rest: int) -> None:
    """Writes the values and, behind them, what stands for no row."""
    room[: len(values)] = values
    room[len(values) :] = rest
