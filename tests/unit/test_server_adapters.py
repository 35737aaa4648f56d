"""Adapters over HTTP: they are models of the list, and whoever names one is answered by it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headrace.engine.calls import PinPrefix
from tests.support.fake_engine import pinned
from tests.support.fake_server import Running, ask, check_refusal, serving, text

pytestmark = pytest.mark.unit

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture
def server() -> Iterator[Running]:
    with serving(lora_modules="sql=folder/of/sql,late=other", cache_control_pins=2) as running:
        yield running


def test_they_are_listed_behind_their_model(server: Running) -> None:
    cards = server.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("fake", "fake", None), ("sql", "folder/of/sql", "fake"), ("late", "other", "fake"),
    ]  # fmt: skip
    assert server.http.get("/v1/models/sql").json()["parent"] == "fake"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, ask()),
        (TEXT, text()),
        ("/v1/messages", MESSAGES),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/score", {"text": "hello", "options": ["a", "b"]}),
        ("/v1/cache/prefixes", {"prompt": "x" * 200}),
    ],
)
@pytest.mark.parametrize("name", ["sql", "fake"])
def test_whoever_is_named_answers(server: Running, url: str, body: dict[str, Any], name: str) -> None:
    reply = server.http.post(url, json={**body, "model": name})
    assert reply.status_code == 200, reply.text
    assert set(server.engine.adapters) == {"sql" if name == "sql" else ""}
    assert reply.json().get("model", name) == name


def test_an_unknown_one_is_no_model(server: Running) -> None:
    reply = server.http.post(TEXT, json=text(model="sqlx"))
    assert reply.status_code == 404 and "'fake', 'sql', 'late'" in reply.json()["error"]["message"]
    assert not server.engine.adapters


def test_a_prompt_invokes_one_that_begins_late(server: Running) -> None:
    check_refusal(server.http.post(TEXT, json=text("hello", model="late")), 400, "model")
    assert not server.engine.adapters and server.http.get("/metrics").status_code == 200
    assert server.http.post(TEXT, json=text("hello Now:", model="late")).status_code == 200
    assert server.engine.adapters == ["late"]


def test_pins_are_of_whoever_was_named(server: Running) -> None:
    calls: list[PinPrefix] = []

    def pin(call: PinPrefix) -> dict[str, Any]:
        calls.append(call)
        return pinned(call)

    server.engine.answers[PinPrefix] = pin
    prompt = "x" * 200
    for model in ("sql", "fake"):
        server.http.post("/v1/cache/prefixes", json={"model": model, "prompt": prompt})
    part = {"type": "text", "text": prompt + "Now:", "cache_control": {"type": "ephemeral"}}
    body = {**MESSAGES, "messages": [{"role": "user", "content": [part]}], "model": "late"}
    assert server.http.post("/v1/messages", json=body).status_code == 200
    assert [call.adapter for call in calls] == ["sql", "", "late"]
    assert len({call.id for call in calls}) == 3, "the same prefix of another adapter is another pin"
    start = calls[-1].adapter_start
    assert bytes(calls[-1].tokens[start:]).startswith(b"Now:") and [call.adapter_start for call in calls[:2]] == [0, 0]


def test_what_was_cached_is_explained_by_requests_of_the_same_adapter(server: Running) -> None:
    def cause(model: str) -> str:
        reply = server.http.post(TEXT, json=text("y" * 300, model=model)).json()
        return str(reply["headrace"]["reuse"]["cause"])

    assert [cause(model) for model in ("fake", "sql")] == ["first", "first"]
    assert "first" not in (cause("sql"), cause("fake"))
