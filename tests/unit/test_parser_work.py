"""Parsers of hostile texts: work grows with the text and no faster, and nothing but the beginning of a mark waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from headrace.server.parsers.parts import Answer, OutputParser
from headrace.server.parsers.registry import NONE, TOOL_FORMATS, Formats, make_parser
from headrace.server.parsers.scan import Marks, Reader
from headrace.server.turn import Tool

pytestmark = pytest.mark.unit

# fmt: off
HOSTILE = ["{", "[", '"', "\\", " ", "\n{", "<tool_call", "<tool_call>{", '{"name": "search", "arguments": {"a": ',
           '{"name": "x"}\n', "<think>", "[search(a=[", "[search()]\n", "a=1, ", "<|channel|>x", "to=functions.a ",
           "<function=a>", "<parameter=a>", "<tool_call>a", '<invoke name="a">', "<｜tool▁call▁begin｜>a<｜tool▁sep｜>",
           "`", "<arg_key>a</arg_key><arg_value>", "</arg_value>", "</parameter>", "[TOOL_CALLS]a", "[TOOL_CALLS][",
           "<|python_tag|>", "<|tool_call_start|>[", "<TOOLCALL>[", "<|START_ACTION|>[", "<tool_calls>[",
           "<function_calls>search("]
BEGINNINGS = {"hermes": '<tool_call>{"name": "search", "arguments": {"a": ',
              "nemotron_json": '<TOOLCALL>[{"name": "search", "arguments": {"a": ',
              "hunyuan_a13b": '<tool_calls>[{"name": "search", "arguments": {"a": ',
              "olmo3": "<function_calls>search(a=",
              "cohere": '<|START_ACTION|>[{"tool_name": "search", "parameters": {"a": ',
              "mistral": '[TOOL_CALLS]search[ARGS]{"a": ',
              "pythonic": "[search(a=", "lfm2": "<|tool_call_start|>[search(a=",
              "qwen3_coder": "<function=search><parameter=a>",
              "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n",
              "deepseek_v31": '<｜tool▁call▁begin｜>search<｜tool▁sep｜>{"a": ',
              "minimax_m2": '<minimax:tool_call><invoke name="search"><parameter name="a">',
              "glm45": "<tool_call>search<arg_key>a</arg_key><arg_value>",
              "json": '{"name": "search", "arguments": ', "llama3_json": '{"name": "search", "parameters": ',
              "seed_oss": "<function=search><parameter=a>",
              "openai": "<|channel|>commentary to=functions.search <|message|>"}
# fmt: on
LENGTH = 160


def parser_of(name: str) -> OutputParser:
    return make_parser(Formats(name, "harmony" if name == "openai" else "think"), [Tool("search")])


class Work:
    """Characters that readers copy or look through, and how many they have not read when more come."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.touched = self.waited = 0
        feed, take, find, peek = Reader.feed, Reader._take, Marks.find, Reader.peek

        def noted_feed(reader: Reader, text: str) -> None:
            self.waited = max(self.waited, reader.unread)
            self.touched += reader.unread + len(text)
            feed(reader, text)

        def noted_take(reader: Reader, end: int) -> str:
            self.touched += len(piece := take(reader, end))
            return piece

        def noted_find(marks: Marks, text: str, at: int) -> tuple[int, str]:
            begin, mark = find(marks, text, at)
            self.touched += (begin + len(mark) if mark else len(text)) - at
            return begin, mark

        def noted_peek(reader: Reader) -> Iterator[None]:
            self.touched += 1
            return peek(reader)

        for name, noted in (("feed", noted_feed), ("_take", noted_take), ("peek", noted_peek)):
            monkeypatch.setattr(Reader, name, noted)
        monkeypatch.setattr(Marks, "find", noted_find)

    def of(self, parser: OutputParser, pieces: Iterable[str]) -> int:
        self.touched = 0
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        return self.touched


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_work_is_linear_and_what_waits_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(monkeypatch)
    longest = max(map(len, Formats(name, "think").marks))
    for hostile in HOSTILE:
        for begin in ("", BEGINNINGS[name]):
            texts = [begin + hostile * (LENGTH * size // len(hostile)) for size in (1, 2)]
            for once, twice in (texts, [[text] for text in texts]):
                assert work.of(parser_of(name), twice) < 2.1 * work.of(parser_of(name), once) + LENGTH, (begin, hostile)
    assert 0 < work.waited < longest


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_deep_texts_are_taken(name: str) -> None:
    """Neither brackets nor marks nest parsers, so no depth of theirs is too great."""
    for hostile in ("[", "{", '{"a":', "[{", "(", "<tool_call>", "[TOOL_CALLS]"):
        parser, found = parser_of(name), Answer()
        found.add(parser.push(BEGINNINGS[name] + hostile * 5_000))
        found.add(parser.finish())
        assert len(found.calls) <= 1


def test_a_format_of_no_tools_is_text() -> None:
    parser = make_parser(Formats(NONE, NONE), [Tool("search")])
    assert [part.text for part in parser.push("<tool_call>{")] == ["<tool_call>{"]
