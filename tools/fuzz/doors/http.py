"""The HTTP port: requests whose bodies, heads and bytes are nonsense. Each gets an answer that is no fault of the
server, or the connection's end; the server goes on, and no chunk stays taken."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.support.fake_server import CHAT, TEXT, Running, ask, serving, text
from tools.fuzz.doors import Door
from tools.fuzz.mutate import EDGES, FLOATS, TEXTS, damaged, dumped, edited, odd

FIELDS = ["temperature", "top_p", "top_k", "seed", "stop", "n", "logprobs", "top_logprobs", "logit_bias", "max_tokens",
          "min_tokens", "echo", "stream", "stream_options", "cache_salt", "public_prefix_tokens", "tools", "user",
          "chat_template_kwargs", "prompt", "messages", "model", "input", "previous_response_id", "text", "reasoning",
          "tool_choice", "include", "metadata", "store", "max_output_tokens", "instructions", "system", "thinking",
          "stop_sequences", "output_config", "context_management", "tokens", "add_special_tokens",
          "query", "documents", "top_n", "template", "return_documents"]  # fmt: skip
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RERANK, CLASSIFY = "/v1/rerank", "/v1/classify"
ROUTES = [TEXT, CHAT, RESPONSES, MESSAGES, MESSAGES + "/count_tokens", TOKENIZE, DETOKENIZE, RERANK, CLASSIFY,
          RESPONSES + "/resp_1", RESPONSES + "/resp_1/input_items", "/v1/models", "/health", "/metrics",
          "/openapi.json", "/", "/v1/completions/..", "/%00", "/" + "a" * 9000, "*"]  # fmt: skip
HEADS = ["Authorization: Bearer x", "Content-Length: -1",
         "Content-Length: 99999999999999999999", "Expect: 100-continue",
         "Transfer-Encoding: chunked", "Connection: Upgrade", "Upgrade: websocket", "Content-Encoding: gzip",
         "Content-Type: text/plain", "Host: ", "X: " + "y" * 9000, "a b: c", ":", "X:\x00"]  # fmt: skip


def door() -> Door:
    return Http()


class Http:
    memory_mib = 192
    case_s = 30.0

    def open(self, folder: Path) -> None:
        logging.disable(logging.CRITICAL)
        self._closing = ExitStack()
        self._server: Running = self._closing.enter_context(serving(stable_system_prompt=True, labels=("a",)))

    def case(self, rng: Random) -> str:
        raw = self._request(rng)
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=20) as link:
            for piece in _pieces(raw, rng):
                with suppress(OSError):
                    link.sendall(piece)
            if rng.random() < 0.1:
                told = "left"
            else:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_WR)
                told = _status(link)
        if rng.random() < 0.05:
            assert self._server.http.get("/health").status_code == 200
        return told

    def _request(self, rng: Random) -> bytes:
        route = rng.choice(ROUTES) if rng.random() < 0.15 else rng.choice((TEXT, *BODIES))
        body: Any = BODIES.get(route, text)()
        if rng.random() < 0.6:
            body = edited(body, rng)
        for _ in range(rng.choice((0, 1, 2)) if isinstance(body, dict) else 0):
            body[rng.choice(FIELDS)] = rng.choice((rng.choice(EDGES), rng.choice(FLOATS), rng.choice(TEXTS), odd(rng)))
        raw = dumped(body).encode()
        if rng.random() < 0.2:
            raw = damaged(raw, rng)
        head = [f"{rng.choice(('POST', 'POST', 'POST', 'GET', 'PUT', 'X'))} {route} HTTP/1.1", "Host: x"]
        head += ["Content-Type: application/json", f"Content-Length: {len(raw)}", "Connection: close"]
        if rng.random() < 0.15:
            head.insert(rng.randrange(1, len(head)), rng.choice(HEADS))
        whole = "\r\n".join(head).encode() + b"\r\n\r\n" + raw
        return damaged(whole, rng) if rng.random() < 0.1 else whole

    def close(self) -> None:
        stats = self._server.engine.stats
        self._closing.close()
        assert stats.kv.chunks_used == 0, "chunks stay taken"


def _response() -> dict[str, Any]:
    """With an item of each kind, and a tool."""
    call = {"call_id": "c", "name": "f", "arguments": "{}"}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
    ]
    return {"input": items, "tools": [tool], "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 8}


def _message() -> dict[str, Any]:
    """With a block of each kind, and a tool."""
    tool = {"name": "f", "description": "a", "input_schema": {"type": "object", "properties": {}}, "strict": True}
    source = {"type": "text", "media_type": "text/plain", "data": "a"}
    answer = [
        {"type": "thinking", "thinking": "b", "signature": ""},
        {"type": "redacted_thinking", "data": "c"},
        {"type": "text", "text": "d"},
        {"type": "tool_use", "id": "e", "name": "f", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "e", "content": [{"type": "text", "text": "g"}], "is_error": True}
    messages = [
        {"role": "user", "content": [{"type": "document", "source": source, "title": "h"}]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": [result, {"type": "text", "text": "i", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "j"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;\ngitStatus: k"}]
    more = {"tools": [tool], "tool_choice": {"type": "tool", "name": "f"}, "thinking": {"type": "adaptive"}}
    return {"max_tokens": 8, "messages": messages, "system": system, **more}


def _rerank() -> dict[str, Any]:
    return {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "template": "{query}: {document}"}


BODIES = {CHAT: ask, RESPONSES: _response, MESSAGES: _message, DETOKENIZE: lambda: {"tokens": [1, 2]},
          RERANK: _rerank, CLASSIFY: lambda: {"input": ["a", "b"]}}  # fmt: skip


def _pieces(raw: bytes, rng: Random) -> list[bytes]:
    if rng.random() < 0.8:
        return [raw]
    at = rng.randrange(len(raw) + 1)
    return [raw[:at], raw[at:]]


def _status(link: socket.socket) -> str:
    """Of the first answer; all of it is read."""
    got = b""
    with suppress(ConnectionError):
        while part := link.recv(1 << 16):
            got += part
            assert len(got) < 1 << 24, "an answer without end"
    if not got:
        return "closed"
    status = got.split(b" ", 2)[1][:3].decode()
    assert status[0] in "1234" or status == "501", got[:500]
    return status
