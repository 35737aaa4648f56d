"""MiniMax-M2: <minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>, several
invokes in one, </minimax:tool_call>."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headrace.server.parsers.json_calls import NAME_LIMIT
from headrace.server.parsers.lark import Grammar, quoted
from headrace.server.parsers.marked import MarkedParser, Markup
from headrace.server.parsers.scan import Reading, marks_of
from headrace.server.turn import Tool

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END, PARAMETER, PARAMETER_END = '<invoke name="', "</invoke>", '<parameter name="', "</parameter>"
NAMED, LINE = '">', "\n"
_NAME = re.compile(r"[^\s<>\"]+")
_KEY = re.compile(r"[^\n<>\"]+")


class MiniMaxM2Parser(MarkedParser):
    """The first mark says that calls come, so calls of any name are told. Strings keep the white space at their
    ends."""

    value_end = PARAMETER_END
    key_begin, key_name, key_ends = PARAMETER, _KEY, (NAMED,)

    def read(self) -> Reading[None]:
        marks = marks_of(BEGIN)
        while (yield from self.reader.until(marks, self.flow.text)):
            self.reader.hold(BEGIN)
            yield from self._invokes()
            self.fail()

    def _invokes(self) -> Reading[None]:
        """Reads calls and the mark behind them; what is none, or follows a broken one, is left in what is held."""
        reader, begun = self.reader, self.calls
        yield from reader.skip_space()
        while (yield from reader.literal(INVOKE)):
            name = yield from reader.whole(_NAME, NAME_LIMIT)
            if not name or not (yield from reader.literal(NAMED)) or not (yield from self.call(name)):
                return
            reader.hold()
            yield from reader.skip_space()
        if self.calls > begun and ((yield from reader.literal(END)) or reader.cut(INVOKE, END)):
            reader.drop()

    def end(self) -> Reading[bool]:
        """With its own mark, or that of all calls, which is not read here."""
        reader = self.reader
        yield from reader.skip_space()
        ended = (yield from reader.literal(INVOKE_END)) or bool((yield from reader.coming(END)))
        if ended or reader.cut(PARAMETER, NAMED, INVOKE_END, END):
            reader.drop()
        return ended


_MARKUP = Markup(
    "minimax_m2", _KEY, lambda grammar, name: quoted(f"{PARAMETER}{name}{NAMED}"), PARAMETER_END, quoted(LINE),
    PARAMETER_END,
)  # fmt: skip


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """Raises InvalidRequest as Markup.arguments."""
    end = quoted(INVOKE_END)
    calls = [f"{quoted(f'{INVOKE}{tool.name}{NAMED}{LINE}')} {_MARKUP.arguments(grammar, tool, end)}" for tool in tools]
    several = grammar.several(" | ".join(calls), LINE, most)
    # A line break apart from the mark: as one text they would go before the break between two calls.
    return f"{grammar.text(f'{BEGIN}{LINE}', (BEGIN,))} {several} {quoted(LINE)} {grammar.text(END, (END,))}"
