"""Grammars in Lark's form: what is refused before the library reads it, and JSON Schemas inside (`%json {...}`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from headrace.engine.structured.keywords import Refused
from headrace.engine.structured.patterns import Unreadable, translated

MAX_GRAMMAR = 64 << 10
"""Characters, those of the schemas within apart."""

MAX_RULES = 1000
"""The library's recursion goes along rules and terminals, and ends the process where there are some thousands."""

MAX_TIMES = 10_000
"""Copies that a grammar asks for: the product of all least counts outside expressions and texts."""

_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
      | (?P<text>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<special><[^>\n]*>)
      | (?P<directive>%[a-z]+)
      | (?P<attributes>[A-Za-z_][\w.-]*\[[^\]\n]*\]\s*:)
      | (?P<rule>[?!]?[A-Za-z_][\w-]*\s*(?:\{[^}\n]*\})?\s*(?:\.-?\d+)?\s*:)
      | (?P<count>(?<=[^\s])\{\d+(?:,\d*)?\}|~\s*\d+)
      | (?P<operator>[&~])
      | .""",
    re.X | re.S,
)
_FLAGS = re.compile(r"\(\?([imsU-]+)([:)])")
_ATTRIBUTE = re.compile(r"\b(stop|temperature)\b")


def checked(grammar: str, added: Mapping[str, int] | None = None) -> tuple[str, list[str]]:
    """A grammar with a place `%json {...}` for each schema in it, and these schemas' texts. Raises Refused.

    The places hold the schemas' numbers: `%json 0`. added: tokens that the grammar may name, which become their ids.
    """
    parts: list[str] = []
    schemas: list[str] = []
    rules, times, at = 0, 1, 0
    while at < len(grammar):
        found = _TOKENS.match(grammar, at)
        assert found
        kind, text, line = found.lastgroup, found[0], grammar.count("\n", 0, at) + 1
        at = found.end()
        rules += kind in ("rule", "attributes")
        if kind == "count":
            times *= max(1, int(re.sub(r"\D", " ", text).split()[0]))
        if rules > MAX_RULES or times > MAX_TIMES:
            what = f"more than {MAX_RULES} rules" if rules > MAX_RULES else f"repeats more than {MAX_TIMES:,} times"
            raise Refused(f"grammar, line {line}", what, "use a smaller one")
        _check(kind, text, f"grammar, line {line}")
        named = kind == "special" and added is not None and text in added
        parts.append(f"<[{added[text]}]>" if named and added is not None else text)
        if text == "%json":
            at = _cut(grammar, at, line, schemas)
            parts.append(f" {len(schemas) - 1}")
    if len(text := "".join(parts)) > MAX_GRAMMAR:
        raise Refused("grammar", f"is longer than {MAX_GRAMMAR:,} characters", "use a shorter one")
    return text, schemas


def _check(kind: str | None, text: str, where: str) -> None:
    if kind == "operator":
        raise Refused(where, "& and ~ on terminals have no bounded cost", "write one expression")
    if kind == "attributes" and (found := _ATTRIBUTE.search(text)):
        raise Refused(where, f"{found[0]}= is not supported", "use lazy or suffix, or the request's own parameters")
    if kind == "regex":
        try:
            translated(_FLAGS.sub(lambda found: "(?:" * (found[2] == ":"), text[1 : text.rindex("/")]))
        except Unreadable as fault:
            raise Refused(where, str(fault)) from None


def _cut(grammar: str, at: int, line: int, schemas: list[str]) -> int:
    """Takes a schema out of a grammar; the place behind it."""
    start = at + len(grammar[at:]) - len(grammar[at:].lstrip())
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, start)
    except (ValueError, RecursionError) as fault:
        raise Refused(f"grammar, line {line}", f"%json is not followed by JSON: {fault}") from None
    schemas.append(json.dumps(schema))
    return end
