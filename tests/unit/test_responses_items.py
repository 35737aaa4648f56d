"""Input items of the Responses API: what is taken, how it is kept, which messages a template reads."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.server.errors import ApiError
from headrace.server.responses.items import MAX_ITEMS, Item, check_conversation, messages_of, read_input
from headrace.server.responses.sealed import sealed

pytestmark = pytest.mark.unit


def read(*given: Any) -> list[Item]:
    return read_input(list(given), lambda _: None)


def told(*given: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return messages_of(read(*given), instructions)


def said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def call(call_id: str = "c1", name: str = "add", arguments: str = '{"a": 1}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(output: Any = "3", call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reasoning(text: str = "hmm") -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def template_call() -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_text_is_a_message_of_the_user() -> None:
    assert messages_of(read_input("hello", lambda _: None), "be kind") == [
        said("system", "be kind"),
        said("user", "hello"),
    ]


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    answer = [
        {"type": "output_text", "text": "c", "annotations": [], "logprobs": [], "parsed": {"x": 1}},
        {"type": "refusal", "refusal": "no"},
    ]
    assert told(said("developer", parts), said("assistant", answer)) == [
        said("system", "a\nb"),
        said("assistant", "c\nno"),
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    second = call("c2", "mul", "{}")
    messages = told(
        said("user", "1 + 2?"), reasoning("add"), said("assistant", "Well,"), call(), second,
        result(), result("0", "c2"), said("assistant", "3"),
    )  # fmt: skip
    other = {"id": "c2", "type": "function", "function": {"name": "mul", "arguments": {}}}
    assert messages == [
        said("user", "1 + 2?"),
        {
            "role": "assistant",
            "content": "Well,",
            "reasoning_content": "add",
            "tool_calls": [template_call(), other],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3", "name": "add"},
        {"role": "tool", "tool_call_id": "c2", "content": "0", "name": "mul"},
        said("assistant", "3"),
    ]


def test_what_comes_behind_a_call_belongs_to_its_turn() -> None:
    (turn, _) = told(call(), reasoning("more"), said("assistant", "and so"), result())
    assert (turn["content"], turn["reasoning_content"]) == ("and so", "more")


def test_two_answers_are_two_messages() -> None:
    assert told(said("assistant", "a"), said("assistant", "b")) == [said("assistant", "a"), said("assistant", "b")]
    assert told(said("assistant", "a"), reasoning(), said("assistant", "b")) == [
        said("assistant", "a"),
        {**said("assistant", "b"), "reasoning_content": "hmm"},
    ]


@pytest.mark.parametrize("arguments", ["no json", "[1]", "[" * 100_000], ids=["text", "list", "deep"])
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    (turn,) = told(call(arguments=arguments))
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "item",
    [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "hmm"}], "encrypted_content": sealed("other")},
        {"summary": [{"type": "summary_text", "text": "hmm"}], "content": None},
        {"summary": [], "encrypted_content": sealed("hmm")},
        {"summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": sealed("hmm")},
    ],
    ids=["content", "summary", "sealed", "sealed and summary"],
)
def test_reasoning_comes_back_from_where_it_is(item: dict[str, Any]) -> None:
    (turn,) = told({"type": "reasoning", "id": "rs_1", **item})
    assert turn == {**said("assistant", ""), "reasoning_content": "hmm"}


def test_items_are_kept_under_ids_of_ours() -> None:
    items = read({"type": "message", "id": "msg_theirs", "status": "completed", **said("user", "a")}, call(), result())
    assert [item["id"].split("_")[0] for item in items] == ["msg", "fc", "fco"]
    assert len({item["id"] for item in items}) == 3 and "msg_theirs" not in [item["id"] for item in items]
    assert all(len(item["id"]) > 40 for item in items)
    assert (
        read_input([{**call(), "id": "fc_1", "status": None, "caller": None}], lambda _: None)[0]["status"]
        == "completed"
    )


@pytest.mark.parametrize("reference", [{"type": "item_reference", "id": "x"}, {"id": "x"}], ids=["typed", "id alone"])
def test_a_reference_is_the_kept_item(reference: dict[str, str]) -> None:
    kept = read(said("user", "kept"))[0]
    assert read_input([reference], {"x": kept}.get) == [kept]
    with pytest.raises(ApiError) as refused:
        read(reference)
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "input[0].id", "item_not_found")


IMAGE, AUDIO = {"type": "input_image", "image_url": "u"}, {"type": "input_audio"}

BAD: dict[str, tuple[Any, str]] = {
    "nothing": (None, "input"),
    "an empty list": ([], "input"),
    "an object": ({"role": "user"}, "input"),
    "too many": ([said("user", "")] * (MAX_ITEMS + 1), "input"),
    "a text among items": (["a"], "input[0]"),
    "an item of nothing": ([{}], "input[0].type"),
    "an unknown item": ([{"type": "computer_call"}], "input[0].type"),
    "a type that is a list": ([{"type": []}], "input[0].type"),
    "an unknown role": ([said("tool", "a")], "input[0].role"),
    "no content": ([{"role": "user"}], "input[0].content"),
    "content of another type": ([said("user", 5)], "input[0].content"),
    "a misspelt field": ([{**said("user", "a"), "rolle": 1}], "input[0].rolle"),
    "an image": ([said("user", "a"), said("user", [IMAGE])], "input[1].content[0].type"),
    "a file as output": ([call(), result([{"type": "input_file", "file_id": "f"}])], "input[1].output[0].type"),
    "audio": ([said("user", [{"type": "input_text", "text": ""}, AUDIO])], "input[0].content[1].type"),
    "a part without text": ([said("user", [{"type": "input_text"}])], "input[0].content[0].text"),
    "a refusal without text": ([said("assistant", [{"type": "refusal"}])], "input[0].content[0].text"),
    "a call without a name": ([{"type": "function_call", "call_id": "c", "arguments": ""}], "input[0].name"),
    "an output without its call": ([result()], "input"),
    "a call behind its output": ([result(), call()], "input"),
    "reasoning of another server": ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}],
                                    "input[0].encrypted_content"),
    "reasoning that is damaged": ([{"type": "reasoning", "summary": [], "encrypted_content": "headrace1.*"}],
                                  "input[0].encrypted_content"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_item(name: str) -> None:
    given, param = BAD[name]
    with pytest.raises(ApiError) as refused:
        check_conversation(read_input(given, lambda _: None))
    assert (refused.value.status, refused.value.param) == (400, param), refused.value.message


def test_a_conversation_has_no_more_items_than_an_input() -> None:
    items = read(reasoning(""))
    check_conversation(items * MAX_ITEMS)
    with pytest.raises(ApiError):
        check_conversation(items * (MAX_ITEMS + 1))


def test_a_refusal_looks_at_no_more_than_the_first_fault() -> None:
    with pytest.raises(ApiError) as refused:
        read(said("user", [{"type": "input_text", "text": 1}, *[{"type": "input_text"}] * 100_000]))
    assert refused.value.param == "input[0].content[0].text" and len(refused.value.message) < 200
