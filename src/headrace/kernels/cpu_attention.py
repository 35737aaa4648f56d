"""The C++ kernels' attention over chunks, and appending to the pools.

R, T: rows; Hq, Hkv: query and KV heads; D: head size. bf16 and fp32, CPU tensors only: ValueError for any others. Pools
have the type of the rows, or int8 with scales (docs/attention.md). kernels.backend says what each call does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.kernels.extension import VNNI_ISAS, address, check, heads_of, isa, require, type_of
from headrace.kernels.records import Layout, Mask, Pool
from headrace.kernels.state import Partial, RunningState
from headrace.types import CHUNK

if TYPE_CHECKING:
    from headrace.kernels import _cpu as native

LOG_2 = math.log(2.0)


def attend(q: Tensor, pool: Pool, mask: Mask) -> Tensor:
    """Attention of rows q [R, Hq, D] over the chunks of the mask's items: [R, Hq, D]."""
    out = torch.empty(q.shape, dtype=q.dtype)
    _run(q, pool, mask, out=out)
    return out


def partial(q: Tensor, pool: Pool, mask: Mask, state: RunningState | None = None) -> RunningState:
    """Merges the mask's chunks on from `state` (None: from nothing): a new state."""
    unit = unit_of(q.dtype, q.shape[-1])
    if state is not None:
        state.expect(tuple(q.shape), unit)
    left = RunningState(_room(q), _room(q), torch.empty(q.shape[0], dtype=torch.int32), unit)
    _run(q, pool, mask, state=state, left=left)
    return left


def _room(q: Tensor) -> Partial:
    """Memory for a Partial of these rows."""
    rows, heads, _ = q.shape
    return Partial(torch.empty(q.shape), torch.empty(rows, heads), torch.empty(rows, heads))


def unit_of(dtype: torch.dtype, dim: int) -> float:
    """The unit (see RunningState) in which the kernels merge for this type and head size."""
    return LOG_2 if layout(dtype, dim) == "vnni" else 1.0


def addresses(state: RunningState | None) -> tuple[int, ...]:
    """Where a state lies, as the extension takes it. Raises ValueError unless its tensors are such as it can take."""
    if state is None:
        return ()
    return (*partial_at(state.total, state.shape), *partial_at(state.block, state.shape), _block_of(state))


