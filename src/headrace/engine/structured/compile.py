"""The grammar of an answer's shape, as llguidance reads it, and the refusal of a shape that it cannot take.

JSON is written on one line, as `json.dumps` writes it by default: `, ` and `: ` and no other blanks. So a model cannot
write blanks for ever, and all text between two values is forced. Strings are written without \\uXXXX.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.engine.structured import lark
from headrace.engine.structured.keywords import Refused, unwritable
from headrace.engine.structured.patterns import Unreadable, translated
from headrace.engine.structured.schemas import Lowered, lowered
from headrace.errors import InvalidRequest
from headrace.structured import Structured

JSON_OPTIONS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    # Without u a key has one spelling: "a" and "\u0061" would be two for the grammar, and one for a reader of the JSON.
    "json_allowed_escapes": 'nrbtf\\"',
}

MAX_CHOICES_LENGTH = 128 << 10
"""Characters of all choices together."""

MAX_TRIALS = 64
"""Parts of a schema that are tried alone, for telling which one cannot be taken."""

_SAID = {
    "min/maxProperties only supported": (
        "minProperties and maxProperties cannot be enforced beside optional properties",
        "list the properties in required, or leave these bounds out",
    ),
    "Unable to determine if regex is empty": (
        "this pattern with this length, format or second pattern costs too much",
        "write the length into the pattern, or leave one of them out",
    ),
    "can't determine if patternProperty": ("patternProperties may overlap", "use patterns that exclude each other"),
    "are not disjoint": ("patternProperties overlap", "use patterns that exclude each other"),
    "Regex is empty": ("no text fits this pattern, format and length together", "leave one of them out"),
    "schema too large": ("the cases of allOf, anyOf and oneOf multiply to too many", "use fewer"),
    "circular references with sibling": ("a recursive $ref beside other keywords", "use $ref alone"),
    "lookarounds not supported": (
        "^ and $ inside an expression look around, which is not supported",
        "leave them out, or put them at its beginning and its end",
    ),
}
"""What the library says, as what is wrong and the remedy."""


def grammar_of(structured: Structured, added: Mapping[str, int] | None = None) -> str:
    """The grammar of this shape; equal texts for equal shapes. added: tokens that a grammar may name.

    Raises InvalidRequest for a shape that cannot be taken; not all of what cannot is noticed here: see `check`.
    """
    kind = structured.kind
    if kind == "json_object":
        return _of_schema({"type": "object"})
    if kind == "json":
        return _of_schema(_lowered(structured.json or "").whole())
    if kind == "regex":
        return LLMatcher.grammar_from_regex(expression_of(structured.regex or ""))
    if kind == "choice":
        return _of_choices(structured.choice)
    grammar, schemas = lark.checked(structured.grammar or "", added)
    texts = [json.dumps(_with_options(_lowered(schema, written=True).whole())) for schema in schemas]
    return LLMatcher.grammar_from_lark(re.sub(r"(?<=%json )\d+", lambda found: texts[int(found[0])], grammar))


def expression_of(regex: str) -> str:
    """A regular expression as llguidance reads it. Raises InvalidRequest."""
    try:
        return translated(regex, python=True)
    except Unreadable as fault:
        raise Refused("regex", str(fault)) from None


def limits() -> LLParserLimits:
    """What a grammar may cost: when it is compiled (about 0.5 s, 100 MiB), and for each token: 0.1 s and, if it is
    ambiguous all over and the vocabulary large, up to 0.3 s (docs/schemas.md)."""
    return LLParserLimits(
        max_items_in_row=2000,  # 450 optional properties need 1,800. Looked at when a row is made: see lark.MAX_NAMES.
        initial_lexer_fuel=200_000,
        step_lexer_fuel=200_000,
        step_max_items=5_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check(structured: Structured, tokenizer: LLTokenizer | None, added: Mapping[str, int] | None = None) -> None:
    """Raises InvalidRequest (`param`: "structured") for a shape that cannot be taken; the message says which part.

    With a tokenizer, a shape that no answer fits is noticed as well, and one whose first token costs too much. added:
    see grammar_of.
    """
    fault = _fault(grammar_of(structured, added), tokenizer)
    if not fault:
        return
    if structured.kind == "json":
        _refuse_schema(_lowered(structured.json or ""), tokenizer, fault)
    if structured.kind == "regex":
        _refuse(structured.kind, fault)
    raise Refused(structured.kind, _line(fault))  # with the place in a grammar


def _fault(grammar: str, tokenizer: LLTokenizer | None) -> str:
    """What the library says against a grammar, with or without a panic; "" for a good one."""
    fault = LLMatcher.validate_grammar(grammar, tokenizer, limits=limits())
    if fault.startswith("WARNING"):
        fault = ""
    if fault or tokenizer is None:
        return fault
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        found = matcher.get_error()
        return "no answer fits it" if "NoExtension" in found else found
    return ""


def _refuse_schema(made: Lowered, tokenizer: LLTokenizer | None, fault: str) -> NoReturn:
    """Names the smallest part that fails alone, as the library tells no place."""
    pointer, trials = "#", 0
    moved = True
    while moved and trials < MAX_TRIALS:
        moved = False
        for inner, part in made.parts.items():
            if not inner.startswith(f"{pointer}/") or _between(made.parts, pointer, inner):
                continue
            trials += 1
            if trials > MAX_TRIALS:
                break
            if part is not False and (found := _fault(_of_schema(made.whole(part)), tokenizer)):
                pointer, fault, moved = inner, found, True
                break
    _refuse(pointer, fault)


def _refuse(pointer: str, fault: str) -> NoReturn:
    """In our own words where there are any."""
    for said, (reason, remedy) in _SAID.items():
        if said in fault:
            raise Refused(pointer, reason, remedy)
    raise Refused(pointer, _line(fault))


def _between(parts: dict[str, Any], outer: str, inner: str) -> bool:
    """Whether a part lies between two others."""
    names = inner[len(outer) + 1 :].split("/")
    return any("/".join([outer, *names[:count]]) in parts for count in range(1, len(names)))


def _line(fault: str) -> str:
    """The library's words without the text around the place, which may be long, and without a panic's stack."""
    if fault.startswith("panic"):
        return "the library for grammars failed on it"
    return fault.split("\n<", 1)[0].strip()[:500]


def _lowered(text: str, written: bool = False) -> Lowered:
    """`written`: the schema may have the options that this module would give it."""
    try:
        schema = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"json is no JSON Schema: {error}", "structured") from None
    if written and isinstance(schema, dict) and schema.get("x-guidance") == JSON_OPTIONS:
        del schema["x-guidance"]
    return lowered(schema)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:40]} is beyond what a double holds")
    return value


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": JSON_OPTIONS}


def _of_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_with_options(schema)))


def _of_choices(choices: tuple[str, ...]) -> str:
    texts = sorted(set(choices))
    if sum(map(len, texts)) > MAX_CHOICES_LENGTH:
        raise Refused(
            "choice", f"is longer than {MAX_CHOICES_LENGTH:,} characters together", "use fewer or shorter ones"
        )
    if any("\ud800" <= char <= "\udfff" for text in texts for char in text):
        raise Refused("choice", "half of a surrogate pair")
    if any(unwritable(text) for text in texts):
        raise Refused("choice", "has a control character")
    return "start: TEXT\nTEXT: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
