"""How attention_kernels.walk is launched: lanes of a task, warps, and buffers for loads under way.

Chosen by `python -m tools.gpu.spills`, which compiles each choice: registers hold what the loops need, and shared
memory suffices. P: head size rounded up to a power of two. Split and flash tasks of a layer have the same choice, so
that the sum of a lane's probabilities is spread over threads alike and has the same bits. Where flash tasks have
another, a row is in one warp of either.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from headrace.kernels.triton.heads import Heads
from headrace.kernels.triton.tile_schedule import LANES
from headrace.types import CHUNK


class WalkOptions(NamedTuple):
    """lanes: of a task, except where the kernels for Hopper decide; warps: for these lanes; stages: of loads; columns:
    of the values that are summed up at a time, None: all; keys: of a chunk that are taken together, alike for split and
    flash tasks of a layer, since probabilities are rounded for so many."""

    lanes: int
    warps: int
    stages: int
    columns: int | None = None
    keys: int = CHUNK


OPTIONS = {
    8: {
        64: WalkOptions(64, 4, 3),
        128: WalkOptions(64, 8, 2),
        256: WalkOptions(32, 8, 2),
        512: WalkOptions(32, 8, 2, keys=32),
    },
    9: {
        64: WalkOptions(64, 4, 3),
        128: WalkOptions(64, 4, 3),
        256: WalkOptions(64, 8, 2),
        512: WalkOptions(64, 4, 2, columns=256, keys=32),
    },
    10: {
        64: WalkOptions(64, 4, 3),
        128: WalkOptions(64, 8, 3),
        256: WalkOptions(64, 8, 1),
        512: WalkOptions(64, 8, 1, columns=256, keys=32),
    },
}
"""By major compute capability and the largest P. Hopper's own kernels need 4 warps for 64 lanes: a row in one warp.
99 KB of shared memory (sm_86, sm_89) suffice for those of 8, which all other GPUs take too."""
FLASH_256 = WalkOptions(128, 8, 2, columns=128)
FLASH_256_INT8 = WalkOptions(64, 8, 2, columns=128)
"""Of flash tasks with P = 256 on a Hopper GPU, where a program of all columns would hold two sums of 64 lanes by 256.
The products of scores are made by both programs; so they would be by both warp groups of one."""
FLASH_512 = {9: WalkOptions(128, 8, 2, columns=128, keys=32), 10: WalkOptions(64, 8, 1, columns=128, keys=32)}
"""The same with P = 512, by major compute capability, where split tasks' choice would spill."""
LATENT = {
    8: WalkOptions(32, 8, 2, keys=32),
    9: WalkOptions(64, 4, 2, columns=256, keys=32),
    10: WalkOptions(64, 8, 2, columns=256, keys=32),
}
FLASH_LATENT = {9: WalkOptions(64, 4, 2, columns=128, keys=32), 10: WalkOptions(64, 8, 1, columns=128, keys=32)}
"""Of latents (latent_kernels), of 512 numbers and 64, by major compute capability. columns: of the 512."""
UNROLLED = WalkOptions(64, 16, 1)
"""For rows in fp32, whose products are no tensor core's: each part of a thread is unrolled."""
LEAST_PART = 16
"""Numbers of a product at least."""
UNROLLED_COLUMNS = 256
"""Of values that are summed up at a time for them, at most."""


@cache
def walk_options(device: torch.device, heads: Heads, dtype: torch.dtype) -> WalkOptions:
    """For such heads, and rows of this type. Elsewhere than on a CUDA device, where Triton's interpreter runs them: as
    on a Hopper GPU."""
    fp32 = dtype == torch.float32
    if heads.once:
        return latent_chosen(_major(device), heads.dim, fp32=fp32)
    return chosen(_major(device), heads.padded, heads.part, fp32)


@cache
def flash_options(device: torch.device, heads: Heads, dtype: torch.dtype) -> WalkOptions:
    """walk_options of flash tasks. dtype: float32 if the rows are in it, otherwise the pools' type."""
    if heads.once:
        return latent_chosen(_major(device), heads.dim, flash=True, fp32=dtype == torch.float32)
    return flash_chosen(_major(device), heads.padded, heads.part, dtype)


def heads_of(shape: tuple[int, int, int], once: bool, device: torch.device) -> Heads:
    """Heads of this (Hq, Hkv, D), as tasks on the device have them. Raises ValueError for latents of several heads, or
    too small for the two products that make scores of them."""
    if not once:
        return Heads(*shape)
    _, kv_heads, dim = shape
    if kv_heads != 1 or dim <= LEAST_PART:
        raise ValueError(f"latents are one KV head of more than {LEAST_PART} numbers, got {kv_heads} of {dim}")
    return Heads(*shape, once=True, lanes=latent_chosen(_major(device), dim).lanes)


def latent_parts(dim: int) -> tuple[int, int]:
    """P and R of latent_kernels: the greatest power of two below a head's size, and the rest rounded up to one."""
    first = max(LEAST_PART, 1 << (dim - 1).bit_length() - 1)
    return first, max(LEAST_PART, 1 << (dim - first - 1).bit_length())


def latent_chosen(major: int, dim: int, flash: bool = False, fp32: bool = False) -> WalkOptions:
    """Of latents of this size, by major compute capability."""
    first, rest = latent_parts(dim)
    found = LATENT.get(major, LATENT[8])
    if fp32:
        found = UNROLLED._replace(lanes=found.lanes, columns=UNROLLED_COLUMNS, keys=found.keys)
    elif flash:
        found = FLASH_LATENT.get(major, found)
    columns = found.columns or first
    # The rest is shared out like the first part, in no less than a product takes.
    return found._replace(columns=max(min(columns, first), first * LEAST_PART // rest))


def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def chosen(major: int, padded: int, part: int, fp32: bool = False) -> WalkOptions:
    """walk_options of a major compute capability."""
    table = OPTIONS.get(major, OPTIONS[8])
    found = next(options for largest, options in table.items() if padded <= largest)
    if fp32:
        columns = UNROLLED_COLUMNS if padded > UNROLLED_COLUMNS else None
        found = UNROLLED._replace(lanes=found.lanes, columns=columns, keys=found.keys)
    return found if part <= found.lanes else found._replace(lanes=LANES)


def flash_chosen(major: int, padded: int, part: int, dtype: torch.dtype) -> WalkOptions:
    """flash_options of a major compute capability."""
    if dtype == torch.float32:
        return chosen(major, padded, part, fp32=True)
    if major == 9 and padded == 256:
        return FLASH_256_INT8 if dtype == torch.int8 else FLASH_256
    if padded == 512 and major in FLASH_512:
        return FLASH_512[major]
    return chosen(major, padded, part)
