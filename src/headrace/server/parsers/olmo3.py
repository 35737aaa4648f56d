"""OLMo 3: <function_calls>f(a=1, b="x")</function_calls>, each call on a line of its own."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers import pythonic
from headrace.server.parsers.lark import Grammar
from headrace.server.parsers.scan import Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<function_calls>", "</function_calls>"


class Olmo3Parser(pythonic.PythonicParser):
    """The calls of Llama 4 without their list, between marks."""

    def read(self) -> Reading[None]:
        reader, marks = self.reader, marks_of(BEGIN)
        while (yield from reader.until(marks, self.flow.text)):
            begun = self.calls
            reader.hold(BEGIN)
            yield from reader.skip_space()
            while (yield from self._one()):
                reader.hold()
                yield from reader.skip_space()
            if self.calls > begun and ((yield from reader.literal(END)) or reader.cut(END)):
                reader.drop()
            else:
                self.fail()


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    begin, end = (grammar.text(mark, (BEGIN, END)) for mark in (BEGIN, END))
    calls = grammar.several(pythonic.any_call(grammar, tools), "\n", most)
    return f"{begin} {calls} {end}"
