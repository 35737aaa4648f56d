"""An answer that the engine aborts is a failure of its request on every route, whole and streamed, and never an end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_server import CHAT, TEXT, Running, serving

pytestmark = pytest.mark.unit

ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"prompt": "hello"},
    "/v1/messages": {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_answer_is_a_failure(route: str, stream: bool, fast: Running) -> None:
    fast.engine.abort_after = 3
    try:
        reply = fast.http.post(route, json={**ROUTES[route], "stream": stream})
    finally:
        fast.engine.abort_after = None
    if not stream:
        told = reply.json()["error"]
        assert reply.status_code == 500 and "the grammar cannot go on" in told["message"]
        assert reply.headers["x-should-retry"] == "false", "it would fail again"
        return
    last = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")][-1]
    assert "the grammar cannot go on" in json.dumps(last) and "event: error" in reply.text
    assert "[DONE]" not in reply.text and "message_stop" not in reply.text and "response.completed" not in reply.text
    assert fast.http.post(route, json=ROUTES[route]).status_code == 200
