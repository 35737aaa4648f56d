"""DeepSeek-V3.1: NAME<｜tool▁sep｜>{...} between the marks of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.server.parsers.deepseek_v3 import BEGIN, CALL, CALL_END, END, MARKS, SEP, DeepSeekV3Parser, between_marks
from headrace.server.parsers.lark import Grammar
from headrace.server.turn import Tool


class DeepSeekV31Parser(DeepSeekV3Parser):
    """The same: the calls of both are told apart as they are read."""


def written(name: str, arguments: str) -> str:
    """An answer with one call."""
    return f"{BEGIN}{CALL}{name}{SEP}{arguments}{CALL_END}{END}"


def calls_grammar(grammar: Grammar, tools: Sequence[Tool], most: int) -> str:
    end = grammar.text(CALL_END, MARKS)
    calls = [f"{grammar.text(f'{CALL}{tool.name}{SEP}', MARKS)} {grammar.arguments(tool)} {end}" for tool in tools]
    return between_marks(grammar, grammar.several(" | ".join(calls), "", most))
