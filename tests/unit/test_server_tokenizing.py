"""/tokenize and /detokenize on the fake engine, whose tokens are bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_server import Running, serving

pytestmark = pytest.mark.unit

HELLO = [{"role": "user", "content": "hé"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_a_prompt(server: Running) -> None:
    reply = server.http.post("/tokenize", json={"model": "fake", "prompt": "ab", "return_token_strs": True}).json()
    assert reply == {"count": 2, "max_model_len": 4000, "tokens": [97, 98], "token_strs": ["a", "b"]}
    long = server.http.post("/tokenize", json={"prompt": "x" * 9000}).json()
    assert long["count"] == 9000 and long["token_strs"] is None


def test_special_tokens_are_asked_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.engine.tokenizer is not None
    encode = lambda text, add_special_tokens=True: [256] * add_special_tokens + list(text.encode())  # noqa: E731
    monkeypatch.setattr(server.engine.tokenizer, "encode", encode)
    counts = [
        server.http.post("/tokenize", json={"prompt": "ab", **more}).json()["count"]
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    ]
    assert counts == [3, 3, 2]


def test_messages(server: Running) -> None:
    body = {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"sign": "!"}}
    assert bytes(server.http.post("/tokenize", json=body).json()["tokens"]).decode() == "hé\n!"


def test_what_counters_of_tokens_ask_first(server: Running) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert told["eos_token"] == "<256>" and told["bos_token"] is None and told["model_max_length"] == 4000
    assert "message" in told["chat_template"]


def test_back_to_text(server: Running) -> None:
    tokens = server.http.post("/tokenize", json={"prompt": "hé"}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": [*tokens, 256]}).json() == {"prompt": "hé<256>"}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "boss", "content": ""}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [258]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "gpt"}, 404, "model"),
    ],
)
def test_refusals(server: Running, route: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = server.http.post(route, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param)


def test_a_model_without_a_tokenizer() -> None:
    with serving() as running:
        running.engine.tokenizer = None
        for route, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            reply = running.http.post(route, json=body)
            assert reply.status_code == 400 and "no tokenizer" in reply.json()["error"]["message"]
