"""Reading a text that is still being written, and telling what was read in parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from headrace.server.turn import Tool

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reading yields where it needs more text, and returns what it has read."""
Sink = Callable[[str], None]

SPACE = re.compile(r"\s+")


class Marks:
    """Texts that are looked for. None of them may contain another."""

    def __init__(self, *marks: str) -> None:
        self.marks = marks
        self._any = re.compile("|".join(re.escape(mark) for mark in marks))
        self._begins = frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))
        self._longest = max(len(mark) for mark in marks) - 1

    def find(self, text: str, at: int) -> tuple[int, str]:
        """Where the first mark begins, and which; or what may still become one at the end of the text, and ''."""
        if found := self._any.search(text, at):
            return found.start(), found[0]
        for begin in range(max(at, len(text) - self._longest), len(text)):
            if text[begin:] in self._begins:
                return begin, ""
        return len(text), ""


@lru_cache(maxsize=64)
def marks_of(*marks: str) -> Marks:
    """The same object for the same marks: parsers are made for every answer."""
    return Marks(*marks)


class Reader:
    """Text that comes in pieces. What a reading gives is a function of the whole text, however it was cut: a reading
    decides when the text so far leaves no choice, or has ended. At most the beginning of a mark stays unread.

    From `hold` on, what is read is kept, until `drop` or `release`.
    """

    def __init__(self) -> None:
        self._text, self._at, self._closed = "", 0, False
        self._held: list[str] | None = None

    def feed(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def close(self) -> None:
        """No more text comes."""
        self._closed = True

    @property
    def unread(self) -> int:
        return len(self._text) - self._at

    def hold(self, before: str = "") -> None:
        """Keeps what is read from here on, after what is kept already. before: text just read that belongs to it."""
        self._held = [*(self._held or ()), before]

    def drop(self) -> None:
        self._held = None

    def release(self) -> str:
        held, self._held = "".join(self._held or ()), None
        return held

    def rest(self) -> str:
        """Reads all that is there."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        piece, self._at = self._text[self._at : end], end
        if self._held is not None and piece:
            self._held.append(piece)
        return piece

    # ---- readings --------------------------------------------------------------------------------------------------

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; '' at the end of the text."""
        while self._at == len(self._text):
            if self._closed:
                return ""
            yield
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Reads what is there of the characters that the pattern (one or more of a set) matches; '' where the next is
        another. The run may go on after it."""
        if not (yield from self.peek()):
            return ""
        found = pattern.match(self._text, self._at)
        return self._take(found.end()) if found else ""

    def whole(self, pattern: re.Pattern[str], most: int) -> Reading[str | None]:
        """A whole run; None, with the rest unread, if it has more than `most` characters."""
        found, size = [], 0
        while piece := (yield from self.run(pattern)):
            found.append(piece)
            size += len(piece)
            if size > most:
                return None
        return "".join(found)

    def skip_space(self) -> Reading[None]:
        while (yield from self.run(SPACE)):
            pass

    def literal(self, text: str) -> Reading[bool]:
        """Reads this text if it comes next."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._take(self._at + len(text))
                return True
            if not text.startswith(there) or self._closed:
                return False
            yield

    def coming(self, *texts: str) -> Reading[str]:
        """Which of these texts comes next, and stays unread; '' if none. None of them may begin with another."""
        longest = max(map(len, texts))
        while True:
            there = self._text[self._at : self._at + longest]
            found = next((text for text in texts if there.startswith(text)), "")
            if found or self._closed or not any(text.startswith(there) for text in texts):
                return found
            yield

    def bounded(self, end_of: Callable[[str, int], int], sink: Sink) -> Reading[bool]:
        """Hands text to `sink` until `end_of` (the text, and from where it is new) says where it ends, -1: after it.
        False at the end of the text."""
        while True:
            end = end_of(self._text, self._at)
            if piece := self._take(len(self._text) if end < 0 else end):
                sink(piece)
            if end >= 0 or self._closed:
                return end >= 0
            yield

    def cut(self, *texts: str) -> bool:
        """Whether the text ended within one of these, none of which came whole; reads what there is of it, if so."""
        if not self._closed or self.unread >= max(map(len, texts)):
            return False
        rest = self._text[self._at :]
        found = any(text.startswith(rest) for text in texts)
        if found:
            self._take(len(self._text))
        return found

    def until(self, marks: Marks, sink: Sink) -> Reading[str]:
        """Hands all text before the first mark to `sink`, piece by piece; the mark, read and not handed over, or '' at
        the end of the text."""
        while True:
            begin, mark = marks.find(self._text, self._at)
            if not mark and self._closed:
                begin = len(self._text)
            if piece := self._take(begin):
                sink(piece)
            if mark:
                self._take(begin + len(mark))
                return mark
            if self._closed:
                return ""
            yield


class Flow:
    """Text around calls: white space at its ends is left out where calls stand; text without calls stays as it is."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: list[str] = []
        self.told = self._after_gap = self._gaps = False

    def text(self, piece: str) -> None:
        if self._after_gap:
            piece = piece.lstrip()
        body = piece.rstrip()
        if body:
            self._sink("".join([*self._pending, body]))
            self.told, self._after_gap, self._pending = True, False, []
        if piece[len(body) :]:
            self._pending.append(piece[len(body) :])

    def gap(self) -> None:
        """A call stands here."""
        self._after_gap = self._gaps = True
        if not self.told:
            self._pending = []

    def part(self) -> None:
        """The text that follows is a message of its own, on a line of its own."""
        if self.told:
            self._pending.append("\n")

    def finish(self) -> None:
        if not self._gaps and self._pending:
            self._sink("".join(self._pending))
        self._pending = []


class Parser:
    """An OutputParser around one reading, `read`. It tells text by `flow`, calls by `start` and `arguments`.

    new_id: makes the id of a call. tools: those of the request; none where calls are text.
    """

    def __init__(self, new_id: Callable[[], str], tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.reader = Reader()
        self._out: list[Part] = []
        self._new_id = new_id
        self.calls = 0
        self.flow = Flow(lambda text: self._out.append(TextPart(text)))
        self._reading = self.read()

    def read(self) -> Reading[None]:
        raise NotImplementedError

    def start(self, name: str, call_id: str | None = None) -> int:
        """Begins a call, whose text so far was held, and gives its number."""
        self.reader.drop()
        self.flow.gap()
        self._out.append(CallStart(self.calls, call_id or self._new_id(), name))
        self.calls += 1
        return self.calls - 1

    def arguments(self, number: int, text: str) -> None:
        if text:
            self._out.append(CallArguments(number, text))

    def reasoning(self, text: str) -> None:
        self._out.append(ReasoningPart(text))

    def fail(self) -> str:
        """What was held is text after all."""
        held = self.reader.release()
        self.flow.text(held)
        return held

    def push(self, text: str) -> list[Part]:
        self.reader.feed(text)
        next(self._reading, None)
        return self._told()

    def finish(self) -> list[Part]:
        self.reader.close()
        next(self._reading, None)
        self.flow.finish()
        return self._told()

    def _told(self) -> list[Part]:
        out, self._out[:] = list(self._out), []
        return joined(out)


def joined(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind as one part."""
    found: list[Part] = []
    for _, same in groupby(parts, lambda part: (type(part), getattr(part, "number", None))):
        first, *more = same
        if more and not isinstance(first, CallStart):
            first = first._replace(
                text="".join(part.text for part in (first, *more) if not isinstance(part, CallStart))
            )
        found.append(first)
    return found
