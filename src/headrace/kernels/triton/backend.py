"""The Triton backend: attention over chunks of pools in a GPU's memory, and appending to them.

R, T: rows; Hq, Hkv: query and KV heads; D: head size. bf16, fp16 and fp32. q, k, v and the pools are CUDA tensors; the
data of a plan (items, positions, slots, offsets) comes from the CPU, where it is cut into tasks (tile_schedule).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from headrace.kernels.dispatch import LARGEST_TRITON_HEAD
from headrace.kernels.triton import attention_kernels, tile_schedule

LOG2_E = math.log2(math.e)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STATE_BYTES = 1 << 28
"""Of states that tasks of one span may leave; more rows walk all their spans one after another."""


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 of any other, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Work:
    """A plan's items for its rows, cut into tasks and carried to the GPU. rows: at these positions, int64 [R]."""

    def __init__(
        self, items: Tensor, positions: Tensor, heads: int, kv_heads: int, dim: int, device: torch.device
    ) -> None:
        self.heads, self.kv_heads, self.dim, self.rows = heads, kv_heads, dim, len(positions)
        group = heads // kv_heads
        self.part = min(group, tile_schedule.LANES)
        self.parts = -(-group // self.part)
        spans = int(positions.max()) // tile_schedule.SPAN + 1 if self.rows else 0
        # Positions go on within their chunk (PlanAttention.go_on), and so within their span.
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

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int | None, bias: Tensor | None
    ) -> Tensor:
        """q [R, Hq, D] -> [R, Hq, D]; positions int32 [R] on the GPU."""
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
                q, k, v, self.items, tasks, positions, q if bias is None else bias, acc, m, z, out, scale * LOG2_E,
                q.stride(0), 0 if bias is None else bias.shape[-1], self.spans, window or 0,
                KV_HEADS=self.kv_heads, PART=self.part, PARTS=self.parts, LANES=tile_schedule.LANES, SPLIT=self.split,
                RESUME=number > 0, BIAS=bias is not None, PRECISION="ieee", **shape,
                num_warps=4 if padded <= 128 else 8, num_stages=3 if padded <= 128 else 2,
            )  # fmt: skip
        if self.split:
            together = min(16, max(1, 2048 // padded))
            attention_kernels.fold_spans[(self.rows, -(-self.heads // together))](
                acc, m, z, positions, out, self.spans, window or 0, TOGETHER=together, **shape, num_warps=4
            )
        return out


class Step:
    """Attention of one engine step, as cpu_step.Step: items[window] int32 [n, 4], positions int64 [T], slots and
    offsets int32 [T] on the CPU; bias fp32 [Hq, keys] on the GPU. Raises ValueError for a type or size that has no
    kernel."""

    def __init__(
        self,
        items: Mapping[int | None, Tensor],
        positions: Tensor,
        slots: Tensor,
        offsets: Tensor,
        *,
        heads: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        scale: float,
        bias: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cuda", torch.cuda.current_device())
        check(dtype, shape[2])
        self.scale, self.bias, self.device = scale, bias, device
        self.work = {w: Work(each, positions, heads, *shape[1:], device) for w, each in items.items()}
        self.slots = slots.to(device)
        self.positions, self.offsets = positions.int().to(device), offsets.to(device)

    def go_on(self, positions: Tensor, offsets: Tensor) -> None:
        """Other positions and offsets for the rows of the same items, each in the chunk in which it was."""
        self.positions.copy_(positions.int(), non_blocking=True)
        self.offsets.copy_(offsets, non_blocking=True)

    def __call__(self, k_pool: Tensor, v_pool: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Stores k, v [T, Hkv, D] in the pools, then attends: q [T, Hq, D] -> [T, Hq, D], in new memory."""
        _store(k_pool, v_pool, k, v, self.slots, self.offsets)
        return self.work[window].run(_rows(q), k_pool, v_pool, self.positions, self.scale, window, self.bias)


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    items: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention of rows q [R, Hq, D] over the chunks that `items` lists: see kernels.cpu_attention.attend."""
    _check_scales(k_scale, v_scale)
    (_, heads, dim), kv_heads = q.shape, k_pool.shape[1]
    check(q.dtype, dim)
    work = Work(items, positions, heads, kv_heads, dim, q.device)
    return work.run(_rows(q), k_pool, v_pool, positions.int().to(q.device), scale, window, bias)


def append(
    pool_k: Tensor,
    pool_v: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    offsets: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes k, v [T, Hkv, D] into the pools as key offsets[t] of chunk slots[t], int32 [T] each."""
    _check_scales(k_scale, v_scale)
    check(k.dtype, k.shape[-1])
    _store(pool_k, pool_v, k, v, slots.to(k.device), offsets.to(k.device))


def check(dtype: torch.dtype, dim: int) -> None:
    """Raises ValueError for a type or head size that the kernels do not know."""
    if dtype not in DTYPES:
        raise ValueError(f"the Triton kernels take bfloat16, float16 and float32, got {dtype}")
    if dim > LARGEST_TRITON_HEAD:
        raise ValueError(f"the Triton kernels take heads of up to {LARGEST_TRITON_HEAD}, got {dim}")


def _check_scales(k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    if k_scale is not None or v_scale is not None:
        raise ValueError("the Triton kernels know no int8 keys and values; leave kv_cache_dtype 'auto'")


def _rows(q: Tensor) -> Tensor:
    """q [R, Hq, D] with each row contiguous."""
    return q if q.stride(2) == 1 and q.stride(1) == q.shape[2] else q.contiguous()


def _store(pool_k: Tensor, pool_v: Tensor, k: Tensor, v: Tensor, slots: Tensor, offsets: Tensor) -> None:
    rows, kv_heads, dim = k.shape
    if not rows:
        return
    k, v = _rows(k), _rows(v)
    padded = max(16, 1 << (dim - 1).bit_length())
    attention_kernels.store[(rows, kv_heads)](
        k, v, pool_k, pool_v, slots, offsets, k.stride(0), v.stride(0), KV_HEADS=kv_heads, D=dim, P=padded, num_warps=1
    )
