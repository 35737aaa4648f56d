"""Tools of the server's tests: a server over the fake engine in a thread, a reader of /metrics, bad requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import uvicorn.server

from headrace.config import SETTINGS, EngineConfig
from headrace.server.app import create_app
from headrace.server.serve import bind, make_server
from tests.support.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class Maker:
    """Makes fake engines. `prepare(number, engine)` may arrange failures; while `hold` is cleared none is made."""

    def __init__(self, config: EngineConfig, prepare: Callable[[int, FakeEngine], None], **options: Any) -> None:
        self.config, self.prepare, self.options = config, prepare, options
        self.engines: list[FakeEngine] = []
        self.hold = threading.Event()
        self.hold.set()

    async def __call__(self) -> FakeEngine:
        await asyncio.to_thread(self.hold.wait, 20)
        engine = FakeEngine(self.config, **self.options)
        self.prepare(len(self.engines), engine)
        self.engines.append(engine)
        return engine


# A server looks each tenth of a second whether it is to end: those of tests are many and short, and look more often.
_more_often = {**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)}
uvicorn.server.asyncio = SimpleNamespace(**_more_often)  # type: ignore[attr-defined]


class Running:
    """A server in a thread of this process."""

    def __init__(self, given: FakeEngine | Maker, config: EngineConfig) -> None:
        self.given = given
        self.config = config
        sock = bind("127.0.0.1", 0)
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = create_app(given, config)
        self.server = make_server(self.app)
        self.server.config.timeout_graceful_shutdown = 1
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[sock])), daemon=True)
        self.thread.start()
        self.http = httpx.Client(base_url=self.url, timeout=20)

    @property
    def engine(self) -> FakeEngine:
        """The latest."""
        return self.given.engines[-1] if isinstance(self.given, Maker) else self.given

    def wait(self, status: int = 200) -> None:
        until(lambda: self.http.get("/health").status_code == status)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=20)

    def metric(self, name: str, **labels: str) -> float:
        return metric(self.http.get("/metrics").text, name, **labels)

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive(), "the server does not end"


def until(condition: Callable[[], bool], seconds: float = 30.0, every_s: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(every_s)


def metric(page: str, name: str, **labels: str) -> float:
    """Value of one sample of a /metrics page."""
    for line in page.splitlines():
        wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
        if wanted and line.startswith((f"headrace:{name}{{", f"headrace:{name} ")):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no metric {name} {labels}")


@contextmanager
def serving(ready: bool = True, **options: Any) -> Iterator[Running]:
    """A server over one fake engine or, given `prepare`, over a Maker. Options are EngineConfig's or the engine's."""
    settings = {k: options.pop(k) for k in list(options) if k in SETTINGS}
    config = EngineConfig(model="fake", **settings)
    prepare = options.pop("prepare", None)
    given = FakeEngine(config, **options) if prepare is None else Maker(config, prepare, **options)
    running = Running(given, config)
    try:
        if ready:
            running.wait()
        yield running
    finally:
        running.close()


def open_request(port: int, body: dict[str, Any], path: str = TEXT, key: str = "none") -> socket.socket:
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    sock.sendall(f"{head}X-Api-Key: {key}\r\n\r\n".encode() + raw)
    return sock


def ask(content: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


def text(prompt: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, "max_tokens": 8, **more}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

BAD_REQUESTS: dict[str, tuple[str, Any, int, str | None]] = {
    # name: (route, body or raw bytes, status, param); "MODEL" stands for the served model's name
    "unknown model": (CHAT, ask(model="gpt-9"), 404, "model"),
    "model of a wrong type": (CHAT, ask(model=3), 400, "model"),
    "no messages": (CHAT, {"model": "MODEL"}, 400, "messages"),
    "empty messages": (CHAT, ask(messages=[]), 400, "messages"),
    "unknown role": (CHAT, ask(messages=[{"role": "boss", "content": "hi"}]), 400, "messages[0].role"),
    "tool without a call": (CHAT, ask(messages=[{"role": "tool", "content": "hi"}]), 400, "messages[0].tool_call_id"),
    "calls of a user": (
        CHAT,
        ask(messages=[{"role": "user", "content": "", "tool_calls": [CALL]}]),
        400,
        "messages[0].tool_calls",
    ),
    "answer to a call by a user": (
        CHAT,
        ask(messages=[{"role": "user", "content": "", "tool_call_id": "1"}]),
        400,
        "messages[0].tool_call_id",
    ),
    "image part": (
        CHAT,
        ask(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
    "message without content": (CHAT, ask(messages=[{"role": "user"}]), 400, "messages[0].content"),
    "tool of another type": (CHAT, ask(tools=[{"type": "web_search"}]), 400, "tools"),
    "tool with a bad name": (CHAT, ask(tools=[tool("a b")]), 400, "tools"),
    "two tools of one name": (CHAT, ask(tools=[tool("f"), tool("f")]), 400, "tools"),
    "unknown tool chosen": (
        CHAT,
        ask(tools=[tool("f")], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice",
    ),
    "tool_choice without tools": (CHAT, ask(tool_choice="required"), 400, "tool_choice"),
    "older functions": (CHAT, ask(functions=[{"name": "f"}]), 400, "functions"),
    "response_format": (CHAT, ask(response_format={"type": "structural_tag"}), 400, "response_format"),
    "json schema": (CHAT, ask(response_format={"type": "json_schema", "json_schema": {}}), 400, "response_format"),
    "reasoning_effort": (CHAT, ask(reasoning_effort="most"), 400, "reasoning_effort"),
    "negative budget": (CHAT, ask(thinking_token_budget=-1), 400, "thinking_token_budget"),
    "template of the client": (CHAT, ask(chat_template="{{ 1 }}"), 400, "chat_template"),
    "reserved template variable": (CHAT, ask(chat_template_kwargs={"tools": []}), 400, "chat_template_kwargs"),
    "top_logprobs alone": (CHAT, ask(top_logprobs=2), 400, "top_logprobs"),
    "too many top_logprobs": (CHAT, ask(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    "logprobs of a wrong type": (CHAT, ask(logprobs=5), 400, "logprobs"),
    "two different lengths": (CHAT, ask(max_completion_tokens=9), 400, "max_tokens"),
    "negative max_completion_tokens": (
        CHAT,
        ask(max_tokens=None, max_completion_tokens=-1),
        400,
        "max_completion_tokens",
    ),
    "half a surrogate pair": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "messages"),
    "half a surrogate pair in a prompt": (TEXT, b'{"prompt": "a\\udfff"}', 400, "prompt"),
    "half a surrogate pair in bytes": (TEXT, b'{"prompt": "a", "stop": "\xed\xa0\x80"}', 400, None),
    "half a surrogate pair in UTF-16": (TEXT, r'{"prompt": "a", "cache_salt": "\ud800"}'.encode("utf-16"), 400, None),
    "empty prompt": (TEXT, text(""), 400, "prompt"),
    "prompt without tokens": (TEXT, text([]), 400, "prompt"),
    "empty prompt among others": (TEXT, text(["a", ""]), 400, "prompt"),
    "no prompt": (TEXT, {"model": "MODEL"}, 400, "prompt"),
    "prompt of a wrong type": (TEXT, text({"a": 1}), 400, "prompt"),
    "prompt of mixed types": (TEXT, text([1, "a"]), 400, "prompt"),
    "prompt with a truth value": (TEXT, text([1, True]), 400, "prompt"),
    "prompt too long": (TEXT, text([65] * 70_000), 400, "prompt"),
    "token ids out of range": (TEXT, text([1, 2_000_000]), 400, "prompt"),
    "negative token id": (TEXT, text([-1]), 400, "prompt"),
    "negative max_tokens": (TEXT, text(max_tokens=-1), 400, "max_tokens"),
    "no max_tokens left": (TEXT, text(max_tokens=0), 400, "max_tokens"),
    "max_tokens beyond the context": (TEXT, text(max_tokens=10_000_000), 400, "max_tokens"),
    "max_tokens as text": (TEXT, text(max_tokens="8"), 400, "max_tokens"),
    "max_tokens as a fraction": (TEXT, text(max_tokens=1.5), 400, "max_tokens"),
    "min_tokens above max_tokens": (TEXT, text(min_tokens=9), 400, "min_tokens"),
    "nan temperature": (TEXT, b'{"prompt": "hi", "temperature": NaN}', 400, "temperature"),
    "infinite temperature": (TEXT, b'{"prompt": "hi", "temperature": 1e999}', 400, "temperature"),
    "negative temperature": (TEXT, text(temperature=-0.1), 400, "temperature"),
    "top_p of zero": (TEXT, text(top_p=0), 400, "top_p"),
    "top_k below -1": (TEXT, text(top_k=-2), 400, "top_k"),
    "huge n": (TEXT, text(n=1_000_000), 400, "n"),
    "n of zero": (TEXT, text(n=0), 400, "n"),
    "best_of": (TEXT, text(best_of=3), 400, "best_of"),
    "suffix": (TEXT, text(suffix="end"), 400, "suffix"),
    "logit_bias of a word": (TEXT, text(logit_bias={"hello": 1}), 400, "logit_bias"),
    "logit_bias out of range": (TEXT, text(logit_bias={"1": 101}), 400, "logit_bias"),
    "logit_bias beyond the vocabulary": (TEXT, text(logit_bias={"9999999": 1}), 400, "logit_bias"),
    "logit_bias of a wrong type": (TEXT, text(logit_bias=[1]), 400, "logit_bias"),
    "stop token out of range": (TEXT, text(stop_token_ids=[9_999_999]), 400, "stop_token_ids"),
    "empty stop": (TEXT, text(stop=""), 400, "stop"),
    "too many stops": (TEXT, text(stop=["x"] * 17), 400, "stop"),
    "stop of a wrong type": (TEXT, text(stop=[1]), 400, "stop"),
    "too many logprobs": (TEXT, text(logprobs=99), 400, "logprobs"),
    "seed as text": (TEXT, text(seed="1"), 400, "seed"),
    "huge seed": (TEXT, text(seed=10**30), 400, "seed"),
    "priority of another type": (TEXT, text(priority="high"), 400, "priority"),
    "priority that is no integer": (CHAT, ask(priority=0.5), 400, "priority"),
    "priority out of range": (TEXT, text(priority=2**31), 400, "priority"),
    "tenant of the client's own": (TEXT, text(tenant="acme"), 400, "tenant"),
    "weight of the client's own": (TEXT, text(weight=9), 400, "weight"),
    "empty salt": (TEXT, text(cache_salt=""), 400, "cache_salt"),
    "stream_options without stream": (TEXT, text(stream_options={"include_usage": True}), 400, "stream_options"),
    "prompt_logprobs in a stream": (TEXT, text(stream=True, prompt_logprobs=1), 400, "prompt_logprobs"),
    "unknown field": (TEXT, text(tempereture=1), 400, "tempereture"),
    "unknown field in a message": (
        CHAT,
        ask(messages=[{"role": "user", "content": "hi", "mood": "good"}]),
        400,
        "messages[0].mood",
    ),
    "field given twice": (TEXT, b'{"prompt": "hi", "n": 1, "n": 2}', 400, "n"),
    "invalid JSON": (TEXT, b'{"prompt": "hi"', 400, None),
    "no body": (TEXT, b"", 400, None),
    "JSON of another kind": (TEXT, b'["prompt"]', 400, None),
    "JSON nested too deeply": (TEXT, b'{"prompt": ' + b"[" * 100_000, 400, None),
    "not UTF-8": (TEXT, b'{"prompt": "\xff"}', 400, None),
    "unknown route": ("/v1/images/generations", ask(), 404, None),
}


def send_bad(http: httpx.Client, name: str, model: str) -> tuple[httpx.Response, int, str | None]:
    route, body, status, param = BAD_REQUESTS[name]
    if isinstance(body, bytes):
        return http.post(route, content=body), status, param
    named = {**body, "model": model} if body.get("model") in ("MODEL", "fake") else body
    return http.post(route, json=named), status, param


def check_refusal(reply: httpx.Response, status: int, param: str | None) -> None:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"].endswith("_error")
    assert error["param"] == param, error
