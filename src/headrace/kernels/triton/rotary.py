"""Norms of queries and keys, rotation and storing on a GPU: one launch (rotary_kernels).

T: rows; Hq, Hkv: query and KV heads, D: head size. A row has the same bits whatever other rows ride along, and a key
the same whether it is stored or handed back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.records import Pool, QKRotary
from headrace.kernels.triton import rotary_kernels
from headrace.kernels.triton.launching import direct
from headrace.kernels.triton.limits import check

ELEMENTS = 1024
"""Of the heads that one program takes together."""


def rotate(heads: Tensor, rotary: QKRotary) -> tuple[Tensor, Tensor, Tensor]:
    """heads [T, Hq + 2 Hkv, D], as projected -> q [T, Hq, D], k and v [T, Hkv, D], views of new memory but for v, which
    is one of `heads`: what there is behind keys, maybe nothing. Raises ValueError for a type or size that has no
    kernel."""
    own = rotary.heads + rotary.kv_heads
    out = _launch(heads, rotary, own, None)
    return out[:, : rotary.heads], out[:, rotary.heads :], heads[:, own:]


def rotate_and_store(heads: Tensor, rotary: QKRotary, pool: Pool, slots: Tensor, offsets: Tensor) -> Tensor:
    """The same with k and v stored in the pool as key offsets[t] of chunk slots[t], int32 [T] each on the GPU; negative
    slots keep nothing: q [T, Hq, D], in new memory. The pool's type must be that of the heads."""
    return _launch(heads, rotary, rotary.heads, (pool.k, pool.v, slots, offsets))


def _launch(heads: Tensor, rotary: QKRotary, own: int, stored: tuple[Tensor, Tensor, Tensor, Tensor] | None) -> Tensor:
    """The first `own` heads, turned. stored: pools, slots and offsets for the others, if they are to be stored."""
    rows, count, dim = heads.shape
    check(heads.dtype, dim)
    out = torch.empty(rows, own, dim, dtype=heads.dtype, device=heads.device)
    if not rows:
        return out
    if heads.stride(2) != 1 or heads.stride(1) != dim or heads.stride(0) % dim or heads.data_ptr() % 16:
        heads = heads.clone(memory_format=torch.contiguous_format)
    turn = rotary.cos_sin
    norms = (out if each is None else each for each in (rotary.q_norm, rotary.k_norm))
    padded = max(16, 1 << (dim - 1).bit_length())
    together = max(1, ELEMENTS // padded)
    direct(rotary_kernels.rotate_heads)[(rows, -(-(count if stored else own) // together))](
        heads, out if turn is None else turn, *norms,
        out, *(stored or (out, out, out, out)), heads.stride(0) // dim, 0 if turn is None else turn.stride(0),
        rotary.eps, rotary.offset, Q=rotary.heads, KV=rotary.kv_heads, D=dim, P=padded,
        TURNED=0 if turn is None else turn.shape[1], NORM=rotary.k_norm is not None, STORE=stored is not None,
        TOGETHER=together, num_warps=4,
    )  # fmt: skip
    return out
