"""Command R7B and A: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>.

The model numbers the calls of a turn, beginning with 0 in each: a call gets an id of its own here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.server.parsers.hermes import HermesParser
from headrace.server.parsers.lark import Grammar
from headrace.server.turn import Tool

BEGIN, END = "<|START_ACTION|>", "<|END_ACTION|>"
BREAK = "\n    "


class CohereParser(HermesParser):
    """As Hermes, between other marks and in a list, with another word for names."""

    begin, end = BEGIN, END
    named, numbered = "tool_name", True


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    calls, number = [], grammar.rule("/[0-9]{1,3}/")
    for tool in tools:
        first = grammar.text('{"tool_call_id": "')
        then = grammar.text(f'", "tool_name": {json.dumps(tool.name)}, "parameters": ')
        calls.append(f"{first} {number} {then} {grammar.arguments(tool)} {grammar.text('}')}")
    begin, end = grammar.text(f"{BEGIN}[{BREAK}", (BEGIN, END)), grammar.text(f"\n]{END}", (BEGIN, END))
    several = grammar.several(" | ".join(calls), f",{BREAK}", most)
    return f"{begin} {several} {end}"
