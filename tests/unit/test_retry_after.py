"""Whoever is told to come again is told when: each 429 and 503 has Retry-After."""

from __future__ import annotations

import httpx
import pytest

from headrace.server.errors import ApiError, as_api_error
from headrace.types import EngineDead, Overloaded
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import CHAT, TEXT, ask, serving, text

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (ApiError(429, "wait"), 5),
        (ApiError(503, "wait", headers={"Retry-After": "7"}), 7),
        (Overloaded("full", 0.2), 1),
        (EngineDead("dead"), 5),
    ],
)
def test_errors(error: Exception, seconds: int) -> None:
    assert as_api_error(error, "req_1").headers == {"Retry-After": str(seconds)}
    assert as_api_error(ApiError(400, "wrong"), "req_1").headers is None


def waits(reply: httpx.Response) -> bool:
    return reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1


def refused(http: httpx.Client) -> bool:
    message = {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    asked = [http.post(TEXT, json=text()), http.post(CHAT, json=ask()), http.post("/v1/messages", json=message)]
    return all(map(waits, [*asked, http.get("/health"), http.get("/v1/models")]))


def test_a_server_that_loads() -> None:
    with serving(ready=False, start_s=5.0) as running:
        assert refused(running.http)


def test_an_engine_that_has_failed_for_good() -> None:
    def prepare(number: int, engine: FakeEngine) -> None:
        engine.fail_after_tokens = 2

    with serving(prepare=prepare, restart=False) as running:
        assert waits(running.http.post(TEXT, json=text(max_tokens=100)))
        running.wait(503)
        assert refused(running.http)
