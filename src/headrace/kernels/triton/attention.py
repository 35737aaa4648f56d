"""The Triton backend: attention over chunks of pools in a GPU's memory, and appending to them.

R, T: rows; Hq, Hkv: query and KV heads; D: head size. bf16, fp16 and fp32. q, k, v and the pools are CUDA tensors; the
data of a plan (items, positions, slots, offsets) comes from the CPU, where it is cut into tasks (tile_schedule).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.cpu_step import Pools, StepOver
from headrace.kernels.records import Mask, Pool, QKRotary, StepInputs
from headrace.kernels.triton import attention_kernels, tile_schedule
from headrace.kernels.triton.limits import check
from headrace.kernels.triton.rotary import rotate_and_store

LOG2_E = math.log2(math.e)
STATE_BYTES = 1 << 28
"""Of states that tasks of one span may leave; more rows walk all their spans one after another."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 of any other, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class TileWork:
    """A plan's items for its rows, cut into tasks and carried to the GPU. rows: at these positions, int64 [R]."""

    def __init__(
        self, items: Tensor, positions: Tensor, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.rows = heads, kv_heads, dim, len(positions)
        group = heads // kv_heads
        self.part = min(group, tile_schedule.LANES)
        self.parts = -(-group // self.part)
        spans = int(positions.max()) // tile_schedule.SPAN + 1 if self.rows else 0
        # Positions go on within their chunk (PlanAttention.advance), and so within their span.
        self.spans = spans
        programs = -(-self.rows // tile_schedule.rows_together(self.part)) * kv_heads * self.parts
        states = self.rows * spans * heads * dim * 4
        apart = spans > 1 and states <= STATE_BYTES and programs < 2 * processors(device)
        done = (tile_schedule.split if apart else tile_schedule.flash)(items.numpy(), self.rows, self.part)
        self.split = done.split
        self.items = torch.from_numpy(done.items).to(device)
        self.rounds = [torch.from_numpy(each.tasks).to(device) for each in done.rounds]
        self.states: tuple[Tensor, ...] | None = None
        if apart:
            shape = (self.rows, spans, heads)
            self.states = (
                torch.empty((*shape, dim), device=device),
                torch.empty(shape, device=device),
                torch.empty(shape, device=device),
            )

    def run(self, q: Tensor, pool: Pool, mask: Mask) -> Tensor:
        """q [R, Hq, D] -> [R, Hq, D]. The mask's items are those of this work; its positions lie on the GPU, int32."""
        window, bias = mask.window, mask.bias
        if mask.cap is not None or mask.sinks is not None:
            raise ValueError("the Triton kernels know no soft caps and no sinks; use attention_backend 'reference'")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not self.rows:
            return out
        padded = max(16, 1 << (self.dim - 1).bit_length())
        acc, m, z = self.states if self.states is not None else (out, out, out)
        shape = {
            "HEADS": self.heads,
            "D": self.dim,
            "P": padded,
            "SPAN": tile_schedule.SPAN,
            "WINDOW": window is not None,
        }
        for number, tasks in enumerate(self.rounds):
            attention_kernels.walk[(len(tasks), self.kv_heads * self.parts)](
                q, pool.k, pool.v, self.items, tasks, mask.positions, q if bias is None else bias, acc, m, z, out,
                mask.scale * LOG2_E,
                q.stride(0), 0 if bias is None else bias.shape[-1], self.spans, window or 0,
                KV_HEADS=self.kv_heads, PART=self.part, PARTS=self.parts, LANES=tile_schedule.LANES, SPLIT=self.split,
                RESUME=number > 0, BIAS=bias is not None, PRECISION="ieee", **shape,
                num_warps=4 if padded <= 128 else 8, num_stages=3 if padded <= 128 else 2,
            )  # fmt: skip
        if self.split:
            together = min(16, max(1, 2048 // padded))
            attention_kernels.merge_spans[(self.rows, -(-self.heads // together))](
                acc, m, z, mask.positions, out, self.spans, window or 0, TOGETHER=together, **shape, num_warps=4
            )
        return out


class TritonStep:
    """Attention of one engine step. Of its inputs the bias lies on the GPU, all else on the CPU. Raises ValueError for
    a type or size that has no kernel."""

    def __init__(self, step: StepInputs, device: torch.device | None = None) -> None:
        device = device or torch.device("cuda", torch.cuda.current_device())
        _, kv_heads, dim = step.shape
        check(step.dtype, dim)
        at, heads = step.positions, step.heads
        self.work = {w: TileWork(each, at, heads, kv_heads, dim, device) for w, each in step.items.items()}
        self.slots = step.slots.to(device)
        self.positions, self.offsets = at.int().to(device), step.offsets.to(device)
        self.masks = step.masks(self.positions)

    def go_on(self, positions: Tensor, offsets: Tensor) -> None:
        """Other positions and offsets for the rows of the same items, each in the chunk in which it was."""
        self.positions.copy_(positions.int(), non_blocking=True)
        self.offsets.copy_(offsets, non_blocking=True)

    def __call__(
        self, pool: Pool, q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k, v [T, Hkv, D] in the pool, then attends: q [T, Hq, D] -> [T, Hq, D], in new memory."""
        _store(pool, k, v, self.slots, self.offsets)
        return self.work[window].run(_rows(q), pool, replace(self.masks[window], sinks=sinks))

    def projected(
        self, pool: Pool, heads: Tensor, rotary: QKRotary, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """The same from projected heads [T, Hq + 2 Hkv, D], which one launch norms, rotates and stores."""
        if rotary.plain:
            return self(pool, *rotary(heads), window, sinks)
        q = rotate_and_store(heads, rotary, pool, self.slots, self.offsets)
        return self.work[window].run(q, pool, replace(self.masks[window], sinks=sinks))

    def over(self, pools: Pools, windows: Sequence[int | None], sinks: Sequence[Tensor] | None = None) -> StepOver:
        raise ValueError("the Triton kernels run one layer after another")


def attend(q: Tensor, pool: Pool, mask: Mask) -> Tensor:
    """Attention of rows q [R, Hq, D] over the chunks of the mask's items: [R, Hq, D]. See kernels.backend."""
    _check_scales(pool)
    (_, heads, dim), kv_heads = q.shape, pool.k.shape[1]
    check(q.dtype, dim)
    work = TileWork(mask.items, mask.positions, heads, kv_heads, dim, q.device)
    return work.run(_rows(q), pool, replace(mask, positions=mask.positions.int().to(q.device)))


def append(pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes k_new, v_new [T, Hkv, D] into the pool as key offsets[t] of chunk slots[t], int32 [T] each."""
    _check_scales(pool)
    check(k_new.dtype, k_new.shape[-1])
    _store(pool, k_new, v_new, slots.to(k_new.device), offsets.to(k_new.device))


def _check_scales(pool: Pool) -> None:
    if pool.k_scale is not None or pool.v_scale is not None:
        raise ValueError("the Triton kernels know no int8 keys and values; leave kv_cache_dtype 'auto'")


def _rows(q: Tensor) -> Tensor:
    """q [R, Hq, D] with each row contiguous."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def _store(pool: Pool, k: Tensor, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
    rows, kv_heads, dim = k.shape
    if not rows:
        return
    k, v = _rows(k), _rows(v)
    padded = max(16, 1 << (dim - 1).bit_length())
    attention_kernels.store[(rows, kv_heads)](
        k, v, pool.k, pool.v, slots, offsets, k.stride(0), v.stride(0), KV_HEADS=kv_heads, D=dim, P=padded, num_warps=1
    )
