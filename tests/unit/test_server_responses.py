"""/v1/responses over the fake engine, as the unmodified OpenAI client sees it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response

from headrace.server.protocol import parse_body
from headrace.server.responses.body import ResponsesBody
from headrace.server.responses.items import messages_of, read_input
from headrace.types import Structured
from tests.support.fake_server import Running, serving
from tests.support.responses_tools import ADD, FILES, speaks_hermes

pytestmark = pytest.mark.unit

ROUTE = "/v1/responses"


def thought(text: str) -> str:
    return f"<think>{text}</think>"


def called(arguments: str) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(prepare=speaks_hermes) as running:
        yield running


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    server.engine.scripts.clear()
    return server.client()


def says(server: Running, *scripts: str) -> None:
    server.engine.scripts += scripts


def events_of(reply: str) -> list[dict[str, Any]]:
    """Each frame has its event's name, and the events are numbered."""
    frames = [frame.split("\n") for frame in reply.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_create(server: Running, client: openai.OpenAI) -> None:
    says(server, "Hello!")
    made = client.responses.create(
        model="fake", input="abc" * 50, instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, user="me"
    )
    Response.model_validate(made.to_dict(), strict=True)
    assert (made.output_text, made.status, made.object) == ("Hello!", "completed", "response")
    assert server.engine.asked[-1][0] == "Be kind.\n" + "abc" * 50 + "\n"
    assert (made.metadata, made.temperature, made.top_p, made.user) == ({"a": "b"}, 0.5, 1.0, "me")
    assert made.instructions == "Be kind." and made.completed_at is not None and made.error is None
    assert made.usage is not None and made.usage.input_tokens_details.cached_tokens == 64
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (160, 6, 166)
    assert made.headrace["new_tokens"] == 96  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "script",
    [thought("hm") + "Hello!", "", "a" + called("{}") + "b" + called('{"a": 1}')],
    ids=["reasoning", "nothing", "calls"],
)
def test_the_stream_adds_up_to_the_whole(server: Running, client: openai.OpenAI, script: str) -> None:
    more: dict[str, Any] = {"stop": ["#"]}  # also ends answers that say nothing
    says(server, script + "#", script + "#")
    ask: dict[str, Any] = {"model": "fake", "input": "hello", "tools": [ADD], "extra_body": more}
    whole = client.responses.parse(**ask)
    with client.responses.stream(**ask) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[:2] == ["response.created", "response.in_progress"] and seen[-1] == "response.completed"
    assert [_plain(item) for item in final.output] == [_plain(item) for item in whole.output]
    Response.model_validate(final.to_dict() | {"output": [item.to_dict() for item in whole.output]}, strict=True)
    assert final.output_text == whole.output_text and final.usage == whole.usage


def _plain(item: Any) -> dict[str, Any]:
    return item.to_dict() | {"id": "", "call_id": ""}  # type: ignore[no-any-return]


def test_reasoning_is_an_item_and_counted(server: Running, client: openai.OpenAI) -> None:
    says(server, thought("hmm") + "Hi", thought("hmm") + "Hi")
    made = client.responses.create(model="fake", input="a", include=["reasoning.encrypted_content"])
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.output[0].content[0].text == "hmm" and made.output[0].encrypted_content  # type: ignore[union-attr]
    assert made.usage is not None and made.usage.output_tokens_details.reasoning_tokens == len("<think>hmm")
    reply = server.http.post(ROUTE, json={"input": "a", "stream": True, "reasoning": {"summary": "auto"}})
    names = [event["type"] for event in events_of(reply.text)]
    assert names[2:5] == [
        "response.output_item.added", "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
    ]  # fmt: skip


def test_an_answer_cut_short_is_incomplete(server: Running, client: openai.OpenAI) -> None:
    made = client.responses.create(model="fake", input="abc", max_output_tokens=2)
    assert (made.status, made.output_text) == ("incomplete", "ab")
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    reply = server.http.post(ROUTE, json={"input": "abc", "max_output_tokens": 2, "stream": True})
    assert events_of(reply.text)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "status"), [(";", "incomplete"), ("</tool", "completed")])
def test_a_call_that_a_stop_string_cuts_is_not_complete(server: Running, stream: bool, stop: str, status: str) -> None:
    server.engine.scripts = [called('{"x": "a;b"}')]
    body = {"input": "?", "tools": [ADD], "stop": stop, "stream": stream}
    reply = server.http.post(ROUTE, json=body)
    made = events_of(reply.text)[-1]["response"] if stream else reply.json()
    (call,) = made["output"]
    assert (made["status"], call["status"]) == ("completed", status)


def test_parse_gives_the_clients_own_class(server: Running, client: openai.OpenAI) -> None:
    class Sum(pydantic.BaseModel):
        a: int

    says(server, '{"a": 3}')
    made = client.responses.parse(model="fake", input="1 + 2?", text_format=Sum)
    assert made.output_parsed == Sum(a=3)
    assert made.text is not None and made.text.format.type == "json_schema"  # type: ignore[union-attr]
    assert server.engine.asked[-1][1].structured is not None


