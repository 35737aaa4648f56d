"""Shapes of answers: schemas, expressions and grammars of pieces that nest, repeat, refer to themselves and overlap."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from headrace.engine.structured.compile import limits
from headrace.structured import Structured
from headrace.types import InvalidRequest
from tools.fuzz.doors import Door
from tools.fuzz.mutate import TEXTS, odd

EXPRESSIONS = [
    "(",
    ")",
    "[",
    "]",
    "|",
    "*",
    "+",
    "?",
    ".",
    "^",
    "$",
    "a",
    "ab",
    "{1,1000}",
    "{1000}",
    "{0,100000}",
    "(?:",
    "(?=",
    "\\b",
    "\\1",
    "[^a]",
    "[a-z]",
    "[a&&b]",
    "\\p{L}",
    "\\u{1F600}",
    "\\d",
    "\\W",
    "(a|aa)*",
    "(.*x){30}",
    "(a?){50}",
    "/",
    "\n",
]
RULES = [
    "start: a b",
    'start: start start | "a"',
    'start: "a" start | ""',
    "a: b a | b",
    'b: "x"',
    'b: "x"{0,1000}',
    "b: /.*/",
    "X: Y Y",
    "Y: /(a|b)*/",
    "a: X",
    'b: %json {"type": "object"}',
    'b: %json {"not": {}}',
    "a: <[1]>",
    "a[lazy]: /.*x/",
    'a[stop="x"]: /.*/',
    "X: ~Y",
    "X: Y & Y",
    "%ignore / /",
    "%import common.INT",
    "b: INT",
    'a: (b | a){2,5} "y"?',
    "# no",
]
KEYWORDS = [
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "minProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "multipleOf",
    "exclusiveMinimum",
    "anyOf",
    "allOf",
    "oneOf",
    "$ref",
    "$defs",
    "not",
    "uniqueItems",
    "$id",
    "$anchor",
    "$schema",
]
VALUES: list[Any] = [
    "string",
    "object",
    ["array", "null"],
    0,
    1,
    2,
    1e300,
    -1,
    0.01,
    10**30,
    True,
    [],
    {},
    "#",
    "#/$defs/a",
    "#/properties/a",
    "^a+$",
    "(.*a.{9})*",
    "date",
    "uri",
    ["a", "b"],
    ["a"],
    [1, None],
]


def door() -> Door:
    return Shapes()


class Shapes:
    memory_mib = 700
    case_s = 30.0

    def open(self, folder: Path) -> None:
        from tools.schemas.accepting import tokenizer

        self._tokenizer = tokenizer()

    def case(self, rng: Random) -> str:
        from llguidance import LLMatcher

        from headrace.engine.structured.compile import check, grammar_of

        try:
            structured = self._shape(rng)
            check(structured, self._tokenizer)
        except InvalidRequest as error:
            assert error.param == "structured" and len(str(error)) < 3000
            return "refused"
        matcher = LLMatcher(self._tokenizer, grammar_of(structured), log_level=0, limits=limits())
        for _ in range(60):
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(257) if mask[token // 8] >> token % 8 & 1]
            if matcher.is_error() or not allowed:
                return "out of fuel"
            token = rng.choice(allowed)
            if token == 256:
                return "whole"
            matcher.consume_token(token)
            if matcher.is_stopped():
                return "out of fuel" if matcher.is_error() else "whole"
        return "begun"

    def _shape(self, rng: Random) -> Structured:
        kind = rng.choice(("json", "json", "regex", "grammar", "choice"))
        if kind == "json":
            return Structured(json=_schema(rng, rng.choice((1, 3, 6, 60))))
        if kind == "choice":
            return Structured(choice=rng.choices(TEXTS, k=rng.randint(1, 9)))
        pieces, between = (EXPRESSIONS, "") if kind == "regex" else (RULES, "\n")
        text = between.join(rng.choices(pieces, k=rng.choice((1, 3, 8, 20))))
        return Structured(**{kind: text * rng.choice((1, 1, 1, 50))})

    def close(self) -> None:
        pass


def _schema(rng: Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.1:
        return odd(rng) if rng.random() < 0.1 else rng.choice((True, {}, {"type": "string"}, {"type": "integer"}))
    made: dict[str, Any] = {}
    for keyword in rng.choices(KEYWORDS, k=rng.randint(1, 3 if depth < 10 else 1)):
        inner = [_schema(rng, depth - 1) for _ in range(rng.choice((1, 1, 2)) if depth < 10 else 1)]
        if keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
            made[keyword] = inner
        elif keyword in ("properties", "patternProperties", "$defs"):
            made[keyword] = dict(zip(("a", "b"), inner, strict=False))
        elif keyword in ("items", "additionalProperties", "not"):
            made[keyword] = inner[0]
        else:
            made[keyword] = rng.choice(VALUES)
    return made
