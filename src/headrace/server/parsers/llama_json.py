"""Llama 3.1 and 3.2: {"name": ..., "parameters": {...}}, after <|python_tag|> or not, several separated by ';'."""

from __future__ import annotations

from headrace.server.parsers.json_calls import CallReader
from headrace.server.parsers.line_calls import LineParser
from headrace.server.parsers.scan import Reading


class LlamaJsonParser(LineParser):
    opening = "{["
    marks: tuple[str, ...] = ("<|python_tag|>",)

    def call(self) -> Reading[bool]:
        calls = CallReader(self, eager=False, names=self.names)
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