def test_formats_are_shapes_of_the_answer() -> None:
    for told, shape in (
        ({"type": "json_schema", "name": "a", "schema": {"type": "object"}}, Structured(json={"type": "object"})),
        ({"type": "json_object"}, Structured(json_object=True)),
        ({"type": "text"}, None),
        (None, None),
    ):
        body = parse_body(ResponsesBody, json.dumps({"input": "a", "text": {"format": told}}).encode())
        assert body.to_params().structured == shape


def test_a_loop_of_tools(server: Running, client: openai.OpenAI) -> None:
    says(server, thought("add") + called('{"a": 3}'), "It is 3.")
    asked: list[Any] = [{"role": "user", "content": "1 + 2?"}]
    first = client.responses.create(model="fake", input=asked, tools=[ADD], store=False)  # type: ignore[list-item]
    call = next(item for item in first.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments), call.status) == ("add", {"a": 3}, "completed")
    asked += first.output
    asked.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    second = client.responses.create(model="fake", input=asked, tools=[ADD], store=False)  # type: ignore[list-item]
    assert second.output_text == "It is 3." and server.engine.asked[-1][0] == "1 + 2?\n\n3\n"
    assert (second.tools[0].name, second.parallel_tool_calls) == ("add", True)  # type: ignore[union-attr]


def test_previous_response_id_goes_on(server: Running, client: openai.OpenAI) -> None:
    says(server, "I am fake.", called('{"a": 1}'), "One.")
    first = client.responses.create(model="fake", input="Who?", instructions="Be kind.")
    second = client.responses.create(model="fake", input="1?", previous_response_id=first.id, tools=[ADD])  # type: ignore[list-item]
    result = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "1"}  # type: ignore[union-attr]
    third = client.responses.create(model="fake", input=[result], previous_response_id=second.id)  # type: ignore[list-item]
    assert server.engine.asked[-1][0] == "Who?\nI am fake.\n1?\n\n1\n"  # the instructions are not carried over
    assert third.output_text == "One." and third.previous_response_id == second.id
    assert client.responses.retrieve(third.id) == third
    listed = client.responses.input_items.list(third.id, order="asc")
    assert [item.type for item in listed] == [
        "message", "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert [item.type for item in client.responses.input_items.list(third.id, limit=2)][:1] == ["function_call_output"]
    page = client.responses.input_items.list(third.id, limit=2)
    assert len(page.data) == 2 and page.has_more and len(list(page)) == 5
    for item in listed.data:
        type(item).model_validate(item.to_dict(), strict=True)


def test_item_references_are_the_kept_items(server: Running, client: openai.OpenAI) -> None:
    says(server, thought("hm") + "Hello", "Bye", "x")
    first = client.responses.create(model="fake", input="a")
    references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
    client.responses.create(model="fake", input=[*references, {"role": "user", "content": "b"}])
    assert server.engine.asked[-1][0] == "Hello\nb\n"
    client.responses.delete(first.id)
    client.responses.create(model="fake", input=references)  # the second response holds them too


def test_a_kept_response_is_its_owners(server: Running, client: openai.OpenAI) -> None:
    before = server.metric("responses_kept"), server.metric("responses_kept_bytes")
    salted = client.responses.create(model="fake", input="a", max_output_tokens=1, extra_body={"cache_salt": "mine"})
    assert server.metric("responses_kept") == before[0] + 1 and server.metric("responses_kept_bytes") > before[1]
    for salt in ({}, {"cache_salt": "other"}):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(salted.id, extra_query=salt)
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="fake", input="b", previous_response_id=salted.id, extra_body=salt)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="fake", input=[{"id": salted.output[0].id}], extra_body=salt)  # type: ignore[list-item]
        assert server.http.delete(f"{ROUTE}/{salted.id}", params=salt).status_code == 404
    assert client.responses.retrieve(salted.id, extra_query={"cache_salt": "mine"}).id == salted.id
    assert server.http.delete(f"{ROUTE}/{salted.id}", params={"cache_salt": "mine"}).json()["deleted"] is True
    assert server.http.get(f"{ROUTE}/{salted.id}", params={"cache_salt": "mine"}).status_code == 404


def test_what_is_not_to_be_kept_is_not(server: Running, client: openai.OpenAI) -> None:
    before = server.metric("responses_kept"), server.metric("responses_kept_bytes")
    made = client.responses.create(model="fake", input="a", max_output_tokens=1, store=False)
    assert (server.metric("responses_kept"), server.metric("responses_kept_bytes")) == before
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_input_is_counted_without_an_answer(server: Running, client: openai.OpenAI) -> None:
    asked = len(server.engine.asked)
    assert client.responses.input_tokens.count(model="fake", input="hello", instructions="Be kind.").input_tokens == 15
    assert len(server.engine.asked) == asked
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="gpt-9", input="hello")


