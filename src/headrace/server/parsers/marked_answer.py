"""An answer that stands between marks of its own, as HunYuan-A13B's does: <answer>...</answer>. What is in it is
another parser's."""

from __future__ import annotations

from headrace.server.parsers.parts import OutputParser, Part
from headrace.server.parsers.scan import Flow, Reader, Reading, joined, marks_of


class MarkedAnswerParser:
    """Leaves out the marks, and white space beside them; `inner` reads what is between and behind them. A text that
    does not begin with the mark `begin`, behind white space, goes to `inner` as it is."""

    def __init__(self, inner: OutputParser, begin: str, end: str) -> None:
        self._inner, self._begin, self._end = inner, begin, end
        self._reader = Reader()
        self._out: list[Part] = []
        self._reading = self._read()

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self._begin)):
            reader.drop()
            answer = Flow(self._hand)
            answer.gap()
            yield from reader.until(marks_of(self._end), answer.text)
            yield from reader.skip_space()
        self._hand(reader.release())
        while (yield from reader.peek()):
            self._hand(reader.rest())

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
