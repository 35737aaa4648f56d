"""Chunks of the pools as stored bytes: what comes back, within which bounds, and that nobody sees how pools lie.

n: chunks; Hkv: KV heads; D: head size; H: hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.kernels import chunk_formats, chunk_formats_torch, cpu, dispatch, reference
from headrace.kernels.records import Layout, Pool
from headrace.types import CHUNK

pytestmark = pytest.mark.cpu

SLOTS = 3
DTYPES = (torch.bfloat16, torch.float32, torch.int8)
LAYOUTS: tuple[Layout, ...] = ("plain", "vnni")
ISAS = cpu.available_isas() if cpu.available() else ()
DIMS = (16, 20, 64, 80, 96, 128)


@pytest.fixture(params=["torch", *ISAS])
def ways(request: Any) -> Iterator[str]:
    """torch, or C++ with each instruction set."""
    if request.param == "torch":
        with dispatch.force("torch"):
            yield "torch"
        return
    before = cpu.isa()
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(before)


SHARED = pytest.mark.usefixtures("ways")


@dataclass
class Pools:
    """One layer's pool; `plain` holds what it holds in plain order."""

    plain: tuple[Tensor, Tensor]
    pool: Pool
    layout: Layout

    @property
    def k(self) -> Tensor:
        return self.pool.k

    @property
    def v(self) -> Tensor:
        return self.pool.v

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.pool.tensors

    @property
    def scales(self) -> list[Tensor]:
        return list(self.parts[2:])

    def empty(self) -> Pools:
        return Pools(self.plain, Pool.of([torch.zeros_like(x) for x in self.parts], self.pool.once), self.layout)

    def store(self, sections: Tensor, slots: Tensor, format: Any) -> list[bool]:
        return chunk_formats.store_kv_many(sections, self.pool, slots, format, layout=self.layout)

    def load(self, sections: Tensor, slots: Tensor, format: Any) -> None:
        chunk_formats.load_kv_many(sections, self.pool, slots, format, layout=self.layout)

    def section(self, format: Any) -> Tensor:
        return torch.full(
            (SLOTS, chunk_formats.kv_bytes(*self.k.shape[1:3], self.k.dtype, format)), 0xEE, dtype=torch.uint8
        )


