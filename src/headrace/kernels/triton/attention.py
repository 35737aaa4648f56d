"""The Triton backend: attention over chunks of pools in a GPU's memory, and appending to them.

R, T: rows; Hq, Hkv: query and KV heads; D: head size. bf16, fp16 and fp32. q, k, v and the pools are CUDA tensors; the
data of a plan (items, positions, slots, offsets) comes from the CPU, where it is cut into tasks (tile_schedule), and
goes to the GPU in one block (arena).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.config.attention import Window
from headrace.device import current
from headrace.kernels.cpu_step import Pools, StepOver
from headrace.kernels.records import Mask, Pool, QKRotary, StepInputs
from headrace.kernels.triton import (
    attention_kernels,
    hopper,
    hopper_agreement,
    hopper_latents,
    int8_kv_kernels,
    latent_kernels,
    tile_schedule,
)
from headrace.kernels.triton.arena import Arena, TaskArena, TaskSizes, padded
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.hopper_agreement import PORTABLE, Ways
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.limits import check, check_stored
from headrace.kernels.triton.rotary import rotate_and_store
from headrace.kernels.triton.tile_schedule import Bounds, TileSchedule
from headrace.kernels.triton.walk_options import WalkOptions, flash_options, heads_of, latent_parts, walk_options

LOG2_E = math.log2(math.e)
UNUSED = 3
"""Programs without a task in what is compared: recorded launches have some."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 of any other, where Triton's interpreter runs the kernels."""
    return current().processors if device.type == "cuda" else 1


def bounds(heads: Heads, device: torch.device, dtype: torch.dtype, plain: bool) -> Bounds:
    """plain: scores are neither biased nor capped."""
    return bounds_by(heads, device, dtype, agreed(heads, dtype, device) if plain else PORTABLE)


