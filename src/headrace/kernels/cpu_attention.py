"""The C++ kernels' attention over chunks, and appending to the pools.

R, T: rows; Hq, Hkv: query and KV heads; D: head size. bf16 and fp32, CPU tensors only: ValueError for any others. Pools
have the type of the rows, or int8 with scales k_scale and v_scale, fp32 [slots, Hkv, 64] (docs/attention.md).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.kernels.extension import PAIRED, check, heads_of, isa, require, type_of
from headrace.kernels.state import FoldState, Partial
from headrace.types import CHUNK

LOG_2 = math.log(2.0)


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
    """Attention of rows q [R, Hq, D] over the chunks that `items` lists: [R, Hq, D], zeros for rows that see no key.

    k_pool [slots, Hkv, D, 64], v_pool [slots, Hkv, 64, D]. items int32 [n, 4] = (slot, key_start, row_begin, row_end):
    the chunk in `slot` holds the keys at key_start..key_start+63 and is offered to rows row_begin..row_end-1. A row's
    items come in ascending key_start; otherwise any order gives the same bits. A row at position p sees the keys at
    p - window + 1 .. p (no window: 0 .. p). bias [Hq, keys] fp32 is added to the scaled scores by key position.
    """
    out = torch.empty(q.shape, dtype=q.dtype)
    _run(q, k_pool, v_pool, items, positions, scale, window, bias, k_scale, v_scale, out=out)
    return out


def partial(
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
    state: FoldState | None = None,
) -> FoldState:
    """Folds the chunks of `items` on from `state` (None: from nothing), everything else as in `attend`: a new state.

    A row's items come in ascending key_start from call to call too. However they are cut into calls, `finish` gives
    the bits of one `attend`.
    """
    unit = fold_unit(q.dtype, q.shape[-1])
    if state is not None:
        state.expect(tuple(q.shape), unit)
    left = FoldState(_room(q), _room(q), torch.empty(q.shape[0], dtype=torch.int32), unit)
    _run(q, k_pool, v_pool, items, positions, scale, window, bias, k_scale, v_scale, state=state, left=left)
    return left


def _room(q: Tensor) -> Partial:
    """Memory for a Partial of these rows."""
    rows, heads, _ = q.shape
    return Partial(torch.empty(q.shape), torch.empty(rows, heads), torch.empty(rows, heads))


def fold_unit(dtype: torch.dtype, dim: int) -> float:
    """The unit (see FoldState) in which the kernels fold for this type and head size."""
    return LOG_2 if layout(dtype, dim) == "paired" else 1.0


def addresses(state: FoldState | None) -> tuple[int, ...]:
    """Where a state lies, as the extension takes it. Raises ValueError unless its tensors are such as it can take."""
    if state is None:
        return ()
    rows, heads, _ = state.shape
    for part in (state.total, state.block):
        check("acc", part.acc, torch.float32, state.shape)
        check("m", part.m, torch.float32, (rows, heads))
        check("l", part.l, torch.float32, (rows, heads))
    check("block_of", state.block_of, torch.int32, (rows,))
    tensors = [x for part in (state.total, state.block) for x in (part.acc, part.m, part.l)]
    return tuple(x.data_ptr() for x in (*tensors, state.block_of))


def _run(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    items: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    *,
    out: Tensor | None = None,
    state: FoldState | None = None,
    left: FoldState | None = None,
) -> None:
    """Fills `out` or `left`, going on from `state`."""
    rows, heads, dim, q_stride = heads_of("q", q)
    if k_pool.dim() != 4 or v_pool.dim() != 4:
        raise ValueError(f"pools must have 4 dimensions, got {list(k_pool.shape)} and {list(v_pool.shape)}")
    slots, kv_heads = k_pool.shape[:2]
    scales = _check_pools(k_pool, v_pool, k_scale, v_scale, q.dtype, (slots, kv_heads, dim))
    check("items", items, torch.int32, (items.shape[0], 4))
    check("positions", positions, torch.int64, (rows,))
    if kv_heads == 0 or heads % kv_heads or (window is not None and window < 1):
        raise ValueError(f"cannot attend with {heads} query heads, {kv_heads} KV heads and window {window}")
    bias_at, bias_len = 0, 0
    if bias is not None:
        bias_len = bias.shape[-1]
        check("bias", bias, torch.float32, (heads, bias_len))
        bias_at = bias.data_ptr()
    require().attend(
        type_of(q), q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), 0 if out is None else out.data_ptr(),
        items.data_ptr(), positions.data_ptr(), bias_at, rows, q_stride, items.shape[0], heads, kv_heads, dim, slots,
        window or 0, bias_len, scale, torch.get_num_threads(), *scales, addresses(state), addresses(left),
    )  # fmt: skip


def _check_pools(
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
) -> tuple[int, int]:
    """Addresses of the scales, 0 where there are none. shape: slots, Hkv, D."""
    slots, kv_heads, dim = shape
    stored = dtype if k_scale is None and v_scale is None else torch.int8
    check("k_pool", k_pool, stored, (slots, kv_heads, dim, CHUNK))
    check("v_pool", v_pool, stored, (slots, kv_heads, CHUNK, dim))
    if k_scale is None and v_scale is None:
        return 0, 0
    if k_scale is None or v_scale is None:
        raise ValueError("int8 pools need both k_scale and v_scale")
    check("k_scale", k_scale, torch.float32, (slots, kv_heads, CHUNK))
    check("v_scale", v_scale, torch.float32, (slots, kv_heads, CHUNK))
    return k_scale.data_ptr(), v_scale.data_ptr()


def layout(dtype: torch.dtype, dim: int) -> str:
    """How the pools must lie where rows have this type and head size: 'natural' (K [slots, Hkv, D, 64], V [slots, Hkv,
    64, D]) or 'paired' (two elements of a pair side by side: K [slots, Hkv, D/2, 64, 2], V [slots, Hkv, 32, D, 2])."""
    return "paired" if isa() in PAIRED and dtype == torch.bfloat16 and dim % 16 == 0 else "natural"


def arrange(k_pool: Tensor, v_pool: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Natural pools in the layout that the kernels read, in new memory and under the natural shapes.

    dtype: the type of the rows, where the pools are int8.
    """
    slots, kv_heads, dim, _ = k_pool.shape
    if layout(dtype or k_pool.dtype, dim) == "natural":
        return k_pool.clone(), v_pool.clone()
    k = k_pool.view(slots, kv_heads, dim // 2, 2, CHUNK).transpose(3, 4).contiguous()
    v = v_pool.view(slots, kv_heads, CHUNK // 2, 2, dim).transpose(3, 4).contiguous()
    return k.view(k_pool.shape), v.view(v_pool.shape)


def append(
    k_pool: Tensor,
    v_pool: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    slots: Tensor,
    offsets: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes row t of k_new, v_new [T, Hkv, D] into both pools at key offsets[t] of chunk slots[t] (int32 [T] each).

    Into int8 pools goes x / scale, rounded to even, with scale = (greatest |x| of the D elements) / 127.
    """
    rows, kv_heads, dim, k_stride = heads_of("k_new", k_new)
    v_rows, v_heads, v_dim, v_stride = heads_of("v_new", v_new)
    if (v_rows, v_heads, v_dim) != (rows, kv_heads, dim) or v_new.dtype != k_new.dtype:
        raise ValueError(f"k_new and v_new differ: {list(k_new.shape)} and {list(v_new.shape)}, or in type")
    slot_count = k_pool.shape[0]
    scales = _check_pools(k_pool, v_pool, k_scale, v_scale, k_new.dtype, (slot_count, kv_heads, dim))
    check("slots", slots, torch.int32, (rows,))
    check("offsets", offsets, torch.int32, (rows,))
    require().append(
        type_of(k_new), k_new.data_ptr(), v_new.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), slots.data_ptr(),
        offsets.data_ptr(), rows, k_stride, v_stride, kv_heads, dim, slot_count, torch.get_num_threads(),
        *scales,
    )  # fmt: skip
