"""Every parser, over texts written by hand: the parts add up to what was meant, however the text is cut."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.parsers.parts import Answer, CallArguments, Part
from headrace.server.parsers.registry import NONE, TOOL_FORMATS, Formats, make_parser
from headrace.server.turn import Tool

pytestmark = pytest.mark.unit

PROPERTIES = {"q": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array"}, "flag": {"type": "boolean"},
              "any": {"type": ["string", "null"]}, "x": {}}  # fmt: skip
TOOLS = [Tool("get_weather"), Tool("search", parameters={"type": "object", "properties": PROPERTIES}), Tool("now")]
BY_FORMAT = {name: import_module(f"tests.unit.parser_texts.{name}").CASES for name in TOOL_FORMATS}
"""Format -> its texts."""
REASONING = import_module("tests.unit.parser_texts.reasoning").CASES


class Case:
    """One text, what it is parsed by, and what it shall give. None: not written down."""

    def __init__(self, formats: Formats, prompt_end: str, text: str, *meant: Any) -> None:
        self.formats, self.prompt_end, self.text, self.meant = formats, prompt_end, text, meant

    def parts(self, pieces: Iterable[str]) -> list[Part]:
        numbers = count()
        parser = make_parser(self.formats, TOOLS, prompt_end=self.prompt_end, new_id=lambda: f"id{next(numbers)}")
        return [part for piece in pieces for part in parser.push(piece)] + parser.finish()

    def answer(self, pieces: Iterable[str]) -> Answer:
        found = Answer()
        found.add(self.parts(pieces))
        return found


def cases() -> list[Case]:
    found = []
    for name, texts in BY_FORMAT.items():
        formats = Formats(name, "harmony" if name == "openai" else NONE)
        for text, told, calls, *reasoning in texts:
            found.append(Case(formats, "", text, told, calls, *(reasoning or [""])))
    for opened, text, reasoning, told, calls in REASONING:
        found.append(Case(Formats("hermes", "think"), "<think>\n" if opened else "", text, told, calls, reasoning))
    return found


CASES = cases()


def cuts(text: str) -> Iterable[Sequence[str]]:
    """The text in two, cut at every byte; a cut inside a character moves to its end."""
    data = text.encode()
    for at in range(len(data) + 1):
        decoder = codecs.getincrementaldecoder("utf-8")()
        yield decoder.decode(data[:at]), decoder.decode(data[at:], final=True)


def test_there_are_thirty_texts_a_format() -> None:
    assert {name: len(texts) for name, texts in {**BY_FORMAT, "reasoning": REASONING}.items() if len(texts) < 30} == {}
    assert len({case.text + str(case.formats) + case.prompt_end for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", [*TOOL_FORMATS, "think"])
def test_texts_give_what_was_meant(name: str) -> None:
    for case in (case for case in CASES if name in (case.formats.tools, case.formats.reasoning)):
        found = case.answer([case.text])
        told, calls, reasoning = case.meant
        assert found.reasoning == reasoning, case.text
        assert told is None or found.text == told, case.text
        if calls is not None:
            meant = [(call[0], call[1], *(call[2:] or (f"id{i}",))) for i, call in enumerate(calls)]
            assert [(call.name, call.arguments, call.call_id) for call in found.calls] == meant, case.text


@pytest.mark.parametrize("name", [*TOOL_FORMATS, "think"])
def test_every_cut_gives_the_same(name: str) -> None:
    for case in (case for case in CASES if name in (case.formats.tools, case.formats.reasoning)):
        whole = case.answer([case.text])
        assert case.answer(case.text) == whole, case.text
        for pieces in cuts(case.text):
            assert case.answer(pieces) == whole, pieces


@given(st.sampled_from(CASES), st.data())
def test_random_cuts_give_the_same(case: Case, data: st.DataObject) -> None:
    ends = sorted(data.draw(st.lists(st.integers(0, len(case.text)), max_size=6)))
    pieces = [case.text[begin:end] for begin, end in zip([0, *ends], [*ends, len(case.text)], strict=True)]
    assert case.answer(pieces) == case.answer([case.text])


@given(st.sampled_from(list(TOOL_FORMATS)), st.booleans(), st.data())
def test_any_text_is_taken(name: str, opened: bool, data: st.DataObject) -> None:
    """Texts of the formats' own pieces in any order: no exception, and the same in one piece and by characters."""
    pieces = [*Formats(name, "think").marks, *"{}[]()\"'\\:,=<1aé \n", '"name"', '"search"', "search", '"arguments"',
              "<parameter=", "</parameter>", "<function=", "</function>", "to=functions.",
              '{"name": "search", "arguments": {', *Formats("glm45").marks, '<invoke name="', '">', "</invoke>",
              '<parameter name="', "function", "```json", "```"]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=30)))
    case = Case(Formats(name, "harmony" if name == "openai" else "think"), "<think>" if opened else "", text)
    assert case.answer(text) == case.answer([text])


STREAMED = [
    ("hermes", '<tool_call>{"name": "search", "arguments": {"q": "', "ab", '"}}</tool_call>'),
    ("llama3_json", '{"name": "search", "parameters": {"q": "', "ab", '"}}'),
    ("json", '{"name": "search", "arguments": {"q": "', "ab", '"}}'),
    ("mistral", '[TOOL_CALLS]search[ARGS]{"q": "', "ab", '"}'),
    ("pythonic", "[search(q='x", "ab", "')]"),
    ("openai", '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"q": "', "ab", '"}<|call|>'),
    (
        "qwen3_coder",
        "<tool_call>\n<function=search>\n<parameter=q>\n",
        "ab",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=search>\n<parameter=q>",
        "ab",
        "</parameter>\n</function>\n</seed:tool_call>",
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{"q": "',
        "ab",
        '"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"q": "',
        "ab",
        '"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="q">',
        "ab",
        "</parameter>\n</invoke>\n</minimax:tool_call>",
    ),
    ("glm45", "<tool_call>search\n<arg_key>q</arg_key>\n<arg_value>", "ab", "</arg_value>\n</tool_call>"),
]


@pytest.mark.parametrize(("name", "before", "value", "after"), STREAMED, ids=[name for name, *_ in STREAMED])
def test_arguments_are_told_as_they_come(name: str, before: str, value: str, after: str) -> None:
    parser = make_parser(Formats(name), TOOLS)
    begun = Answer()
    begun.add(parser.push(before))
    assert begun.calls[0].name == "search"
    for letter in value * 3:
        assert parser.push(letter) == [CallArguments(0, letter)]
    begun.add([*parser.push(after), *parser.finish()])
    assert len(begun.calls) == 1 and begun.calls[0].arguments.endswith('"}') and begun.text == ""
