"""The parts of an answer add up."""

from __future__ import annotations

from headrace.server.parsers.parts import Answer, Call, CallArguments, CallStart, PlainText, ReasoningPart, TextPart


def test_parts_add_up() -> None:
    answer = Answer()
    answer.add([ReasoningPart("a"), TextPart("b"), ReasoningPart("c"), CallStart(0, "x", "f"), CallArguments(0, "{")])
    answer.add([TextPart("d"), CallStart(1, "y", "g"), CallArguments(1, "{}"), CallArguments(0, "}")])
    assert answer == Answer("bd", "ac", [Call("x", "f", "{}"), Call("y", "g", "{}")])


def test_plain_text_is_one_kind_of_part() -> None:
    parser = PlainText()
    assert [parser.push("a"), parser.push(""), parser.finish()] == [[TextPart("a")], [], []]
