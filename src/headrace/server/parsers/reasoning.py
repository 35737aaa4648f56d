"""Reasoning before the answer: <think>...</think>, or [THINK]...[/THINK]. What follows is another parser's."""

from __future__ import annotations

from headrace.server.parsers.parts import OutputParser, Part, ReasoningPart
from headrace.server.parsers.scan import Flow, Reader, Reading, joined, marks_of


class ReasoningParser:
    """Splits reasoning from the answer, which `inner` reads. White space at both ends of the reasoning, and before the
    answer that follows it, is left out.

    The answer begins inside reasoning where `opened` (the template wrote the mark), else with the mark `begin`, which
    only white space may precede. Reasoning without an end goes on to the end of the text.
    """

    def __init__(self, inner: OutputParser, begin: str, end: str, opened: bool) -> None:
        self._inner, self._begin, self._end, self._opened = inner, begin, end, opened
        self._reader = Reader()
        self._out: list[Part] = []
        self._reading = self._read()

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self._begin)) or self._opened:
            yield from self._reason()
        self._hand(reader.release())
        while (yield from reader.peek()):
            self._hand(reader.rest())

    def _reason(self) -> Reading[None]:
        self._reader.drop()
        thought = Flow(lambda text: self._out.append(ReasoningPart(text)))
        thought.gap()
        yield from self._reader.until(marks_of(self._end), thought.text)
        yield from self._reader.skip_space()

    def _hand(self, text: str) -> None:
        if text:
            self._out += self._inner.push(text)

    def push(self, text: str) -> list[Part]:
        self._reader.feed(text)
        next(self._reading, None)
        return self._told()

    def finish(self) -> list[Part]:
        self._reader.close()
        next(self._reading, None)
        self._out += self._inner.finish()
        return self._told()

    def _told(self) -> list[Part]:
        out, self._out[:] = list(self._out), []
        return joined(out)
