"""What /v1/responses refuses, naming the field as it was sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_server import Running, serving
from tests.support.responses_tools import ADD, FILES, speaks_hermes

pytestmark = pytest.mark.unit

ROUTE = "/v1/responses"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(prepare=speaks_hermes) as running:
        yield running


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "an image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    "background": ({"background": True}, "background"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a kept prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text"),
    "a format of another kind": ({"text": {"format": {"type": "xml"}}}, "text"),
    "a schema without a name": ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, "tools"),
    "two tools of one name": ({"tools": [ADD, ADD]}, "tools[1].name"),
    "two flat names": ({"tools": [{**ADD, "name": "mcp__files__add"}, FILES]}, "tools[1].tools[0].name"),
    "a long flat name": ({"tools": [{**FILES, "name": "f" * 126}]}, "tools[0].tools[0].name"),
    "a custom tool in a namespace": ({"tools": [{**FILES, "tools": [{"type": "custom", "name": "f"}]}]}, "tools"),
    "an unknown tool chosen": ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of another kind": ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    "no room": ({"max_output_tokens": 100_000}, "max_output_tokens"),
    "the name of another route": ({"max_tokens": 5}, "max_tokens"),
    "several answers": ({"n": 2}, "n"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "too many logprobs": ({"top_logprobs": 50}, "top_logprobs"),
    "an unknown include": ({"include": ["everything"]}, "include"),
    "an unknown summary": ({"reasoning": {"summary": "concise"}}, "reasoning"),
    "metadata of a wrong type": ({"metadata": {"a": 1}}, "metadata"),
    "an unknown field": ({"tempereture": 1}, "tempereture"),
    "what the template refuses": ({"instructions": "refuse me"}, "input"),
    "the beginning of what is not reported": ({"prompt_logprobs_start": 3}, "prompt_logprobs_start"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_field(server: Running, name: str) -> None:
    body, param = BAD[name]
    for route in (ROUTE, f"{ROUTE}/input_tokens"):
        reply = server.http.post(route, json={"model": "fake", "input": "hello", **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), (route, reply.text)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens must be 1 or more, got 0"),
        ({"max_output_tokens": -1}, "max_output_tokens must be 1 or more, got -1"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids needs include: ['message.output_text.logprobs']"),
    ],
)
def test_remedies_are_those_of_this_route(server: Running, body: dict[str, Any], told: str) -> None:
    error = server.http.post(ROUTE, json={"input": "hello", **body}).json()["error"]
    assert (error["param"], error["message"]) == (next(iter(body)), told)


@pytest.mark.parametrize("fields", [{"structured_outputs": {"regex": "refuse me"}}, {"guided_regex": "refuse me"}])
def test_shapes_that_cannot_be_taken_are_named_as_they_were_sent(fields: dict[str, Any]) -> None:
    with serving() as running:
        reply = running.http.post(ROUTE, json={"input": "hello", **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))
