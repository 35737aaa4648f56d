"""GLM-4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>.

GLM-4.5 and 4.6 write a line break behind the name and behind each key and value, GLM-4.7 writes none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT
from headrace.server.parsers.lark import Grammar, quoted
from headrace.server.parsers.marked import MarkedParser, Markup
from headrace.server.parsers.scan import SPACE, Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
_NAME = re.compile(r"[^\s<>{}\"]+")
_KEY = re.compile(r"[^\n<>]+")


class Glm45Parser(MarkedParser):
    """The marks say that a call comes, so a call of any name is told. Strings keep the white space at their ends."""

    value_end = VALUE_END
    key_begin, key_name, key_ends = KEY, _KEY, (KEY_END, VALUE)

    def read(self) -> Reading[None]:
        marks = marks_of(BEGIN)
        while (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(BEGIN)
            yield from self.reader.skip_space()
            if name := (yield from self._name()):
                yield from self.call(name)
            self.fail()

    def _name(self) -> Reading[str]:
        """The name of a call; '' where neither an argument nor the call's end follows it. White space or the beginning
        of a mark completes a name that the text's end cuts off from the rest."""
        reader = self.reader
        name = yield from reader.whole(_NAME, NAME_LIMIT)
        if not name:
            return ""
        spaced = yield from reader.run(SPACE)
        yield from reader.skip_space()
        called = (yield from reader.coming(KEY, END)) or ((spaced or reader.unread) and reader.cut(KEY, END))
        return name if called else ""

    def end(self) -> Reading[bool]:
        reader = self.reader
        yield from reader.skip_space()
        ended = yield from reader.literal(END)
        if ended or reader.cut(*MARKS[1:]):
            reader.drop()
        return ended


_LINE = quoted("\n") + "?"
"""A line break or none, as the model has learnt it."""


def _before_value(grammar: Grammar, name: str) -> str:
    return f"{grammar.text(f'{KEY}{name}{KEY_END}', MARKS)} {_LINE} {grammar.text(VALUE, MARKS)}"


_MARKUP = Markup("glm45", _KEY, _before_value, VALUE_END, _LINE, VALUE_END)


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """Raises InvalidRequest as Markup.arguments."""
    end = grammar.text(END, MARKS)
    calls = [
        f"{grammar.text(f'{BEGIN}{tool.name}', MARKS)} {_LINE} {_MARKUP.arguments(grammar, tool, end)}"
        for tool in tools
    ]
    return grammar.several(" | ".join(calls), "\n", most, optional=True)
