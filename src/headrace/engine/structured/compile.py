"""The grammar of an answer's shape, as llguidance reads it, and the refusal of a shape that it cannot take.

JSON is written on one line, as `json.dumps` writes it by default: `, ` and `: ` and no other blanks. So a model cannot
write blanks for ever, and all text between two values is forced. Strings are written without \\uXXXX.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headrace.errors import InvalidRequest
from headrace.structured import Structured

JSON_OPTIONS: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    # Without u a key has one spelling: "a" and "\u0061" would be two for the grammar, and one for a reader of the JSON.
    "json_allowed_escapes": 'nrbtf\\"',
}


def grammar_of(structured: Structured) -> str:
    """The grammar of this shape; equal texts for equal shapes. Raises InvalidRequest for one that cannot be read."""
    kind = structured.kind
    if kind == "json_object":
        return _of_schema({"type": "object"})
    if kind == "json":
        try:
            schema = json.loads(structured.json or "")
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json is no JSON Schema: {error}", "structured") from None
        return _of_schema({} if schema is True else schema)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(structured.regex or "")
    if kind == "choice":
        texts = sorted(set(structured.choice))
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(structured.grammar or "")


def limits() -> LLParserLimits:
    """What a grammar may cost: when it is compiled, and for each token."""
    return LLParserLimits(verbose_errors=False)


def check(structured: Structured, tokenizer: LLTokenizer | None) -> None:
    """Raises InvalidRequest (`param`: "structured") for a shape that cannot be taken; the message says which part."""
    fault = LLMatcher.validate_grammar(grammar_of(structured), tokenizer, limits=limits())
    if fault and not fault.startswith("WARNING"):
        raise InvalidRequest(f"{structured.kind} cannot be taken: {fault}", "structured")


def _of_schema(schema: object) -> str:
    if not isinstance(schema, dict):
        raise InvalidRequest("json must be a JSON Schema that some answer fits: an object or true", "structured")
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
