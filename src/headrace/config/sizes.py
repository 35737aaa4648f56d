"""Sizes as people write them: 128k tokens, 16GiB, 500MiB."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Literal

Unit = Literal["tokens", "GiB", "MiB"]
"""What a plain number counts."""

THOUSANDS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
"""By the letter behind a number, in either case: 128k tokens are 131,072."""
NUMBER = r"(\d[\d_,]*(?:\.\d+)?|\.\d+)\s*"
TOKENS = re.compile(NUMBER + r"([kmg]?)")
BYTES = re.compile(NUMBER + r"(?:([kmgt])(i?b)?)?")
EXAMPLES = {"tokens": "131072, 128k or 1M", "GiB": "16, 16GiB, 1.5G or 500MiB", "MiB": "512, 512MiB or 1GiB"}


def parse_size(name: str, text: str, unit: Unit) -> int | float:
    """Tokens or MiB as an integer, GiB as a float. k, M, G and T count by 1,024, KB to TB by 1,000.

    Raises ValueError naming the setting, with examples.
    """
    with suppress(ValueError):
        return float(text) if unit == "GiB" else int(text)
    found = (TOKENS if unit == "tokens" else BYTES).fullmatch(text.strip().lower())
    if found is None:
        told = "a number of tokens" if unit == "tokens" else "a size"
        plain = "" if unit == "tokens" else f" (a plain number: {unit})"
        raise ValueError(f"{name} must be {told}, such as {EXAMPLES[unit]}{plain}, got {text!r}")
    number = float(found[1].replace("_", "").replace(",", ""))
    if unit == "tokens":
        return _whole(name, number * THOUSANDS[found[2]], text, "tokens")
    own = 1 << 30 if unit == "GiB" else 1 << 20
    size = number if not found[2] else number * _bytes(found[2], found[3]) / own
    return size if unit == "GiB" else _whole(name, size, text, "MiB")


def _bytes(letter: str, rest: str | None) -> int:
    return 1000 ** ("kmgt".index(letter) + 1) if rest == "b" else THOUSANDS[letter]


def _whole(name: str, value: float, text: str, what: str) -> int:
    """Whole tokens; MiB are cut off, but not to 0."""
    if what == "tokens" and value != int(value):
        raise ValueError(f"{name} must be whole tokens, such as {EXAMPLES['tokens']}, got {text!r}")
    return math.floor(value)
