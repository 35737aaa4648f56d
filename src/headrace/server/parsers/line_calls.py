"""Calls that no mark announces: they stand where a line begins, and only names of the request's tools make them."""

from __future__ import annotations

from headrace.server.parsers.scan import SPACE, Parser, Reading, marks_of


class LineParser(Parser):
    """What begins a line (or the text, or follows a call) with one of `opening`, and is a call by `call`, is one; all
    else is text. So prose that quotes a call in its midst stays prose.

    marks: texts that may stand before a call, anywhere, and are left out there.
    """

    opening: str
    marks: tuple[str, ...] = ()

    def call(self) -> Reading[bool]:
        """Reads what may be a call, or several; whether there was one. The reader holds what is none."""
        raise NotImplementedError

    def read(self) -> Reading[None]:
        lines, mark = marks_of("\n", *self.marks), ""
        while mark or (yield from self.reader.peek()):
            while not mark and (space := (yield from self.reader.run(SPACE))):
                self.flow.text(space)
            self.reader.hold(mark)
            mark = ""
            yield from self.reader.skip_space()
            called = (yield from self._opening()) and (yield from self.call())
            held = self.fail()
            if called or (held.rstrip(" \t").endswith("\n") and (yield from self._opening())):
                continue
            mark = yield from self.reader.until(lines, self.flow.text)
            if mark == "\n":
                self.flow.text(mark)
                mark = ""

    def _opening(self) -> Reading[bool]:
        """Whether a character comes next with which calls begin."""
        return (yield from self.reader.peek()) in tuple(self.opening)
