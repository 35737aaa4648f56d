"""Whether direct launches hand a kernel what Triton's own do: asked of the GPU itself, before one is used."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver

from headrace.kernels.triton import launch_kernels
from headrace.kernels.triton.launch_entries import CONTRACTED, Blocks, Unexpected, block_form, entry_of

log = logging.getLogger(__name__)

ROWS, COLUMNS, PROGRAMS = 8, 64, 3
_found: dict[int, bool] = {}


def agrees(device: int) -> bool | None:
    """Of a CUDA device, the current one, by its number; -1: there is none, and nothing to ask. None: it cannot be asked
    while a graph is recorded."""
    if device < 0:
        return True
    if device not in _found:
        if torch.cuda.is_current_stream_capturing():
            return None
        _found[device] = _compared(torch.device("cuda", device))
    return _found[device]


def _compared(device: torch.device) -> bool:
    try:
        if all(_same(device, copied) for copied in (False, True)[: 1 + _copies_blocks(device)]):
            return True
        log.warning("kernels get other arguments when launched directly, and are launched by Triton")
    except (Unexpected, TritonError, TypeError, RuntimeError) as error:
        log.warning("kernels cannot be launched directly, and are launched by Triton: %s", error)
    return False


def _copies_blocks(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _same(device: torch.device, copied: bool) -> bool:
    """The first launch is Triton's, and compiles; the next are of other tensors and numbers, by either."""
    constants = {"ROWS": ROWS, "COLUMNS": COLUMNS, "COPIED": copied, "num_warps": 1, **CONTRACTED}
    form = block_form(ROWS, COLUMNS)

    def given(seed: int) -> tuple[Tensor, Tensor, float, int, int, int, Tensor]:
        numbers = torch.arange(PROGRAMS * ROWS * COLUMNS, device=device).view(-1, COLUMNS) % 97 + seed
        words = torch.arange(COLUMNS, dtype=torch.int32, device=device) * seed
        return numbers.bfloat16(), words, 0.5 + seed, 1, 16 * seed, 2 * seed + 1, torch.zeros_like(numbers).float()

    def by_triton(seed: int) -> tuple[object, Tensor]:
        blocks, *others, out = given(seed)
        taken = form.described(blocks) if copied else blocks
        compiled: object = launch_kernels.echo[(PROGRAMS,)](taken, *others, out, **constants)
        return compiled, out

    compiled, _ = by_triton(1)
    entry = entry_of(launch_kernels.echo, compiled, len(given(1)), constants)
    for seed in (2, 3):
        blocks, words, *numbers, out = given(seed)
        first = Blocks(blocks, form) if copied else blocks.data_ptr()
        stream = driver.active.get_current_stream(device.index)
        entry((PROGRAMS,), stream, [first, words.data_ptr(), *numbers, out.data_ptr()])
        if not torch.equal(out, by_triton(seed)[1]):
            return False
    return True
