"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT, CallReader, value
from headrace.server.parsers.lark import Grammar, json_call
from headrace.server.parsers.scan import Parser, Reading, marks_of
from headrace.server.turn import Tool

BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}()\"]+")
_LETTERS = string.ascii_letters + string.digits


def call_id() -> str:
    """Nine letters and digits, as Mistral's templates want them."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


class MistralParser(Parser):
    """The mark says that a call comes, so a call of any name is told. The arguments of the newer form end where their
    JSON does; without arguments it is a call of none."""

    def read(self) -> Reading[None]:
        marks, calls = marks_of(BEGIN), CallReader(self, eager=True)
        while (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(BEGIN)
            yield from self.reader.skip_space()
            while (yield from self.reader.literal(BEGIN)):
                yield from self.reader.skip_space()
            if (yield from self.reader.peek()) in ("[", "{"):
                yield from calls.objects()
            else:
                yield from self._named()
            self.fail()

    def _named(self) -> Reading[None]:
        reader, told = self.reader, None
        name = yield from reader.whole(_NAME, NAME_LIMIT)
        if not name:
            return
        if (yield from reader.literal(ID)):
            told = yield from reader.whole(_NAME, NAME_LIMIT)
        marked = yield from reader.literal(ARGS)
        yield from reader.skip_space()
        if not marked and (yield from reader.peek()) not in ("{", ""):
            return
        number = self.start(name, told)
        if (yield from reader.peek()) == "{":
            yield from value(reader, lambda piece: self.arguments(number, piece))
        elif (yield from reader.peek()):
            self.arguments(number, "{}")


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """The newer form where the vocabulary has [ARGS]."""
    marks = (BEGIN, ID, ARGS)
    if ARGS not in grammar.tokens:
        return f'{grammar.text(BEGIN, marks)} " "? "[" {grammar.several(json_call(grammar, tools), ", ", most)} "]"'
    named = [f"{grammar.text(f'{BEGIN}{tool.name}{ARGS}', marks)} {grammar.arguments(tool)}" for tool in tools]
    return grammar.several(" | ".join(named), "", most)
