r"""Regular expressions of clients, in the dialect that llguidance reads, with the same answers or fewer.

Clients write ECMA-262 (JSON Schema's `pattern`) or Python; the library reads Rust's dialect, where `[a&&b]`, `[[a]`,
`\d` and `.` mean other things. Where ECMA-262 and Python disagree about a class, such as `\d`, `\W` or `.`, the
characters are written on which both agree, so that either of them accepts each answer.

What a state machine cannot decide is refused: what looks around (`(?=`, `\b`), what refers back (`\1`). Upper bounds of
repetitions need no limit here, since the library counts instead of copying; lower ones do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from headrace.engine.structured.keywords import unwritable

MAX_GROUPS = 100
"""Groups inside groups; the library's own limit is 250, and its recursion ends the process when there is none."""

MAX_LEAST = 16_384
"""Characters that every match has at least, all alternatives together; the library looks ahead over forced text."""

_SPACE = r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}"
_FEW = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_PYTHON = {"d": r"\p{Nd}", "w": r"\p{L}\p{N}_", "s": _SPACE}
_MANY = {"d": r"\p{Nd}", "w": r"\p{Alphabetic}\p{M}\p{N}\p{Pc}", "s": _SPACE + r"\x1C-\x1F\u{85}\u{FEFF}"}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_CONTROL = {"t": r"\t", "n": r"\n", "r": r"\r", "v": r"\x0B", "f": r"\x0C", "0": r"\x00"}

_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]{1,64}\}")
_SINGLE = re.compile(r"\\(?:u\{|x)([0-9A-F]{1,6})\}?")
"""One character as it is written here."""
_GROUP = re.compile(r"\?(:|P?<[A-Za-z_]\w{0,63}>)")


class Unreadable(ValueError):
    """An expression that cannot be taken; the message says what and at which character."""


