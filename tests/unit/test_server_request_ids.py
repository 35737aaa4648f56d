"""Replies and the log's lines about their requests have one id."""

from __future__ import annotations

import json
import logging

import pytest

from tests.support.fake_server import TEXT, serving, text, until
from tests.support.server_log import logged

pytestmark = pytest.mark.unit


def test_a_reply_and_the_lines_about_it_have_one_id() -> None:
    """Under the name that the route's clients look for. A stream has it at its beginning."""
    streamed = text(stream=True)
    with logged("json", logging.DEBUG) as out, serving() as running:
        client = running.client()
        message = {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
        ids = [running.http.post(TEXT, json=body).headers["x-request-id"] for body in (text(), streamed, text(n=0))]
        ids.append(client.completions.create(model="fake", prompt="hi")._request_id)
        ids.append(running.http.post("/v1/messages", json=message).headers["request-id"])
        refused = running.http.post("/v1/messages", json={"model": "fake"})
        assert refused.json()["request_id"] == refused.headers["request-id"]
        ids.append(refused.headers["request-id"])
        assert len({*ids, running.http.get("/v1/models").headers["x-request-id"]}) == 7
        until(lambda: out.getvalue().count('"ended"') == 4)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["request_id"] for line in lines if "request_id" in line] == ids


def test_a_fault_is_told_with_the_id_of_its_reply() -> None:
    with logged("json") as out, serving() as running:
        running.engine.check = None
        reply = running.http.post(TEXT, json=text())
        assert reply.status_code == 500
    (fault,) = (line for line in map(json.loads, out.getvalue().splitlines()) if line["level"] == "error")
    assert fault["request_id"] == reply.headers["x-request-id"] and "TypeError" in fault["exception"]
