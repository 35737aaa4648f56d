"""Launches the attention kernels for Hopper GPUs (hopper_kernels): which layers they take, and in what grids.

Hq, Hkv: query and KV heads; D: head size. Everywhere else `attention_kernels.walk` computes the same bits.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton.launch_entries import BlockForm, Blocks, block_form
from headrace.kernels.triton.launching import direct

FLASH_GROUPS = 2
"""Warp groups of a flash task, of 64 lanes each."""
FLASH_LANES = 64 * FLASH_GROUPS
SPLIT_PROGRAMS = 2
"""Of split tasks on one multiprocessor: as many as fit its shared memory."""
RING_BYTES = 128 << 10
"""Of chunks under way in a flash program; a split program, which shares its multiprocessor, has 96 KiB."""


@cache
def present(place: torch.device) -> bool:
    """Whether the device is one of Hopper's, and Triton has the language of these kernels."""
    if place.type != "cuda" or torch.cuda.get_device_capability(place) != (9, 0):
        return False
    return find_spec("triton.experimental.gluon") is not None


def takes(place: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether there are kernels for Hq and Hkv heads of size D and such keys and values."""
    fits = dim in (64, 128) and heads // kv_heads <= 64
    return fits and dtype in (torch.bfloat16, torch.float16) and present(place)


def takes_call(q: Tensor, pool: Pool, mask: Mask) -> bool:
    """Whether there are kernels for q [R, Hq, D] on the pool: chunks begin at multiples of 16 bytes, the scores are
    neither biased nor capped, and rows do not attend within blocks."""
    _, kv_heads, dim = pool.shape
    others = mask.bias is not None or mask.cap is not None or (mask.window or 0) < 0
    if others or pool.k.data_ptr() % 16 or pool.v.data_ptr() % 16:
        return False
    return takes(q.device, pool.k.dtype, q.shape[1], kv_heads, dim)


def flash(
    q: Tensor,
    pool: Pool,
    items: Tensor,
    tasks: Tensor,
    count: Tensor,
    mask: Mask,
    out: Tensor,
    factor: float,
    span: int,
    programs: int,
) -> None:
    """count[0] tasks, of at most `programs`, of rows that walk all their spans. See hopper_kernels.flash."""
    kv_heads = pool.shape[1]
    k, v, shape, stage = _described(q, pool, span)
    direct(_kernels().flash)[(programs, kv_heads)](
        q, k, v, items, tasks, count, mask.positions, q if mask.sinks is None else mask.sinks, out, factor, q.stride(0),
        **shape, SINKS=mask.sinks is not None, STAGES=RING_BYTES // stage, num_warps=4,
    )  # fmt: skip


def split(
    q: Tensor, pool: Pool, items: Tensor, tasks: Tensor, count: Tensor, bases: Tensor, mask: Mask,
    states: tuple[Tensor, Tensor, Tensor], factor: float, span: int, programs: int, resume: bool,
) -> None:  # fmt: skip
    """count[0] tasks of one span each, by at most so many programs. See hopper_kernels.split."""
    k, v, shape, stage = _described(q, pool, span)
    direct(_kernels().split)[(programs, pool.shape[1])](
        q, k, v, items, tasks, count, mask.positions, bases, *states, factor, q.stride(0), mask.window or 0,
        **shape, STAGES=(RING_BYTES - (32 << 10)) // stage, RESUME=resume, WINDOW=mask.window is not None,
        num_warps=4, maxnreg=128,
    )  # fmt: skip


def _described(q: Tensor, pool: Pool, span: int) -> tuple[Any, Any, dict[str, int], int]:
    """Keys and values as blocks of a chunk's KV head, the sizes that the kernels know, and bytes of one such pair."""
    _, kv_heads, dim = pool.shape
    k, v = Blocks(pool.k, _form(dim, 64)), Blocks(pool.v, _form(64, dim))
    return k, v, {"HEADS": q.shape[1], "KV_HEADS": kv_heads, "D": dim, "SPAN": span}, 2 * 2 * 64 * dim


@cache
def _kernels() -> Any:
    """The module of the kernels: Gluon is not in every Triton."""
    from headrace.kernels.triton import hopper_kernels

    return hopper_kernels


@cache
def _form(rows: int, columns: int) -> BlockForm:
    """Blocks of all chunks and KV heads, one behind the other."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return block_form(rows, columns, layout=NVMMASharedLayout(128, 16, 2), flat=True)