def test_logprobs_of_the_text(server: Running, client: openai.OpenAI) -> None:
    says(server, thought("hm") + "Hi", thought("hm") + "Hi")
    ask: dict[str, Any] = {
        "model": "fake",
        "input": "a",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**ask)
    entries = whole.output[1].content[0].logprobs  # type: ignore[union-attr]
    assert [entry.token for entry in entries][-2:] == ["H", "i"] and len(entries[0].top_logprobs) == 2
    with client.responses.stream(**ask) as stream:
        streamed = [entry for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_midst(stream: bool) -> None:
    with serving(prepare=lambda _, engine: setattr(engine, "fail_after_tokens", 3), restart=False) as running:
        if not stream:
            reply = running.http.post(ROUTE, json={"input": "abcdef"})
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "engine_dead"
            return
        with pytest.raises(openai.APIError, match="injected failure"):
            list(running.client().responses.create(model="fake", input="abcdef", stream=True))


@pytest.mark.parametrize("tokens", [0, 3], ids=["before the first token", "in the midst"])
def test_a_failed_stream_ends_in_response_failed(tokens: int) -> None:
    fails = {"prepare": lambda _, engine: setattr(engine, "fail_after_tokens", tokens), "restart": False}
    with serving(token_s=0.05, **fails) as running:
        events = events_of(running.http.post(ROUTE, json={"input": "abcdef", "stream": True}).text)
    names = [event["type"] for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names.count("response.output_text.delta") == tokens
    assert names[-2:] == ["error", "response.failed"]
    assert events[-2]["message"] == events[-2]["error"]["message"]
    assert events[-1]["response"]["status"] == "failed" and events[-1]["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace(server: Running, stream: bool) -> None:
    """As Codex sends those of MCP servers: one flat name for the model, two for the client, there and back."""
    says(server, called("{}").replace("add", "mcp__files__add"))
    body: dict[str, Any] = {"model": "fake", "input": "hello", "tools": [FILES, ADD], "stream": stream}
    reply = server.http.post(ROUTE, json=body)
    if stream:
        done = [event for event in events_of(reply.text) if event["type"] == "response.output_item.done"]
        call = done[-1]["item"]
    else:
        told = reply.json()
        call = told["output"][-1]
        assert told["tools"][0]["tools"][1]["name"] == "_sub", "told as it was asked"
    assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__files", "add", "{}")
    items = [
        {"role": "user", "content": "hello"},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "3"},
    ]
    assert server.http.post(ROUTE, json={**body, "stream": False, "input": items}).status_code == 200
    (turn,) = [each for each in messages_of(read_input(items, lambda _: None)) if "tool_calls" in each]
    assert turn["tool_calls"][0]["function"]["name"] == "mcp__files__add"


def test_names_and_schemas_within_a_namespace() -> None:
    body = parse_body(ResponsesBody, json.dumps({"input": "a", "tools": [ADD, FILES]}).encode())
    tools = body.functions()
    assert [tool.name for tool in tools] == ["add", "mcp__files__add", "mcp__files_sub"]
    assert tools[2].where == "tools[1].tools[1].parameters" and tools[2].description == "Files.\nadds"
    chosen = {"type": "function", "namespace": "mcp__files", "name": "add"}
    given = json.dumps({"input": "a", "tools": [ADD, FILES], "tool_choice": chosen}).encode()
    assert parse_body(ResponsesBody, given).choice(tools).names == ("mcp__files__add",)


def test_what_changes_nothing_is_taken(server: Running) -> None:
    body = {
        "background": False, "truncation": "disabled", "text": {"verbosity": "medium", "format": None}, "n": 1,
        "max_tool_calls": 3, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "tools": [],
        "prompt_cache_options": {"mode": "implicit"}, "client_metadata": {"a": "b"}, "stream_options": None,
        "reasoning": {"effort": None}, "include": ["web_search_call.action.sources"], "tool_choice": "auto", "seed": 1,
        "top_k": 3, "metadata": None, "conversation": None,
    }  # fmt: skip
    reply = server.http.post(ROUTE, json={"input": "hello", "max_output_tokens": 1, **body})
    assert reply.status_code == 200, reply.text
    assert (reply.json()["prompt_cache_key"], reply.json()["max_tool_calls"]) == ("k", 3)


@pytest.mark.parametrize(
    "path, param",
    [
        ("resp_1", "response_id"),
        ("resp_1/input_items", "response_id"),
        ("KEPT?stream=true", "stream"),
        ("KEPT?salt=a", "salt"),
        ("KEPT/input_items?limit=0", "limit"),
        ("KEPT/input_items?limit=x", "limit"),
        ("KEPT/input_items?order=up", "order"),
        ("KEPT/input_items?after=msg_1", "after"),
    ],
)
def test_refused_reading(server: Running, path: str, param: str) -> None:
    kept = server.http.post(ROUTE, json={"input": "hello", "max_output_tokens": 1}).json()["id"]
    reply = server.http.get(f"{ROUTE}/{path.replace('KEPT', kept)}")
    assert (reply.status_code, reply.json()["error"]["param"]) == (404 if "resp_1" in path else 400, param)


def test_a_server_may_keep_nothing() -> None:
    with serving(response_store_mb=0) as running:
        made = running.client().responses.create(model="fake", input="a", max_output_tokens=1)
        assert made.store is False  # type: ignore[attr-defined]
        assert running.metric("responses_kept") == 0
        assert running.http.get(f"{ROUTE}/{made.id}").status_code == 404
