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

MAX_NAMES = 2500
MAX_SQUARES = 1_000_000
"""Names in rules, and the sum over all rules of the square of their number. A rule that can be empty puts all of its
places into one row of the library's parser, which costs that square before the library looks at its own limits."""

MAX_TIMES = 10_000
"""Copies that a grammar asks for: the product of all least counts outside expressions and texts."""

_TOKENS = re.compile(
    r"""(?P<comment>//[^\n]*+|\#[^\n]*+)
      | (?P<text>"(?:\\.|[^"\\\n])*+"i?)
      | (?P<regex>/(?:\\.|[^/\\\n])++/[imslux]*+)
      | (?P<special><[^>\n]{0,200}+>)
      | (?P<directive>%[a-z]++)
      | (?P<attributes>[A-Za-z_][\w.-]*+\[[^\]\n]{0,500}+\]\s*+:)
      | (?P<rule>[?!]?[A-Za-z_][\w-]*+\s*+(?:\{[^}\n]{0,500}+\}\s*+)?(?:\.-?\d++\s*+)?:)
      | (?P<count>(?<=[^\s])\{\d++(?:,\d*+)?\}|~\s*+\d++)
      | (?P<operator>[&~])
      | (?P<name>[A-Za-z_][\w-]*+)
      | \s++
      | .""",
    re.X | re.S,
)
"""Possessive throughout, so that no text is read again and again."""
_BLANKS = re.compile(r"\s*+")
_FLAGS = re.compile(r"\(\?([imsU-]+)([:)])")
_ATTRIBUTE = re.compile(r"\b(stop|temperature)\b")


def checked(grammar: str, added: Mapping[str, int] | None = None) -> tuple[str, list[str]]:
    """A grammar with a place `%json {...}` for each schema in it, and these schemas' texts. Raises Refused.

    The places hold the schemas' numbers: `%json 0`. added: tokens that the grammar may name, which become their ids.
    """
    parts: list[str] = []
    schemas: list[str] = []
    size = _Size()
    line, length, at = 1, 0, 0
    while at < len(grammar):
        found = _TOKENS.match(grammar, at)
        assert found
        kind, text, where = found.lastgroup, found[0], f"grammar, line {line}"
        at, length = found.end(), length + len(text)
        size.add(kind, text, where)
        if length > MAX_GRAMMAR:
            raise Refused("grammar", f"is longer than {MAX_GRAMMAR:,} characters", "use a shorter one")
        _check(kind, text, where)
        line += text.count("\n")
        named = kind == "special" and added is not None and text in added
        parts.append(f"<[{added[text]}]>" if named and added is not None else text)
        if text == "%json":
            start, at = at, _cut(grammar, at, line, schemas)
            line += grammar.count("\n", start, at)
            parts.append(f" {len(schemas) - 1}")
    return "".join(parts), schemas


class _Size:
    """What a grammar holds so far."""

    def __init__(self) -> None:
        self.rules = self.names = self.in_rule = self.squares = 0
        self.times = 1

    def add(self, kind: str | None, text: str, where: str) -> None:
        """Raises Refused beyond a bound."""
        if kind in ("rule", "attributes"):
            self.rules, self.in_rule = self.rules + 1, 0
        elif kind == "name":
            self.names, self.in_rule = self.names + 1, self.in_rule + 1
            self.squares += 2 * self.in_rule - 1
        if kind == "count":
            least = re.sub(r"\D", " ", text).split()[0]
            self.times *= max(1, int(least)) if len(least) < 10 else MAX_TIMES + 1
        for beyond, what in (
            (self.rules > MAX_RULES, f"more than {MAX_RULES:,} rules"),
            (self.names > MAX_NAMES, f"more than {MAX_NAMES:,} names in rules"),
            (self.squares > MAX_SQUARES, "too many names in one rule"),
            (self.times > MAX_TIMES, f"repeats more than {MAX_TIMES:,} times"),
        ):
            if beyond:
                raise Refused(where, what, "use a smaller one")


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
    start = _BLANKS.match(grammar, at).end()  # type: ignore[union-attr]
    try:
        schema, end = json.JSONDecoder().raw_decode(grammar, start)
    except (ValueError, RecursionError) as fault:
        raise Refused(f"grammar, line {line}", f"%json is not followed by JSON: {fault}") from None
    schemas.append(json.dumps(schema))
    return end
