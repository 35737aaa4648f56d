"""Bytes of a token as a vocabulary spells it, where a decoder works token by token: byte-level BPE, and the kinds of
sentencepiece with the space mark and byte fallback."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

PieceRule = Callable[[str], bytes]
"""From a token as the vocabulary spells it to the bytes it stands for inside a text."""


def piece_rule(decoder: Any) -> PieceRule | None:
    """The rule for a decoder of the tokenizers library, None where its tokens cannot be decoded one by one."""
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level
    marks = [mark for step in steps if (mark := _space_mark(step))]
    # Strip takes a space from the beginning of the whole text, but only after Fuse; before, from every token.
    if "Strip" in kinds and ("Fuse" not in kinds or kinds.index("Strip") < kinds.index("Fuse")):
        return None
    if len(marks) == 1 and all(_space_mark(step) or _is_neutral(step) for step in steps):
        mark, fallback = marks[0], "ByteFallback" in kinds
        return lambda piece: _marked(piece, mark, fallback)
    return None


def _space_mark(step: Mapping[str, Any]) -> str | None:
    """The character that this decoder step turns into a space, if that is what it does."""
    found: str | None = None
    if step["type"] == "Metaspace":
        found = step["replacement"]
    if step["type"] == "Replace" and step["content"] == " ":
        found = step["pattern"].get("String")
    return found


def _is_neutral(step: Mapping[str, Any]) -> bool:
    """Whether the step changes nothing inside a text, but for bytes and the text's first space."""
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] <= 1 and step["stop"] == 0)
    return step["type"] in ("ByteFallback", "Fuse")


def _marked(piece: str, mark: str, fallback: bool) -> bytes:
    if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(mark, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest from U+0100 on in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


_SPELLED = {byte: char for char, byte in _ALPHABET.items()}


def spelled(token: bytes) -> str:
    """As byte-level vocabularies spell it."""
    return "".join(_SPELLED[byte] for byte in token)


def _byte_level(piece: str) -> bytes:
    """An added token with a character outside the alphabet stands for itself, as in the tokenizers library."""
    try:
        return bytes([_ALPHABET[char] for char in piece])
    except KeyError:
        return piece.encode()
