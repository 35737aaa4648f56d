"""Python literals as JSON text, while they are written: strings, numbers, True, False, None, lists, tuples, dicts."""

from __future__ import annotations

import ast
import json
import math
import re

from headrace.server.parsers.scan import Reader, Reading, Sink

MOST_DEPTH = 64
_WORD_LIMIT = 400
_WORD = re.compile(r"[\w.+\-]+")
_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {**{c: "\\" + c for c in 'nrtbf\\"'}, "'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b"}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def literal(reader: Reader, sink: Sink, depth: int = 0) -> Reading[bool]:
    """Hands a literal to `sink` as JSON text as it comes; whether it is whole. Where it is none, is cut, or has more
    than MOST_DEPTH levels, what remains of it is held or unread."""
    first = yield from reader.peek()
    if first in ("'", '"') and first:
        return (yield from _string(reader, sink))
    if first and first in _CLOSING:
        return depth < MOST_DEPTH and (yield from _several(reader, sink, first, depth + 1))
    word = yield from _word(reader)
    if word:
        reader.drop()
        sink(word)
    return bool(word)


def _word(reader: Reader) -> Reading[str]:
    """A number, True, False or None as JSON; '' if it is none, and then it is held."""
    reader.hold()
    text = yield from reader.whole(_WORD, _WORD_LIMIT)
    if not text or not (yield from reader.peek()):
        return ""
    if text in _WORDS or _NUMBER.fullmatch(text):
        return _WORDS.get(text, text)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return ""
    return json.dumps(found) if isinstance(found, int | float) and math.isfinite(found) else ""


def _several(reader: Reader, sink: Sink, opening: str, depth: int) -> Reading[bool]:
    """A list, tuple or dict."""
    closing = _CLOSING[opening]
    yield from reader.literal(opening)
    sink("{" if opening == "{" else "[")
    between = ""
    while True:
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(closing)):
            break
        if (yield from reader.peek()) in ("", ","):
            return False
        reader.drop()
        sink(between)
        between = ", "
        if opening == "{" and not (yield from _key(reader, sink)):
            return False
        if not (yield from literal(reader, sink, depth)):
            return False
        reader.hold()
        yield from reader.skip_space()
        if not (yield from reader.literal(",")):
            if not (yield from reader.literal(closing)):
                return False
            break
    reader.drop()
    sink("}" if opening == "{" else "]")
    return True


def _key(reader: Reader, sink: Sink) -> Reading[bool]:
    if (yield from reader.peek()) in ("'", '"'):
        if not (yield from _string(reader, sink)):
            return False
        reader.hold()
    else:
        word = yield from _word(reader)
        if not word:
            return False
        sink(json.dumps(word))
    yield from reader.skip_space()
    if not (yield from reader.literal(":")):
        return False
    sink(": ")
    reader.drop()
    yield from reader.skip_space()
    return True


def _string(reader: Reader, sink: Sink) -> Reading[bool]:
    quote = yield from reader.peek()
    end = quote
    if (yield from reader.literal(quote * 3)):
        end = quote * 3
    else:
        yield from reader.literal(quote)
    sink('"')
    while not (yield from reader.literal(end)):
        if piece := (yield from reader.run(_PLAIN)):
            sink(piece)
            continue
        char = yield from reader.peek()
        if not char:
            return False
        yield from reader.literal(char)
        sink((yield from _escape(reader)) if char == "\\" else json.dumps(char)[1:-1])
    sink('"')
    return True


def _escape(reader: Reader) -> Reading[str]:
    """What follows a backslash, as JSON writes it."""
    letter = yield from reader.peek()
    if letter in _HEX:
        yield from reader.literal(letter)
        return _of_code(letter, (yield from _some(reader, "0123456789abcdefABCDEF", _HEX[letter])), 16, _HEX[letter])
    if letter and letter in "01234567":
        return _of_code("", (yield from _some(reader, "01234567", 3)), 8, 1)
    yield from reader.literal(letter)
    return _ESCAPES.get(letter, "\\\\" + letter) if letter else ""


def _some(reader: Reader, letters: str, most: int) -> Reading[str]:
    found = ""
    while len(found) < most and (letter := (yield from reader.peek())) and letter in letters:
        yield from reader.literal(letter)
        found += letter
    return found


def _of_code(letter: str, digits: str, base: int, least: int) -> str:
    code = int(digits, base) if len(digits) >= least else -1
    return json.dumps(chr(code))[1:-1] if 0 <= code < 0x110000 else "\\\\" + letter + digits
