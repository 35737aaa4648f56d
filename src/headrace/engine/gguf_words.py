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
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN3_5 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")


def _by_capitals(ends: str, digits: str) -> str:
    """Words by their capitals. ends: what may end one; digits: how many make one."""
    before, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    letters = f"{before}{upper}*{lower}+{ends}|{before}{upper}+{lower}*{ends}"
    return rf"{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


TEKKEN = _by_capitals("", r"\p{N}")
GPT4O = _by_capitals("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")

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


def _cut(regex: str) -> tuple[Step, ...]:
    return (lambda: pre_tokenizers.Split(Regex(regex), "isolated"), _bytes(False))


def _digits(apart: bool) -> Step:
    return lambda: pre_tokenizers.Digits(individual_digits=apart)


def _punctuation() -> Any:
    return pre_tokenizers.Punctuation("contiguous")


def _threes() -> Any:
    return pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")


PLAIN, LLAMA = Words((_bytes(True),)), Words(_cut(LLAMA3), whole=True, begins=True)
DIGITS = Words((_digits(True), _bytes(True)))
QWEN = Words(_cut(QWEN2), normal=True)
FALCON = Words((_punctuation, _bytes(True), _digits(False), _threes))
WORDS = {
    "gpt-2": PLAIN, "phi-2": PLAIN, "olmo": Words(PLAIN.steps, normal=True),
    "smollm": DIGITS, "refact": DIGITS, "starcoder": DIGITS,
    "llama-bpe": LLAMA, "llama3": LLAMA, "smaug-bpe": Words(LLAMA.steps, whole=True),
    "dbrx": Words(LLAMA.steps), "glm4": Words(LLAMA.steps), "chatglm-bpe": Words(LLAMA.steps),
    "qwen2": QWEN, "deepseek-r1-qwen": QWEN, "qwen35": Words(_cut(QWEN3_5), normal=True),
    "tekken": Words(_cut(TEKKEN), whole=True, begins=True), "gpt-4o": Words(_cut(GPT4O)),
    "falcon": FALCON, "default": FALCON,
}  # fmt: skip
"""default: llama.cpp's rules where it knows no better, which are Falcon's."""