def partial_at(part: Partial, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Where acc, m and l of a Partial of shape (R, Hq, D) lie."""
    check("acc", part.acc, torch.float32, shape)
    check("m", part.m, torch.float32, shape[:2])
    check("l", part.l, torch.float32, shape[:2])
    return part.acc.data_ptr(), part.m.data_ptr(), part.l.data_ptr()


def _block_of(state: RunningState) -> int:
    check("block_of", state.block_of, torch.int32, state.shape[:1])
    return state.block_of.data_ptr()


def _run(
    q: Tensor,
    pool: Pool,
    mask: Mask,
    *,
    out: Tensor | None = None,
    state: RunningState | None = None,
    left: RunningState | None = None,
) -> None:
    """Fills `out` or `left`, going on from `state`."""
    rows, heads, dim, q_stride = heads_of("q", q)
    if pool.k.dim() != 4 or pool.v.dim() != 4:
        raise ValueError(f"pools must have 4 dimensions, got {list(pool.k.shape)} and {list(pool.v.shape)}")
    slots, kv_heads = pool.k.shape[:2]
    stored = pool_at(pool, q.dtype, (slots, kv_heads, dim))
    if kv_heads == 0 or heads % kv_heads or mask.window == 0:
        raise ValueError(f"cannot attend with {heads} query heads, {kv_heads} KV heads and window {mask.window}")
    require().attend(
        type_of(q), q.data_ptr(), stored, _mask_at(mask, rows, heads), address(out), rows=rows, q_stride=q_stride,
        heads=heads, start=addresses(state), left=addresses(left), threads=torch.get_num_threads(),
    )  # fmt: skip


def _mask_at(mask: Mask, rows: int, heads: int) -> native.Mask:
    """A mask as the extension takes it."""
    check("items", mask.items, torch.int32, (mask.items.shape[0], 4))
    check("positions", mask.positions, torch.int64, (rows,))
    keys = 0
    if mask.bias is not None:
        keys = mask.bias.shape[-1]
        check("bias", mask.bias, torch.float32, (heads, keys))
    if mask.sinks is not None:
        check("sinks", mask.sinks, torch.float32, (heads,))
    return require().Mask(
        mask.items.data_ptr(), mask.positions.data_ptr(), address(mask.bias), address(mask.sinks),
        count=mask.items.shape[0], window=mask.window or 0, bias_len=keys, scale=mask.scale, cap=mask.cap or 0.0,
    )  # fmt: skip


def pool_at(pool: Pool, dtype: torch.dtype, shape: tuple[int, int, int]) -> native.Pool:
    """A pool as the extension takes it. shape: slots, Hkv, D. dtype: of the rows, and of the pool unless it is int8."""
    slots, kv_heads, dim = shape
    plain = pool.k_scale is None and pool.v_scale is None
    check_pool(pool, dtype if plain else torch.int8, shape)
    if not plain:
        _check_scales(pool, (slots, kv_heads, CHUNK))
    return require().Pool(
        keys_at(pool), pool.v.data_ptr(), address(pool.k_scale), address(pool.v_scale),
        slots=slots, kv_heads=kv_heads, dim=dim,
    )  # fmt: skip


def check_pool(pool: Pool, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Raises ValueError unless keys and values have this type and shape, (slots, Hkv, D), as the extension has them."""
    slots, kv_heads, dim = shape
    if not pool.once:
        check("k_pool", pool.k, dtype, (slots, kv_heads, dim, CHUNK))
    check("v_pool", pool.v, dtype, (slots, kv_heads, CHUNK, dim))


def keys_at(pool: Pool) -> int:
    """Where a pool's keys lie; 0 where they are its values, as the extension takes that."""
    return 0 if pool.once else pool.k.data_ptr()


def _check_scales(pool: Pool, shape: tuple[int, int, int]) -> None:
    if pool.k_scale is None or pool.v_scale is None:
        raise ValueError("int8 pools need both k_scale and v_scale")
    check("k_scale", pool.k_scale, torch.float32, shape)
    check("v_scale", pool.v_scale, torch.float32, shape)


def layout(dtype: torch.dtype, dim: int) -> Layout:
    """How the pools must lie where rows have this type and head size."""
    return "vnni" if isa() in VNNI_ISAS and dtype == torch.bfloat16 and dim % 16 == 0 else "plain"


def arrange(pool: Pool, dtype: torch.dtype | None = None) -> Pool:
    """A plain pool in the layout that the kernels read, in new memory and under the plain shapes.

    dtype: the type of the rows, where the pool is int8.
    """
    slots, kv_heads, dim = pool.shape
    pairs = layout(dtype or pool.k.dtype, dim) == "vnni"
    v = pool.v.view(slots, kv_heads, CHUNK // 2, 2, dim).transpose(3, 4).contiguous() if pairs else pool.v.clone()
    v = v.view(pool.v.shape)
    if pool.once:
        return replace(pool, k=v.transpose(2, 3), v=v)
    k = pool.k.view(slots, kv_heads, dim // 2, 2, CHUNK).transpose(3, 4).contiguous() if pairs else pool.k.clone()
    return replace(pool, k=k.view(pool.k.shape), v=v)


def append(pool: Pool, k_new: Tensor, v_new: Tensor, slots: Tensor, offsets: Tensor) -> None:
    """Writes row t of k_new, v_new [T, Hkv, D] into the pool at key offsets[t] of chunk slots[t]."""
    rows, kv_heads, dim, k_stride = heads_of("k_new", k_new)
    v_rows, v_heads, v_dim, v_stride = heads_of("v_new", v_new)
    if (v_rows, v_heads, v_dim) != (rows, kv_heads, dim) or v_new.dtype != k_new.dtype:
        raise ValueError(f"k_new and v_new differ: {list(k_new.shape)} and {list(v_new.shape)}, or in type")
    stored = pool_at(pool, k_new.dtype, (pool.k.shape[0], kv_heads, dim))
    check("slots", slots, torch.int32, (rows,))
    check("offsets", offsets, torch.int32, (rows,))
    require().append(
        type_of(k_new), stored, k_new.data_ptr(), v_new.data_ptr(), slots.data_ptr(), offsets.data_ptr(), rows=rows,
        k_stride=k_stride, v_stride=v_stride, threads=torch.get_num_threads(),
    )  # fmt: skip
