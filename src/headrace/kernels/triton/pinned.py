"""Reading many pieces of pinned host memory by one kernel: a copy of each would take longer to launch than to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.triton import pinned_kernels
from headrace.kernels.triton.launching import direct

WORD, BLOCK = 8, 2048
PROGRAMS = 16
"""Enough for the whole link, of 132 or so that run at once: the others are left to what computes."""


def gather(into: Tensor, parts: Sequence[Tensor]) -> None:
    """into[i] = parts[i], on the current stream: parts uint8 [bytes] each in pinned memory, into uint8 [n, bytes] on a
    GPU, contiguous. Raises ValueError for bytes or addresses that are no multiples of 8, and parts that do not fit."""
    count, size = into.shape
    addresses = [part.data_ptr() for part in parts]
    if len(parts) != count or any(part.nbytes != size or not part.is_contiguous() for part in parts):
        raise ValueError(f"need {count} contiguous parts of {size} bytes")
    if size % WORD or any(address % WORD for address in addresses) or into.data_ptr() % WORD:
        raise ValueError(f"parts of {size} bytes must begin and end at multiples of {WORD}")
    if count:
        table = torch.tensor(addresses, dtype=torch.int64).to(into.device, non_blocking=True)
        words = size // WORD
        tasks = count * -(-words // BLOCK)
        grid = (min(PROGRAMS, tasks),)
        direct(pinned_kernels.gather)[grid](table, into.view(torch.int64), tasks, words, BLOCK=BLOCK, num_warps=8)
