"""Chunks of the pools <-> the bytes that tiers keep of them, in a layout that no kernel decides.

n: chunks; Hkv: KV heads; D: head size; H: hidden size; 64: tokens of a chunk. A section is what is stored of one layer
of one chunk: K [Hkv, D, 64], V [Hkv, 64, D], then scales; or activations X [64, H], then scales. Of values that are the
keys too (latent attention) there is V alone. csrc/store/stored.cpp describes it to the byte. Three formats:

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

All run on the calling thread alone and let other Python threads run meanwhile (the C++ kernels; torch may not). Pools
on a GPU, whose buffers lie there too, are torch's: raw chunks are handed to the current stream and not waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.config import OffloadFormat
from headrace.kernels import chunk_formats_torch, cpu_attention, dispatch
from headrace.kernels.chunk_formats_torch import FORMATS, Plane
from headrace.kernels.extension import address, check, require
from headrace.kernels.records import Layout, Pool
from headrace.types import CHUNK

ALIGN = 64
"""Sections are filled up to a multiple of this."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8"}
"""C++ names of the types that pools may have."""


def kv_bytes(kv_heads: int, dim: int, dtype: torch.dtype, format: OffloadFormat, once: bool = False) -> int:
    """Bytes of a section of keys and values of a pool of this type. once: values are the keys too."""
    planes = 1 if once else 2
    return _section(planes * kv_heads * CHUNK * dim, planes * kv_heads * CHUNK, dtype, format)


def x_bytes(hidden: int, dtype: torch.dtype, format: OffloadFormat) -> int:
    """Bytes of a section of activations."""
    return _section(CHUNK * hidden, CHUNK, dtype, format)


