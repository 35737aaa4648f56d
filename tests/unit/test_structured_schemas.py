"""JSON Schemas: what is enforced to the letter, and what is refused, with the pointer of the part."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.engine.structured.compile import check, grammar_of, limits
from headrace.engine.structured.lark import _TOKENS
from headrace.engine.structured.schemas import MAX_PARTS
from headrace.errors import InvalidRequest
from headrace.structured import Structured
from tools.schemas.accepting import Accepting, tokenizer
from tools.schemas.families import built
from tools.schemas.judging import fault
from tools.schemas.written import WRITTEN

pytestmark = pytest.mark.unit


class Runs:
    """A vocabulary of single bytes, and of a's in a row."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>", *(b"a" * length for length in range(2, 120)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def accepts(schema: Any, text: str) -> bool:
    return Accepting(Structured(json=json.dumps(schema))).whole(text)


def refusal(**shape: Any) -> str:
    with pytest.raises(InvalidRequest) as refused:
        check(Structured(**shape), tokenizer())
    assert refused.value.param == "structured"
    return str(refused.value)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a/b": {"not": {}}}}, "#/properties/a~1b/not"),
        ({"items": {"uniqueItems": True}}, "#/items/uniqueItems"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"contains": {}}}}, "#/$defs/a/contains"),
        ({"anyOf": [{"type": "null"}, {"format": "cron"}]}, "#/anyOf/1/format"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "#/oneOf"),
        ({"$ref": "#"}, "#: refers to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "#/$defs/a: refers to itself"),
        ({"$ref": "http://example.com/a.json"}, "#/$ref"),
        ({"$ref": "#/nowhere"}, "#/$ref"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "#/$schema"),
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "#/properties/a/pattern"),
        ({"properties": {"a": {"pattern": r"\bword"}}}, "#/properties/a/pattern"),
        ({"minProperties": 2}, "#/minProperties"),
        ({"const": 2**53 + 1}, "#/const"),
        ({"enum": ["a", "\u0001"]}, "#/enum/1"),
        ({"type": "integer", "multipleOf": 123456789}, "#/multipleOf"),
        ({"const": -1e19, "type": "integer"}, "#/const"),  # the library's process would end
        ({"enum": [1, -9223372036854775808.0], "type": "integer"}, "#/enum/1"),
        ({"const": [1e20], "items": {"type": "integer"}}, "#/const/0"),
        ({"exclusiveMinimum": 9223372036854774784}, "#/exclusiveMinimum"),
        ({"multipleOf": 0.53}, "#/multipleOf: 0.53 is no number that can be enforced exactly; count in smaller units"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 1009}]}, "#/allOf/1/multipleOf: the least common multiple"),
        ({"allOf": [{"properties": {"a": {"multipleOf": 997}}}, {"properties": {"a": {"multipleOf": 1009}}}]},
         "#/allOf/1/properties/a/multipleOf"),
        ({"$ref": "#/$defs/a", "multipleOf": 997, "$defs": {"a": {"multipleOf": 1009}}}, "#/multipleOf: the least"),
        ({"pattern": r"^a\x00b$"}, "#/pattern: a control character"),
        ({"pattern": "^(x\\x7f|q)y$"}, "#/pattern: a control character"),
        ({"pattern": r"^x\vy$"}, "#/pattern: a control character"),
        ({"patternProperties": {"^a\u0001b$": {}}}, "#/patternProperties/^a\u0001b$: a control character"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"d": {"type": ["null", "number"]}},
          "oneOf": [{"$ref": "#/definitions/d", "const": 0}, {"type": "null"}]}, "#/oneOf"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "oneOf": [{"const": 1}, {"type": "null"}]}, "#/oneOf"),
        ({"type": "number", "minimum": 1e-300}, "#/minimum: has too many decimals: 1e-300"),
        ({"items": {"properties": {"a": {"allOf": [{"pattern": f"{letter}.*"} for letter in "abcdefghijkl"]}}}},
         "#/items/properties/a"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         "#: each value of it holds another of its kind, so no answer ends"),
        ({"properties": {"a": {"$ref": "#/$defs/list"}}, "$defs": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 1},
            "pair": {"allOf": [{"anyOf": [{"$ref": "#/$defs/list"}]}]}}}, "#/$defs/list: each value of it holds"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "#: each value of it holds"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "#/x-guidance"),
        ({"required": True}, "#/required"),
        ({"type": "string", "format": "date", "maxLength": 4},
         "#: no text fits this pattern, format and length together; leave one of them out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_by_its_pointer(schema: Any, pointer: str) -> None:
    assert refusal(json=schema).startswith(pointer)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "date"}, '"2024-02-29"', '"2023-02-29"'),
        ({"format": "time"}, '"23:59:59Z"', '"12:00:60Z"'),
        ({"properties": {"a": {"const": 1}}, "type": "object"}, '{"a": 1}', '{"\\u0061": 2}'),
        ({"const": [1, {"b": None}]}, '[1, {"b": null}]', '[1,{"b":null}]'),
        ({"type": "string", "pattern": "[a&&b]"}, '"&"', '"c"'),
        ({"type": "string", "pattern": "^.$"}, '"x"', '"\\r"'),
        ({"type": "integer", "maximum": 2**63 - 1}, "5", "9223372036854775808"),
        ({"maximum": 12345678901234567, "type": "number"}, "12345678901234500", "12345678901234570"),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1.25", "1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.001}, "0.0005", "0"),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "-1.25", "-1"),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"exclusiveMaximum": 0.5}]}, "0.25", "0"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "multipleOf": 0.1}, "0.1", "0"),
        ({"multipleOf": 0.07}, "0.21", "0.2"),
        ({"multipleOf": 0.11}, "0.33", "0.3"),
        ({"properties": {"a": {"multipleOf": 997}, "b": {"multipleOf": 1009}}}, '{"a": 997, "b": 1009}', '{"b": 997}'),
        ({"allOf": [{"multipleOf": 101}, {"multipleOf": 103}]}, "10403", "101"),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 1e16}]}, "10000000000000002", "10000000000000000"),
        ({"allOf": [{"type": "integer"}, {"exclusiveMaximum": -9007199254740992}]}, "-9007199254740994",
         "-9007199254740992"),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 1e16, "multipleOf": 2}]}, "10000000000000002",
         "10000000000000000"),
        ({"pattern": r"^[\x00a]$"}, '"a"', '""'),
        ({"const": 9007199254740992.0, "type": "integer"}, "9007199254740992", "9007199254740993"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"d": {"type": "number"}},
          "oneOf": [{"$ref": "#/definitions/d", "const": 0}, {"type": "null"}]}, "null", '"a"'),
        ({"type": "number", "exclusiveMinimum": -100000000000000, "maximum": 0}, "-99", "-100000000000000"),
        ({"unevaluatedProperties": False, "properties": {"a": {}}, "type": "object"}, '{"a": 1}', '{"b": 1}'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{}], "anyOf": [{}], "additionalItems": False},
         "[1]", "[1, 2]"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 1,
          "exclusiveMinimum": True}, "2", "1"),
    ],
)  # fmt: skip
def test_enforced_to_the_letter(schema: Any, good: str, bad: str) -> None:
    assert accepts(schema, good) and not accepts(schema, bad)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, '{"a": {"a": {}}}'),
        ({"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, '{"a": null}'),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 0}, "[[], [[]]]"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 1}, "[1, [2]]"),
        ({"$ref": "#/$defs/tree", "$defs": {
            "tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/end"}}, "required": ["left"]},
            "end": {"anyOf": [{"$ref": "#/$defs/tree"}, {"const": 0}]}}}, '{"left": {"left": 0}}'),
    ],
)  # fmt: skip
def test_what_refers_to_itself_and_ends(schema: Any, text: str) -> None:
    assert accepts(schema, text)