def vnni(x: Tensor) -> Tensor:
    slots, heads, rows, cols = x.shape
    return x.view(slots, heads, rows // 2, 2, cols).transpose(3, 4).contiguous().view(x.shape)


def plainly(x: Tensor, layout: Layout) -> Tensor:
    """Numbers of a pool in plain order."""
    if layout == "plain":
        return x
    slots, heads, rows, cols = x.shape
    return x.view(slots, heads, rows // 2, cols, 2).transpose(3, 4).reshape(x.shape)


def made(k: Tensor, v: Tensor, layout: Layout, scales: tuple[Tensor, Tensor] | None = None) -> Pools:
    """Pools of k [slots, Hkv, D, 64] and v [slots, Hkv, 64, D], in plain order."""
    lain = (vnni(k), vnni(v)) if layout == "vnni" else (k.clone(), v.clone())
    return Pools((k, v), Pool(*lain, *(scales or ())), layout)


def drawn(dtype: torch.dtype, dim: int = 32, layout: Layout = "plain", heads: int = 2, seed: int = 0) -> Pools:
    g = torch.Generator().manual_seed(seed)
    shapes = (SLOTS, heads, dim, CHUNK), (SLOTS, heads, CHUNK, dim)
    if dtype == torch.int8:
        k, v = (torch.randint(-127, 128, shape, generator=g, dtype=torch.int8) for shape in shapes)
        k_scale, v_scale = (torch.rand(SLOTS, heads, CHUNK, generator=g) for _ in range(2))
        return made(k, v, layout, (k_scale, v_scale))
    k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return made(k, v, layout)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def all_slots() -> Tensor:
    return torch.arange(SLOTS, dtype=torch.int32)


def round_trip(pools: Pools, format: Any) -> tuple[Pools, Tensor]:
    """Fresh pools with what came back, and the sections."""
    sections, back = pools.section(format), pools.empty()
    assert pools.store(sections, all_slots(), format) == [True] * SLOTS
    back.load(sections, all_slots(), format)
    return back, sections


@SHARED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_gives_the_bits_back(dtype: torch.dtype, layout: Layout) -> None:
    for dim in DIMS:
        pools = drawn(dtype, dim, layout)
        for x in pools.parts:
            if x.is_floating_point():
                x.view(-1)[:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40])
        back, _ = round_trip(pools, "raw")
        for x, y in zip(pools.parts, back.parts, strict=True):
            assert torch.equal(bits(x), bits(y)), dim


@SHARED
@pytest.mark.parametrize("format", ["raw", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_sections_do_not_depend_on_the_layout(dtype: torch.dtype, format: Any) -> None:
    for dim in DIMS:
        plain, pairs = drawn(dtype, dim), drawn(dtype, dim, "vnni")
        (a, first), (b, second) = round_trip(plain, format), round_trip(pairs, format)
        assert torch.equal(first, second), dim
        assert torch.equal(bits(vnni(a.k)), bits(b.k)) and torch.equal(bits(vnni(a.v)), bits(b.v)), dim


@SHARED
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("format", ["raw", "int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_that_are_the_values_are_stored_once(dtype: torch.dtype, format: Any, layout: Layout) -> None:
    """They come back as when they are stored beside keys."""
    for dim in DIMS:
        pools = drawn(dtype, dim, layout)
        once = Pools(pools.plain, Pool.of(pools.parts[1::2], once=True), layout)
        size, slots = chunk_formats.kv_bytes(2, dim, dtype, format, once=True), torch.tensor([2, 0], dtype=torch.int32)
        sections, back = torch.full((SLOTS, size), 0xEE, dtype=torch.uint8), once.empty()
        assert once.store(sections[:2], slots, format) == [True, True]
        assert 2 * size <= pools.section(format).shape[1] + chunk_formats.ALIGN
        back.load(sections[:2], slots, format)
        both, _ = round_trip(pools, format)
        assert len(back.parts) == 1 + (dtype == torch.int8)
        for x, y in zip(back.parts, both.parts[1::2], strict=True):
            assert torch.equal(bits(x[[0, 2]]), bits(y[[0, 2]])), dim
            assert not x[1].any()


@SHARED
def test_a_raw_section_is_k_then_v_then_scales() -> None:
    pools = drawn(torch.bfloat16, 16, "vnni")
    _, sections = round_trip(pools, "raw")
    want = [torch.cat([bits(x[i]).flatten() for x in pools.plain]) for i in range(SLOTS)]
    assert torch.equal(sections, torch.stack(want))
    pools = drawn(torch.int8, 16, "vnni")
    _, sections = round_trip(pools, "raw")
    parts = (*pools.plain, *pools.scales)
    assert torch.equal(sections[1], torch.cat([bits(x[1]).flatten() for x in parts]))
    assert torch.equal(sections, round_trip(pools, "int8")[1])


@SHARED
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_torch(dtype: torch.dtype, format: Any) -> None:
    for dim in (16, 20, 80):
        pools = drawn(dtype, dim)
        back, sections = round_trip(pools, format)
        with dispatch.force("torch"):
            other, same = round_trip(pools, format)
        assert torch.equal(sections, same), dim
        for x, y in zip(back.parts, other.parts, strict=True):
            assert torch.equal(bits(x), bits(y)), dim


FLOATS = st.one_of(
    st.floats(-8, 8, width=32),
    st.floats(-65504, 65504, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 6e-8, 3e-8, 1e-5, 65504.0, -65504.0, 1.0, -1.0]),
)


@st.composite
def numbers(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """K and V of 3 slots, one head of 16, fp32: few different values, so that groups are constant, zero or mixed."""
    values = torch.tensor(draw(st.lists(FLOATS, min_size=1, max_size=6)), dtype=torch.float32)
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    noise = draw(st.sampled_from([0.0, 1e-3, 1.0]))

    def plane(*shape: int) -> Tensor:
        x = values[torch.randint(len(values), shape, generator=g)]
        x = x * (1 - noise * torch.rand(shape, generator=g))
        x[0, :, : shape[2] // 2] = values[0]  # runs of one value
        return x

    return plane(SLOTS, 1, 16, CHUNK), plane(SLOTS, 1, CHUNK, 16)


def int8_bound(x: Tensor, axis: int) -> Tensor:
    """What kernels.chunk_formats promises, for scales along an axis."""
    return x.abs().amax(axis, keepdim=True).double() / 254 * (1 + 5e-5) + 1e-42


def int4_bound(x: Tensor, y: Tensor) -> Tensor:
    groups = x.reshape(-1, 64).double()
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = 1.001 * (most - least + least.abs() / 1024) / 15 + 2e-7
    return (step / 2 * (1 + 1e-5)).expand(groups.shape).reshape(x.shape) + y.double().abs() * 1e-7


def within(y: Tensor, x: Tensor, bound: Tensor, dtype: torch.dtype) -> None:
    """|y - x| <= bound + the rounding to bf16."""
    rounding = y.double().abs() / 256 + 1e-40 if dtype == torch.bfloat16 else 0
    assert y.isfinite().all()
    assert ((y.double() - x.double()).abs() <= bound + rounding).all()


@SHARED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@settings(deadline=None)
@given(kv=numbers())
def test_errors_of_int8(dtype: torch.dtype, kv: tuple[Tensor, Tensor]) -> None:
    pools = made(kv[0].to(dtype), kv[1].to(dtype), "plain")
    back, _ = round_trip(pools, "int8")
    within(back.k, pools.k, int8_bound(pools.k, -2), dtype)
    within(back.v, pools.v, int8_bound(pools.v, -1), dtype)


@SHARED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@settings(deadline=None)
@given(kv=numbers())
def test_errors_of_int4(dtype: torch.dtype, kv: tuple[Tensor, Tensor]) -> None:
    pools = made(*(x.clamp(-65000, 65000).to(dtype) for x in kv), "plain")
    back, sections = round_trip(pools, "int4")
    for x, y in ((pools.k, back.k), (pools.v, back.v)):
        within(y, x, int4_bound(x, y), dtype)
    groups = torch.cat([x.reshape(SLOTS, -1, 64) for x in (pools.k, pools.v)], dim=1).double()
    bounds = sections[:, groups[0].numel() // 2 :][:, : groups.shape[1] * 4].contiguous().view(torch.float16).double()
    low, step = bounds.view(SLOTS, -1, 2).unbind(-1)
    assert (low <= groups.amin(-1)).all() and (step >= 0).all()
    assert ((groups.amax(-1) - low) * (1 - 1e-6) <= 15 * step + 1e-44).all()
    with dispatch.force("torch"):
        _, same = round_trip(pools, "int4")
    assert torch.equal(sections, same)


@SHARED
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.140625, 65504.0, -65504.0, 2.0**-14, 2.0**-24, -(2.0**-20)])
def test_constant_groups_are_exact_in_int4(value: float) -> None:
    k, v = torch.full((SLOTS, 1, 16, CHUNK), value), torch.full((SLOTS, 1, CHUNK, 16), value)
    back, _ = round_trip(made(k, v, "plain"), "int4")
    assert torch.equal(back.k, k) and torch.equal(back.v, v)


@SHARED
def test_int4_of_an_int8_pool() -> None:
    """Twice rounded: to int4, and again as the pool stores numbers."""
    pools = drawn(torch.int8, 32, "vnni", seed=5)
    back, _ = round_trip(pools, "int4")
    for i, axis in enumerate((-2, -1)):
        numbers = [
            chunk_formats_torch.Plane(p.parts[i], p.scales[i], axis == -2, True).get(all_slots().long())[0].float()
            * p.scales[i].unsqueeze(axis)
            for p in (pools, back)
        ]
        top = numbers[1].abs().amax(axis, keepdim=True).double()
        error = (numbers[1].double() - numbers[0].double()).abs()
        assert (error <= int4_bound(*numbers) + top / 254 * 1.001).all() and error.max() > 0


@SHARED
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_rounded(bad: float) -> None:
    for format in ("int8", "int4"):
        for name in ("k", "v"):
            pools = drawn(torch.bfloat16)
            getattr(pools, name)[1, 1, 3, 7] = bad
            fits = pools.store(pools.section(format), all_slots(), format)
            assert fits == [True, False, True]
        x = torch.ones(CHUNK, 72)
        x[63, 71] = bad
        section = torch.empty(1, chunk_formats.x_bytes(72, x.dtype, format), dtype=torch.uint8)
        assert chunk_formats.store_x_many(section, x[None], all_slots()[:1], format) == [False]


@SHARED
@pytest.mark.parametrize("value", [65536.0, -65536.0, 3e38])
def test_what_fp16_does_not_hold_is_not_stored_as_int4(value: float) -> None:
    pools = drawn(torch.bfloat16)
    pools.k[2, 0, 0, 0] = value
    for format, fit in (("raw", True), ("int8", True), ("int4", False)):
        fits = pools.store(pools.section(format), all_slots(), format)
        assert fits == [True, True, fit]


@SHARED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    for hidden in (20, 64, 72, 256):
        x = torch.randn(CHUNK, hidden, generator=g).to(dtype)
        bounds = {"raw": torch.zeros(()), "int8": int8_bound(x, -1), "int4": int4_bound(x, x) + 1e-6}
        for format in ("raw", "int8", "int4"):
            section = torch.empty(1, chunk_formats.x_bytes(hidden, dtype, format), dtype=torch.uint8)
            back = torch.full_like(x, torch.nan)
            assert chunk_formats.store_x_many(section, x[None], all_slots()[:1], format) == [True]
            chunk_formats.load_x_many(section, back[None], all_slots()[:1], format)
            within(back, x, bounds[format], dtype if format != "raw" else torch.float32)


@SHARED
def test_sections_of_chosen_slots_that_lie_apart() -> None:
    pools = drawn(torch.bfloat16, 20, "vnni", heads=1)
    back, size = pools.empty(), chunk_formats.kv_bytes(1, 20, torch.bfloat16, "int4")
    assert size % 64 == 0 and size > 2 * 20 * 36
    blob = torch.full((2, size + 128), 0x55, dtype=torch.uint8)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    pools.store(blob[:, 64:-64], slots, "int4")
    assert (blob[:, :64] == 0x55).all() and (blob[:, -64:] == 0x55).all()
    assert (blob[:, 64 + 2 * 20 * 36 : -64] == 0).all()
    back.load(blob[:, 64:-64], slots, "int4")
    whole, _ = round_trip(pools, "int4")
    for i in range(SLOTS):
        want = whole.k[i] if i != 1 else torch.zeros_like(whole.k[1])
        assert torch.equal(back.k[i], want)
    one = pools.empty()
    for i in range(SLOTS):
        section, slot = torch.empty(1, size, dtype=torch.uint8), all_slots()[i : i + 1]
        assert pools.store(section, slot, "int4") == [True]
        one.load(section, slot, "int4")
    assert torch.equal(one.k, whole.k) and torch.equal(one.v, whole.v)
    back.load(blob[:0, 64:-64], slots[:0], "int4")


@pytest.mark.parametrize(
    ("dtype", "format", "size"),
    [("bfloat16", "raw", 4), ("float32", "raw", 8), ("int8", "raw", 2.0625), ("bfloat16", "int8", 2.0625),
     ("bfloat16", "int4", 1.125), ("float32", "int4", 1.125), ("int8", "int4", 1.125)],
)  # fmt: skip
def test_sizes(dtype: str, format: Any, size: float) -> None:
    """Bytes for a key and a value."""
    assert chunk_formats.kv_bytes(8, 128, getattr(torch, dtype), format) == size * 8 * 128 * 64
    assert dtype == "int8" or chunk_formats.x_bytes(512, getattr(torch, dtype), format) <= size * 512 * 64 / 2


@pytest.mark.skipif(not cpu.available(), reason=str(cpu.unavailable_reason()))
def test_the_kernels_own_layout_is_the_default() -> None:
    for dim in (20, 64):
        k, v = drawn(torch.bfloat16, dim).plain
        own = cpu.arrange(Pool(k, v))
        assert reference.layout(torch.bfloat16, dim) == "plain"
        sections = torch.empty(SLOTS, chunk_formats.kv_bytes(2, dim, torch.bfloat16, "raw"), dtype=torch.uint8)
        chunk_formats.store_kv_many(sections, own, all_slots(), "raw")
        assert torch.equal(sections[1], torch.cat([bits(x[1]).flatten() for x in (k, v)]))


@SHARED
def test_refusals() -> None:
    pools, section = drawn(torch.bfloat16), drawn(torch.bfloat16).section("raw")
    good = (section, pools.pool, all_slots(), "raw")
    for place, bad, message in (
        (0, section[:, :-1], "buffer must be"),
        (0, section[:2], "buffer must be"),
        (0, section.view(torch.int8), "buffer must be"),
        (1, replace(pools.pool, k=pools.k[:, :, :20]), "k_pool must be"),
        (1, replace(pools.pool, v=pools.v.float()), "v_pool must be"),
        (2, all_slots().long(), "slots must be"),
        (2, all_slots() + 1, r"slots\[2\] is 3|slots must be"),
        (2, all_slots() - 1, r"slots\[0\] is -1|slots must be"),
        (3, "int2", "formats: raw, int8, int4"),
    ):
        for move in (chunk_formats.store_kv_many, chunk_formats.load_kv_many):
            args: list[Any] = list(good)
            args[place] = bad
            with pytest.raises(ValueError, match=message):
                move(*args, layout="plain")
    int8 = drawn(torch.int8)
    scaled = Pool(pools.k, pools.v, *int8.scales)
    with pytest.raises(ValueError, match="int8 pools, and no others"):
        chunk_formats.store_kv_many(section, scaled, all_slots(), "raw")
    with pytest.raises(ValueError, match="int8 pools, and no others"):
        chunk_formats.store_kv_many(int8.section("raw"), Pool(int8.k, int8.v), all_slots(), "raw", layout="plain")
    with pytest.raises(ValueError, match="say dtype or layout"):
        chunk_formats.store_kv_many(int8.section("raw"), int8.pool, all_slots(), "raw")
    with pytest.raises(ValueError, match="activations must be"):
        chunk_formats.store_x_many(section, torch.zeros(3, 64, 2, dtype=torch.int8), all_slots(), "raw")
    odd = torch.empty(SLOTS, section.shape[1] + 2, dtype=torch.uint8)[:, 2:]
    with pytest.raises(ValueError, match="multiples of 4"):
        chunk_formats.store_kv_many(odd, *good[1:], layout="plain")