def _section(numbers: int, tokens: int, dtype: torch.dtype, format: OffloadFormat) -> int:
    if dtype not in ELEMENTS or format not in FORMATS:
        raise ValueError(f"cannot store {dtype} as {format!r}; formats: {', '.join(FORMATS)}")
    return -(-sum(FORMATS[format].sizes(numbers, tokens, dtype)) // ALIGN) * ALIGN


def some_heads(
    sections: Tensor, heads: range, kv_heads: int, dim: int, dtype: torch.dtype, format: OffloadFormat
) -> Tensor:
    """Of sections of keys and values of `kv_heads` heads, uint8 [n, kv_bytes(...)], those of some heads alone."""
    codes, scales = FORMATS[format].sizes(CHUNK * dim, CHUNK, dtype)
    size = kv_bytes(len(heads), dim, dtype, format)
    found = torch.zeros(len(sections), size, dtype=torch.uint8, device=sections.device)
    start = at = 0
    for size in (codes, codes, scales, scales):  # of one head: K, V, and the scales of each
        found[:, at : at + len(heads) * size] = sections[:, start + heads.start * size : start + heads.stop * size]
        start, at = start + kv_heads * size, at + len(heads) * size
    return found


def store_kv_many(
    buffer: Tensor,
    pool: Pool,
    slots: Tensor,
    format: OffloadFormat,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> list[bool]:
    """Fills buffer, uint8 [n, kv_bytes(...)], from chunks `slots`, int32 [n], of one layer's pool.

    Returns which could be. Rows of the buffer may lie apart. dtype: the type computed in (default: the pool's). layout:
    how the pool lies (default: as the C++ kernels have it).
    """
    return _store(buffer, _kv_planes(pool, dtype, layout), slots, format, _kv_bytes(pool, format))


def load_kv_many(
    buffer: Tensor,
    pool: Pool,
    slots: Tensor,
    format: OffloadFormat,
    dtype: torch.dtype | None = None,
    layout: Layout | None = None,
) -> None:
    """The way back, into chunks `slots`, no two the same; parameters as in store_kv_many."""
    _load(buffer, _kv_planes(pool, dtype, layout), slots, format, _kv_bytes(pool, format))


def _kv_bytes(pool: Pool, format: OffloadFormat) -> int:
    return kv_bytes(*pool.shape[1:], pool.v.dtype, format, pool.once)


def store_x_many(buffer: Tensor, x_pool: Tensor, slots: Tensor, format: OffloadFormat) -> list[bool]:
    """Fills buffer, uint8 [n, x_bytes(...)], from chunks `slots` (int32 [n]) of x_pool [slots, 64, H].

    Returns which could be.
    """
    return _store(buffer, _x_planes(x_pool), slots, format, x_bytes(x_pool.shape[-1], x_pool.dtype, format))


def load_x_many(buffer: Tensor, x_pool: Tensor, slots: Tensor, format: OffloadFormat) -> None:
    """The way back, into chunks `slots`, no two the same."""
    _load(buffer, _x_planes(x_pool), slots, format, x_bytes(x_pool.shape[-1], x_pool.dtype, format))


def gather(into: Tensor, sections: Sequence[Tensor]) -> None:
    """into[i] = sections[i]: sections uint8 [bytes] each in pinned memory, into [n, bytes] on a GPU, whose current
    stream is given that to do: by one kernel, since a copy of 64 KiB takes longer to launch than to run."""
    if into.is_cuda:
        from headrace.kernels.triton import pinned

        return pinned.gather(into, sections)
    for there, section in zip(into, sections, strict=True):
        there.copy_(section, non_blocking=True)


def take_raw(section: Tensor, tensors: Sequence[Tensor], slot: int) -> None:
    """One chunk, as "raw", out of pools on a GPU into pinned memory, uint8 [bytes]: the current stream is given the
    copies. The rest of the section becomes zeros."""
    at = 0
    for tensor in tensors:
        part = tensor[slot]
        section[at : at + part.nbytes].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        at += part.nbytes
    if at < len(section):
        section[at:] = 0


def _kv_planes(pool: Pool, dtype: torch.dtype | None, layout: Layout | None) -> list[Plane]:
    stored = pool.k.dtype
    if pool.k.dim() != 4 or stored not in ELEMENTS:
        raise ValueError(f"k_pool must be [slots, Hkv, D, 64], got {list(pool.k.shape)} of {stored}")
    slots, heads, dim = pool.shape
    if not pool.once:
        _check_pool("k_pool", pool.k, stored, (slots, heads, dim, CHUNK))
    _check_pool("v_pool", pool.v, stored, (slots, heads, CHUNK, dim))
    if (pool.k_scale is None) != (pool.v_scale is None) or (pool.k_scale is None) == (stored == torch.int8):
        raise ValueError(f"int8 pools, and no others, have k_scale and v_scale; these are of {stored}")
    for name, scale in (("k_scale", pool.k_scale), ("v_scale", pool.v_scale)):
        if scale is not None:
            _check_pool(name, scale, torch.float32, (slots, heads, CHUNK))
    if stored == torch.int8 and dtype is None and layout is None:
        raise ValueError("int8 pools lie as the type that is computed in asks for: say dtype or layout")
    if layout is None:
        layout = cpu_attention.layout(dtype or stored, dim) if dispatch.in_cpp() else "plain"
    vnni = layout == "vnni"
    if vnni and dim % 2:
        raise ValueError(f"heads of {dim} elements do not lie in pairs")
    keys = [] if pool.once else [Plane(pool.k, pool.k_scale, True, vnni)]
    return [*keys, Plane(pool.v, pool.v_scale, False, vnni)]


def _x_planes(x_pool: Tensor) -> list[Plane]:
    if x_pool.dim() != 3 or x_pool.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"activations must be [slots, 64, H], got {list(x_pool.shape)} of {x_pool.dtype}")
    slots, _, hidden = x_pool.shape
    _check_pool("x_pool", x_pool, x_pool.dtype, (slots, CHUNK, hidden))
    return [Plane(x_pool.view(slots, 1, CHUNK, hidden), None, False, False)]


def _store(buffer: Tensor, planes: list[Plane], slots: Tensor, format: OffloadFormat, size: int) -> list[bool]:
    place = planes[0].pool
    _check(buffer, slots, size, place)
    buffer[:, _used(planes, format) :] = 0  # nothing of what was in memory before goes to disk
    if dispatch.on_gpu(place) or not dispatch.in_cpp():
        _check_slots(planes, slots)
        return chunk_formats_torch.store(buffer, planes, _indices(slots, place), FORMATS[format])
    fits = torch.empty(len(slots), dtype=torch.bool)
    _move(fits.data_ptr(), buffer, planes, slots, format)
    return fits.tolist()


def _load(buffer: Tensor, planes: list[Plane], slots: Tensor, format: OffloadFormat, size: int) -> None:
    place = planes[0].pool
    _check(buffer, slots, size, place)
    if not dispatch.on_gpu(place) and dispatch.in_cpp():
        return _move(0, buffer, planes, slots, format)
    if not len(slots):
        return
    _check_slots(planes, slots)
    chunk_formats_torch.load(buffer, planes, _indices(slots, place), FORMATS[format])


def _indices(slots: Tensor, pool: Tensor) -> Tensor:
    return slots.to(pool.device, torch.int64, non_blocking=True)


def _used(planes: list[Plane], format: OffloadFormat) -> int:
    """Bytes of a section before it is filled up."""
    return sum(sum(plane.sizes(FORMATS[format])) for plane in planes)


def _move(fits: int, buffer: Tensor, planes: list[Plane], slots: Tensor, format: OffloadFormat) -> None:
    ext, values, keys = require(), planes[-1], planes[0] if len(planes) == 2 else None
    slot_count, heads, _, dim = values.pool.shape
    pool = ext.Pool(
        0 if keys is None else keys.pool.data_ptr(), values.pool.data_ptr(),
        0 if keys is None else address(keys.scale), address(values.scale), slots=slot_count, kv_heads=heads, dim=dim,
    )  # fmt: skip
    ext.move_chunks(
        fits, buffer.data_ptr(), slots.data_ptr(), pool, stride=buffer.stride(0), count=len(slots),
        element=getattr(ext.Element, ELEMENTS[values.pool.dtype]), format=getattr(ext.Format, format),
        vnni=values.vnni,
    )  # fmt: skip


def _check_pool(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """As extension.check, for a pool that may lie on a GPU."""
    if not dispatch.on_gpu(x):
        check(name, x, dtype, shape)
    elif x.dtype != dtype or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)} of {dtype}, got {list(x.shape)} of {x.dtype}")


def _check(buffer: Tensor, slots: Tensor, size: int, pool: Tensor) -> None:
    check("slots", slots, torch.int32, (len(slots),))
    shape, place = (len(slots), size), pool.device
    if buffer.dtype != torch.uint8 or buffer.shape != shape or buffer.device != place or buffer.stride(1) != 1:
        raise ValueError(
            f"the buffer must be a tensor {list(shape)} of torch.uint8 on {place} with contiguous rows, got "
            f"{list(buffer.shape)} of {buffer.dtype} on {buffer.device} with strides {buffer.stride()}"
        )
    if buffer.data_ptr() % 4 or buffer.stride(0) % 4:
        raise ValueError("sections must start at multiples of 4 bytes")


def _check_slots(planes: list[Plane], slots: Tensor) -> None:
    count = len(planes[0].pool)
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= count):
        raise ValueError(f"slots must be from 0 to {count - 1}, got {slots.tolist()}")
