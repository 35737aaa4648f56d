"""What clients of a soak do: every route, whole and streamed, right and wrong, patient and not.

A kind is a function of a Client; it returns the status it was answered with, raises AssertionError where the answer is
wrong, and whatever httpx raises where there is none. `PROBES` says which route a kind needs.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import httpx

from headrace.assets.facts import filler

TEXT = filler()
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "code": {"type": "integer", "minimum": 0}},
    "required": ["city", "code"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "a code", "parameters": SCHEMA}}
WRONG: list[tuple[str, Any]] = [
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}),
    (CHAT, {"messages": [{"role": "boss", "content": "hi"}]}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "model": "none such"}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "no such type"}}}}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "tool_choice": "required"}),
    (COMPLETIONS, {"prompt": [1, 10**9]}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 10**7}),
    (COMPLETIONS, {"prompt": "hi", "tempereture": 1}),
    (COMPLETIONS, b'{"prompt": "hi"'),
    (COMPLETIONS, b'{"prompt": ' + b"[" * 50_000),
    ("/v1/none", {}),
]  # fmt: skip


class Client:
    """One of several at work at the same time, with a connection pool and dice of its own."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.http = httpx.Client(base_url=url, timeout=120)

    def text(self, most: int = 400) -> str:
        """A piece of the filler; few beginnings, so that prefixes are shared."""
        start = self.rng.randrange(8) * 500
        return TEXT[start : start + self.rng.randrange(20, most)]

    def asked(self, **more: Any) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": self.text()},
            {"role": "user", "content": "What is the code of Lisbon?"},
        ]
        given = {"messages": messages, "max_tokens": self.rng.randrange(1, 40), **more}
        if self.rng.random() < 0.3:
            given["cache_salt"] = f"tenant {self.rng.randrange(4)}"
            given["public_prefix_tokens"] = self.rng.choice((0, 64))
        if self.rng.random() < 0.3:
            given |= {"temperature": 0.8, "top_p": 0.9, "seed": self.rng.randrange(1000), "n": self.rng.randrange(1, 4)}
        return given

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))

    def right(self, path: str, body: Any) -> dict[str, Any]:
        reply = self.post(path, body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:300]}"
        told: dict[str, Any] = reply.json()
        return told

    def streamed(self, path: str, body: Any, most: int = 10**9) -> list[str]:
        """The data of the events; after `most` of them the client leaves."""
        got: list[str] = []
        with self.http.stream("POST", path, json={**body, "stream": True}) as reply:
            if reply.status_code != 200:
                raise AssertionError(f"{path}: {reply.status_code} {reply.read()[:300]!r}")
            for line in reply.iter_lines():
                assert not line.startswith("event: error"), line
                if line.startswith("data: "):
                    got.append(line[6:])
                if len(got) >= most:
                    break
        return got


def chat(client: Client) -> int:
    assert client.right(CHAT, client.asked())["choices"][0]["finish_reason"] in ("stop", "length")
    return 200


def chat_stream(client: Client) -> int:
    assert client.streamed(CHAT, client.asked(stream_options={"include_usage": True}))[-1] == "[DONE]"
    return 200


def completions(client: Client) -> int:
    prompts = [client.text() for _ in range(client.rng.randrange(1, 4))]
    more = client.rng.choice(({}, {"logprobs": 2, "echo": True}, {"prompt_logprobs": 1}, {"return_token_ids": True}))
    made = client.right(COMPLETIONS, {"prompt": prompts, "max_tokens": 12, **more})
    assert len(made["choices"]) == len(prompts)
    return 200


def long_prompt(client: Client) -> int:
    start = client.rng.randrange(4) * 1000
    body = {"prompt": TEXT[start : start + client.rng.randrange(4000, 16_000)], "max_tokens": 8}
    return len(client.streamed(COMPLETIONS, body)) and 200


def cut(client: Client) -> int:
    """Leaves in the midst of a stream."""
    path = client.rng.choice((CHAT, COMPLETIONS))
    body = client.asked(max_tokens=400) if path == CHAT else {"prompt": client.text(), "max_tokens": 400}
    client.streamed(path, {**body, "ignore_eos": True}, most=client.rng.randrange(1, 20))
    client.http.close()  # what httpx has left unread ends with its connection
    client.http = httpx.Client(base_url=client.url, timeout=120)
    return 200


def gone(client: Client) -> int:
    """Sends a request, or half of one, and leaves before an answer."""
    raw = json.dumps({"prompt": TEXT[: client.rng.choice((100, 12_000))], "max_tokens": 100}).encode()
    host, _, port = client.url.removeprefix("http://").partition(":")
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as link:
        link.sendall((head.encode() + raw)[: client.rng.choice((20, len(head) + 10, 10**9))])
    return 0


def tools(client: Client) -> int:
    asked = client.asked(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=120, n=1)
    if client.rng.random() < 0.5:
        assert client.streamed(CHAT, asked)[-1] == "[DONE]"
        return 200
    choice = client.right(CHAT, asked)["choices"][0]
    if choice["finish_reason"] != "length":
        json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
    return 200


def schema(client: Client) -> int:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    form = form if client.rng.random() < 0.8 else {"type": "json_object"}
    choice = client.right(CHAT, client.asked(response_format=form, max_tokens=100, n=1))["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    return 200


def wrong(client: Client) -> int:
    reply = client.post(*client.rng.choice(WRONG))
    assert 400 <= reply.status_code < 500, f"{reply.status_code} {reply.text[:200]}"
    return reply.status_code


def responses(client: Client) -> int:
    body = {"input": client.text(), "max_output_tokens": 20}
    if client.rng.random() < 0.5:
        assert "response.c" in client.streamed("/v1/responses", body)[0]
        return 200
    first = client.right("/v1/responses", body)
    if client.rng.random() < 0.5:
        client.right("/v1/responses", {**body, "previous_response_id": first["id"]})
    return 200


def messages(client: Client) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": client.text()}], "max_tokens": 20}
    if client.rng.random() < 0.5:
        assert "message_stop" in client.streamed("/v1/messages", body)[-1]
        return 200
    client.right("/v1/messages/count_tokens", {name: body[name] for name in ("model", "messages")})
    assert client.right("/v1/messages", body)["stop_reason"]
    return 200


def embeddings(client: Client) -> int:
    texts = [client.text() for _ in range(client.rng.randrange(1, 6))]
    assert len(client.right("/v1/embeddings", {"input": texts})["data"]) == len(texts)
    return 200


def score(client: Client) -> int:
    options = [client.text(60) for _ in range(client.rng.randrange(1, 12))]
    assert len(client.right("/v1/score", {"text": client.text(), "options": options})["data"]) == len(options)
    return 200


def tokenize(client: Client) -> int:
    tokens = client.right("/tokenize", {"prompt": client.text()})["tokens"]
    assert client.right("/detokenize", {"tokens": tokens})["prompt"]
    return 200


def look(client: Client) -> int:
    for path in ("/health", "/v1/models", "/metrics", "/openapi.json"):
        assert client.http.get(path).status_code == 200, path
    return 200


KINDS: dict[Callable[[Client], int], float] = {
    chat: 3, chat_stream: 3, completions: 2, long_prompt: 1, cut: 2, gone: 1, tools: 2, schema: 2, wrong: 2,
    responses: 1, messages: 1, embeddings: 1, score: 1, tokenize: 1, look: 1,
}  # fmt: skip
"""And how often each comes."""

PROBES = {responses: "/v1/responses", messages: "/v1/messages", embeddings: "/v1/embeddings", score: "/v1/score",
          tokenize: "/tokenize"}  # fmt: skip
