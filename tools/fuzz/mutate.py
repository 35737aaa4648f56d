"""What attackers do to bytes and to JSON, drawn from a seeded source."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

EDGES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30]
TEXTS = ["", "0", "\x00", "\x1b[2J", "a\nINFO forged", "\u202e", "\ud800", "../../etc/passwd", "%s%n", "A" * 70_000]
FLOATS = [0.0, -0.0, 1e-320, 1e308, -1.0, float("nan"), float("inf"), float("-inf")]


def damaged(data: bytes, rng: Random) -> bytes:
    """The bytes with one to four faults: bits flipped, ends cut, pieces left out, repeated, overwritten, moved in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1) if rng.random() < 0.5 else min(len(out), rng.randrange(128))
        length = rng.choice((1, 2, 4, 8, 64, 4096))
        kind = rng.randrange(7)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + length]
        elif kind == 3:
            out[at:at] = out[at : at + length]
        elif kind == 4:
            out[at : at + length] = rng.choice((b"\x00", b"\xff", b"9", b"-")) * min(length, 64)
        elif kind == 5:
            out[at:at] = rng.randbytes(min(length, 64))
        else:
            out[at : at + 8] = rng.choice(EDGES).to_bytes(16, "little", signed=True)[:8]
    return bytes(out)


def odd(rng: Random, depth: int = 0) -> Any:
    """A JSON value that nobody expects."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice(EDGES)
    if kind == 3:
        return rng.choice(FLOATS)
    if kind == 4:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.randrange(-3, 300)
    if kind == 6:
        return [odd(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))]
    if kind == 7:
        return {rng.choice(TEXTS): odd(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))}
    return nested(rng.choice((10, 500, 100_000)))


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


def edited(value: Any, rng: Random) -> Any:
    """A copy of a JSON value with one to three odd values in it, fields left out or added."""
    out = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        out = _edit(out, rng)
    return out


def dumped(value: Any) -> str:
    """JSON text; of what is nested too deeply to be written, something nested as deeply."""
    try:
        return json.dumps(value)
    except RecursionError:
        return "[" * 100_000


def _edit(value: Any, rng: Random) -> Any:
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value, key=str))
        fate = rng.random()
        if fate < 0.15:
            del value[key]
        elif fate < 0.25:
            value[rng.choice(TEXTS)] = odd(rng)
        elif isinstance(value[key], dict | list) and fate < 0.7:
            value[key] = _edit(value[key], rng)
        else:
            value[key] = odd(rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        value[at] = _edit(value[at], rng)
        return value
    return odd(rng)
