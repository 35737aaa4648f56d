"""/openapi.json has every route, is a valid document, and says what bodies and replies are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator

from headrace.server.openapi import ROUTES, document
from tests.support.fake_server import BAD_REQUESTS, CHAT, TEXT, Running, ask, serving, text

pytestmark = pytest.mark.unit

DOCUMENT = document(True)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def classifier() -> Iterator[Running]:
    with serving(labels=("relevance",)) as running:
        yield running


def validator(schema: dict[str, Any], closed: bool = False) -> Draft202012Validator:
    """closed: replies may have no field that the document does not name."""
    components = json.loads(json.dumps(DOCUMENT["components"]))
    for each in components["schemas"].values() if closed else ():
        if each.get("type") == "object" and "properties" in each:
            each["additionalProperties"] = False
    return Draft202012Validator({**schema, "components": components})


def body_of(path: str) -> Draft202012Validator:
    return validator(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def test_every_route_is_there_and_no_other(server: Running) -> None:
    found = {
        (method, route.path.replace(":path}", "}"))
        for route in flat(server.app.routes)
        for method in getattr(route, "methods", ())
    }
    assert found == {(route.method, route.path) for route in ROUTES}
    assert {(method.upper(), path) for path, told in DOCUMENT["paths"].items() for method in told} == found


def flat(routes: Any) -> Iterator[Any]:
    """Routes of routers too."""
    for route in routes:
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        yield from flat(inner) if inner else [route]


def test_it_is_a_valid_document(server: Running) -> None:
    served = server.http.get("/openapi.json").json()
    assert served == document(False) and OpenAPI.model_validate(served).openapi == "3.1.0"
    names = [told["operationId"] for path in served["paths"].values() for told in path.values()]
    assert len(set(names)) == len(names)
    schemas = served["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    assert all(ref.removeprefix("#/components/schemas/") in schemas for ref in references(served))
    assert not any("__" in name for name in schemas)  # two models of one name


def references(told: Any) -> Iterator[str]:
    if isinstance(told, dict):
        yield from [told["$ref"]] if isinstance(told.get("$ref"), str) else []
        yield from told["mapping"].values() if isinstance(told.get("mapping"), dict) else []
    for each in told.values() if isinstance(told, dict) else told if isinstance(told, list) else ():
        yield from references(each)


def test_the_key_is_told_and_wanted() -> None:
    assert DOCUMENT["security"] == [{"bearer": []}, {"x-api-key": []}]
    assert DOCUMENT["paths"]["/health"]["get"]["security"] == []
    with serving(api_key="k3y") as running:
        assert running.http.get("/openapi.json").status_code == 401
        told = running.http.get("/openapi.json", headers={"Authorization": "Bearer k3y"}).json()
    assert told == DOCUMENT


MESSAGE = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
LOGPROBS = "message.output_text.logprobs"
ITEMS = [
    {"role": "user", "content": "hi"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]},
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ask(logprobs=True, top_logprobs=2, n=2, stop="x", user="u")),
    (TEXT, text([1, 2], logprobs=1, echo=True, prompt_logprobs=1, return_token_ids=True)),
    ("/v1/messages", MESSAGE | {"system": "be brief", "metadata": {}, "stop_sequences": ["i"]}),
    ("/v1/messages/count_tokens", {"messages": MESSAGE["messages"]}),
    ("/v1/score", {"text": "a", "options": ["b", [97]], "normalize": "tokens"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4, "user": "u"}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 3, "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", {"input": ITEMS, "include": [LOGPROBS], "metadata": {"a": "b"}, "instructions": "be brief"}),
    ("/v1/responses/input_tokens", {"input": "a"}),
    ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGE["messages"]}),
    ("/detokenize", {"tokens": [97]}),
]


@pytest.mark.parametrize(("path", "body"), GOOD, ids=[f"{number} {path}" for number, (path, _) in enumerate(GOOD)])
def test_bodies_and_replies_are_as_told(server: Running, path: str, body: dict[str, Any]) -> None:
    body_of(path).validate(body)
    reply = server.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(told, closed=True).validate(reply.json())


DOCUMENTS = ["b", {"text": "c"}]
CLASSIFIED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/classify", {"model": "fake", "input": ["a", "b"], "user": "u"}),
    ("/v1/rerank", {"query": "a", "documents": DOCUMENTS, "top_n": 1, "template": "{query} {document}"}),
    ("/v2/rerank", {"model": "fake", "query": "a", "documents": ["b"]}),
    ("/rerank", {"query": "a", "documents": DOCUMENTS, "return_documents": False, "cache_salt": "x"}),
]


@pytest.mark.parametrize(("path", "body"), CLASSIFIED, ids=[path for path, _ in CLASSIFIED])
def test_those_of_classifiers_too(classifier: Running, path: str, body: dict[str, Any]) -> None:
    test_bodies_and_replies_are_as_told(classifier, path, body)


@pytest.mark.parametrize("name", ["query", "documents", "document", "text", "top_n"])
def test_the_document_refuses_what_reranking_refuses(name: str) -> None:
    wrong: dict[str, Any] = {
        "query": {"query": ""}, "documents": {"documents": []}, "document": {"documents": ["a", ""]},
        "text": {"documents": [{"title": "a"}]}, "top_n": {"top_n": 0},
    }  # fmt: skip
    assert not body_of("/v1/rerank").is_valid({"query": "a", "documents": ["b"], **wrong[name]})


@pytest.mark.parametrize("version", [None, "2023-06-01"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health"])
def test_other_replies_are_as_told(server: Running, path: str, version: str | None) -> None:
    reply = server.http.get(path.format(name="fake"), headers={"anthropic-version": version} if version else {})
    told = DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator(told, closed=True).validate(reply.json())


def test_kept_responses_are_as_told(server: Running) -> None:
    made = server.http.post("/v1/responses", json={"input": ITEMS}).json()["id"]
    for method, more in (("get", "/input_items"), ("get", ""), ("delete", "")):
        told = DOCUMENT["paths"][f"/v1/responses/{{response_id}}{more}"][method]["responses"]
        reply = server.http.request(method, f"/v1/responses/{made}{more}")
        validator(told["200"]["content"]["application/json"]["schema"], closed=True).validate(reply.json())
    validator(told["404"]["content"]["application/json"]["schema"]).validate(
        server.http.delete(f"/v1/responses/{made}").json()
    )


def test_errors_are_as_told(server: Running) -> None:
    for path, body in ((CHAT, {}), ("/v1/messages", {})):
        reply = server.http.post(path, json=body)
        told = DOCUMENT["paths"][path]["post"]["responses"][str(reply.status_code)]["content"]["application/json"]
        validator(told["schema"], closed=True).validate(reply.json())


BEYOND_A_SCHEMA = {
    "two tools of one name", "unknown tool chosen", "tool_choice without tools", "reserved template variable",
    "top_logprobs alone", "two different lengths", "half a surrogate pair", "half a surrogate pair in a prompt",
    "prompt too long", "token ids out of range", "max_tokens beyond the context", "min_tokens above max_tokens",
    "best_of", "logit_bias beyond the vocabulary", "stop token out of range", "stream_options without stream",
    "prompt_logprobs in a stream", "tool without a call", "calls of a user", "answer to a call by a user",
    "message without content", "no max_tokens left",
}  # fmt: skip
"""Refused for what several fields say together, or for the model's size."""

REFUSED = {
    name: (path, body)
    for name, (path, body, status, _) in BAD_REQUESTS.items()
    if isinstance(body, dict) and status == 400 and name not in BEYOND_A_SCHEMA
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_document_refuses_what_the_server_refuses(name: str) -> None:
    path, body = REFUSED[name]
    assert path in DOCUMENT["paths"] and not body_of(path).is_valid(body)


def test_fields_that_are_refused_are_not_there() -> None:
    for route in ROUTES:
        if route.body is not None:
            told = DOCUMENT["components"]["schemas"][route.body.__name__]["properties"]
            assert not set(told) & set(route.body.refused) and set(route.body.ignored) <= set(told)