def test_one_of_with_references_to_tagged_cases() -> None:
    cases = {kind: {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"}
    schema = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in cases], "$defs": cases}
    assert accepts(schema, '{"kind": "b"}') and not accepts(schema, '{"kind": "c"}')


@pytest.mark.parametrize("shape", [
    {"json": "[" * 100_000},
    {"json": '{"items":' * 5000 + "{}" + "}" * 5000},
    {"json": {"$ref": "#/$defs/0", "$defs": {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(5000)}}},
    {"json": {"properties": {str(n): {} for n in range(20_000)}}},
    {"json": {"required": [str(n) for n in range(20_000)]}},
    {"json": {"properties": {str(n): {} for n in range(900)}, "minProperties": 1, "additionalProperties": False}},
    {"json": {"anyOf": [{"type": "null"}] * (MAX_PARTS + 1)}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"{n}{m}": {}}} for m in range(4)]} for n in range(30)]}},
    {"json": {"type": "string", "pattern": "((a{1000}){1000}){1000}"}},
    {"json": {"type": "string", "pattern": "(" * 5000 + ")" * 5000}},
    {"json": {"const": "x" * 100_000}},
    {"regex": "a{100000}"},
    {"grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(5000)) + '\nr5000: "a"'},
    {"grammar": "start: X\nX: " + " & ".join(f"/(.{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17))},
    {"grammar": "start: X\nX: ~/a/"},
    {"grammar": 'start: "a"{100}{1000}'},
    {"grammar": 'start: "' + "a" * 100_000 + '"'},
    {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"grammar": 'start: x "z"\nx[stop="b"]: /.*/'},
    {"grammar": 'start: %json {"not": {}}'},
    {"choice": ["x" * 200_000]},
], ids=lambda shape: f"{next(iter(shape))}-{str(next(iter(shape.values())))[:30]}")  # fmt: skip
def test_hostile_shapes_are_refused(shape: dict[str, Any]) -> None:
    refusal(**shape)


@pytest.mark.parametrize("shape", [
    {"regex": "(a|aa)*b"}, {"regex": "[a-z]{1,100000}"}, {"regex": "(.*a.{20})|(.*b.{20})"},
    {"grammar": 'start: "a" start'}, {"grammar": 'start: start start | "a" | ""'},
    {"grammar": 'start: ((("a"{0,50}){0,50}){0,50}){0,50}'},
    {"json": {"type": "string", "minLength": 10**6}}, {"json": {"type": "array", "maxItems": 10**9}},
    {"json": {"type": "string", "allOf": [{"pattern": f"^(.{{{n}}})*$"} for n in (997, 991)]}},
], ids=str)  # fmt: skip
def test_others_run_out_of_fuel_or_do_not_need_it(shape: dict[str, Any]) -> None:
    accepting = Accepting(Structured(**shape))
    assert accepting.whole("a" * 100) in (True, False)


def powers(names: int) -> str:
    """A grammar that may be empty, ambiguous all over."""
    return f'start: e\ne: {" | ".join(" ".join(["e"] * times) for times in range(2, names))} | "a" |'


@pytest.mark.parametrize(
    "grammar", ["e: e e | /[ab]/", "e: e e e | e e | /a/ | /aa/ |", "e: e? e? /a/? e?", powers(12)[9:]]
)
def test_ambiguous_grammars_end_by_the_items_of_a_token(grammar: str) -> None:
    """A vocabulary of long runs, as real ones have of blanks: the library stops at its items, not after its minutes."""
    words = LLTokenizer(TokenizerWrapper(Runs()), eos_token=256)
    matcher = LLMatcher(words, grammar_of(Structured(grammar=f"start: e\n{grammar}")), log_level=0, limits=limits())
    matcher.compute_bitmask()
    for _ in range(300):
        if not matcher.is_error():
            matcher.consume_token(ord("a"))
            matcher.compute_bitmask()
    assert "items" in matcher.get_error()


def test_texts_that_match_too_many_patterns_are_refused() -> None:
    """The library would multiply out how each of them may go on: minutes for 16 of them."""
    parts = [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(5)]
    assert refusal(json={"type": "string", "allOf": parts}).startswith("#: one text has to match more than 4 patterns")
    nested = {"$defs": {"two": {"allOf": parts[:2]}, "one": {"anyOf": [{"type": "null"}, parts[2]]}}}
    twos = [{"$ref": "#/$defs/two"}, {"allOf": [{"$ref": "#/$defs/one"}, {"format": "uuid", "pattern": "a"}]}]
    assert "more than 4 patterns" in refusal(json={**nested, "properties": {"x": {"allOf": twos}}})
    apart = [{"type": "string", **part} for part in parts]
    check(Structured(json={"anyOf": apart}), None)
    check(Structured(json={"properties": dict(zip("abcde", apart, strict=True))}), None)


def test_values_of_const_count_as_parts() -> None:
    assert refusal(json={"enum": [{"a": n, "b": [n]} for n in range(3000)]}).startswith("#/enum: the schema has more")
    check(Structured(json={"enum": [str(n) for n in range(3000)]}), None)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (powers(60), "too many names in one rule"),
        ("start: a\n" + "\n".join(f"a{i}: a a a a a" for i in range(600)), "more than 2,500 names in rules"),
        ("start: a{" + "1" * 5000 + "}", "repeats more than"),
        ("start: /a{" + "1" * 5000 + "}/", "a repetition's bounds"),
        ("\n" * 70_000, "longer than"),
    ],
    ids=["one-rule", "rules", "count", "count-in-regex", "lines"],
)
def test_grammars_beyond_a_bound_are_refused(grammar: str, told: str) -> None:
    assert told in refusal(grammar=grammar)


def test_no_text_of_a_grammar_is_read_again_and_again() -> None:
    """What repeats without a bound is possessive: what a text of n characters costs is n, not its square."""
    bare = re.sub(r"\\.|\[[^\]]*\]|\{0,\d+\}\+", "x", _TOKENS.pattern)
    repeats = re.findall(r"[*+]+", bare)
    assert len(repeats) > 10 and all(len(each) == 2 for each in repeats), repeats


def test_the_200_schemas_can_be_enforced() -> None:
    schemas = dict([*built(), *WRITTEN.items()])
    assert len(schemas) == 200
    for name, schema in list(schemas.items())[::7]:
        Draft202012Validator.check_schema(schema) if "draft-0" not in str(schema.get("$schema")) else None
        grammar_of(Structured(json=schema)), name
        check(Structured(json=schema), None)


def test_the_judge_of_answers() -> None:
    assert fault({"multipleOf": 0.1}, "0.30") is None
    assert fault({"type": "object"}, '{"a": -0, "b": [1.50, "\\n"]}') is None
    assert "otherwise" in (fault({"type": "object"}, '{"a":1}') or "")
    assert "date" in (fault({"format": "date"}, '"2023-02-29"') or "")
    assert "JSON" in (fault({}, "{") or "")
