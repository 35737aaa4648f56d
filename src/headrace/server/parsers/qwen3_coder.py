"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT
from headrace.server.parsers.lark import Grammar, quoted
from headrace.server.parsers.marked import MarkedParser, Markup
from headrace.server.parsers.scan import Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]+")
_KEY = re.compile(r"[^\n<>]+")


class Qwen3CoderParser(MarkedParser):
    """The marks say that a call comes, so a call of any name is told. first, last: those around a call."""

    value_end, breaks = PARAMETER_END, True
    key_begin, key_name, key_ends = PARAMETER, _KEY, (">",)
    first, last = BEGIN, END

    def read(self) -> Reading[None]:
        marks = marks_of(self.first, FUNCTION)
        while mark := (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(mark)
            yield from self.reader.skip_space()
            if mark == FUNCTION or (yield from self.reader.literal(FUNCTION)):
                yield from self._function()
            self.fail()

    def _function(self) -> Reading[None]:
        """Reads a call behind its first mark; what is none, or follows a broken one, is left in what is held."""
        name = yield from self.reader.whole(_NAME, NAME_LIMIT)
        if name and (yield from self.reader.literal(">")):
            yield from self.call(name)

    def end(self) -> Reading[bool]:
        """With both marks or one of them."""
        reader = self.reader
        ended = yield from reader.literal(FUNCTION_END)
        if ended:
            reader.drop()
            reader.hold()
        yield from reader.skip_space()
        if (yield from reader.literal(self.last)):
            reader.drop()
            return True
        if reader.cut(PARAMETER, FUNCTION_END, self.last):
            reader.drop()
        return ended


def markup(format: str, wrap: str) -> Markup:
    """How forced calls write arguments; wrap: what stands around each value."""
    return Markup(
        format, _KEY, lambda grammar, name: quoted(f"{PARAMETER}{name}>{wrap}"), wrap + PARAMETER_END, quoted("\n"),
        PARAMETER_END,
    )  # fmt: skip


_MARKUP = markup("qwen3_coder", "\n")


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """Raises InvalidRequest as Markup.arguments."""
    return xml_calls(grammar, tools, most, _MARKUP, BEGIN, END)


def xml_calls(grammar: Grammar, tools: Sequence[Tool], most: int, written: Markup, first: str, last: str) -> str:
    """Calls between the marks `first` and `last`. Raises InvalidRequest as Markup.arguments."""
    calls = []
    for tool in tools:
        begin = grammar.text(f"{first}\n{FUNCTION}{tool.name}>\n", (first,))
        end = grammar.text(f"{FUNCTION_END}\n{last}", (last,))
        calls.append(f"{begin} {written.arguments(grammar, tool, end)}")
    return grammar.several(" | ".join(calls), "\n", most)
