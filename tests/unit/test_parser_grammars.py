"""Grammars that force calls and bound reasoning: whatever they allow is parsed into calls that fit their schemas."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest

from headrace.errors import InvalidRequest
from headrace.server.parsers.constraint import constraint
from headrace.server.parsers.lark import MOST_CALLS, arguments_schema, bare
from headrace.server.parsers.parts import Answer
from headrace.server.parsers.registry import NONE, TOOL_FORMATS, Formats, make_parser
from headrace.server.turn import Reasoning, Tool, ToolChoice
from headrace.structured import Structured
from tests.support.grammar_walks import Vocabulary, Walk, vocabulary

pytestmark = pytest.mark.unit


def schema(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or [], "additionalProperties": False}


PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string", "maxLength": 4}},
         "required": ["lat"], "additionalProperties": False}  # fmt: skip
CITY, WORDS = {"type": "string", "maxLength": 6}, {"type": ["string", "null"], "maxLength": 3}
PARAMETERS = {
    "now": schema(),
    "get_weather": schema(["city"], city=CITY, days={"type": "integer"}),
    "search-it": schema(q={"enum": ["a</x>", 'b "c"\n', "d\\"]}, deep={"type": "boolean"}),
    "go": {**schema(["to"], to={"$ref": "#/$defs/place"}, tags={"type": "array", "maxItems": 2, "items": WORDS}),
           "$defs": {"place": PLACE}},
    "mixed": schema(["x"], x={"anyOf": [{"type": "integer"}, {"const": "é👍"}]}, y={"type": "null"}),
}  # fmt: skip
TOOLS = [Tool(name, parameters=parameters) for name, parameters in PARAMETERS.items()]
REQUIRED, ONE = ToolChoice("required"), ToolChoice("required", parallel=False)


def test_a_tool_without_parameters_has_no_arguments() -> None:
    """Where a schema names its properties and says no more of others, a forced call has none of these."""
    for given in ({}, {"type": "object"}, {"type": "object", "properties": {}}, {"properties": {"x": {}}}):
        closed = arguments_schema(Tool("now", parameters=given))
        assert closed["additionalProperties"] is False
        assert closed.get("properties", {}) == given.get("properties", {})
    for more in ({"additionalProperties": True}, {"required": ["x"]}, {"anyOf": [{"required": ["x"]}]}):
        assert arguments_schema(Tool("now", parameters=more)).get("additionalProperties") is not False


def marks_of(name: str) -> tuple[str, ...]:
    return Formats(name, "harmony" if name == "openai" else "think").marks


def formats(name: str, words: Vocabulary) -> Formats:
    return Formats(name, "harmony" if name == "openai" else "think", words.added)


def parsed(found: Formats, text: str, choice: ToolChoice = REQUIRED, prompt_end: str = "") -> Answer:
    parser, answer = make_parser(found, TOOLS, choice, prompt_end), Answer()
    answer.add(parser.push(text) + parser.finish())
    return answer


def begin(
    found: Formats,
    words: Vocabulary,
    choice: ToolChoice = REQUIRED,
    prompt_end: str = "",
    budget: int | None = None,
    structured: Structured | None = None,
    enabled: bool | None = None,
) -> Walk:
    shape = constraint(found, TOOLS, choice, Reasoning(enabled, budget), prompt_end, structured)
    assert shape is not None
    return Walk(shape, words)


def check_calls(answer: Answer) -> None:
    assert answer.calls and answer.text == ""
    for call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), PARAMETERS[call.name])
        assert not set("\n\t\r").intersection(call.arguments), "blanks have no end"


@pytest.mark.parametrize("tokens", [False, True], ids=["marks-as-text", "marks-as-tokens"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_forced_calls_fit_their_schemas(name: str, tokens: bool) -> None:
    words = vocabulary(*marks_of(name)) if tokens else vocabulary()
    found, done, called = formats(name, words), 0, set()
    for seed in range(24):
        walk = begin(found, words, enabled=False, choice=REQUIRED if seed % 2 else ONE).go_on(seed)
        if walk.whole:
            answer = parsed(found, walk.text)
            check_calls(answer)
            assert len(answer.calls) <= (MOST_CALLS if seed % 2 and name != "openai" else 1)
            done, called = done + 1, called | {call.name for call in answer.calls}
    assert done >= 16 and len(called) >= 3


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("tool", PARAMETERS)
def test_a_named_call_is_of_its_name(name: str, tool: str) -> None:
    words = vocabulary(*marks_of(name))
    found, choice, done = formats(name, words), ToolChoice("required", (tool,), parallel=False), 0
    for seed in range(3):
        walk = begin(found, words, choice, enabled=False).go_on(seed)
        if walk.whole:
            answer = parsed(found, walk.text, choice)
            check_calls(answer)
            assert [call.name for call in answer.calls] == [tool]
            done += 1
    assert done


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if name != "openai"])
def test_several_calls_come_in_one_answer(name: str) -> None:
    words, choice = vocabulary(), ToolChoice("required", ("now",))
    walks = (begin(formats(name, words), words, choice, enabled=False).go_on(seed) for seed in range(40))
    assert any(len(parsed(formats(name, words), walk.text).calls) > 1 for walk in walks)


NAMED = ToolChoice("required", ("now",), parallel=False)
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("tokens", [False, True], ids=["marks-as-text", "marks-as-tokens"])
def test_reasoning_may_come_first(tokens: bool) -> None:
    words = vocabulary(*marks_of("hermes")) if tokens else vocabulary()
    found = formats("hermes", words)
    for prompt_end, text in (
        ("", f"<think>\nhm < ok\n</think>\n\n{NOW}"),
        ("<think>\n", f"hm < ok\n</think>{NOW}"),
        ("", NOW),
    ):
        walk = begin(found, words, NAMED, prompt_end).write(text)
        answer = parsed(found, text, NAMED, prompt_end)
        assert walk.whole and answer.reasoning == ("hm < ok" if "hm" in text else "")
        check_calls(answer)
    if tokens:  # else it is a thought that goes on
        with pytest.raises(ValueError, match="satisfy"):
            begin(found, words, NAMED, "<think>\n").write(NOW)
    for prompt_end in ("</think>\n\n", ""):
        with pytest.raises(ValueError, match="satisfy"):
            begin(found, words, NAMED, prompt_end, enabled=False).write("<think>\nhm")


def test_a_budget_ends_reasoning_token_by_token() -> None:
    words = vocabulary(*marks_of("hermes"))
    found, close = formats("hermes", words), words.added["</think>"]
    walk = begin(found, words, NAMED, "<think>", budget=3)
    some = sorted(walk.allowed() - {close})[50]
    assert close in walk.allowed()
    walk.take(some, some)
    assert close in walk.allowed() and len(walk.allowed()) > 1000
    assert walk.take(some).allowed() == {close}
    assert begin(found, words, NAMED, "<think>", budget=0).allowed() == {close}
    assert begin(found, words, NAMED, "<think>", budget=3).write(f"a</think>{NOW}").whole


def test_a_budget_without_a_token_counts_characters() -> None:
    words = vocabulary()
    walk = begin(formats("hermes", words), words, NAMED, "<think>", budget=2).write("a b c d ")
    assert walk.go_on(1).text.startswith("a b c d </think>")
    assert begin(formats("hermes", words), words, NAMED, "<think>", budget=2).write(f"a</think>{NOW}").whole


@pytest.mark.parametrize("tokens", [False, True], ids=["marks-as-text", "marks-as-tokens"])
def test_after_a_budget_alone_any_text_may_come(tokens: bool) -> None:
    words = vocabulary(*marks_of("hermes")) if tokens else vocabulary()
    found, auto = formats("hermes", words), ToolChoice()
    for prompt_end, text in (("<think>", "a</think>"), ("", "<think>a</think>")):
        walk = begin(found, words, auto, prompt_end, budget=4).write(text)
        assert walk.whole and len(walk.allowed()) >= words.tokens.vocab_size - len(words.added)
        assert walk.write("\nYes, <tool_call> \n").whole
    with pytest.raises(ValueError, match="satisfy"):
        begin(found, words, auto, "", budget=4).write("no thought")


SHAPES = {
    "json": (Structured(json={"type": "array", "items": {"type": "integer"}, "maxItems": 2}), "[1, 2]"),
    "json_object": (Structured(json_object=True), '{"a": 1}'),
    "regex": (Structured(regex=r"a/b+\n[0-9]\.\w"), "a/bb\n1.e"),
    "choice": (Structured(choice=('x "y"\n', "z")), 'x "y"\n'),
    "grammar": (Structured(grammar='start: one+\none: "q" B\nB: /[0-9]{2}/'), "q12q34"),
}


@pytest.mark.parametrize(("shape", "text"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["hermes", "openai"])
def test_a_shape_applies_after_reasoning(name: str, shape: Structured, text: str) -> None:
    words = vocabulary(*marks_of(name))
    found, none = formats(name, words), ToolChoice("none")
    if name == "hermes":
        written = [f"<think>hm</think>\n\n{text}", text]
    else:
        final = f"<|channel|>final<|message|>{text}"
        written = [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}", final]
    for whole in written:
        assert begin(found, words, none, structured=shape).write(whole).whole
        assert parsed(found, whole, none).text == text
    with pytest.raises(ValueError, match="satisfy"):
        begin(found, words, none, structured=shape).write("Other words.")


def test_a_shape_or_calls_where_both_may_come() -> None:
    words = vocabulary(*marks_of("hermes"))
    for text in (NOW, f"{NOW}\n{NOW}", "true", f"<think>hm</think>{NOW}"):
        assert (
            begin(formats("hermes", words), words, ToolChoice(), structured=Structured(json={"type": "boolean"}))
            .write(text)
            .whole
        )


def test_nothing_is_forced_where_nothing_is_asked() -> None:
    found, boolean = Formats("hermes", "think"), Structured(json={"type": "boolean"})
    assert constraint(found, TOOLS, ToolChoice(), Reasoning(), "", None) is None
    assert constraint(found, TOOLS, ToolChoice("none"), Reasoning(), "", None) is None
    assert constraint(found, [Tool("f", strict=True)], ToolChoice(), Reasoning(), "<think>", None) is None
    assert constraint(Formats("hermes"), TOOLS, ToolChoice(), Reasoning(budget=5), "", None) is None
    assert constraint(found, TOOLS, ToolChoice(), Reasoning(False, 5), "", None) is None
    assert constraint(Formats(), [], ToolChoice(), Reasoning(), "", boolean) is boolean
    assert constraint(found, [], ToolChoice(), Reasoning(False), "", boolean) is boolean
    assert constraint(Formats(NONE), TOOLS, ToolChoice(), Reasoning(), "", boolean) is boolean


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"properties": {"a": found}}
    return found


PATTERN, MARKED = {"type": "string", "pattern": "a"}, {"enum": ["</parameter></arg_value>"]}
XML = ("qwen3_coder", "glm45", "minimax_m2")
STRINGS = {"qwen3_coder": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>"),
           "minimax_m2": ('<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">', "</parameter>"),
           "glm45": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value>")}  # fmt: skip
"""Format -> what a call of a string begins with, and what ends the string."""


GET, WEATHER = Tool("get", parameters=schema(a={"type": "string"}, ab={"type": "integer"})), TOOLS[1]
"""Names that begin alike."""
LEARNT = {
    "glm45": [
        "<tool_call>get\n<arg_key>ab</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>get\n</tool_call>",
        "<tool_call>get<arg_key>a</arg_key><arg_value>\nx</arg_value></tool_call><tool_call>get</tool_call>",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="get">\n<parameter name="a">x</parameter>\n</invoke>\n'
        '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call>\n<invoke name="get">\n</invoke>\n</minimax:tool_call>',
    ],
    "hunyuan_a13b": [
        '<tool_calls>[{"name": "get", "arguments": {"a": "x"}}, '
        '{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_calls>'
    ],
    "olmo3": [
        '<function_calls>get(a="x")\nget_weather(city="Rome")</function_calls>',
        "<function_calls>get()</function_calls>",
    ],
    "cohere": [
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get", "parameters": {"a": "x"}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_weather", "parameters": {"city": "Rome"}}\n]<|END_ACTION|>'
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n"
        '```json\n{"a": "x"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ],
}
"""Format -> calls as the chat templates of its models write them."""


@pytest.mark.parametrize("tokens", [False, True], ids=["marks-as-text", "marks-as-tokens"])
@pytest.mark.parametrize("name", LEARNT)
def test_calls_are_forced_as_the_models_have_learnt_them(name: str, tokens: bool) -> None:
    words = vocabulary(*marks_of(name)) if tokens else vocabulary()
    for prompt_end, thought in (("", ""), ("<think>\n", "hm</think>"), ("<think>\n", "hm\n</think>\n\n")):
        shape = constraint(formats(name, words), [GET, WEATHER], REQUIRED, Reasoning(), prompt_end, None)
        assert shape is not None
        for text in LEARNT[name]:
            assert Walk(shape, words).write(thought + text).whole, text


@pytest.mark.parametrize("tokens", [False, True], ids=["marks-as-text", "marks-as-tokens"])
@pytest.mark.parametrize("name", XML)
def test_a_string_ends_with_the_first_mark(name: str, tokens: bool) -> None:
    """Also with one that is spelled where the vocabulary has a token for it: a parser sees no difference."""
    words = vocabulary(*marks_of(name)) if tokens else vocabulary()
    tool, (before, end) = Tool("f", parameters=schema(["a"], a={"type": "string"})), STRINGS[name]
    shape = constraint(formats(name, words), [tool], ONE, Reasoning(False), "", None)
    assert shape is not None
    for value in ("", "Oslo", "a\n"):
        assert Walk(shape, words).write(f"{before}{value}{end}").allowed()
    spelled = Walk(shape, words).write(before).spell("a" + end)
    with pytest.raises(ValueError, match="satisfy"):
        spelled.spell("b")


REFUSED = {
    "no-tool": ("hermes", [], ToolChoice("required"), "tool_choice"),
    "no-such-tool": ("hermes", TOOLS, ToolChoice("required", ("other",)), "tool_choice"),
    "no-parser": (NONE, TOOLS, REQUIRED, "tool_choice"),
    "no-object": ("hermes", [Tool("f", parameters={"type": "array"})], REQUIRED, "tools"),
    **{f"pattern-in-{name}": (name, [Tool("f", parameters=schema(a=PATTERN))], REQUIRED, "tools") for name in XML},
    **{f"mark-in-{name}": (name, [Tool("f", parameters=schema(a=MARKED))], REQUIRED, "tools") for name in XML},
    "no-schema": ("hermes", [Tool("f", parameters={"properties": {"a": {"type": "strin"}}})], REQUIRED, "tools"),
    "no-properties": ("pythonic", [Tool("f", parameters={"properties": 3, "required": 4})], REQUIRED, "tools"),
    "deep": ("hermes", [Tool("f", parameters=deep(3000))], REQUIRED, "tools"),
    **{f"whole-schema-in-{name}": (name, [Tool("f", parameters={"anyOf": [{}]})], REQUIRED, "tools") for name in XML},
}


@pytest.mark.parametrize(("name", "tools", "choice", "param"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_forced_is_refused(name: str, tools: list[Tool], choice: ToolChoice, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        constraint(Formats(name), tools, choice, Reasoning(), "", None)
    assert refused.value.param == param and (param != "tools" or not tools or repr(tools[0].name) in str(refused.value))


def test_texts_that_are_marks_cannot_be_forced() -> None:
    words = vocabulary(*marks_of("hermes"), "<other>")
    mark, other = {"enum": ["a </tool_call> b"]}, {"enum": ["a <other> b"]}
    for schema_of in (mark, other, {"type": "string", "description": "Write </tool_call>."}):
        tools = [Tool("f", parameters=schema(a=schema_of))]
        with pytest.raises(InvalidRequest, match="contain '</tool_call>'") if schema_of is mark else nullcontext():
            assert constraint(formats("hermes", words), tools, REQUIRED, Reasoning(), "", None)


def test_words_for_readers_are_left_out_of_grammars() -> None:
    named = {"type": "string", "description": "e", "default": "f", "enum": ["x", {"title": 1}]}
    listed = {"items": {"$comment": "g", "anyOf": [{"examples": []}, True]}}
    told = {"type": "object", "description": "d", "properties": {"description": named, "title": listed}}
    left = {"description": {"type": "string", "enum": ["x", {"title": 1}]}, "title": {"items": {"anyOf": [{}, True]}}}
    assert bare(told) == {"type": "object", "properties": left}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_tools_make_a_grammar(name: str) -> None:
    words = {"type": "string", "description": "What it is good for. " * 100}
    tools = [Tool(f"tool_{i}", parameters=schema(["a"], **dict.fromkeys("abcde", words))) for i in range(40)]
    shape = constraint(Formats(name), tools, REQUIRED, Reasoning(), "", None)
    assert shape is not None and len(shape.grammar or "") < 48_000
    assert Walk(shape, vocabulary()).allowed()
