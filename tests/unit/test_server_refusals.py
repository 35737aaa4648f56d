"""Bad requests to the HTTP server: each is refused with its parameter's name, and the next is served."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.fake_server import BAD_REQUESTS, CHAT, TEXT, Running, ask, check_refusal, send_bad, serving, text

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_is_refused_and_the_next_is_served(fast: Running, name: str) -> None:
    check_refusal(*send_bad(fast.http, name, "fake"))
    assert fast.http.post(TEXT, json=text("ok", max_tokens=2)).json()["choices"][0]["text"] == "ok"
    assert fast.engine.stats.kv.chunks_used == 0


def test_refusal_of_the_template_is_told(fast: Running) -> None:
    check_refusal(fast.http.post(CHAT, json=ask("refuse me")), 400, "messages")


def test_template_variable_that_does_not_fit(fast: Running) -> None:
    check_refusal(fast.http.post(CHAT, json=ask(chat_template_kwargs={"no": 1})), 400, "chat_template_kwargs")


def test_too_long_a_prompt_has_openais_code(fast: Running) -> None:
    for stream in (False, True):
        assert fast.http.post(CHAT, json=ask("x" * 5000, stream=stream)).json()["error"] == {
            "message": "the prompt is too long", "type": "invalid_request_error", "param": "messages",
            "code": "context_length_exceeded",
        }  # fmt: skip


def test_wrong_method(fast: Running) -> None:
    check_refusal(fast.http.get(CHAT), 405, None)
    allowed = fast.http.options("/v1/responses/resp_1")
    check_refusal(allowed, 405, None)
    assert allowed.headers["allow"] == "DELETE, GET", "of all routes of this path"


def test_openai_client_raises_its_own_errors(fast: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        fast.client().completions.create(model="fake", prompt="hi", max_tokens=-5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        fast.client().completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"


FUNCTION = {"name": "a b", "parameters": {"type": "object"}}
PATHS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a function's name": (
        {"tools": [{"type": "function", "function": FUNCTION}]}, "tools", "tools[0].function.name: String should",
    ),
    "a schema's name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format",
        "response_format.json_schema.name is required",
    ),
    "a schema that is no object": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": [1]}}}, "response_format",
        "response_format.json_schema.schema: Input should be",
    ),
    "logprobs by the client's name": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be"),
    "no choice": (
        {"structured_outputs": {"choice": []}}, "structured_outputs", "structured_outputs: choice must be a list of 1",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "messages[0].content[0].type: 'image_url' is not supported here; possible: 'text'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_refusals_name_the_field_as_the_client_wrote_it(fast: Running, name: str) -> None:
    more, param, told = PATHS[name]
    reply = fast.http.post(CHAT, json=ask(**more) if "messages" not in more else more)
    check_refusal(reply, 400, param)
    assert reply.json()["error"]["message"].startswith(told)


def test_body_too_large(fast: Running) -> None:
    check_refusal(fast.http.post(TEXT, content=b" " * (33 * 2**20)), 413, None)
    assert fast.http.post(TEXT, json=text()).status_code == 200


def test_a_body_that_is_announced_as_too_large_is_not_waited_for(fast: Running) -> None:
    """Of a client that asks before it sends."""
    with socket.create_connection(("127.0.0.1", fast.port), timeout=10) as sock:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\nExpect: 100-continue\r\n\r\n"
        sock.sendall(head.encode())
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    assert fast.http.post(TEXT, json=text(), headers={"expect": "100-continue"}).status_code == 200


@pytest.mark.parametrize("prompt", [["a", [1]], [[1], "a"], ["a", 1], [[1], [True]]])
def test_prompts_are_of_one_kind(fast: Running, prompt: Any) -> None:
    reply = fast.http.post(TEXT, json=text(prompt))
    check_refusal(reply, 400, "prompt")
    assert "a list of such lists" in reply.json()["error"]["message"]


def test_a_number_of_thousands_of_digits(fast: Running) -> None:
    body = json.dumps(text()).replace('"max_tokens": ', '"seed": ' + "9" * 5000 + ', "max_tokens": ')
    reply = fast.http.post(TEXT, content=body)
    check_refusal(reply, 400, None)
    assert reply.json()["error"]["message"] == "the body is not valid JSON: a number has too many digits"


def test_compressed_body_is_refused_with_the_remedy(fast: Running) -> None:
    packed = gzip.compress(json.dumps(text()).encode())
    reply = fast.http.post(TEXT, content=packed, headers={"content-encoding": "gzip"})
    check_refusal(reply, 415, None)
    assert "send plain JSON" in reply.json()["error"]["message"] and reply.headers["accept-encoding"] == "identity"
    assert fast.http.post(TEXT, json=text(), headers={"content-encoding": "identity"}).status_code == 200


def test_probes_may_ask_for_the_head_alone(fast: Running) -> None:
    reply = fast.http.head("/health")
    assert reply.status_code == 200 and not reply.content


def test_verbosity_of_openais_default_is_no_fault(fast: Running) -> None:
    assert fast.http.post(CHAT, json=ask(verbosity="medium")).status_code == 200
    check_refusal(fast.http.post(CHAT, json=ask(verbosity="low")), 400, "verbosity")


def test_no_pages_for_developers(fast: Running) -> None:
    for path in ("/docs", "/redoc", "/"):
        assert fast.http.get(path).status_code == 404


def test_internal_error_tells_nothing(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(fast.engine, "check", broken)
    reply = fast.http.post(TEXT, json=text())
    check_refusal(reply, 500, None)
    assert "secret" not in reply.text


def test_model_without_tokenizer(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast.engine, "tokenizer", None)
    check_refusal(fast.http.post(CHAT, json=ask()), 400, "messages")
    check_refusal(fast.http.post(TEXT, json=text("abc")), 400, "prompt")
    reply = fast.http.post(TEXT, json=text([97, 98], return_token_ids=True, max_tokens=3, logprobs=0)).json()
    assert reply["choices"][0]["token_ids"] == [97, 98, 97]
    assert reply["choices"][0]["logprobs"]["tokens"] == ["97", "98", "97"]
