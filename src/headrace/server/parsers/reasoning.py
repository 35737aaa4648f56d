"""What stands before the answer or around it, and is no part of it: reasoning, as <think>...</think>, and marks of the
answer's own, as HunYuan-A13B's <answer>...</answer>. The answer is another parser's."""

from __future__ import annotations

from headrace.server.parsers.parts import OutputParser, Part, ReasoningPart
from headrace.server.parsers.scan import Flow, Reader, Reading, joined, marks_of


class OuterParser:
    """Reads how a text begins, and hands the rest to `inner`. A text that begins otherwise than with the mark `begin`,
    behind white space, goes there as it is."""

    def __init__(self, inner: OutputParser, begin: str, end: str, opened: bool = False) -> None:
        self._inner, self._begin, self._end, self._opened = inner, begin, end, opened
        self._reader = Reader()
        self._out: list[Part] = []
        self._reading = self._read()

    def _read(self) -> Reading[None]:
        reader = self._reader
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self._begin)) or self._opened:
            reader.drop()
            within = Flow(self._tell)
            within.gap()
            yield from reader.until(marks_of(self._end), within.text)
            yield from reader.skip_space()
        self._hand(reader.release())
        while (yield from reader.peek()):
            self._hand(reader.rest())

    def _tell(self, text: str) -> None:
        """What stands between the marks, without white space at its ends."""
        raise NotImplementedError

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


class ReasoningParser(OuterParser):
    """Splits reasoning from the answer, which `inner` reads. White space at both ends of the reasoning, and before the
    answer that follows it, is left out.

    The answer begins inside reasoning where `opened` (the template wrote the mark), else with the mark `begin`, which
    only white space may precede. Reasoning without an end goes on to the end of the text.
    """

    def _tell(self, text: str) -> None:
        self._out.append(ReasoningPart(text))


class MarkedAnswerParser(OuterParser):
    """Leaves out the marks around an answer, and white space beside them; `inner` reads what is between and behind
    them."""

    def _tell(self, text: str) -> None:
        self._hand(text)
