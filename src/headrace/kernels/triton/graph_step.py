"""Attention of steps whose index data lies in memory of a fixed size: what a CUDA graph launches and reads.

A recording is of a number of rows and of rounds of tasks (tile_schedule); the plans of the steps that replay it differ.
R: rows of a step; T: rows of the recording, those behind the step's being padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.device import current
from headrace.kernels.backend import GraphSizes
from headrace.kernels.records import Mask
from headrace.kernels.triton import attention, tile_schedule, token_kernels
from headrace.kernels.triton.arena import Arena, TaskSizes, padded
from headrace.kernels.triton.attention import ArenaStep, TileWork, bounds
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.kept_rows import keep_rows
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.limits import check_stored
from headrace.kernels.triton.tile_schedule import SPAN, SPAN_CHUNKS, Bounds, Int32, Int64, TileSchedule
from headrace.kernels.triton.walk_options import heads_of
from headrace.types import chunks_for

ROUNDS = 4
"""Of tasks: how often the sequences of a step may part within one span, and once more."""
TASKS, LATER_TASKS = 8, 4
"""Room for each row, beside the tasks of chunks that nobody shares; in later rounds, of which few rows have any."""
LOOKED_UP = 128
"""Tokens that one program looks up."""
PROGRAMS = 8
"""Of a launch for each multiprocessor: how many tasks there are only the device knows."""
MERGES = 256
"""Programs that merge rows' spans, for each head."""
COPIES = 2
"""Times that the whole pool may be met by prompts in one step: each walks its own copy of the items that it shares."""


