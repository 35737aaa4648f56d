"""The server's key, queue, loading, failing; clients that go away; what it tells in metrics and log."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest

from headrace.config import EngineConfig
from headrace.progress import LoadPhase
from headrace.server import serve
from headrace.server.app import create_app
from headrace.server.serve import bind, make_server
from headrace.types import UnsupportedModel
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import TEXT, Running, check_refusal, metric, open_request, serving, text, until

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_api_key_covers_all_but_health() -> None:
    with serving(api_key="s3cret") as running:
        assert running.http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            check_refusal(running.http.get(path), 401, None)
        check_refusal(running.http.post(TEXT, json=text()), 401, None)
        for wrong in ("Bearer wrong", "s3cret", "Basic s3cret", "Bearer", "Bearer s3cret2"):
            assert running.http.get("/v1/models", headers={"Authorization": wrong}).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            running.client("other").models.list()
        assert running.client("s3cret").models.list().data[0].id == "fake"


def test_full_queue_answers_429() -> None:
    with serving(max_queued_requests=1, running_limit=1, token_s=0.02) as running:
        replies: list[httpx.Response] = []

        def send() -> None:
            replies.append(httpx.post(running.url + TEXT, json=text(max_tokens=100), timeout=20))

        threads = [threading.Thread(target=send) for _ in range(2)]
        threads[0].start()
        until(lambda: running.engine.stats.scheduler.running == 1)
        threads[1].start()
        until(lambda: running.engine.stats.scheduler.waiting == 1)
        for stream in (False, True):
            refused = running.http.post(TEXT, json=text(stream=stream))
            check_refusal(refused, 429, None)
            assert refused.headers["retry-after"] == "3"
        with pytest.raises(openai.RateLimitError):
            running.client().completions.create(model="fake", prompt="hi")
        running.engine.token_s = 0.0
        for thread in threads:
            thread.join()
        assert [reply.status_code for reply in replies] == [200, 200]
        assert running.metric("http_errors_total", status="429") == 3


def test_more_prompts_than_the_queue_holds() -> None:
    with serving(max_queued_requests=2) as running:
        check_refusal(running.http.post(TEXT, json=text(["a", "b", "c"])), 400, "prompt")


def test_loading_answers_503_then_serves() -> None:
    may_go_on = threading.Event()

    class Loading(FakeEngine):
        async def start(self, progress: Any = None, *, phases: Any = None) -> None:
            phases(LoadPhase("weights", 1, 2))
            while not may_go_on.is_set():
                await asyncio.sleep(0.01)
            await super().start(progress, phases=phases)

    config = EngineConfig(model="fake")
    running = Running(Loading(config), config)
    try:
        until(lambda: "50%" in running.http.get("/health").text)
        assert running.http.get("/health").json()["status"] == "loading"
        running.wait(503)
        check_refusal(running.http.post(TEXT, json=text()), 503, None)
        check_refusal(running.http.get("/metrics"), 503, None)
        may_go_on.set()
        running.wait(200)
        assert running.http.post(TEXT, json=text()).status_code == 200
    finally:
        running.close()


def test_failure_to_load_shows_in_health() -> None:
    config = EngineConfig(model="fake")
    engine = FakeEngine(config)
    engine.start_error = UnsupportedModel("no such thing as MambaForever")
    running = Running(engine, config)
    try:
        until(lambda: "MambaForever" in running.http.get("/health").text)
        assert running.http.get("/health").status_code == 503
        assert running.app.state.headrace.error is engine.start_error
    finally:
        running.close()


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_in_the_midst(stream: bool) -> None:
    with serving(token_s=0.001) as running:
        running.engine.fail_after_tokens = 20
        failed: list[bool] = []
        running.app.state.headrace.on_failure = lambda: failed.append(True)
        reply = running.http.post(TEXT, json=text(max_tokens=100, stream=stream))
        if stream:
            assert reply.status_code == 200
            *_, event = reply.text.strip().split("\n\n")
            assert event.startswith("event: error\ndata: ")
            error = json.loads(event.split("data: ")[1])["error"]
        else:
            assert reply.status_code == 503
            error = reply.json()["error"]
        assert error["code"] == "engine_dead" and "injected failure" in error["message"]
        until(lambda: running.http.get("/health").status_code == 503)
        check_refusal(running.http.post(TEXT, json=text()), 503, None)
        assert running.http.get("/metrics").status_code == 200
        assert failed == [True]


def test_openai_client_sees_the_failure_of_a_stream() -> None:
    with serving(token_s=0.001) as running:
        running.engine.fail_after_tokens = 20
        with pytest.raises(openai.APIError, match="injected failure"):
            list(running.client().completions.create(model="fake", prompt="hi", max_tokens=100, stream=True))


def test_failure_of_the_watch_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: FakeEngine) -> str:
        raise RuntimeError("lost")

    monkeypatch.setattr(FakeEngine, "wait_dead", broken)
    with serving(ready=False) as running:
        until(lambda: "lost" in running.http.get("/health").text)
        assert running.server.exit_code() == 1


def test_exit_codes() -> None:
    config = EngineConfig(model="fake")
    server = make_server(create_app(FakeEngine(config), config))
    assert server.exit_code() == 0
    server.state.phase = "failed"
    assert server.exit_code() == 1
    server.handle_exit(signal.SIGTERM, None)
    assert server.exit_code() == 1, "a signal after a failure does not hide it"
    server.state.error = UnsupportedModel("no")
    assert server.exit_code() == 2
    server.asked_to_end = True
    assert server.exit_code() == 0


def test_what_waits_for_requests_waits_longer_than_they_may_last() -> None:
    """Else their tasks would be cancelled, with tracebacks in the log."""
    config = EngineConfig(model="fake", shutdown_timeout_s=42.5)
    assert make_server(create_app(FakeEngine(config), config)).config.timeout_graceful_shutdown == 45


def test_empty_key_is_refused() -> None:
    with pytest.raises(ValueError, match="api_key"):
        EngineConfig(model="fake", api_key=" ")


def test_slow_body_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.answering.READ_S", 0.2)
    with serving() as running, socket.create_connection(("127.0.0.1", running.port), timeout=10) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        assert sock.recv(1000).startswith(b"HTTP/1.1 408")
        assert len(running.app.state.headrace.reading) == 0


def test_health_keeps_the_reason_from_strangers() -> None:
    with serving(api_key="k") as running:
        running.engine.die("secret path")
        running.wait(503)
        assert "secret" not in running.http.get("/health").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abc", ["abc", "def"]])
def test_client_leaves_while_queued_or_decoding(stream: bool, prompt: Any) -> None:
    with serving(running_limit=2, token_s=0.01) as running:
        stats = running.engine.stats
        count = 1 if prompt == "abc" else 2
        socks = [open_request(running.port, text(prompt, max_tokens=3000, stream=stream)) for _ in range(4)]
        until(lambda: stats.scheduler.running == 2 and stats.scheduler.waiting == 4 * count - 2)
        for sock in reversed(socks):
            sock.close()
        until(lambda: stats.scheduler.running == stats.scheduler.waiting == stats.kv.chunks_used == 0, 2.0)
        assert len(running.engine.aborted) == 4 * count
        until(lambda: running.metric("clients_gone_total") == 4)
        assert running.http.post(TEXT, json=text()).status_code == 200


def test_client_leaves_before_the_body_is_whole(fast: Running) -> None:
    sock = socket.create_connection(("127.0.0.1", fast.port))
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    until(lambda: len(fast.app.state.headrace.reading) == 1)
    sock.close()
    until(lambda: len(fast.app.state.headrace.reading) == 0)


def test_200_clients_leave_at_random_moments() -> None:
    rng = random.Random(7)
    with serving(running_limit=16, token_s=0.002) as running:
        socks: list[tuple[float, socket.socket]] = []
        start = time.monotonic()
        for i in range(200):
            body = text("word " * rng.randrange(1, 60), max_tokens=rng.randrange(1, 300), stream=i % 2 == 0)
            socks.append((start + rng.random() * 1.5, open_request(running.port, body)))
        for moment, sock in sorted(socks, key=lambda item: item[0]):
            time.sleep(max(0.0, moment - time.monotonic()))
            sock.close()
        left = ("num_requests_running", "num_requests_waiting", "kv_chunks_used")
        until(lambda: not any(map(running.metric, left)))
        assert running.metric("clients_gone_total") > 50
        assert running.http.post(TEXT, json=text()).status_code == 200


def test_metrics_have_the_known_names(fast: Running) -> None:
    fast.http.post(TEXT, json=text())
    page = fast.http.get("/metrics").text
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_sum",
        "request_time_per_output_token_seconds_bucket",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "kv_chunks_used",
        "kv_chunks_cached",
        "kv_chunks_total",
        "kv_chunks_unshared",
        "prefilled_tokens_total",
        "evictions_total",
    ):
        assert metric(page, name, model_name="fake") >= 0
    assert metric(page, "request_success_total", model_name="fake", finished_reason="length") > 0


def test_latencies_count_each_request_once() -> None:
    with serving(token_s=0.01) as running:
        for stream in (False, True):
            running.http.post(TEXT, json=text(max_tokens=5, stream=stream))
        running.http.post(TEXT, json=text(max_tokens=-1))
        assert running.metric("time_to_first_token_seconds_count") == 2
        assert running.metric("inter_token_latency_seconds_count") == 8
        assert running.metric("inter_token_latency_seconds_sum") >= 0.08
        assert running.metric("generation_tokens_total") == 10


def test_peak_of_sharing_is_kept() -> None:
    with serving() as running:
        for prompt in ("a" * 64 * 9, "b"):
            running.http.post(TEXT, json=text(prompt))
        assert running.metric("kv_chunks_used") == 0
        assert (running.metric("kv_chunks_used_peak"), running.metric("kv_chunks_unshared_peak")) == (10, 20)


def test_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(token_s=0.02, log_interval_s=0.1) as running:
        assert "KV cache  64,000 tokens" in caplog.text and "16 sequences of 4,000 tokens" in caplog.text
        time.sleep(0.3)
        assert "running" not in caplog.text, "idle servers are silent"
        running.http.post(TEXT, json=text("z" * 128, max_tokens=20))
        until(lambda: "length    prompt" in caplog.text)
    assert "running   1  waiting   0  read" in caplog.text
    assert "prompt     128 (     64 cached)  output     20" in caplog.text


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match="host 'nosuch' is no address of this machine: Name or service not known"):
        bind("nosuch", 8000)


async def test_the_process_that_was_begun_is_the_first_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_engine_class", lambda: lambda config: Mock(begun=None))
    begun: Any = object()
    make: Any = serve.engine_maker(EngineConfig(), begun)
    assert [(await make()).begun, (await make()).begun] == [begun, None]
