"""A failed engine is replaced: what clients see meanwhile, what is counted, and when the server gives up."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.server.restarts import MOST, WINDOW_S, RestartLimit
from headrace.types import EngineDead, UnsupportedModel
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import TEXT, Running, check_refusal, serving, text, until

pytestmark = pytest.mark.unit


def healthy(number: int, engine: FakeEngine) -> None:
    pass


def fails_to_start(error: Exception, *numbers: int) -> Callable[[int, FakeEngine], None]:
    def prepare(number: int, engine: FakeEngine) -> None:
        if number in numbers:
            engine.start_error = error

    return prepare


def watched(running: Running) -> list[str]:
    """Reasons of the server's failure, as they come."""
    failed: list[str] = []
    state = running.app.state.headrace
    state.on_failure = lambda: failed.append(state.reason)
    return failed


def until_made(running: Running, count: int) -> None:
    until(lambda: len(running.given.engines) == count)


@pytest.mark.parametrize("stream", [False, True])
def test_failed_engine_is_replaced(stream: bool) -> None:
    with serving(prepare=healthy, token_s=0.001) as running:
        failed, first = watched(running), running.engine
        first.fail_after_tokens = 20
        running.given.hold.clear()
        reply = running.http.post(TEXT, json=text(max_tokens=100, stream=stream))
        assert "injected failure" in reply.text and reply.status_code == (200 if stream else 503)
        running.wait(503)
        health = running.http.get("/health").json()
        assert health["status"] == "restarting" and "injected failure" in health["error"]["message"]
        refused = running.http.post(TEXT, json=text(stream=stream))
        check_refusal(refused, 503, None)
        assert refused.json()["error"]["code"] == "restarting" and int(refused.headers["retry-after"]) >= 1
        assert running.metric("engine_restarts_total") == 1, "the page is there while the engine is away"
        running.given.hold.set()
        running.wait(200)
        assert running.engine is not first
        assert running.http.post(TEXT, json=text("abcd", max_tokens=4)).json()["choices"][0]["text"] == "abcd"
        assert running.metric("generation_tokens_total") == 20 + 4, "counters do not fall"
        assert running.metric("kv_chunks_total") == 1000 and running.metric("num_requests_running") == 0
        assert failed == [] and running.server.exit_code() == 0


def test_an_engine_that_ends_while_the_server_stops_is_not_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """As where all processes of a server get the signal."""
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=healthy, token_s=0.05) as running:
        failed, running.engine.fail_after_tokens = watched(running), 5

        def stop() -> None:
            until(lambda: running.metric("num_requests_running") == 1)
            loop = running.server.servers[0].get_loop()
            loop.call_soon_threadsafe(running.server.handle_exit, signal.SIGTERM, None)

        stopping = threading.Thread(target=stop)
        stopping.start()
        reply = running.http.post(TEXT, json=text(max_tokens=100))
        stopping.join()
        assert reply.status_code == 503 and "injected failure" in reply.text
        running.thread.join(10)
        assert len(running.given.engines) == 1 and failed == [] and running.server.exit_code() == 0
    assert "starting it again" not in caplog.text


def test_failed_engine_is_shut_down_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    async def shutdown(self: FakeEngine) -> None:
        ended.append(id(self))

    monkeypatch.setattr(FakeEngine, "shutdown", shutdown)
    seen: list[list[int]] = []
    with serving(prepare=lambda number, engine: seen.append(list(ended))) as running:
        first = running.engine
        first.die("lost")
        until_made(running, 2)
        assert seen == [[], [id(first)]]


def test_restarts_without_success_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=lambda number, engine: engine.die(f"failure {number}"), ready=False) as running:
        until(lambda: running.app.state.headrace.phase == "failed")
        assert len(running.given.engines) == MOST + 1
        assert running.metric("engine_restarts_total") == MOST
        assert running.server.exit_code() == 1
        assert f"failure {MOST}" in running.http.get("/health").text
        refused = running.http.post(TEXT, json=text())
        check_refusal(refused, 503, None)
        assert refused.json()["error"]["code"] == "engine_dead"
    assert f"not started again: {MOST} restarts within 60 s" in caplog.text


def test_a_success_makes_room_for_more_restarts() -> None:
    with serving(prepare=healthy) as running:
        for number in range(2 * MOST):
            assert running.http.post(TEXT, json=text()).status_code == 200
            running.engine.die("lost")
            until_made(running, number + 2)
            running.wait(200)
        assert running.metric("engine_restarts_total") == 2 * MOST


@pytest.mark.parametrize("error", [EngineDead("killed while loading"), ValueError("no memory")])
def test_failure_to_start_again_is_tried_again(error: Exception) -> None:
    with serving(prepare=fails_to_start(error, 1, 2)) as running:
        running.engine.die("lost")
        until_made(running, 4)
        running.wait(200)
        assert running.http.post(TEXT, json=text()).status_code == 200


def test_exit_code_is_1_where_the_model_had_been_served() -> None:
    with serving(prepare=fails_to_start(ValueError("no memory"), *range(1, 9))) as running:
        failed = watched(running)
        running.engine.die("lost")
        until(lambda: failed != [])
        assert len(failed) == 1 and "no memory" in failed[0] and running.server.exit_code() == 1
        assert len(running.given.engines) == MOST + 1


@pytest.mark.parametrize(("error", "code"), [(UnsupportedModel("Mamba"), 2), (EngineDead("killed"), 1)])
def test_model_that_never_loaded_is_not_tried_again(error: Exception, code: int) -> None:
    with serving(prepare=fails_to_start(error, 0), ready=False) as running:
        until(lambda: running.app.state.headrace.phase == "failed")
        assert running.server.exit_code() == code and len(running.given.engines) == 1


def test_without_restart_the_failure_is_the_end() -> None:
    with serving(prepare=healthy, restart=False) as running:
        failed = watched(running)
        running.engine.die("lost")
        until(lambda: failed != [])
        assert running.http.get("/health").json()["status"] == "failed" and running.server.exit_code() == 1
        assert len(running.given.engines) == 1 and running.metric("engine_restarts_total") == 0


def test_health_keeps_the_reason_from_strangers() -> None:
    with serving(prepare=healthy, api_key="k") as running:
        running.given.hold.clear()
        running.engine.die("secret path")
        running.wait(503)
        told = running.http.get("/health").text
        assert "restarting" in told and "secret" not in told
        assert running.http.post(TEXT, json=text()).status_code == 401
        running.given.hold.set()


def test_window_of_the_limit_is_uptime() -> None:
    limit = RestartLimit()
    assert all(limit.allows(at) for at in (0.0, 0.0, WINDOW_S - 1))
    assert not limit.allows(WINDOW_S - 0.5)
    assert limit.allows(WINDOW_S), "two have left the window"
    assert limit.allows(WINDOW_S) and not limit.allows(WINDOW_S)
    limit.note_success()
    assert limit.allows(WINDOW_S)


@pytest.mark.parametrize(
    "wrong", [{"engine_timeout_s": 0}, {"engine_timeout_s": float("nan")}, {"engine_timeout_s": float("inf")}]
)
def test_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="engine_timeout_s"):
        EngineConfig(**wrong)
    assert EngineConfig().server.restart
