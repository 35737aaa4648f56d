"""Texts for tokenizers: this repository's own, and characters of many scripts with what stands between words."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("docs/*.md", "src/headrace/engine/*.py", "csrc/*/*.cpp")
SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x590), (0x590, 0x700), (0x900, 0xE00), (0xE00, 0x1100), (0x1100, 0x1200),
    (0x1E00, 0x2000), (0x2000, 0x2C00), (0x3000, 0x3100), (0x3100, 0x3400), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4),
    (0xF900, 0xFB00), (0xFE00, 0x10000), (0x10400, 0x10450), (0x1D400, 0x1D800), (0x1E900, 0x1E960),
    (0x1F300, 0x1FA00), (0x20000, 0x20100),
)  # fmt: skip
BETWEEN = (
    "", " ", "  ", "\n", "\r\n", "\n\n", "\t", " \n ", "'s", "'LL", "\u2019s", "'", ".", "-", "/", "1", "123",
    "1234567", "\u00a0", "\u3000",
)  # fmt: skip
ODD = (
    "", " ", "   ", "\n\n\n", "\t\t x", "a  b   c", "hello\r\nworld\r\n\r\n", "don't DON'T we'Ll I'M", "3.14 1,234,567",
    "<|im_start|>user\nhi<|im_end|>", "<s>[INST] hi [/INST]", "<|start|>assistant<|channel|>final",
    "<|begin_of_text|>x<|eot_id|> y", "<\uff5cUser\uff5c>a<\uff5cAssistant\uff5c>",
    "<start_of_turn>user\nhi<end_of_turn>",
    "nai\u0308ve cafe\u0301 \u1100\u1161", "\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
)  # fmt: skip


def texts(count: int = 4000, seed: int = 1) -> list[str]:
    """So many drawn ones, and the others."""
    rng = random.Random(seed)
    files = [path for pattern in SOURCES for path in sorted(ROOT.glob(pattern))[:12]]
    drawn = ["".join(_word(rng) + rng.choice(BETWEEN) for _ in range(rng.randint(1, 12))) for _ in range(count)]
    return [*ODD, *drawn, *(path.read_text()[:20_000] for path in files)]


def _word(rng: random.Random) -> str:
    low, high = rng.choice(SCRIPTS)
    letters = (chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 5)))
    return "".join(letter for letter in letters if unicodedata.category(letter) not in ("Cs", "Cn"))
