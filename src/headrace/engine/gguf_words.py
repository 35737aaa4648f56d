"""How text is cut into words before byte-level BPE: what tokenizer.ggml.pre names, as the models' own tokenizer.json do
it. llama.cpp's names: conversion/base.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"|\s{1}"
)
"""Runs of spaces by powers of 2."""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def _by_capitals(ends: str, digits: str, but: str = "", breaks: str = r"[\r\n/]*") -> str:
    """Words by their capitals. ends: what may end one; digits: how many make one; but: letters of no word; breaks: what
    punctuation takes in."""
    before = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    letters = f"{before}{upper}*{lower}+{ends}|{before}{upper}+{lower}*{ends}"
    return rf"{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{breaks}|\s*[\r\n]+|\s+(?!\S)|\s+"


SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
TEKKEN = _by_capitals("", r"\p{N}")
GPT4O = _by_capitals(SHORT, r"\p{N}{1,3}")
KIMI_K2 = r"[\p{Han}]+|" + _by_capitals(SHORT, r"\p{N}{1,3}", r"&&[^\p{Han}]", r"[\r\n]*")
YOUTU = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+|"
    r"[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+|"
    r"[\u3105-\u312F]+|[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    _by_capitals(SHORT, r"\p{N}"),
)
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
"""Digits by three, counted from their end."""
MINICPM5 = (r"\p{N}{1,3}", LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
SEED = QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}]+")
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Tokens of several words."""

CASED = (
    r"A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293\u0295-\u02AF\u0370-\u0373\u0376\u0377"
    r"\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556"
    r"\u10A0-\u10C5\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77\u1D79-\u1D9A\u1E00-\u1F15"
    r"\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE"
    r"\u1FC2-\u1FC4\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107\u210A-\u2113"
    r"\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184"
    r"\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E"
    r"\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A\x{10400}-\x{1044F}\x{104B0}-\x{104D3}"
    r"\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
"""Letters that have a case, as DeepSeek-V2's tokenizer.json lists them: some scripts and newer ones are not there."""
EAST_ASIAN = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{CASED}]+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    r"\s+$",
    EAST_ASIAN,
)
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    r"[\u4E00-\u9FFF\u3400-\u4DBF\uF900-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+",
    DEEPSEEK_V3[-1],
)
"""Digits by three, counted from their end; scripts without spaces."""

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Words:
    """steps: one pre-tokenizer after another, of which one makes bytes of text. normal: text is brought to NFC. whole:
    a word that is a token is not put together from merges. begins: a text begins with the token for that, where the
    file does not say."""

    steps: tuple[Step, ...]
    normal: bool = False
    whole: bool = False
    begins: bool = False


def _bytes(words: bool) -> Step:
    """words: by gpt-2's."""
    return lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _split(regex: str) -> Step:
    return lambda: pre_tokenizers.Split(Regex(regex), "isolated")


def _cut(*regexes: str, then: tuple[Step, ...] = ()) -> tuple[Step, ...]:
    """By one after another."""
    return (*map(_split, regexes), *then, _bytes(False))


def _digits(apart: bool) -> Step:
    return lambda: pre_tokenizers.Digits(individual_digits=apart)


def _punctuation() -> Any:
    return pre_tokenizers.Punctuation("contiguous")


def _threes() -> Any:
    return pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")


V3 = Words(_cut(*DEEPSEEK_V3))
PLAIN, LLAMA = Words((_bytes(True),)), Words(_cut(LLAMA3), whole=True, begins=True)
DIGITS = Words((_digits(True), _bytes(True)))
QWEN = Words(_cut(QWEN2), normal=True)
FALCON = Words((_punctuation, _bytes(True), _digits(False), _threes))
WORDS = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum"), PLAIN),
    "olmo": Words(PLAIN.steps, normal=True),
    **dict.fromkeys(("smollm", "refact", "starcoder", "minerva-7b", "mellum2"), DIGITS),
    "command-r": Words(DIGITS.steps, normal=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), LLAMA),
    "smaug-bpe": Words(LLAMA.steps, whole=True),
    **dict.fromkeys(("dbrx", "glm4", "chatglm-bpe"), Words(LLAMA.steps)),
    "minicpm5": Words(_cut(*MINICPM5), whole=True), "jais-2": Words(_cut(JAIS2)),
    "qwen2": QWEN, "deepseek-r1-qwen": QWEN, "qwen35": Words(_cut(QWEN3_5), normal=True),
    "hunyuan": Words(QWEN.steps, normal=True, whole=True), "seed-coder": Words(_cut(SEED)),
    "tekken": Words(_cut(TEKKEN), whole=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), Words(_cut(GPT4O))),
    "tiny_aya": Words(_cut(*TINY_AYA)), "kimi-k2": Words(_cut(KIMI_K2), whole=True),
    "afmoe": Words(_cut(*AFMOE)), "youtu": Words(_cut(*YOUTU), whole=True), "exaone-moe": Words(_cut(EXAONE_MOE)),
    "deepseek-llm": Words(_cut(*DEEPSEEK, then=(_digits(True),))),
    "deepseek-coder": Words(_cut(*DEEPSEEK_CODER, then=(_digits(True),))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), V3),
    "falcon": FALCON, "default": FALCON,
}  # fmt: skip
"""default: llama.cpp's rules where it knows no better, which are Falcon's."""
