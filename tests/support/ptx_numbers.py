"""What PTX's arithmetic gives, on raw registers: uint64 [n], one for each thread.

Sums of tensor cores and approximations (ex2, rcp) are the CPU's own: near a GPU's, not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.ptx_memory import Fault, Words

U = np.uint64
FLOATS = {"f16": np.float16, "f32": np.float32, "f64": np.float64}
Numbers = Any
"""An array of numbers."""


def dtype_of(kind: str) -> np.dtype[Any]:
    if kind in FLOATS:
        return np.dtype(FLOATS[kind])
    return np.dtype({"s": "i", "u": "u", "b": "u"}[kind[0]] + str(int(kind[1:]) // 8))


def numbers(raw: Words, kind: str) -> Numbers:
    """What registers hold, by their type; bf16 as fp32."""
    if kind == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    wanted = dtype_of(kind)
    return raw.astype(f"u{wanted.itemsize}").view(wanted)


def raw_of(values: Numbers, kind: str = "") -> Words:
    """Numbers as registers hold them. kind: bf16 rounds fp32 to that."""
    if kind == "bf16":
        bits = values.astype(np.float32).view(np.uint32).astype(U)
        rounded = (bits + U(0x7FFF) + ((bits >> U(16)) & U(1))) >> U(16)
        return np.where(np.isnan(values), U(0x7FFF), rounded)
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(U)


def masked(raw: Words, kind: str) -> Words:
    return raw if kind == "pred" or kind.endswith("64") else raw & U((1 << int(kind[1:])) - 1)


def compute(op: Sequence[str], raws: Sequence[Words]) -> Words:
    """op: an instruction's name and what follows its dots, its type last."""
    name, kind = op[0], op[-1]
    if kind == "pred":
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name](*raws)
    if kind.endswith("x2"):
        half = kind[:-2]
        width = int(half.lstrip("bf"))
        low, high = (
            compute([*op[:-1], half], [raw >> U(begin) & U((1 << width) - 1) for raw in raws]) for begin in (0, width)
        )
        return low | high << U(width)
    if name in ("shl", "shr"):
        return _shifted(name, kind, *raws)
    if "wide" in op:
        wide = np.int64 if kind[0] == "s" else np.uint64
        product = numbers(raws[0], kind).astype(wide) * numbers(raws[1], kind).astype(wide)
        return raw_of(product) + (raws[2] if len(raws) > 2 else U(0))
    x = [numbers(raw, kind) for raw in raws]
    if name not in ARITHMETIC:
        raise Fault(f"unknown instruction {'.'.join(op)}")
    made = ARITHMETIC[name](op, *x)
    return raw_of(made, kind) if kind == "bf16" else raw_of(made.astype(x[0].dtype))


def _shifted(name: str, kind: str, raw: Words, by: Words) -> Words:
    width = int(kind[1:])
    by, far = np.minimum(by & U(0xFFFFFFFF), U(63)), (by & U(0xFFFFFFFF)) >= U(width)
    if name == "shl":
        return masked(np.where(far, U(0), raw << by), kind)
    if kind[0] == "s":
        signed = numbers(raw, kind).astype(np.int64) >> np.minimum(by, U(width - 1)).astype(np.int64)
        return raw_of(signed.astype(dtype_of(kind)))
    return np.where(far, U(0), masked(raw, kind) >> by)


def _least(op: Sequence[str], x: Numbers, y: Numbers) -> Numbers:
    if "xorsign" in op:
        return np.where(np.signbit(x) ^ np.signbit(y), -1, 1) * np.fmin(abs(x), abs(y))
    return np.minimum(x, y) if "NaN" in op else np.fmin(x, y)


def _product(op: Sequence[str], x: Numbers, y: Numbers) -> Numbers:
    if "hi" not in op:
        return x * y
    bits = 8 * x.dtype.itemsize
    return np.array([int(a) * int(b) >> bits for a, b in zip(x, y, strict=True)], x.dtype)


def _divided(op: Sequence[str], x: Numbers, y: Numbers) -> Numbers:
    if op[-1] in FLOATS:
        return x / y
    return np.trunc(x.astype(np.float64) / np.where(y == 0, 1, y))


