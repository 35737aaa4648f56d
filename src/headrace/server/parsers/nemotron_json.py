"""Nemotron Nano 2: <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.hermes import HermesParser
from headrace.server.parsers.lark import Grammar, json_call
from headrace.server.turn import Tool

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"


class NemotronJsonParser(HermesParser):
    """As Hermes, between other marks and in a list."""

    begin, end = BEGIN, END


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    begin, end = grammar.text(f"{BEGIN}[", (BEGIN, END)), grammar.text(f"]{END}", (BEGIN, END))
    return f"{begin} {grammar.several(json_call(grammar, tools), ', ', most)} {end}"
