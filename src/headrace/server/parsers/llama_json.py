"""Llama 3.1 and 3.2: {"name": ..., "parameters": {...}}, after <|python_tag|> or not, several separated by ';'."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.json_calls import CallReader
from headrace.server.parsers.lark import Grammar, json_call
from headrace.server.parsers.line_calls import LineParser
from headrace.server.parsers.scan import Reading
from headrace.server.turn import Tool


class LlamaJsonParser(LineParser):
    opening = "{["
    marks: tuple[str, ...] = ("<|python_tag|>",)

    def call(self) -> Reading[bool]:
        calls = CallReader(self, eager=False, names=self.tools)
        begun = self.calls
        while (yield from calls.objects()):
            self.fail()
            self.reader.hold()
            yield from self.reader.skip_space()
            if not (yield from self.reader.literal(";")):
                break
            yield from self.reader.skip_space()
            if not (yield from self._opening()):
                break
        return self.calls > begun


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    return grammar.several(json_call(grammar, tools, "parameters"), "; ", most)