ARITHMETIC: dict[str, Callable[..., Numbers]] = {
    "add": lambda op, x, y: x + y,
    "sub": lambda op, x, y: x - y,
    "mul": _product,
    "mad": lambda op, x, y, z: x * y + z,
    "fma": lambda op, x, y, z: x.astype(np.float64) * y + z,
    "div": _divided,
    "rem": lambda op, x, y: np.fmod(x, np.where(y == 0, 1, y)),
    "max": lambda op, x, y: np.maximum(x, y) if "NaN" in op else np.fmax(x, y),
    "min": _least,
    "abs": lambda op, x: abs(x),
    "neg": lambda op, x: -x,
    "not": lambda op, x: ~x,
    "and": lambda op, x, y: x & y,
    "or": lambda op, x, y: x | y,
    "xor": lambda op, x, y: x ^ y,
    "ex2": lambda op, x: np.exp2(x),
    "lg2": lambda op, x: np.log2(x),
    "rcp": lambda op, x: 1 / x,
    "sqrt": lambda op, x: np.sqrt(x),
    "rsqrt": lambda op, x: 1 / np.sqrt(x),
}

COMPARED: dict[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def compare(how: str, kind: str, left: Words, right: Words) -> Words:
    x, y = numbers(left, kind), numbers(right, kind)
    none = (x != x) | (y != y)
    if how in ("nan", "num"):
        return (none if how == "nan" else ~none).astype(U)
    if how in COMPARED:
        return (COMPARED[how](x, y) & ~none).astype(U)
    return (COMPARED[how.removesuffix("u")](x, y) | none).astype(U)


def convert(op: Sequence[str], raws: Sequence[Words]) -> Words:
    source, target = op[-1], op[-2]
    if target == "bf16x2":
        high, low = (raw_of(numbers(raw, source), "bf16") for raw in raws)
        return high << U(16) | low
    x = numbers(raws[0], source)
    if target == "bf16":
        return raw_of(x, "bf16")
    if (target[0] in "su" and source[0] == "f") or "rzi" in op or "rni" in op:
        x = np.nan_to_num(np.rint(x) if "rni" in op else np.trunc(x))
        if target[0] in "su":
            limits = np.iinfo(dtype_of(target))
            x = np.clip(x, limits.min, limits.max)
    made = x.astype(dtype_of(target))
    return raw_of(made.astype(np.int64) if target[0] == "s" else made)  # narrow ones fill their register


def funnelled(op: Sequence[str], low: Words, high: Words, by: Words) -> Words:
    """shf: 32 bits of 64, shifted; `wrap` takes the last five bits of `by`."""
    if op[-1] != "b32" or "wrap" not in op:
        raise Fault(f"unknown instruction {'.'.join(op)}")
    both, by = high << U(32) | (low & U(0xFFFFFFFF)), by & U(31)
    return (both << by >> U(32) if "l" in op else both >> by) & U(0xFFFFFFFF)


def inserted(bits: Words, into: Words, first: Words, count: Words) -> Words:
    """bfi: the last `count` bits, in place of those from `first` on."""
    places = ((U(1) << count) - U(1)) << first
    return into & ~places | bits << first & places


def permuted(low: Words, high: Words, chosen: Words) -> Words:
    """prmt: each byte by four bits, of which the last spreads the sign."""
    source, made = high << U(32) | (low & U(0xFFFFFFFF)), np.zeros_like(low)
    for byte in range(4):
        which = chosen >> U(4 * byte) & U(15)
        value = source >> ((which & U(7)) * U(8)) & U(255)
        spread = np.where(value & U(128), U(255), U(0))
        made |= np.where(which & U(8), spread, value) << U(8 * byte)
    return made


def chosen_bits(table: int, a: Words, b: Words, c: Words) -> Words:
    """lop3: any function of three bits."""
    made = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            made |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return made & U(0xFFFFFFFF)


def field(kind: str, raw: Words, begin: Words, length: Words) -> Words:
    """bfe: bits of a register, with their sign if it is signed."""
    bits = raw >> begin & ((U(1) << length) - U(1))
    if kind[0] == "s":
        bits = np.where(bits >> (length - U(1)) & U(1), bits | ~((U(1) << length) - U(1)), bits)
    return masked(bits, kind)