def bounds_by(heads: Heads, device: torch.device, dtype: torch.dtype, ways: Ways) -> Bounds:
    """Of tasks for these kernels. dtype: of the pools."""
    lanes = walk_options(device, heads, dtype).lanes
    flash = flash_options(device, heads, dtype).lanes
    busy = -(-2 * processors(device) // heads.columns)
    flash_lanes = hopper.FLASH_LANES if ways.flash and not heads.once else flash
    return Bounds(heads.part, heads.most_states, busy, flash_lanes, lanes, flash)


def agreed(heads: Heads, dtype: torch.dtype, device: torch.device, window: bool = False, sinks: bool = False) -> Ways:
    """The kernels for Hopper that a layer may use. window, sinks: whether it has them."""
    return hopper_agreement.agreed(heads, dtype, device, _attended, window, sinks)


def _attended(heads: Heads, mask: Mask, q: Tensor, pool: Pool, ways: Ways, states: int, lanes: int) -> Tensor:
    """Attention of rows q [R, Hq, D] by these kernels. states: that split rows may leave; lanes: of a flash task."""
    return attended(heads, Bounds(heads.part, states, 1 << 30, lanes), q, pool, mask, ways)


def attended(heads: Heads, limits: Bounds, q: Tensor, pool: Pool, mask: Mask, ways: Ways | None) -> Tensor:
    """Attention of rows q [R, Hq, D], cut into tasks by these limits. ways: None: see TileWork.run."""
    arena, done = mask.keep(("attend", mask.window, limits, q.device), lambda: _sent(mask, limits, q.device))
    launched = TileWork.of(done, arena.tasks[mask.window], heads)
    if launched.flash:
        launched = replace(launched, flash=launched.flash + UNUSED)
    return launched.run(q, pool, replace(mask, positions=arena.positions.there), ways=ways)


def _sent(mask: Mask, limits: Bounds, place: torch.device) -> tuple[Arena, TileSchedule]:
    """The tasks of a mask's items, on the device."""
    arena, done = _arena_of({mask.window: mask.items}, mask.positions, limits, place)
    arena.move(mask.positions.numpy(), np.empty(0, np.int32))
    arena.send()
    return arena, done[mask.window]


@dataclass(slots=True)
class TileWork:
    """What attention launches for rows of a step. rounds, flash: programs of each launch along the tasks, flash 0: it
    is not launched; merges: at most, along the rows that leave states; states: of these; flash_lanes: of a flash task.
    Programs beyond the counts of the arena do nothing; of flash there are at least as many as tasks."""

    heads: Heads
    arena: TaskArena
    rounds: list[int]
    flash: int
    merges: int
    states: tuple[Tensor, Tensor, Tensor]
    flash_lanes: int = tile_schedule.LANES

    @classmethod
    def of(cls, done: TileSchedule, arena: TaskArena, heads: Heads) -> TileWork:
        """Of a schedule that lies in the arena."""
        states = heads.states(done.states, arena.items.there.device)
        rounds, merges = [len(tasks) for tasks in done.rounds], int(np.count_nonzero(done.bases >= 0))
        return cls(heads, arena, rounds, len(done.flash), merges, states, done.flash_lanes)

    def first(self, rounds: int, flash: int = 0) -> TileWork:
        """The same with so many rounds alone, and so many programs of flash."""
        return replace(self, rounds=self.rounds[:rounds], flash=flash)

    def run(self, q: Tensor, pool: Pool, mask: Mask, out: Tensor | None = None, ways: Ways | None = None) -> Tensor:
        """q [R, Hq, D] -> [R, Hq, D], in new memory or in `out`, where rows of no task stay as they are. The mask's
        positions lie on the GPU, int32; its items are left alone. ways: None: those that agree with the others."""
        q, out = _rows(q), torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        ways = self._ways(q, pool, mask, ways)
        flash = self._hopper_flash if ways.flash and mask.window is None else self._flash
        self._split_rounds(q, pool, mask, ways, resumes=False)
        if self.rounds:
            self._merge(mask, out)
        if self.flash:
            flash(q, pool, mask, out)
        return out

    def split(self, q: Tensor, pool: Pool, mask: Mask, resumes: bool) -> None:
        """The tasks of one span each, which leave their states. resumes: the first round goes on from these, too."""
        q = _rows(q)
        self._split_rounds(q, pool, mask, self._ways(q, pool, mask, None), resumes)

    def _split_rounds(self, q: Tensor, pool: Pool, mask: Mask, ways: Ways, resumes: bool) -> None:
        split = self._hopper_split if ways.split else self._split
        for number in range(len(self.rounds)):
            split(q, pool, mask, number, resumes or number > 0)

    def _ways(self, q: Tensor, pool: Pool, mask: Mask, ways: Ways | None) -> Ways:
        if pool.once:
            taken = hopper_latents.takes(q.device, pool.v.dtype, self.heads) and q.dtype == pool.v.dtype
        else:
            taken = hopper.takes_call(q, pool, mask)
        if not taken:
            return PORTABLE
        if ways is not None:
            return ways
        return agreed(self.heads, pool.k.dtype, q.device, mask.window is not None, mask.sinks is not None)

    def _split(self, q: Tensor, pool: Pool, mask: Mask, number: int, resumes: bool) -> None:
        tasks, count = self.arena.rounds[number].there, self.arena.count_of[number]
        options = walk_options(q.device, self.heads, q.dtype)
        self._walk(q, pool, mask, q, tasks, count, self.rounds[number], options, SPLIT=True, RESUME=resumes)

    def _flash(self, q: Tensor, pool: Pool, mask: Mask, out: Tensor) -> None:
        tasks, count = self.arena.flash.there, self.arena.count_of[-1]
        stored = q.dtype if q.dtype == torch.float32 else pool.k.dtype
        options = flash_options(q.device, self.heads, stored)
        warps = options.warps * self.flash_lanes // options.lanes
        options = options._replace(lanes=self.flash_lanes, warps=warps)
        self._walk(q, pool, mask, out, tasks, count, self.flash, options, SPLIT=False, RESUME=False)

    def _hopper_split(self, q: Tensor, pool: Pool, mask: Mask, number: int, resumes: bool) -> None:
        if pool.once:
            tasks, count = self.arena.rounds[number].there, self.arena.count_of[number]
            self._hopper_latents(q, pool, mask, q, tasks, count, self.rounds[number], split=True, resume=resumes)
            return
        there = hopper.SPLIT_PROGRAMS * processors(q.device) // self.heads.columns
        hopper.split(
            q, pool, self.arena.items.there, self.arena.rounds[number].there, self.arena.count_of[number],
            self.arena.bases.there, mask, self.states, mask.scale * LOG2_E, tile_schedule.SPAN,
            min(self.rounds[number], max(1, there)), resume=resumes,
        )  # fmt: skip

    def _hopper_flash(self, q: Tensor, pool: Pool, mask: Mask, out: Tensor) -> None:
        tasks, count = self.arena.flash.there, self.arena.count_of[-1]
        if pool.once:
            self._hopper_latents(q, pool, mask, out, tasks, count, self.flash, split=False)
            return
        factor, items = mask.scale * LOG2_E, self.arena.items.there
        hopper.flash(q, pool, items, tasks, count, mask, out, factor, tile_schedule.SPAN, self.flash)

    def _hopper_latents(
        self, q: Tensor, pool: Pool, mask: Mask, out: Tensor, tasks: Tensor, count: Tensor, programs: int, **way: bool
    ) -> None:
        self._check_latents(mask)
        programs = min(programs, max(1, processors(q.device) // self.heads.columns))  # one fits a multiprocessor
        hopper_latents.walk(
            q, pool, self.arena.items.there, tasks, count, self.arena.bases.there, mask, self.states, out, self.heads,
            mask.scale * LOG2_E, tile_schedule.SPAN, programs, **way,
        )  # fmt: skip

    def _walk(
        self, q: Tensor, pool: Pool, mask: Mask, out: Tensor, tasks: Tensor, count: Tensor, programs: int,
        options: WalkOptions, **way: bool,
    ) -> None:  # fmt: skip
        heads, bias, cap, sinks = self.heads, mask.bias, mask.cap, mask.sinks
        if pool.once:
            return self._walk_latents(q, pool, mask, out, tasks, count, programs, options, **way)
        acc, m, z = self.states
        columns = options.columns or heads.padded
        shared = 1 if way["SPLIT"] else heads.padded // columns
        direct(attention_kernels.walk)[(programs, heads.columns * shared)](
            q, pool.k, pool.v, q if pool.k_scale is None else pool.k_scale, q if pool.v_scale is None else pool.v_scale,
            self.arena.items.there, tasks, count, mask.positions, self.arena.bases.there, q if bias is None else bias,
            q if sinks is None else sinks, acc, m, z, out,
            mask.scale * LOG2_E * (1.0 if cap is None else 2.0 / cap), (cap or 0.0) * LOG2_E, q.stride(0),
            0 if bias is None else bias.shape[-1], abs(mask.window or 0), **self._shape(mask), **way,
            KV_HEADS=heads.kv_heads, PART=heads.part, PARTS=heads.columns // heads.kv_heads, V=columns,
            K=options.keys, LANES=options.lanes, BIAS=bias is not None, CAP=cap is not None, PRECISION="ieee",
            num_warps=options.warps, num_stages=options.stages,
        )  # fmt: skip

    def _walk_latents(
        self, q: Tensor, pool: Pool, mask: Mask, out: Tensor, tasks: Tensor, count: Tensor, programs: int,
        options: WalkOptions, **way: bool,
    ) -> None:  # fmt: skip
        self._check_latents(mask)
        heads, (first, rest) = self.heads, latent_parts(self.heads.dim)
        shared = 1 if way["SPLIT"] else first // (options.columns or first)
        direct(latent_kernels.walk)[(programs, heads.columns * shared)](
            q, pool.v, self.arena.items.there, tasks, count, mask.positions, self.arena.bases.there, *self.states, out,
            mask.scale * LOG2_E, q.stride(0), HEADS=heads.heads, PART=heads.part, D=heads.dim, P=first, R=rest,
            V=options.columns or first, K=options.keys, LANES=options.lanes, SPAN=tile_schedule.SPAN, PRECISION="ieee",
            num_warps=options.warps, num_stages=options.stages, **way,
        )  # fmt: skip

    def _check_latents(self, mask: Mask) -> None:
        if not self.heads.once or any(each is not None for each in (mask.bias, mask.cap, mask.sinks, mask.window)):
            raise ValueError("latents are attended to without windows, bias, caps and sinks")

    def _merge(self, mask: Mask, out: Tensor) -> None:
        acc, m, z = self.states
        direct(attention_kernels.merge_spans)[(min(self.merges, len(out)), self.heads.heads)](
            acc, m, z, mask.positions, self.arena.bases.there, self.arena.merged.there, self.arena.count_of[-2],
            acc if mask.sinks is None else mask.sinks, out, abs(mask.window or 0), **self._shape(mask), num_warps=1,
        )  # fmt: skip

    def _shape(self, mask: Mask) -> dict[str, Any]:
        return {
            "HEADS": self.heads.heads,
            "D": self.heads.dim,
            "P": self.heads.padded,
            "SPAN": tile_schedule.SPAN,
            "WINDOW": window_kind(mask.window),
            "SINKS": mask.sinks is not None,
        }


def window_kind(window: Window) -> int:
    """As kernels know it: 0, all keys; 1, the latest; 2, those of a row's own block."""
    if window is None:
        return 0
    return 1 if window > 0 else 2


def schedules(
    items: Mapping[int | None, NDArray[np.int32]], positions: NDArray[np.int64], bounds: Bounds
) -> dict[int | None, TileSchedule]:
    """Tasks for each window's items."""
    narrow = bounds._replace(flash_lanes=bounds.window_lanes)
    return {
        window: tile_schedule.cut(each, positions, bounds if window is None else narrow, window)
        for window, each in items.items()
    }


class ArenaStep:
    """append and attend of steps whose index data lies in an arena: what is launched there (work) by window, and what
    the rows see. out: where attention is left; None: in new memory."""

    def __init__(
        self,
        arena: Arena,
        work: Mapping[int | None, TileWork],
        masks: Mapping[int | None, Mask],
        out: Tensor | None = None,
    ) -> None:
        self.arena, self.work, self.masks, self.out = arena, work, masks, out

    def __call__(
        self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k, v [T, Hkv, D] in the pool, then attends: q [T, Hq, D] -> [T, Hq, D]."""
        _store(pool, k, v, self.arena.slots.there, self.arena.offsets.there)
        return self._attended(q, pool, window, sinks)

    def projected(
        self, pool: Pool, heads: Tensor, rotary: QKRotary, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The same from projected heads [T, Hq + 2 Hkv, D], which one launch norms, rotates and stores; into int8 pools
        another stores them."""
        if rotary.plain or pool.k.dtype == torch.int8:
            return self(pool, *rotary(heads), window, sinks)
        q = rotate_and_store(heads, rotary, pool, self.arena.slots.there, self.arena.offsets.there)
        return self._attended(q, pool, window, sinks)

    def _attended(self, q: Tensor, pool: Pool, window: int | None, sinks: Tensor | None) -> Tensor:
        out = None if self.out is None else self.out[: len(q)]
        mask = self.masks[window] if sinks is None else replace(self.masks[window], sinks=sinks)
        return self.work[window].run(q, pool, mask, out)


class TritonStep(ArenaStep):
    """Attention of one engine step. Of its inputs the bias lies on the GPU, all else on the CPU. Raises ValueError for
    a type or size that has no kernel."""

    def __init__(self, step: StepInputs, device: torch.device | None = None) -> None:
        place = device or current().place
        _, kv_heads, dim = step.shape
        check_stored(step.dtype, dim, step.once)
        heads = heads_of((step.heads, kv_heads, dim), step.once, place)
        limits = bounds(heads, place, step.dtype, plain=step.bias is None and step.cap is None)
        arena, done = _arena_of(step.items, step.positions, limits, place)
        padded(arena.slots.host, step.slots.numpy(), -1)
        arena.move(step.positions.numpy(), step.offsets.numpy())
        arena.send()
        work = {window: TileWork.of(each, arena.tasks[window], heads) for window, each in done.items()}
        super().__init__(arena, work, step.masks(arena.positions.there))

    def go_on(self, positions: Tensor, offsets: Tensor) -> None:
        """Other positions and offsets for the rows of the same items, each in the chunk in which it was."""
        self.arena.move(positions.numpy(), offsets.numpy())
        self.arena.send(tasks=False)

    def over(self, pools: Pools, windows: Sequence[int | None], sinks: Sequence[Tensor] | None = None) -> StepOver:
        raise ValueError("the Triton kernels run one layer after another")


def _arena_of(
    items: Mapping[int | None, Tensor], positions: Tensor, limits: Bounds, place: torch.device
) -> tuple[Arena, dict[int | None, TileSchedule]]:
    """An arena with just enough room, filled but for its rows, and the schedules in it."""
    done = schedules({w: each.numpy() for w, each in items.items()}, positions.numpy(), limits)
    sizes = {window: TaskSizes.of(each) for window, each in done.items()}
    arena = Arena(len(positions), sizes, current(), place, pinned=False)
    arena.fill(done)
    return arena, done


def attend(q: Tensor, pool: Pool, mask: Mask) -> Tensor:
    """Attention of rows q [R, Hq, D] over the chunks of the mask's items: [R, Hq, D]. See kernels.backend."""
    _check_scales(pool)
    (_, heads, dim), kv_heads = q.shape, pool.k.shape[1]
    check(q.dtype, dim, pool.once)
    check_stored(pool.v.dtype, dim, pool.once)
    each = heads_of((heads, kv_heads, dim), pool.once, q.device)
    limits = bounds(each, q.device, pool.k.dtype, plain=mask.bias is None and mask.cap is None)
    return attended(each, limits, q, pool, mask, ways=None)


def append(pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes k_new, v_new [T, Hkv, D] into the pool as key offsets[t] of chunk slots[t], int32 [T] each."""
    _check_scales(pool)
    check(k_new.dtype, k_new.shape[-1], pool.once)
    check_stored(pool.v.dtype, k_new.shape[-1], pool.once)
    _store(pool, k_new, v_new, slots.to(k_new.device), offsets.to(k_new.device))


def _check_scales(pool: Pool) -> None:
    if [pool.k_scale is None, pool.v_scale is None] != [pool.k.dtype != torch.int8] * 2:
        raise ValueError(f"int8 pools need both k_scale and v_scale, others neither; the pools are {pool.k.dtype}")


def _rows(q: Tensor) -> Tensor:
    """q [R, Hq, D] with each row contiguous."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def _store(pool: Pool, k: Tensor, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """`append` of checked tensors, those of the places on the device; rows of negative slots are not stored."""
    rows, kv_heads, dim = k.shape
    if not rows:
        return
    if pool.once:
        _store_latents(pool, _rows(v), slots, offsets)
        return
    k, v = _rows(k), _rows(v)
    places, sizes = (slots, offsets, k.stride(0), v.stride(0)), {"KV_HEADS": kv_heads, "D": dim}
    sizes["P"] = max(16, 1 << (dim - 1).bit_length())
    if pool.k.dtype == torch.int8:
        direct(int8_kv_kernels.store)[(rows, kv_heads)](k, v, *pool.tensors, *places, **sizes, num_warps=1)
    else:
        direct(attention_kernels.store)[(rows, kv_heads)](k, v, *pool.tensors, *places, **sizes, num_warps=1)


def _store_latents(pool: Pool, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """`_store` of v [T, 1, D], which is keys as well."""
    rows, _, dim = v.shape
    direct(latent_kernels.store)[(rows,)](
        v, pool.v, slots, offsets, v.stride(0), D=dim, P=1 << (dim - 1).bit_length(), num_warps=1
    )
