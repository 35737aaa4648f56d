"""LFM2: <|tool_call_start|>[f(a=1, b="x"), g()]<|tool_call_end|>."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers import pythonic
from headrace.server.parsers.lark import Grammar
from headrace.server.turn import Tool

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


class Lfm2Parser(pythonic.PythonicParser):
    """The list of Llama 4, between other marks; without them it begins a line."""

    marks = (BEGIN,)
    last = END


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    begin, end = (grammar.text(mark, (BEGIN, END)) for mark in (BEGIN, END))
    return f"{begin} {pythonic.calls_grammar(grammar, tools, most)} {end}"
