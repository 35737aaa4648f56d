"""From parts to items and events: as the types of the openai package want them, and as its accumulator adds them up."""

from __future__ import annotations

from typing import Any, get_args

import openai.types.responses as shapes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent

from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from headrace.server.responses.output import Output, OutputEvent, Token, Told
from headrace.server.responses.sealed import unsealed

pytestmark = pytest.mark.unit

CLASSES = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
"""Name of an event -> the client's class of it."""
ITEMS: dict[str, Any] = {
    "message": shapes.ResponseOutputMessage,
    "reasoning": shapes.ResponseReasoningItem,
    "function_call": shapes.ResponseFunctionToolCall,
}


def run(parts: list[Part], told: Told = Told(), status: Any = "completed") -> tuple[Output, list[OutputEvent]]:
    output = Output(told)
    events = [event for part in parts for event in output.take([part], [Token()])]
    return output, events + output.end(status)


def names(events: list[OutputEvent]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_the_order_of_events() -> None:
    parts = [ReasoningPart("h"), ReasoningPart("m"), TextPart("a"), CallStart(0, "c", "f"), CallArguments(0, "{}")]
    _, events = run([*parts])
    assert names(events) == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [event["output_index"] for event in events] == [0] * 7 + [1] * 6 + [2] * 4


def test_a_summary_takes_the_place_of_the_text() -> None:
    output, events = run([ReasoningPart("hmm"), TextPart("a")], Told(summary=True, sealed=True))
    assert names(events)[:6] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    item = output.items[0]
    assert item["summary"] == [{"type": "summary_text", "text": "hmm"}] and item["content"] == []
    assert unsealed(item["encrypted_content"]) == "hmm"


def test_text_between_calls_is_a_message_of_its_own() -> None:
    output, _ = run([TextPart("a"), CallStart(0, "c", "f"), TextPart("b"), CallStart(1, "d", "g")])
    assert [item["type"] for item in output.items] == ["message", "function_call", "message", "function_call"]
    assert [item.get("arguments") for item in output.items] == [None, "", None, ""]


@pytest.mark.parametrize("parts, kinds", [([], ["message"]), ([ReasoningPart("hmm")], ["reasoning", "message"])])
def test_an_answer_of_nothing_is_an_empty_message(parts: list[Part], kinds: list[str]) -> None:
    output, _ = run(parts)
    assert [item["type"] for item in output.items] == kinds
    assert output.items[-1]["content"][0]["text"] == ""


def test_an_answer_cut_short_is_incomplete_where_it_was_cut() -> None:
    output, _ = run([TextPart("a"), CallStart(0, "c", "f"), CallArguments(0, '{"a')], status="incomplete")
    assert [item["status"] for item in output.items] == ["completed", "incomplete"]
    output, _ = run([ReasoningPart("hm")], status="incomplete")
    assert [(item["type"], item["status"]) for item in output.items] == [("reasoning", "incomplete")]


def test_tokens_count_where_their_part_belongs() -> None:
    output = Output()
    entries = [Token({"token": str(n), "logprob": -1.0, "bytes": [], "top_logprobs": []}) for n in range(6)]
    assert output.take([], entries[:1]) == []  # held back: the beginning of the reasoning
    output.take([ReasoningPart("hm")], entries[1:3])
    output.take([], entries[3:4])
    events = output.take([TextPart("a")], entries[4:5])
    events += output.take([], entries[5:])  # the end of the text: a token without any
    events += output.end()
    assert output.reasoning_tokens == 3
    told = [
        entry["token"] for event in events for entry in event.get("logprobs", ()) if event["type"].endswith("delta")
    ]
    assert told == ["3", "4", "5"]
    assert [entry["token"] for entry in output.items[1]["content"][0]["logprobs"]] == told


def calls(number: int) -> st.SearchStrategy[list[Part]]:
    pieces = st.lists(st.text(max_size=3).map(lambda text: CallArguments(number, text)), max_size=3)
    return pieces.map(lambda more: [CallStart(number, f"call_{number}", "f"), *more])


TEXTS = st.lists(st.builds(TextPart, st.text(max_size=3)) | st.builds(ReasoningPart, st.text(max_size=3)), max_size=4)
ANSWERS = st.integers(0, 2).flatmap(lambda count: st.tuples(TEXTS, *[st.tuples(calls(n), TEXTS) for n in range(count)]))


def flat(answer: Any) -> list[Part]:
    first, *rest = answer
    return [*first, *[part for called, texts in rest for part in (*called, *texts)]]


@settings(max_examples=40, deadline=None)
@given(ANSWERS, st.sampled_from(["completed", "incomplete"]), st.booleans(), st.booleans())
def test_deltas_add_up_to_items_of_the_clients_types(answer: Any, status: Any, summary: bool, hidden: bool) -> None:
    parts = flat(answer)
    output, events = run(parts, Told(summary, hidden), status)
    whole = Output(Told(summary, hidden))
    whole.take(parts, [Token() for _ in parts])
    whole.end(status)
    assert [_without_id(item) for item in whole.items] == [_without_id(item) for item in output.items]
    texts: dict[int, str] = {}
    for number, event in enumerate(events):
        CLASSES[event["type"]].model_validate({**event, "sequence_number": number}, strict=True)
        if event["type"].endswith("delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(output.items):
        ITEMS[item["type"]].model_validate(item, strict=True)
        assert texts.get(index, "") == _text(item)
    spoken = [part.text for part in parts if isinstance(part, TextPart)]
    assert "".join(_text(item) for item in output.items if item["type"] == "message") == "".join(spoken)
    assert [item["name"] for item in output.items if item["type"] == "function_call"] == ["f"] * (len(answer) - 1)


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"] or item["summary"])
