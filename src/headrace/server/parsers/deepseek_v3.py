"""DeepSeek-V3, R1 and V3.1: calls between tokens of their own.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>...<｜tool▁call▁end｜>...<｜tool▁calls▁end｜>, and in each call, of V3.1,
NAME<｜tool▁sep｜>{...}, or, of V3 and R1, function<｜tool▁sep｜>NAME and the arguments as a block of code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT, value
from headrace.server.parsers.lark import Grammar
from headrace.server.parsers.scan import Parser, Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
MARKS = (BEGIN, END, CALL, SEP, CALL_END)
KIND, CODE, FENCE = "function", "```json", "```"
_NAME = re.compile(r"[^\s<{`]+")


class DeepSeekV3Parser(Parser):
    """Reads the calls of both. The marks say that a call comes, so a call of any name is told. Its arguments end where
    their JSON does; without arguments it is a call of none."""

    def read(self) -> Reading[None]:
        marks = marks_of(BEGIN, CALL)
        while mark := (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(mark)
            yield from self.reader.skip_space()
            if mark == CALL or (yield from self.reader.literal(CALL)):
                yield from self._call()
            self.fail()

    def _call(self) -> Reading[None]:
        """Reads a call behind its first mark; what is none, or follows a broken one, is left in what is held."""
        name = yield from self._name()
        if not name:
            return
        number, reader = self.start(name), self.reader
        yield from reader.skip_space()
        if (yield from reader.literal(CODE)) or reader.cut(CODE):
            yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            yield from value(reader, lambda piece: self.arguments(number, piece))
        elif (yield from reader.peek()):
            self.arguments(number, "{}")
        yield from self._end()

    def _name(self) -> Reading[str]:
        """The name of a call, with what stands before its arguments; '' if there is none, or if it may go on behind
        the text's end."""
        reader = self.reader
        yield from reader.skip_space()
        name = yield from reader.whole(_NAME, NAME_LIMIT)
        if not name or not (yield from reader.literal(SEP)):
            return ""
        if name != KIND:
            return name
        called = yield from reader.whole(_NAME, NAME_LIMIT)
        known = called is not None and (yield from reader.peek())
        return (called or name) if known else ""

    def _end(self) -> Reading[None]:
        """Leaves out the marks behind a call."""
        reader = self.reader
        reader.hold()
        yield from reader.skip_space()
        yield from reader.literal(FENCE)
        yield from reader.skip_space()
        if not (yield from reader.literal(CALL_END)):
            if reader.cut(FENCE, CALL_END):
                reader.drop()
            return
        reader.drop()
        reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(END)) or reader.cut(END):
            reader.drop()


def written(name: str, arguments: str) -> str:
    """An answer with one call."""
    return f"{BEGIN}{CALL}{KIND}{SEP}{name}\n{CODE}\n{arguments}\n{FENCE}{CALL_END}{END}"


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    calls, end = [], grammar.text(f"\n{FENCE}{CALL_END}", MARKS)
    for tool in tools:
        begin = grammar.text(f"{CALL}{KIND}{SEP}{tool.name}\n{CODE}\n", MARKS)
        calls.append(f"{begin} {grammar.arguments(tool)} {end}")
    return between_marks(grammar, grammar.several(" | ".join(calls), "\n", most))


def between_marks(grammar: Grammar, calls: str) -> str:
    return f"{grammar.text(BEGIN, MARKS)} {calls} {grammar.text(END, MARKS)}"
