"""For models of no known format: {"name": ..., "arguments" or "parameters": {...}}, or a list of such."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.lark import Grammar, json_call
from headrace.server.parsers.llama_json import LlamaJsonParser
from headrace.server.turn import Tool


class PlainJsonParser(LlamaJsonParser):
    marks = ()


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """An object; a list of objects too, where there may be several."""
    one = grammar.rule(json_call(grammar, tools, "arguments"))
    return one if most == 1 else grammar.rule(f'{one} | "[" {grammar.several(one, ", ", most)} "]"')
