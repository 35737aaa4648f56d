"""Hermes 2 and 3, Qwen 2.5 and 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, several in a row."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import CallReader
from headrace.server.parsers.lark import Grammar, json_call
from headrace.server.parsers.scan import Parser, Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
_REST = re.compile(r"[\s}]+")


class HermesParser(Parser):
    """The mark says that a call comes, so a call of any name is told; the client decides what it makes of it."""

    begin, end = BEGIN, END
    named, numbered = "name", False
    """The key of a call's name; whether its id is a number within the turn, which is left out."""

    def read(self) -> Reading[None]:
        marks, calls = marks_of(self.begin), CallReader(self, eager=True, named=self.named, numbered=self.numbered)
        while (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(self.begin)
            yield from self.reader.skip_space()
            if not (yield from calls.objects()):
                self.fail()
                continue
            self.reader.hold()
            while (yield from self.reader.run(_REST)):
                pass
            if (yield from self.reader.literal(self.end)) or self.reader.cut(self.end):
                self.reader.drop()
            else:
                self.fail()


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    one = json_call(grammar, tools, "arguments", (f"{BEGIN}\n", f"\n{END}"), (BEGIN, END))
    return grammar.several(one, "\n", most)
