"""Launches the attention kernel for latents on Hopper GPUs (hopper_latent_kernels): which layers it takes, and in what
grids. Its bits are not those of latent_kernels.walk, so a layer uses one of them for all that it computes.

Hq: query heads; D: size of a latent.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.records import Mask, Pool
from headrace.kernels.triton import hopper
from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.launch_entries import Blocks, block_form
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.tile_schedule import LANES
from headrace.kernels.triton.walk_options import latent_parts

PARTS = ((256, 64), (512, 64))
"""Sizes of latents, as two parts: those of published models but MiniCPM3's."""
ALIGNED = 16
"""Bytes that a pool's address is a multiple of, for the GPU to copy from it by itself."""


def takes(place: torch.device, dtype: torch.dtype, heads: Heads) -> bool:
    """Whether there are kernels for such latents, of this type."""
    parts = latent_parts(heads.dim)
    fits = heads.once and heads.lanes == LANES and parts in PARTS and sum(parts) == heads.dim
    return fits and dtype in (torch.bfloat16, torch.float16) and hopper.present(place)


def walk(
    q: Tensor, pool: Pool, items: Tensor, tasks: Tensor, count: Tensor, bases: Tensor, mask: Mask,
    states: tuple[Tensor, Tensor, Tensor], out: Tensor, heads: Heads, factor: float, span: int, programs: int,
    split: bool, resume: bool = False,
) -> None:  # fmt: skip
    """count[0] tasks, by at most so many programs for each part of the heads. out [R, Hq, D]: of flash tasks. See
    hopper_latent_kernels.walk_latents. Raises ValueError for a pool that the GPU cannot copy from by itself."""
    if pool.v.data_ptr() % ALIGNED:
        raise ValueError(f"a pool of latents begins at a multiple of {ALIGNED} bytes, got address {pool.v.data_ptr()}")
    first, rest = latent_parts(heads.dim)
    rows = pool.v.view(-1, heads.dim)
    blocks = [Blocks(rows, _form(columns)) for columns in (first, rest)]
    totals = states[0] if split else torch.empty(programs * heads.columns, LANES, heads.dim, device=q.device)
    direct(_kernels().walk_latents)[(programs, heads.columns)](
        q, *blocks, items, tasks, count, mask.positions, bases, *states, totals, out, factor, q.stride(0),
        HEADS=heads.heads, PART=heads.part, P=first, R=rest, SPAN=span, SPLIT=split, RESUME=resume, num_warps=8,
    )  # fmt: skip


@cache
def _kernels() -> Any:
    """The module of the kernel: Gluon is not in every Triton."""
    from headrace.kernels.triton import hopper_latent_kernels

    return hopper_latent_kernels


@cache
def _form(columns: int) -> Any:
    """Blocks of a chunk's keys by so many columns."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return block_form(64, columns, layout=NVMMASharedLayout(128, 16, 2))