@dataclass(frozen=True, slots=True)
class GraphMemory:
    """What all replayed steps of an engine share on the device. limits: of their tasks; states: of split rows; out
    [rows, Hq, D]: where attention is left."""

    sizes: GraphSizes
    heads: Heads
    place: torch.device
    limits: Bounds
    states: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, sizes: GraphSizes, bias: Tensor | None, lent: GraphMemory | None = None) -> GraphMemory:
        """lent: of other layers of the same steps, whose states and outputs lie where these do, as far as there is
        room. Raises ValueError for a type or size that has no kernel."""
        _, kv_heads, dim = sizes.shape
        check_stored(sizes.dtype, dim, sizes.once)
        place = current().place
        heads = heads_of((sizes.heads, kv_heads, dim), sizes.once, place)
        limits = bounds(heads, place, sizes.dtype, plain=bias is None and sizes.cap is None)
        # Long runs are split while they have fewer tasks than keep the device busy.
        longer = min(sizes.prompt_rows, limits.busy * limits.flash_rows)
        count = min(heads.most_states, (sizes.rows + longer) * spans_of(sizes.length))
        rows = max(sizes.rows, sizes.prompt_rows)
        limits = limits._replace(states=count)
        if lent is None:
            out = torch.zeros(rows, sizes.heads, dim, dtype=sizes.computed, device=place)
            return cls(sizes, heads, place, limits, heads.states(count, place), out, bias)
        out = _within(lent.out, (rows, sizes.heads, dim))
        acc, m, z = (_within(*each) for each in zip(lent.states, heads.state_shapes(count), strict=True))
        return cls(sizes, heads, place, limits, (acc, m, z), out, bias)

    def flash_lanes(self, window: int | None) -> int:
        """Of a flash task."""
        return self.limits.flash_lanes if window is None else self.limits.window_lanes

    def flash_programs(self, rows: int, window: int | None) -> int:
        """As many as tasks of so many rows at most: each run ends one, and all of the step's sequences may be runs."""
        if rows <= tile_schedule.SHORT:
            return 0
        together = max(1, self.flash_lanes(window) // self.limits.group)
        return -(-rows // together) + min(self.sizes.rows, rows // (tile_schedule.SHORT + 1))


def _within(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape in that memory if it suffices, otherwise in new memory."""
    size = math.prod(shape)
    if size > memory.numel():
        return torch.zeros(shape, dtype=memory.dtype, device=memory.device)
    return memory.view(-1)[:size].view(shape)


def spans_of(length: int) -> int:
    """Spans of a row that sees so many keys, and one more, into which it may go on."""
    return -(-length // SPAN) + 1


class TritonGraphStep:
    """See kernels.backend.GraphStep: steps of up to `rows` rows. drawn: rows that tokens are drawn from, at most; 0:
    all rows, none of which belongs to a prompt."""

    def __init__(self, memory: GraphMemory, rows: int, drawn: int = 0) -> None:
        self.memory, self._drawn = memory, drawn
        sizes, place = memory.sizes, memory.place
        tasks = {window: self._room(rows, window) for window in sizes.windows}
        self.arena = arena = Arena(rows, tasks, current(), place, pinned=True, drawn=drawn)
        self.tokens, self.positions, self.drawn = arena.tokens.there, arena.positions.there, arena.drawn.there
        self.adapters = arena.adapters.there
        self.chosen = torch.zeros_like(self.tokens)
        programs = max(1, PROGRAMS * attention.processors(place) // memory.heads.columns)
        rounds, bias = [programs] * ROUNDS, memory.bias
        self._masks = {
            window: Mask(each.items.there, self.positions, window=window, bias=bias, cap=sizes.cap, scale=sizes.scale)
            for window, each in arena.tasks.items()
        }
        self._work = {
            window: TileWork(memory.heads, each, rounds, 0, MERGES, memory.states, memory.flash_lanes(window))
            for window, each in arena.tasks.items()
        }
        self.clear()
        current().synchronize()  # from here on the host may write there again

    def prompts(self) -> TritonGraphStep:
        made = TritonGraphStep(self.memory, self.memory.sizes.prompt_rows, drawn=self.memory.sizes.rows)
        made.chosen = self.chosen
        return made

    def _room(self, rows: int, window: int | None) -> TaskSizes:
        memory, sizes = self.memory, self.memory.sizes
        decoding, length, slots = sizes.rows, sizes.length, sizes.shape[0]
        whole = decoding * spans_of(length)
        tasks = min(whole, slots // SPAN_CHUNKS + TASKS * decoding)
        later = [min(whole, LATER_TASKS * decoding)] * (ROUNDS - 1)
        items = (tasks + sum(later)) * SPAN_CHUNKS
        if not self._drawn:
            return TaskSizes((tasks, *later), 0, items)
        # A task of a long run that is split leaves a state for each of its rows.
        tasks += 2 * len(memory.states[0]) // memory.limits.rows_together
        items += COPIES * max(slots, chunks_for(length))
        return TaskSizes((tasks, *later), memory.flash_programs(rows, window), items)

    def clear(self) -> None:
        """Takes a step of no rows."""
        none: Int64 = np.empty(0, np.int64)
        self.fill({window: np.empty((0, 4), np.int32) for window in self._work}, none, none.astype(np.int32))
        self.send([], none, none.astype(np.int32))

    def fill(self, items: Mapping[int | None, Int32], positions: Int64, slots: Int32) -> int | None:
        if len(positions) > self.arena.rows:
            return None
        done = attention.schedules(items, positions, self.memory.limits)
        if not self.arena.fits(done) or not self._has_programs(done, len(positions)):
            return None
        self.arena.fill(done)
        padded(self.arena.slots.host, slots, -1)
        self._filled = True
        return max(len(each.rounds) for each in done.values())

    def _has_programs(self, done: Mapping[int | None, TileSchedule], rows: int) -> bool:
        """Whether a recording of so many rows, or of more, has a program for each flash task. It has none for short
        runs, which are flash where there is no room for their states."""
        return all(len(each.flash) <= self.memory.flash_programs(rows, window) for window, each in done.items())

    def grow(self, rows: Int64, slots: Int32, positions: Int64) -> bool:
        added = zip(rows.tolist(), slots.tolist(), positions.tolist(), strict=True)
        self._filled = all([self.arena.grow(row, slot, position) for row, slot, position in added])
        return self._filled

    def send(
        self,
        tokens: list[int],
        positions: Int64,
        offsets: Int32,
        drawn: Sequence[int] = (),
        adapters: Int64 | None = None,
    ) -> None:
        arena = self.arena
        padded(arena.tokens.host, np.array(tokens, np.int32), 0)
        padded(arena.adapters.host, np.empty(0, np.int64) if adapters is None else adapters, -1)
        padded(arena.drawn.host, np.array(drawn, np.int32), 0)
        arena.move(positions, offsets)
        arena.send(tasks=self._filled)
        self._filled = False

    def keep(self, pools: Sequence[Tensor], layer: int, x: Tensor) -> None:
        keep_rows(pools[layer], x, self.arena.slots.there, self.arena.offsets.there)

    def known(self, rows: int) -> Tensor:
        tokens = torch.empty_like(self.tokens[:rows])
        direct(token_kernels.look_up)[(-(-rows // LOOKED_UP),)](self.tokens, self.chosen, tokens, rows, BLOCK=LOOKED_UP)
        return tokens

    def layers(self, rounds: int, rows: int) -> ArenaStep:
        work = {
            window: each.first(rounds, self.memory.flash_programs(rows, window) if self._drawn else 0)
            for window, each in self._work.items()
        }
        return ArenaStep(self.arena, work, self._masks, self.memory.out)
