"""Parts of an answer as content blocks: whole, and as the events of a stream that a client adds up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.anthropic.events import Blocks, call_input, frame, stop_reason, usage
from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart

pytestmark = pytest.mark.unit


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Anthropic's client makes of a stream's blocks: each begins, grows and ends once, one after the other."""
    blocks: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    open_at = None
    for event in events:
        if event["type"] == "content_block_start":
            assert open_at is None and event["index"] == len(blocks)
            open_at = event["index"]
            blocks.append({**event["content_block"]})
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_at
            open_at = None
        else:
            _grow(blocks[event["index"]], event["delta"], arguments, event["index"])
    assert open_at is None
    for index, text in arguments.items():
        blocks[index]["input"] = json.loads(text)
    return blocks


def _grow(block: dict[str, Any], delta: dict[str, str], arguments: dict[int, str], index: int) -> None:
    if delta["type"] == "text_delta":
        block["text"] += delta["text"]
    elif delta["type"] == "thinking_delta":
        block["thinking"] += delta["thinking"]
    elif delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        arguments[index] = arguments.get(index, "") + delta["partial_json"]


def told(*parts: Part, omit: bool = False) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events, and the blocks of the whole."""
    blocks = Blocks(omit)
    return [*blocks.add(parts), *blocks.finish()], blocks.content


CALL = [CallStart(0, "c1", "f"), CallArguments(0, '{"a": '), CallArguments(0, "1}")]


def test_an_answer_with_everything() -> None:
    events, content = told(
        ReasoningPart("h"), ReasoningPart("m"), TextPart("\n\n"), TextPart("a"), TextPart("b"), *CALL
    )
    assert content == added_up(events) == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "\n\nab"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
    ]  # fmt: skip
    assert [event["delta"]["type"] for event in events if "delta" in event] == [
        "thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta", "input_json_delta",
        "input_json_delta",
    ]  # fmt: skip


def test_white_space_alone_is_no_block() -> None:
    events, content = told(TextPart("\n"), *CALL, TextPart(" "), TextPart("\n"))
    assert [block["type"] for block in content] == [block["type"] for block in added_up(events)] == ["tool_use"]
    assert told(TextPart(" \n"))[1] == told()[1] == []


def test_thinking_may_be_left_out() -> None:
    events, content = told(ReasoningPart("hm"), TextPart("a"), omit=True)
    assert content == added_up(events) and content[0] == {"type": "thinking", "thinking": "", "signature": ""}


SPOKEN = st.builds(TextPart, st.sampled_from(["", " ", "\n", "a", "b "]))
THOUGHT = st.builds(ReasoningPart, st.sampled_from(["", "x", "y"]))


@given(st.lists(SPOKEN | THOUGHT | st.just("call"), max_size=8), st.data())
def test_a_stream_adds_up_to_the_whole(given_parts: list[Any], data: st.DataObject) -> None:
    parts: list[Part] = []
    for part in given_parts:
        number = sum(isinstance(each, CallStart) for each in parts)
        if part == "call":
            pieces = data.draw(st.sampled_from([["{}"], ['{"a":', '"b"}'], ["{", "}"]]))
            parts += [CallStart(number, f"c{number}", "f"), *(CallArguments(number, piece) for piece in pieces)]
        else:
            parts.append(part)
    blocks = Blocks()
    cut = data.draw(st.integers(0, len(parts)))
    events = [*blocks.add(parts[:cut]), *blocks.add(parts[cut:]), *blocks.finish()]
    assert added_up(events) == blocks.content
    spoken = "".join(block.get("text", "") for block in blocks.content)
    assert letters(spoken) == letters("".join(part.text for part in parts if isinstance(part, TextPart)))


def letters(text: str) -> str:
    """Without white space."""
    return "".join(text.split())


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}), (" ", {}), ('{"a": [1, 2]}', {"a": [1, 2]}),
        ('{"a": "b", "c": "cut sho', {"a": "b", "c": "cut sho"}), ('{"a"', {}),
        ("[1]", {"INVALID_JSON": "[1]"}), ("a: 1", {"INVALID_JSON": "a: 1"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
    ],
)  # fmt: skip
def test_arguments_as_an_object(text: str, wanted: dict[str, Any]) -> None:
    assert call_input(text) == wanted


@pytest.mark.parametrize(
    ("finish", "stopped_by", "calls", "cut", "wanted"),
    [
        ("stop", None, False, False, "end_turn"),
        ("stop", None, True, False, "tool_use"),
        ("stop", "END", True, False, "stop_sequence"),
        ("stop", 7, False, False, "end_turn"),
        ("length", None, True, False, "max_tokens"),
        ("length", None, False, True, "model_context_window_exceeded"),
        (None, None, False, False, None),
    ],
)
def test_stop_reasons(finish: Any, stopped_by: Any, calls: bool, cut: bool, wanted: str | None) -> None:
    assert stop_reason(finish, stopped_by, calls, cut) == wanted


def test_frames_and_usage() -> None:
    assert frame({"type": "ping"}) == b'event: ping\ndata: {"type":"ping"}\n\n'
    counted = usage(prompt=100, cached=64, output=7, written=30)
    assert counted == {
        "input_tokens": 6, "cache_creation_input_tokens": 30, "cache_read_input_tokens": 64, "output_tokens": 7,
    }  # fmt: skip
