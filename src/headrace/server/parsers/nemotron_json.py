"""Nemotron Nano 2: <TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.hermes import HermesParser
from headrace.server.parsers.lark import Grammar, json_list
from headrace.server.turn import Tool

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"


class NemotronJsonParser(HermesParser):
    """As Hermes, between other marks and in a list."""

    begin, end = BEGIN, END


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    return json_list(grammar, tools, most, (BEGIN, END))
