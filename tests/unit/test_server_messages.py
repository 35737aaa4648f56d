"""The Messages API over HTTP, on the fake engine: replies, streams, errors, names of the model, counted tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.server.job import Prompt
from headrace.server.parsers.parts import CallArguments, CallStart, Part, ReasoningPart, TextPart
from tests.support.fake_server import Running, serving

pytestmark = pytest.mark.unit

URL = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2023-06-01"}


def asked(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": content}], **more}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        assert found[-1][1]["type"] == found[-1][0]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(served_model_name="fake,other,claude-*") as running:
        yield running


class Marked:
    """A parser for scripts: `h` is reasoning, `c` a call, and everything else text."""

    def __init__(self) -> None:
        self.calls = 0

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for letter in text:
            if letter == "c":
                parts += [CallStart(self.calls, f"t{self.calls}", "f"), CallArguments(self.calls, "{}")]
                self.calls += 1
            else:
                parts.append(ReasoningPart(letter) if letter == "h" else TextPart(letter))
        return parts

    def finish(self) -> list[Part]:
        return []


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Prompt.__init__

    def init(self: Prompt, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self.parser = Marked

    monkeypatch.setattr(Prompt, "__init__", init)


def test_a_message(server: Running) -> None:
    reply = server.http.post(URL, json=asked(system="be brief")).json()
    assert reply.pop("id").startswith("msg_") and reply.pop("headrace")["new_tokens"] == 15
    assert reply == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "be brief"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 15, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 8,
        },
    }  # fmt: skip


def test_a_stream(server: Running) -> None:
    reply = server.http.post(URL, json=asked(stream=True, max_tokens=3))
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.text)
    assert [name for name, _ in events] == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    started, ended = events[0][1]["message"], events[-2][1]
    assert started["content"] == [] and started["usage"]["input_tokens"] == 6 and started["stop_reason"] is None
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 3 and ended["headrace"]["new_tokens"] == 6


@pytest.mark.parametrize(("path", "begun"), [(URL, "message_start"), ("/v1/responses", "response.created")])
def test_a_stream_begins_before_the_prompt_is_read(path: str, begun: str) -> None:
    body = asked(stream=True) if path == URL else {"input": "hello", "stream": True}
    with serving(running_limit=0) as running, running.http.stream("POST", path, json=body) as reply:
        lines = reply.iter_lines()  # whose end would be the connection's
        assert next(lines) == f"event: {begun}"
        assert running.engine.stats.scheduler.waiting == 1


def test_parts_and_how_answers_end(server: Running, marked: None) -> None:
    server.engine.scripts += ["hhokc", "hhokc", "ok"]
    whole = server.http.post(URL, json=asked()).json()
    streamed = events_of(server.http.post(URL, json=asked(stream=True)).text)
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hh", "signature": ""},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t0", "name": "f", "input": {}},
    ]
    assert whole["stop_reason"] == streamed[-2][1]["delta"]["stop_reason"] == "tool_use"
    begun = [event["content_block"]["type"] for name, event in streamed if name == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    assert server.http.post(URL, json=asked()).json()["stop_reason"] == "end_turn"


def test_thinking_may_be_omitted(server: Running, marked: None) -> None:
    server.engine.scripts.append("hhok")
    body = asked(thinking={"type": "adaptive", "display": "omitted"})
    content = server.http.post(URL, json=body).json()["content"]
    assert content == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "ok"}]


def test_a_stop_sequence(server: Running) -> None:
    reply = server.http.post(URL, json=asked(stop_sequences=["lo", "x"])).json()
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "lo")
    assert reply["content"] == [{"type": "text", "text": "hel"}]


def test_max_tokens_may_exceed_the_context(server: Running) -> None:
    """The coding client asks for more than most local models can hold."""
    server.engine.scripts.append("x" * 5000)
    reply = server.http.post(URL, json=asked("y" * 3900, max_tokens=32_000)).json()
    assert reply["stop_reason"] == "model_context_window_exceeded" and reply["usage"]["output_tokens"] == 99
    tight = server.http.post(URL, json=asked("y" * 3900, max_tokens=99)).json()
    assert tight["stop_reason"] == "max_tokens"
    full = server.http.post(URL, json=asked("y" * 4000))
    assert full.status_code == 400 and full.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_may_be_read_for_the_cache_alone(server: Running) -> None:
    drawn = server.metric("request_generation_tokens_sum")
    whole = server.http.post(URL, json=asked("y" * 199, max_tokens=0)).json()
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert server.metric("request_generation_tokens_sum") == drawn
    assert whole["usage"]["cache_creation_input_tokens"] == 96
    names = [name for name, _ in events_of(server.http.post(URL, json=asked(max_tokens=0, stream=True)).text)]
    assert names == ["message_start", "ping", "message_delta", "message_stop"]


def test_usage_adds_up_to_the_prompt(server: Running) -> None:
    counted = server.http.post(URL, json=asked("y" * 199)).json()["usage"]
    assert counted == {
        "input_tokens": 8, "cache_creation_input_tokens": 96, "cache_read_input_tokens": 96, "output_tokens": 8,
    }  # fmt: skip


def test_without_prefix_caching_nothing_is_written() -> None:
    with serving(enable_prefix_caching=False) as running:
        counted = running.http.post(URL, json=asked("y" * 199)).json()["usage"]
    assert counted["cache_creation_input_tokens"] == 0 and counted["input_tokens"] == 104


def test_a_request_of_the_coding_client(server: Running) -> None:
    """Its fields, as version 2.1.197 sends them."""
    cached = {"cache_control": {"type": "ephemeral"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
    body = {
        "model": "claude-opus-4-8",
        "max_tokens": 64_000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.86b; cc_entrypoint=cli;"},
            {"type": "text", "text": "You code.", **cached},
            {"type": "text", "text": "\nRules.\n\ngitStatus: clean", **cached},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **cached}]},
            {"role": "system", "content": "Agents."},
        ],
        "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": schema}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    server.engine.scripts.append("done")
    beta = {"anthropic-beta": "claude-code-20250219", "anthropic-version": "2023-06-01"}
    reply = server.http.post(f"{URL}?beta=true", json=body, headers=beta)
    assert reply.status_code == 200 and events_of(reply.text)[-2][1]["delta"]["stop_reason"] == "end_turn"
    assert "Rules." in server.engine.asked[-1][0] and "Agents." in server.engine.asked[-1][0]


def test_tokens_are_counted(server: Running) -> None:
    body = {name: value for name, value in asked(system="be brief").items() if name != "max_tokens"}
    assert server.http.post(COUNT, json=body).json() == {"input_tokens": 15}
    long = {**body, "messages": asked("y" * 9000)["messages"]}
    assert server.http.post(COUNT, json=long).json()["input_tokens"] > 9000
    refused = server.http.post(COUNT, json={**body, "model": "nope"})
    assert refused.status_code == 404 and refused.json()["type"] == "error"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (asked(model="nope"), 404, "not_found_error"),
        (asked(temperature=2), 400, "invalid_request_error"),
        (asked("refuse me"), 400, "invalid_request_error"),
        (b"{", 400, "invalid_request_error"),
        (b" " * (32 * 2**20 + 1), 413, "request_too_large"),
    ],
    ids=["model", "field", "template", "json", "size"],
)
def test_errors(server: Running, body: Any, status: int, kind: str) -> None:
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    reply = server.http.post(URL, **given)
    assert reply.status_code == status
    told = reply.json()
    assert told == {"type": "error", "error": {"type": kind, "message": told["error"]["message"]},
                    "request_id": reply.headers["request-id"]}  # fmt: skip


def test_other_errors_have_the_shape_too(server: Running) -> None:
    assert server.http.get(URL).json()["error"]["type"] == "invalid_request_error"
    assert server.http.get(f"{URL}/batches").json()["error"]["type"] == "not_found_error"
    assert server.http.get("/v1/nothing").json()["error"]["code"] is None  # OpenAI's elsewhere


def test_the_tool_runner_learns_that_there_are_no_threads(server: Running) -> None:
    """Anthropic's client asks for a thread first and goes on without one by the details of the error."""
    refused = server.http.post(URL, json=asked(thread={"type": "create"}))
    assert refused.status_code == 400
    assert refused.json()["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_keys_and_restarts_are_told_so() -> None:
    with serving(api_key="k3y") as running:
        refused = running.http.post(URL, json=asked())
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert running.http.post(URL, json=asked(), headers={"x-api-key": "k3y"}).status_code == 200
        running.engine.die("test")
        running.wait(503)
        failed = running.http.post(URL, json=asked(), headers={"Authorization": "Bearer k3y"})
    assert failed.status_code == 503 and failed.json()["error"]["type"] == "overloaded_error"


def test_a_full_queue() -> None:
    with serving(max_queued_requests=1) as running:
        running.engine.stats.scheduler.waiting = 1
        refused = running.http.post(URL, json=asked())
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "3"


def test_a_failure_in_a_stream_is_an_event() -> None:
    with serving() as running:
        running.engine.fail_after_tokens = 2
        name, last = events_of(running.http.post(URL, json=asked(stream=True)).text)[-1]
    assert name == "error" and last["error"]["type"] == "overloaded_error"


def test_every_name_of_the_model(server: Running) -> None:
    assert server.http.post(URL, json=asked(model="claude-opus-9")).json()["model"] == "claude-opus-9"
    body = {"model": "other", "messages": asked()["messages"], "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=body).json()["model"] == "other"
    plain = {"model": "claude-x", "prompt": "a", "max_tokens": 1}
    assert server.http.post("/v1/completions", json=plain).json()["model"] == "claude-x"
    refused = server.http.post("/v1/completions", json={**plain, "model": "gpt"})
    assert refused.status_code == 404 and "'fake', 'other', 'claude-*'" in refused.json()["error"]["message"]


def test_lists_of_models(server: Running) -> None:
    ours = server.http.get("/v1/models").json()
    assert ours["object"] == "list" and [card["id"] for card in ours["data"]] == ["fake", "other"]
    theirs = server.http.get("/v1/models", headers=VERSION).json()
    assert (theirs["has_more"], theirs["first_id"], theirs["last_id"]) == (False, "fake", "other")
    card = server.http.get("/v1/models/claude-opus-9", headers=VERSION).json()
    assert card.pop("created_at").endswith("Z")
    assert card == {
        "type": "model", "id": "claude-opus-9", "display_name": "claude-opus-9", "lifecycle": "active",
        "max_input_tokens": 4000, "max_tokens": 4000,
    }  # fmt: skip
    assert server.http.get("/v1/models/fake").json()["object"] == "model"
    assert server.http.get("/v1/models/gpt", headers=VERSION).json()["type"] == "error"
    assert server.http.get("/v1/models/gpt").json()["error"]["code"] == "model_not_found"


def test_a_billing_header_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    body = asked(system="x-anthropic-billing-header: cch=1;\nYou code.")
    with serving() as running, caplog.at_level(logging.WARNING, "headrace.server"):
        for _ in range(2):
            assert running.http.post(URL, json=body).status_code == 200
        assert running.engine.asked[-1][0].startswith("x-anthropic-billing-header")
    assert caplog.text.count("--stable-system-prompt") == 1


def test_the_flag_keeps_the_header_out_of_the_prompt() -> None:
    with serving(stable_system_prompt=True) as running:
        for n in (1, 2):
            running.http.post(URL, json=asked(system=f"x-anthropic-billing-header: cch={n};\nYou code."))
        assert [prompt for prompt, _ in running.engine.asked] == ["You code.\nhello\n"] * 2
