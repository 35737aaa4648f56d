"""Bodies and texts at the limits: refused by counts before they cost much, and read beside other requests."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.server import json_body, protocol
from headrace.server.encoding import CHARACTERS, PIECE, check_length
from headrace.server.errors import ApiError
from headrace.server.json_body import MAX_MEMBERS, MAX_OBJECTS, MAX_VALUES, json_object
from tests.support.fake_server import CHAT, TEXT, ask, serving

pytestmark = pytest.mark.unit

HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b'{"a": [' + b"1," * MAX_VALUES + b"1, 1]}", "values"),
        (b'{"a": [' + b"{}," * MAX_OBJECTS + b"{}]}", "objects"),
        (json.dumps({str(n): n for n in range(MAX_MEMBERS + 1)}).encode(), "members in one object"),
    ],
    ids=["values", "objects", "members"],
)
def test_bodies_of_too_many_parts_are_refused(raw: bytes, told: str) -> None:
    with pytest.raises(ApiError) as refused:
        json_object(raw)
    assert refused.value.status == 400 and told in refused.value.message


def test_parsing_ends_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more objects are made than the bound allows."""
    counters: list[Any] = []
    made = json_body._Objects

    def note() -> Any:
        counters.append(made())
        return counters[-1]

    monkeypatch.setattr(json_body, "_Objects", note)
    with pytest.raises(ApiError):
        json_object(b"[" + b"{}," * (3 * MAX_OBJECTS) + b"{}]")
    assert counters[0].count == MAX_OBJECTS + 1


def test_large_bodies_are_read_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[str] = []
    parse = protocol.parse_body

    def note(*given: Any) -> Any:
        readers.append(threading.current_thread().name)
        return parse(*given)

    monkeypatch.setattr(protocol, "parse_body", note)
    with serving() as running:
        loop = running.thread.name
        for count in (2, 4000):
            reply = running.http.post(CHAT, json={"messages": [HELLO] * count, "max_tokens": 1})
            assert reply.status_code == (200 if count == 2 else 400), reply.text
    assert readers[0] == loop and readers[1] != loop


@pytest.mark.parametrize("route", [CHAT, "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
def test_messages_are_bounded(route: str) -> None:
    body: dict[str, Any] = {"model": "fake", "messages": [HELLO] * 10_001}
    if route == "/v1/messages":
        body["max_tokens"] = 1
    with serving() as running:
        error = running.http.post(route, json=body).json()["error"]
        assert "messages: List should have at most 10000 items" in error["message"], error


def test_a_text_far_beyond_the_context_is_refused_by_its_beginning() -> None:
    read: list[int] = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return [1] * (len(text) // 2)

    text = "ab" * 10_000_000
    with pytest.raises(InvalidRequest, match="20,000,000 characters") as refused:
        check_length(encode, text, 100_000, "input")
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    assert sum(read) <= 3 * 100_000 + 2 * PIECE, "what has more tokens than the context, and little more"
    read.clear()
    check_length(encode, text, len(text) // CHARACTERS, "input")
    assert not read, "an ordinary length is not looked at"
    check_length(lambda piece: [1] * (len(piece) // 100), text, 250_000, "input")


def test_a_text_that_was_read_to_its_end_is_told_as_a_whole() -> None:
    with pytest.raises(InvalidRequest, match=r"^a text of 18,000 characters has 18,000 tokens, and 100 are possible"):
        check_length(list, "x" * 18_000, 100, "prompt")  # type: ignore[arg-type]


def test_routes_refuse_such_texts() -> None:
    text = "a" * 600_000
    with serving() as running:
        for route, body, param in (
            (TEXT, {"prompt": text}, "prompt"),
            (CHAT, ask(messages=[{"role": "user", "content": text}]), "messages"),
            ("/v1/responses", {"input": text}, "input"),
            ("/v1/embeddings", {"input": text}, "input"),
            ("/tokenize", {"prompt": text}, "prompt"),
        ):
            error = running.http.post(route, json=body).json()["error"]
            assert error["code"] == "context_length_exceeded" and error["param"] == param, error
            assert "characters" in error["message"]
    with serving(labels=("a",)) as running:
        for route, body in (("/v1/rerank", {"query": "a", "documents": [text]}), ("/v1/classify", {"input": text})):
            assert running.http.post(route, json=body).json()["error"]["code"] == "context_length_exceeded"
