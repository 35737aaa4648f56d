"""Attention of steps whose index data lies in memory of a fixed size: what a CUDA graph launches and reads.

A recording is of a number of rows and of rounds of tasks (tile_schedule); the plans of the steps that replay it differ.
R: rows of a step; T: rows of the recording, those behind the step's being padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.kernels.backend import GraphSizes
from headrace.kernels.records import Mask
from headrace.kernels.triton import attention
from headrace.kernels.triton.arena import Arena, TaskSizes, padded
from headrace.kernels.triton.attention import ArenaStep, TileWork, bounds
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.kept_rows import keep_rows
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.limits import check_stored
from headrace.kernels.triton.tile_schedule import SPAN, SPAN_CHUNKS, Int32, Int64
from headrace.kernels.triton.token_kernels import look_up

ROUNDS = 4
"""Of tasks: how often the sequences of a step may part within one span, and once more."""
TASKS, LATER_TASKS = 8, 4
"""Room for each row, beside the tasks of chunks that nobody shares; in later rounds, of which few rows have any."""
LOOKED_UP = 128
"""Tokens that one program looks up."""
PROGRAMS = 8
"""Of a launch for each multiprocessor: how many tasks there are only the device knows."""


class TritonGraphStep:
    """See kernels.backend.GraphStep. Raises ValueError for a type or size that has no kernel."""

    def __init__(self, sizes: GraphSizes, bias: Tensor | None = None) -> None:
        slots, kv_heads, dim = sizes.shape
        check_stored(sizes.dtype, dim)
        self.place = current().place
        heads = Heads(sizes.heads, kv_heads, dim)
        whole = sizes.rows * (-(-sizes.length // SPAN) + 1)  # spans of all rows, and one more of each
        states = min(heads.most_states, whole)
        plain = bias is None and sizes.cap is None
        self.bounds = bounds(heads, self.place, sizes.dtype, plain)._replace(states=states)
        tasks = min(whole, slots // SPAN_CHUNKS + TASKS * sizes.rows)
        later = [min(whole, LATER_TASKS * sizes.rows)] * (ROUNDS - 1)
        room = TaskSizes((tasks, *later), 0, (tasks + sum(later)) * SPAN_CHUNKS)
        self.arena = arena = Arena(sizes.rows, dict.fromkeys(sizes.windows, room), current(), self.place, pinned=True)
        self.tokens, self.positions = arena.tokens.there, arena.positions.there
        self.chosen = torch.zeros_like(self.tokens)
        programs = max(1, PROGRAMS * attention.processors(self.place) // heads.columns)
        kept = heads.states(states, self.place)
        self._masks = {
            window: Mask(each.items.there, self.positions, window=window, bias=bias, cap=sizes.cap, scale=sizes.scale)
            for window, each in arena.tasks.items()
        }
        self._work = {
            window: TileWork(heads, each, [programs] * ROUNDS, 0, kept) for window, each in arena.tasks.items()
        }
        self._out = torch.zeros(sizes.rows, sizes.heads, dim, dtype=sizes.computed, device=self.place)
        self.clear()
        current().synchronize()  # from here on the host may write there again

    def clear(self) -> None:
        """Takes a step of no rows."""
        none: Int64 = np.empty(0, np.int64)
        self.fill({window: np.empty((0, 4), np.int32) for window in self._work}, none, none.astype(np.int32))
        self.send([], none, none.astype(np.int32))

    def fill(self, items: Mapping[int | None, Int32], positions: Int64, slots: Int32) -> int | None:
        if len(positions) > self.arena.rows:
            return None
        done = attention.schedules(items, positions, self.bounds)
        if not self.arena.fits(done):
            return None
        self.arena.fill(done)
        padded(self.arena.slots.host, slots, -1)
        self._filled = True
        return max(len(each.rounds) for each in done.values())

    def grow(self, rows: Int64, slots: Int32, positions: Int64) -> bool:
        added = zip(rows.tolist(), slots.tolist(), positions.tolist(), strict=True)
        self._filled = all([self.arena.grow(row, slot, position) for row, slot, position in added])
        return self._filled

    def send(self, tokens: list[int], positions: Int64, offsets: Int32) -> None:
        arena = self.arena
        padded(arena.tokens.host, np.array(tokens, np.int32), 0)
        arena.move(positions, offsets)
        arena.send(tasks=self._filled)
        self._filled = False

    def keep(self, pools: Sequence[Tensor], layer: int, x: Tensor) -> None:
        keep_rows(pools[layer], x, self.arena.slots.there, self.arena.offsets.there)

    def known(self, rows: int) -> Tensor:
        tokens = torch.empty_like(self.tokens[:rows])
        direct(look_up)[(-(-rows // LOOKED_UP),)](self.tokens, self.chosen, tokens, rows, BLOCK=LOOKED_UP)
        return tokens

    def layers(self, rounds: int) -> ArenaStep:
        work = {window: each.first(rounds) for window, each in self._work.items()}
        return ArenaStep(self.arena, work, self._masks, self._out)
