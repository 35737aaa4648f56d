"""Chunks of the pools <-> the bytes that tiers keep of them, in a layout that no kernel decides.

n: chunks; Hkv: KV heads; D: head size; H: hidden size; 64: tokens of a chunk. A section is what is stored of one layer
of one chunk: K [Hkv, D, 64], V [Hkv, 64, D], then scales; or activations X [64, H], then scales. csrc/store/stored.cpp
describes it to the byte. Three formats:

raw: as the pool has it (int8 pools: codes and scales). The same bits come back.

int8: codes -127..127 under a scale of max|x| / 127 for each token and head (K, V) or token (X), fp32. Of an int8 pool
the same as raw. A number x comes back as y with |y - x| <= max|x| / 254 (1 + 5e-5) + 1e-42, before y is rounded to the
pool's type.

int4: codes 0..15 in groups of 64 numbers that follow one another in the layout above (of K: one channel over the
chunk's 64 tokens), under (low, step) in fp16: 36 bytes for 64 numbers. low is rounded down and step up, so that no code
is out of range: step <= 1.001 (max x - min x + |min x| / 1024) / 15 + 2e-7, and a number x comes back as y with
|y - x| <= step / 2 (1 + 1e-5) + |y| 1e-7, before y is rounded to the pool's type. A group that holds one value, which
fp16 holds too, comes back exactly. (FlexGen's scheme, which KVPR stores with; it divides by zero for such groups.)

Rounding to the pool's type: bf16 adds |y| / 256; int8 adds what storing y as int8 does.

What a format cannot hold, a NaN or an infinity (int8, int4) or a number beyond 65504 (int4), is not stored: the
functions then return False, the section is undefined, and the caller stores the chunk raw.

All run on the calling thread alone and let other Python threads run meanwhile (the C++ kernels; torch may not).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace.config import OffloadFormat as Format
from headrace.kernels import chunk_formats_torch, cpu_attention, dispatch
from headrace.kernels.chunk_formats_torch import Plane
from headrace.kernels.extension import check, require
from headrace.types import CHUNK

Layout = Literal["natural", "paired"]
ALIGN = 64
"""Sections are filled up to a multiple of this."""
ELEMENTS = {torch.bfloat16: 0, torch.float32: 1, torch.int8: 2}
FORMATS: dict[Format, int] = {"raw": 0, "int8": 1, "int4": 2}


def kv_bytes(kv_heads: int, dim: int, dtype: torch.dtype, format: Format) -> int:
    """Bytes of a section of keys and values of a pool of this type."""
    return _section(2 * kv_heads * CHUNK * dim, 2 * kv_heads * CHUNK, dtype, format)


def x_bytes(hidden: int, dtype: torch.dtype, format: Format) -> int:
    """Bytes of a section of activations."""
    return _section(CHUNK * hidden, CHUNK, dtype, format)


def _section(numbers: int, tokens: int, dtype: torch.dtype, format: Format) -> int:
    if dtype not in ELEMENTS or format not in FORMATS:
        raise ValueError(f"cannot store {dtype} as {format!r}; formats: {', '.join(FORMATS)}")
    if format == "int4":
        size = numbers // chunk_formats_torch.GROUP * 36
    elif format == "int8" or dtype == torch.int8:
        size = numbers + 4 * tokens
    else:
        size = numbers * dtype.itemsize
    return -(-size // ALIGN) * ALIGN


def layout_of(backend: str, dtype: torch.dtype, dim: int) -> Layout:
    """How an attention backend ('reference' or 'cpu') arranges the pools where it computes in `dtype`."""
    return "paired" if backend == "cpu" and cpu_attention.layout(dtype, dim) == "paired" else "natural"


def store_kv_many(
    buffer: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    format: Format,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> list[bool]:
    """Fills buffer, uint8 [n, kv_bytes(...)], from chunks `slots`, int32 [n], of one layer.

    Returns which could be. k_pool [slots, Hkv, D, 64], v_pool [slots, Hkv, 64, D], with scales [slots, Hkv, 64] if
    int8. Rows of the buffer may lie apart. dtype: the type computed in (default: the pool's). layout: see layout_of
    (default: the C++ kernels').
    """
    planes = _kv_planes(k_pool, v_pool, k_scale, v_scale, dtype, layout)
    return _store(buffer, planes, slots, format, kv_bytes(k_pool.shape[1], k_pool.shape[2], k_pool.dtype, format))


def load_kv_many(
    buffer: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    format: Format,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> None:
    """The way back, into chunks `slots`, no two the same; parameters as in store_kv_many."""
    planes = _kv_planes(k_pool, v_pool, k_scale, v_scale, dtype, layout)
    _load(buffer, planes, slots, format, kv_bytes(k_pool.shape[1], k_pool.shape[2], k_pool.dtype, format))


def store_x_many(buffer: Tensor, x_pool: Tensor, slots: Tensor, format: Format) -> list[bool]:
    """Fills buffer, uint8 [n, x_bytes(...)], from chunks `slots` (int32 [n]) of x_pool [slots, 64, H].

    Returns which could be.
    """
    return _store(buffer, _x_planes(x_pool), slots, format, x_bytes(x_pool.shape[-1], x_pool.dtype, format))


def load_x_many(buffer: Tensor, x_pool: Tensor, slots: Tensor, format: Format) -> None:
    """The way back, into chunks `slots`, no two the same."""
    _load(buffer, _x_planes(x_pool), slots, format, x_bytes(x_pool.shape[-1], x_pool.dtype, format))


def _kv_planes(
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    dtype: torch.dtype | None,
    layout: Layout | None,
) -> list[Plane]:
    if k_pool.dim() != 4 or k_pool.dtype not in ELEMENTS:
        raise ValueError(f"k_pool must be [slots, Hkv, D, 64], got {list(k_pool.shape)} of {k_pool.dtype}")
    slots, heads, dim, _ = k_pool.shape
    check("k_pool", k_pool, k_pool.dtype, (slots, heads, dim, CHUNK))
    check("v_pool", v_pool, k_pool.dtype, (slots, heads, CHUNK, dim))
    if (k_scale is None) != (v_scale is None) or (k_scale is None) == (k_pool.dtype == torch.int8):
        raise ValueError(f"int8 pools, and no others, have k_scale and v_scale; these are of {k_pool.dtype}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            check(name, scale, torch.float32, (slots, heads, CHUNK))
    if k_pool.dtype == torch.int8 and dtype is None and layout is None:
        raise ValueError("int8 pools lie as the type that is computed in asks for: say dtype or layout")
    if layout is None:
        layout = layout_of("cpu" if dispatch.in_cpp() else "reference", dtype or k_pool.dtype, dim)
    if layout == "paired" and dim % 2:
        raise ValueError(f"heads of {dim} elements do not lie in pairs")
    paired = layout == "paired"
    return [Plane(k_pool, k_scale, True, paired), Plane(v_pool, v_scale, False, paired)]


def _x_planes(x_pool: Tensor) -> list[Plane]:
    if x_pool.dim() != 3 or x_pool.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"activations must be [slots, 64, H], got {list(x_pool.shape)} of {x_pool.dtype}")
    slots, _, hidden = x_pool.shape
    check("x_pool", x_pool, x_pool.dtype, (slots, CHUNK, hidden))
    return [Plane(x_pool.view(slots, 1, CHUNK, hidden), None, False, False)]


def _store(buffer: Tensor, planes: list[Plane], slots: Tensor, format: Format, size: int) -> list[bool]:
    _check(buffer, slots, size)
    buffer[:, _used(planes, format) :] = 0  # nothing of what was in memory before goes to disk
    if not dispatch.in_cpp():
        _check_slots(planes, slots)
        return chunk_formats_torch.store(buffer, planes, slots.long(), format)
    fits = torch.empty(len(slots), dtype=torch.bool)
    _move(fits.data_ptr(), buffer, planes, slots, format)
    return fits.tolist()


def _load(buffer: Tensor, planes: list[Plane], slots: Tensor, format: Format, size: int) -> None:
    _check(buffer, slots, size)
    if dispatch.in_cpp():
        return _move(0, buffer, planes, slots, format)
    if not len(slots):
        return
    _check_slots(planes, slots)
    chunk_formats_torch.load(buffer, planes, slots.long(), format)


def _used(planes: list[Plane], format: Format) -> int:
    """Bytes of a section before it is filled up."""
    return sum(sum(chunk_formats_torch.sizes(plane, format)) for plane in planes)


def _move(fits: int, buffer: Tensor, planes: list[Plane], slots: Tensor, format: Format) -> None:
    values, keys = planes[-1], planes[0] if len(planes) == 2 else None
    slot_count, heads, _, dim = values.pool.shape
    k, k_scale = (0, None) if keys is None else (keys.pool.data_ptr(), keys.scale)
    require().move_chunks(
        fits, buffer.data_ptr(), buffer.stride(0), slots.data_ptr(), len(slots), k, values.pool.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(), 0 if values.scale is None else values.scale.data_ptr(),
        slot_count, heads, dim, ELEMENTS[values.pool.dtype], FORMATS[format], values.paired,
    )  # fmt: skip


def _check(buffer: Tensor, slots: Tensor, size: int) -> None:
    check("slots", slots, torch.int32, (len(slots),))
    shape = (len(slots), size)
    if buffer.dtype != torch.uint8 or buffer.shape != shape or not buffer.is_cpu or buffer.stride(1) != 1:
        raise ValueError(
            f"the buffer must be a CPU tensor {list(shape)} of torch.uint8 with contiguous rows, got "
            f"{list(buffer.shape)} of {buffer.dtype} with strides {buffer.stride()}"
        )
    if buffer.data_ptr() % 4 or buffer.stride(0) % 4:
        raise ValueError("sections must start at multiples of 4 bytes")


def _check_slots(planes: list[Plane], slots: Tensor) -> None:
    count = len(planes[0].pool)
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= count):
        raise ValueError(f"slots must be from 0 to {count - 1}, got {slots.tolist()}")