@dataclass(slots=True)
class _Reader:
    """One pass from left to right; `at` is the next character, `done` what is written of the ones before it."""

    text: str
    few: dict[str, str] = field(default_factory=lambda: _FEW)
    at: int = 0
    done: list[str] = field(default_factory=list)
    least: list[int] = field(default_factory=lambda: [0])
    last: int = 0
    """Characters at least: of each open group so far, and of what may be repeated next."""

    def fault(self, what: str) -> Unreadable:
        return Unreadable(f"{what} (character {self.at})")

    def matched(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        found = expression.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def next(self) -> str:
        if self.at >= len(self.text):
            raise self.fault("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def count(self, characters: int) -> None:
        self.last = characters
        self.least[-1] += characters
        if self.least[-1] > MAX_LEAST:
            raise self.fault(f"asks for more than {MAX_LEAST:,} characters")

    @property
    def ahead(self) -> str:
        return self.text[self.at : self.at + 1]


def translated(pattern: str, python: bool = False) -> str:
    """The expression in the library's dialect. `python`: \\d and \\w are those of Python, letters and digits of every
    script. Raises Unreadable."""
    reader, depth, repeatable = _Reader(pattern, _PYTHON if python else _FEW), 0, False
    while reader.ahead:
        char = reader.next()
        if char == "(":
            depth += 1
            _open(reader, depth)
        elif char == ")":
            depth -= 1
            if depth < 0:
                raise reader.fault("a ) without its (")
            reader.done.append(")")
            reader.count(reader.least.pop())
        elif char in "*+?" or (char == "{" and _COUNT.match(pattern, reader.at - 1)):
            _repeat(reader, char, repeatable)
        elif char == "{" and re.match(r",\d+\}", pattern[reader.at : reader.at + 12]):
            raise reader.fault("{,n} has two meanings: write {0,n}")
        else:
            reader.done.append(_one(reader, char))
            if not python and (found := _SINGLE.fullmatch(reader.done[-1])) and unwritable(chr(int(found[1], 16))):
                raise reader.fault("a control character, which answers do not contain: a class may have it")
            reader.count(1)
        repeatable = char not in "(|*+?{" or (char == "{" and reader.done[-1] == r"\{")
    if depth:
        raise reader.fault("a ( without its )")
    return "".join(reader.done)


def _open(reader: _Reader, depth: int) -> None:
    if depth > MAX_GROUPS:
        raise reader.fault(f"more than {MAX_GROUPS} groups inside one another")
    if reader.ahead == "?" and not reader.matched(_GROUP):
        if re.match(r"\?<?[=!]", reader.text[reader.at : reader.at + 3]):
            raise reader.fault("(?=, (?!, (?<= and (?<! look around, which is not supported: say what shall match")
        raise reader.fault("a group with flags is not supported: write (?: or (")
    reader.done.append("(?:")
    reader.least.append(0)


def _repeat(reader: _Reader, char: str, repeatable: bool) -> None:
    if not repeatable:
        raise reader.fault("nothing to repeat")
    if char == "{":
        reader.at -= 1
        found = reader.matched(_COUNT)
        assert found
        digits = (found[1], found[3] or found[1])
        low, high = (int(each) if len(each) < 11 else 1 << 32 for each in digits)  # int() refuses 4,301 digits
        if max(low, high) > 0xFFFFFFFF or low > high:
            raise reader.fault("a repetition's bounds must be in order and below 2^32")
        reader.least[-1] -= reader.last
        reader.count(reader.last * low)
        char = found[0]
    reader.done.append(char)
    if reader.ahead == "?":  # lazy: the same texts
        reader.at += 1
    elif reader.ahead == "+":
        raise reader.fault("possessive repetition is not supported")


def _one(reader: _Reader, char: str) -> str:
    """A character, a class or an anchor outside brackets."""
    if char == "[":
        return _brackets(reader)
    if char == ".":
        return _ANY
    if char in "^$|":
        return char
    if char != "\\":
        return _literal(char)
    letter = reader.ahead
    if letter and letter in "dws":
        reader.at += 1
        return f"[{reader.few[letter]}]"
    if letter and letter in "DWS":
        reader.at += 1
        return f"[^{_MANY[letter.lower()]}]"
    return _escape(reader)


def _escape(reader: _Reader) -> str:
    """What follows a backslash and is one character or a property, inside brackets and outside."""
    if found := reader.matched(_HEX):
        code = int(found[1] or found[2] or found[3], 16)
        if 0xD800 <= code < 0xDC00 and (low := re.match(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})", reader.text[reader.at :])):
            reader.at += low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise reader.fault("half of a surrogate pair")
        return f"\\u{{{code:X}}}"
    if found := reader.matched(_PROPERTY):
        return "\\" + found[0]
    char = reader.next()
    if char == "c" and reader.ahead.isascii() and reader.ahead.isalpha():
        return f"\\x{ord(reader.next()) & 31:02X}"
    if char == "0" and reader.ahead.isdigit():
        raise reader.fault("octal escapes are not supported: write \\xHH")
    if char in _CONTROL:
        return _CONTROL[char]
    if char.isdigit() or char == "k":
        raise reader.fault("references to groups are not supported")
    if char in "bB":
        raise reader.fault("\\b and \\B look around, which is not supported")
    if char.isalpha():
        raise reader.fault(f"\\{char} is no escape that is known here")
    return _literal(char)


def _literal(char: str) -> str:
    if "\ud800" <= char <= "\udfff":
        raise Unreadable("half of a surrogate pair")
    return f"\\u{{{ord(char):X}}}" if not char.isalnum() and char not in " _" else char


def _brackets(reader: _Reader) -> str:
    """A class; each item is written so that no two of them together mean something else in Rust."""
    negated = reader.ahead == "^"
    reader.at += negated
    items: list[str] = []
    while (char := reader.next()) != "]":
        low, single = _item(reader, char, negated)
        if single and reader.ahead == "-" and reader.text[reader.at + 1 : reader.at + 2] not in ("]", ""):
            before = reader.at
            reader.at += 1
            high, single = _item(reader, reader.next(), negated)
            if single:
                items.append(f"{low}-{high}")
                continue
            reader.at = before  # [a-\d]: the dash is a dash
        items.append(low)
    if not items:
        raise reader.fault("an empty class: write what it shall hold")
    return f"[{'^' * negated}{''.join(items)}]"


def _item(reader: _Reader, char: str, negated: bool) -> tuple[str, bool]:
    """One item of a class, and whether it is one character."""
    letter = reader.ahead
    if char == "\\" and letter and letter in "dwsDWS":
        reader.at += 1
        if letter.islower():
            return (_MANY if negated else reader.few)[letter], False
        return f"[^{(reader.few if negated else _MANY)[letter.lower()]}]", False
    if char == "\\" and letter == "b":
        reader.at += 1
        return r"\x08", True
    if char == "\\" and letter == "-":
        reader.at += 1
        return r"\-", True
    if char == "\\":
        one = _escape(reader)
        return one, not one.startswith(("\\p", "\\P"))
    return _literal(char), True
