"""Calls as JSON objects, {"name": ..., "arguments": {...}}, read while they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from headrace.server.parsers.scan import Parser, Reader, Reading, Sink

NAME_LIMIT = 256
"""Characters of a name or key; what is longer is no call."""
ARGUMENTS = ("arguments", "parameters")
_IDS = ("id", "call_id", "tool_call_id")
_PLAIN = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r'[^\s,:"{}\[\]]+')
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


def well_formed(text: str) -> str:
    """With U+FFFD for halves of surrogate pairs: JSON can spell them, and they are no text."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def string_text(reader: Reader, most: int | None) -> Reading[str | None]:
    """A JSON string's content, decoded; None where it is broken, cut, or longer than `most` characters."""
    if not (yield from reader.literal('"')):
        return None
    found, size = [], 0
    while True:
        piece = yield from reader.run(_PLAIN)
        if not piece:
            mark = yield from reader.peek()
            if mark != "\\":
                break
            yield from reader.literal("\\")
            if not (letter := (yield from reader.peek())):
                return None
            yield from reader.literal(letter)
            piece = mark + letter
        found.append(piece)
        size += len(piece)
        if most is not None and size > most:
            return None
    if not (yield from reader.literal('"')):
        return None
    try:
        return well_formed(json.loads('"' + "".join(found) + '"', strict=False))
    except ValueError:
        return None


class _Depth:
    """Where in a JSON value the text is: a counter of brackets, so that depth costs nothing."""

    def __init__(self) -> None:
        self.depth = 0
        self._string = self._escaped = False

    def end(self, text: str, at: int) -> int:
        """Where the value that began before ends in the text; -1 if after it."""
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while found := (_IN_STRING if self._string else _STRUCTURE).search(text, at):
            at = found.end()
            if found[0] == '"':
                self._string = not self._string
            elif found[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            else:
                self.depth += 1 if found[0] in "{[" else -1
            if self.depth == 0 and not self._string:
                return at
        return -1


def value(reader: Reader, sink: Sink) -> Reading[bool]:
    """Hands the raw text of one JSON value to `sink` as it comes; whether it is whole. Only strings and brackets are
    looked at: whether it is valid JSON is the client's to find out."""
    first = yield from reader.peek()
    if first not in ("{", "[", '"'):
        told = False
        while piece := (yield from reader.run(_SCALAR)):
            sink(piece)
            told = True
        return told and bool((yield from reader.peek()))
    return (yield from reader.bounded(_Depth().end, sink))


@dataclass(slots=True)
class _Fields:
    """What is known of a call object."""

    name: str = ""
    call_id: str | None = None
    number: int | None = None
    held: list[str] = field(default_factory=list)
    has_arguments: bool = False
    others: bool = False


class CallReader:
    """Reads call objects for a parser.

    eager: a mark said that calls come, so a call begins with its name, whichever it is. Otherwise objects may be
    anything: a call then has the name of one of `names` (any where empty) and an object of arguments, and begins with
    it. named: the key of its name. numbered: its id is a number within the turn, which is no id.
    """

    def __init__(
        self, parser: Parser, eager: bool, names: Collection[str] = (), named: str = "name", numbered: bool = False
    ) -> None:
        self._parser, self._reader, self._eager = parser, parser.reader, eager
        self._named, self._ids = named, () if numbered else _IDS
        self._names = frozenset(names)

    def objects(self) -> Reading[bool]:
        """Reads an object, or a list of them; whether there was a call. What follows the last call is unread. Where
        something is no call, it is left in what the reader holds (`Parser.fail`)."""
        reader, begun = self._reader, self._parser.calls
        listed = yield from reader.literal("[")
        while True:
            yield from reader.skip_space()
            whole = yield from self._object()
            if not whole or not listed:
                break
            reader.hold()
            yield from reader.skip_space()
            if not (yield from reader.literal(",")):
                if (yield from reader.literal("]")):
                    reader.drop()
                break
        if self._parser.calls > begun and not (yield from reader.peek()):
            reader.drop()
        return self._parser.calls > begun

    def _object(self) -> Reading[bool]:
        """Reads one object; whether it was a whole call."""
        if not (yield from self._reader.literal("{")):
            return False
        found = _Fields()
        if self._eager:
            yield from self._reader.skip_space()
            yield from self._reader.literal("{")  # some models write what their template shows: {{"name": ...}}
        whole = yield from self._fields(found)
        ended = not (yield from self._reader.peek()) and not whole
        if found.number is None and self._may_begin(found) and (whole or ended):
            if whole and not found.has_arguments and found.others and not self._eager:
                return False
            self._begin(found)
        if whole and found.number is not None and not found.has_arguments:
            self._parser.arguments(found.number, "{}")
        return whole and found.number is not None

    def _fields(self, found: _Fields) -> Reading[bool]:
        reader = self._reader
        while True:
            yield from reader.skip_space()
            key = yield from string_text(reader, NAME_LIMIT)
            if key is None:
                return False
            yield from reader.skip_space()
            if not (yield from reader.literal(":")):
                return False
            yield from reader.skip_space()
            if not (yield from self._field(key, found)):
                return False
            yield from reader.skip_space()
            if not (yield from reader.literal(",")):
                return (yield from reader.literal("}"))

    def _field(self, key: str, found: _Fields) -> Reading[bool]:
        if key == self._named and not found.name:
            found.name = (yield from string_text(self._reader, NAME_LIMIT)) or ""
            if self._eager and self._may_begin(found):
                self._begin(found)
            return self._may_begin(found)
        if key in ARGUMENTS and not found.has_arguments:
            return (yield from self._arguments(found))
        if key in self._ids and found.number is None and (yield from self._reader.peek()) == '"':
            found.call_id = yield from string_text(self._reader, NAME_LIMIT)
            return found.call_id is not None
        found.others = found.others or key != "type"
        return (yield from value(self._reader, lambda piece: None))

    def _arguments(self, found: _Fields) -> Reading[bool]:
        first = yield from self._reader.peek()
        if first != "{":
            return (yield from self._other_arguments(found, first))
        found.has_arguments = True
        if found.number is None and self._may_begin(found):
            self._begin(found)
        return (yield from value(self._reader, lambda piece: self._tell(found, piece)))

    def _other_arguments(self, found: _Fields, first: str) -> Reading[bool]:
        """Arguments as a string that holds their JSON, or null for none; otherwise they are told as they are."""
        if first == '"':
            text = yield from string_text(self._reader, None)
        else:
            pieces: list[str] = []
            whole = yield from value(self._reader, pieces.append)
            text = "".join(pieces) if whole else None
            text = "{}" if text == "null" else text
        if text is None or not (self._eager or text.lstrip().startswith("{")):
            return False
        found.has_arguments = True
        self._tell(found, text)
        if found.number is None and self._may_begin(found):
            self._begin(found)
        return True

    def _may_begin(self, found: _Fields) -> bool:
        return bool(found.name) and (self._eager or not self._names or found.name in self._names)

    def _begin(self, found: _Fields) -> None:
        found.number = self._parser.start(found.name, found.call_id)
        self._parser.arguments(found.number, "".join(found.held))
        found.held = []

    def _tell(self, found: _Fields, piece: str) -> None:
        if found.number is None:
            found.held.append(piece)
        else:
            self._parser.arguments(found.number, piece)
