"""Seed-OSS: <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></seed:tool_call>."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.lark import Grammar
from headrace.server.parsers.qwen3_coder import Qwen3CoderParser, markup, xml_calls
from headrace.server.turn import Tool

BEGIN, END = "<seed:tool_call>", "</seed:tool_call>"
_MARKUP = markup("seed_oss", "")


class SeedOssParser(Qwen3CoderParser):
    """As Qwen3-Coder's, between other marks; nothing stands around a value, so line breaks in it are its own."""

    breaks = False
    first, last = BEGIN, END


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    """Raises InvalidRequest as Markup.arguments."""
    return xml_calls(grammar, tools, most, _MARKUP, BEGIN, END)
