"""Activations X kept beside keys and values on a GPU: what enters a layer, written by one launch (kept_row_kernels).

T: rows, H: hidden size.
"""

from __future__ import annotations

from torch import Tensor

from headrace.kernels.triton import kept_row_kernels
from headrace.kernels.triton.launching import direct

COLUMNS = 1024
"""Elements of a row that one program writes."""


def keep_rows(pool: Tensor, x: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes x [T, H] to pool [slots, 64, H] as row offsets[t] of chunk slots[t], int32 [T] or more of each on the GPU.
    Rows of negative slots are not kept. Raises ValueError for a pool of another type or width."""
    rows, width = x.shape
    if pool.dtype != x.dtype or pool.shape[-1] != width:
        raise ValueError(f"a pool of {pool.shape[-1]} x {pool.dtype} keeps no rows of {width} x {x.dtype}")
    x = x if x.stride(1) == 1 else x.contiguous()
    if rows:
        columns = min(COLUMNS, 1 << (width - 1).bit_length())
        direct(kept_row_kernels.keep)[(rows, -(-width // columns))](
            x, pool, slots, offsets, x.stride(0), width, COLUMNS=columns, num_warps=4
        )
