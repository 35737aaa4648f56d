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
UNROLLED = WalkOptions(64, 16, 1)
"""For rows in fp32, whose products are no tensor core's: each part of a thread is unrolled."""
UNROLLED_COLUMNS = 256
"""Of values that are summed up at a time for them, at most."""


@cache
def walk_options(device: torch.device, padded: int, part: int, dtype: torch.dtype) -> WalkOptions:
    """For heads of size P = `padded`, `part` of them in a task, and rows of this type. Elsewhere than on a CUDA device,
    where Triton's interpreter runs them: as on a Hopper GPU."""
    return chosen(_major(device), padded, part, dtype == torch.float32)


@cache
def flash_options(device: torch.device, padded: int, part: int, dtype: torch.dtype) -> WalkOptions:
    """walk_options of flash tasks. dtype: float32 if the rows are in it, otherwise the pools' type."""
    return flash_chosen(_major(device), padded, part, dtype)


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
