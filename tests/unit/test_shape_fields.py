"""The shape of an answer in request bodies: which fields there are, what they become, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from headrace.engine import messages as m
from headrace.server.chat_body import ChatBody
from headrace.server.errors import ApiError
from headrace.server.protocol import CompletionBody, parse_body
from headrace.structured import Structured
from headrace.types import Request, SamplingParams
from tests.support.fake_server import CHAT, TEXT, Running, ask, check_refusal, serving, text

pytestmark = pytest.mark.unit

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


def shape(**fields: Any) -> Structured | None:
    told: Structured | None = (
        parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}).encode()).to_params().structured
    )
    chat = parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    assert chat.to_params().structured == told
    return told


def schema_format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, **more}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured(json_object=True)),
        ({"response_format": schema_format()}, Structured(json=SCHEMA)),
        ({"response_format": schema_format(strict=False, description="An a.")}, Structured(json=SCHEMA)),
        ({"response_format": schema_format(schema=True)}, Structured(json="true")),
        ({"structured_outputs": {"json": SCHEMA}}, Structured(json=SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structured(json=SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, Structured(json_object=True)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Structured(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Structured(grammar='start: "a"')),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, Structured(json=SCHEMA)),
        ({"guided_regex": "a+"}, Structured(regex="a+")),
        ({"guided_choice": ["a"]}, Structured(choice=["a"])),
        ({"guided_grammar": 'start: "a"', "guided_regex": None}, Structured(grammar='start: "a"')),
    ],
    ids=str,
)
def test_fields_become_a_shape(fields: dict[str, Any], expected: Structured | None) -> None:
    assert shape(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "'structural_tag' is not supported"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "no other type"),
        ({"response_format": schema_format(schema=None)}, "response_format", "schema is required"),
        ({"response_format": schema_format(strict="yes")}, "response_format", "strict"),
        ({"structured_outputs": {}}, "structured_outputs", "got none"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex and choice"),
        ({"structured_outputs": {"whitespace_pattern": "a", "regex": "a"}}, "structured_outputs", "whitespace_pattern"),
        ({"guided_choice": []}, "guided_choice", "choice must be a list of 1 to"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "not empty"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "guided_regex", "guided_json and guided_regex"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs", "response_format and structured_outputs",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_and_by_which_name(fields: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        shape(**fields)
    assert (refused.value.status, refused.value.param) == (400, param) and told in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{"structured_outputs": {"regex": "refuse me"}}, {"guided_regex": "refuse me"}], ids=str
)
def test_shapes_that_cannot_be_taken_are_a_400_that_names_the_field(
    fast: Running, stream: bool, fields: dict[str, Any]
) -> None:
    check_refusal(fast.http.post(TEXT, json=text(stream=stream, **fields)), 400, next(iter(fields)))
    check_refusal(fast.http.post(CHAT, json=ask(stream=stream, **fields)), 400, next(iter(fields)))


def test_a_shape_reaches_the_engine_and_its_process(fast: Running) -> None:
    assert fast.http.post(TEXT, json=text(guided_choice=["a", "b"])).status_code == 200
    assert fast.engine.asked[-1][1].structured == Structured(choice=["a", "b"])
    for given in (Structured(choice=["a", "b"]), Structured(json=SCHEMA), Structured(json_object=True)):
        request = Request("r", [1], SamplingParams(structured=given))
        sent = m.to_engine(m.frame(m.Add(request))[m.LENGTH.size :])
        assert isinstance(sent, m.Add) and sent.request.params == request.params
        assert hash(sent.request.params.structured) == hash(given) and msgspec.to_builtins(given)
