"""Connections that say nothing, little or too much: the server answers others meanwhile, and closes these in time."""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from headrace.server import connections
from headrace.server.connections import RESERVED, Connections, LogThrottle, limit
from tests.support.fake_server import TEXT, Running, open_request, serving, text, until

pytestmark = pytest.mark.unit

MOST = 20


@pytest.fixture
def small() -> Iterator[Running]:
    with serving(max_connections=MOST, token_s=0.02) as running:
        yield running


def silent(port: int, closing: ExitStack, first: bytes = b"") -> socket.socket:
    sock = closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
    sock.sendall(first)
    return sock


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed it; what it sent before is thrown away."""
    sock.settimeout(0.01)
    try:
        while sock.recv(1 << 20):
            pass
        return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def health(running: Running) -> int:
    return httpx.get(running.url + "/health", timeout=20).status_code


def test_silent_connections_make_room_the_oldest_first(small: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 60.0)  # their time limit must not do what making room should
    with ExitStack() as closing:
        many = []
        for _ in range(3 * MOST):
            many.append(silent(small.port, closing))
            assert health(small) == 200
        until(lambda: sum(map(closed, many)) >= 2 * MOST)
        assert all(map(closed, many[: 2 * MOST])) and not closed(many[-1])
        assert small.server.connections.open <= MOST + 1


def test_those_that_never_asked_make_room_first() -> None:
    class Stub:
        def __init__(self, name: str) -> None:
            self.name = name

        def end(self, why: str) -> None:
            ended.append(self.name)
            connections.leave(self)  # type: ignore[arg-type]

    ended: list[str] = []
    connections = Connections(2)
    connections.idle = OrderedDict.fromkeys([Stub("asked")])  # type: ignore[list-item,assignment]
    connections.silent = OrderedDict.fromkeys([Stub("older"), Stub("newer")])  # type: ignore[list-item,assignment]
    connections.open = 2
    assert connections.make_room() and not ended
    connections.open = 3
    assert all(connections.make_room() for _ in range(3))
    assert ended == ["older", "newer", "asked"]


def test_a_request_under_way_is_not_closed_to_make_room(small: Running) -> None:
    with ExitStack() as closing:
        body = text("word " * 30, max_tokens=100, stream=True)
        streams = [closing.enter_context(open_request(small.port, body)) for _ in range(4)]
        until(lambda: small.engine.stats.scheduler.running == 4)
        for _ in range(3 * MOST):
            silent(small.port, closing)
        small.engine.token_s = 0.0
        for stream in streams:
            with stream.makefile("rb") as answer:
                assert any(b"[DONE]" in line for line in answer)


def test_where_all_have_a_request_under_way_the_new_one_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with serving(max_connections=3, token_s=0.05) as running, ExitStack() as closing:
        running.http.close()
        until(lambda: running.server.connections.open == 0)
        for _ in range(3):
            closing.enter_context(open_request(running.port, text("word " * 30, max_tokens=200, stream=True)))
        until(lambda: running.engine.stats.scheduler.running == 3)
        more = silent(running.port, closing)
        until(lambda: closed(more))
        until(lambda: "refused, since all others had a request under way" in caplog.text)
        assert running.engine.stats.scheduler.running == 3


@pytest.mark.parametrize("first", [b"", b"GET /health HT", b"\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET"])
def test_heads_that_do_not_come_have_a_time_limit(monkeypatch: pytest.MonkeyPatch, first: bytes) -> None:
    """A byte now and then does not put it off."""
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with serving() as running, ExitStack() as closing:
        sock = silent(running.port, closing, first)
        end = time.monotonic() + 20
        while not closed(sock):
            assert time.monotonic() < end
            try:
                sock.sendall(b"a" if first else b"")
            except ConnectionError:
                break
        assert health(running) == 200


def test_silence_between_requests_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEEP_ALIVE_S", 0.3)
    with serving() as running, ExitStack() as closing:
        for _ in range(2):
            sock = silent(running.port, closing, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in sock.recv(100)
            until(lambda sock=sock: closed(sock))


def test_a_client_that_takes_nothing_of_its_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 0.5)
    with serving() as running, ExitStack() as closing:
        page = b"x" * (64 << 20)  # more than the system holds for a client
        monkeypatch.setattr(running.server.state.metrics, "page", lambda: page)
        running.http.close()
        until(lambda: running.server.connections.open == 0)
        sock = silent(running.port, closing, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: running.server.connections.open == 1)
        until(lambda: running.server.connections.open == 0, 60)
        assert closed(sock)


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 2.0)
    with serving() as running, ExitStack() as closing:
        page = b"x" * (64 << 20)
        monkeypatch.setattr(running.server.state.metrics, "page", lambda: page)
        sock = silent(running.port, closing, b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        taken = last = 0
        while part := sock.recv(1 << 20):
            taken += len(part)
            if taken - last > 4 << 20:  # 16 times, which take twice WRITE_S
                last = taken
                time.sleep(0.25)
        assert taken > len(page)


def test_a_head_too_large_is_refused() -> None:
    with serving() as running, ExitStack() as closing:
        sock = silent(running.port, closing, b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
        assert b" 400 " in sock.recv(100)
        until(lambda: closed(sock))


def test_a_body_whose_end_two_headers_tell_is_refused_with_all_behind_it() -> None:
    """What a proxy that goes by the length would take for the next request is not answered."""
    twice = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving() as running, ExitStack() as closing:
        sock = silent(running.port, closing, twice + b"2\r\n{}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        told = b""
        while part := sock.recv(1 << 16):
            told += part
        assert told.startswith(b"HTTP/1.1 400") and told.count(b"HTTP/1.1") == 1 and b"invalid_framing" in told


def answer_to(port: int, closing: ExitStack, request: bytes) -> bytes:
    """All that comes until the server closes."""
    sock, told = silent(port, closing, request), b""
    while part := sock.recv(1 << 16):
        told += part
    return told


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"no HTTP at all\r\n\r\n",
    ],
    ids=["unknown", "chunks", "length", "host", "nothing"],
)
def test_what_is_no_http_has_one_answer_and_is_no_fault(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running, ExitStack() as closing:
        told = answer_to(running.port, closing, request_)
        assert re.findall(rb"HTTP/1\.1 \d+", told) == [b"HTTP/1.1 400"] and b"x-request-id: req_" in told
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_framing"
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_target_that_names_the_server_and_an_offer_of_another_protocol() -> None:
    with serving() as running, ExitStack() as closing:
        for target, more in ((b"http://here:1/health", b""), (b"/health", b"Upgrade: websocket\r\n")):
            ends = b"Connection: " + (b"Upgrade, close" if more else b"close")
            head = b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n" + more + ends + b"\r\n\r\n"
            assert answer_to(running.port, closing, head).startswith(b"HTTP/1.1 200 ")
        told = answer_to(running.port, closing, b"GET http://here HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b" 404 " in told and b"unknown route: GET /" in told


STARVED = """
import asyncio, resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tests.support.fake_server import serving
with serving(token_s=0.001) as running:
    print(running.port, running.server.connections.most, flush=True)
    sys.stdin.read()
"""


def test_more_connections_than_descriptors() -> None:
    """The server answers, and its log stays short."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", STARVED]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdin is not None and run.stdout is not None and run.stderr is not None
        port, most = map(int, run.stdout.readline().split())
        assert 0 < most < 256
        with ExitStack() as closing:
            for _ in range(400):
                silent(port, closing)
            url = f"http://127.0.0.1:{port}"
            for _ in range(20):
                assert httpx.get(url + "/health", timeout=20).status_code == 200
                assert httpx.post(url + TEXT, json=text(), timeout=20).status_code == 200
        run.stdin.close()
        assert len(run.stderr.read()) < 2000


def test_the_limit_lies_below_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(soft: int, hard: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))

    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    given(1024, 1024)
    assert limit(None) == 1024 - RESERVED and not raised
    given(1024, 4096)
    assert limit(None) == 4096 - RESERVED and raised == [(4096, 4096)]
    assert limit(100) == 100
    with pytest.raises(ValueError, match="raise ulimit -n"):
        limit(4000)
    given(100, 100)
    with pytest.raises(ValueError, match="too few"):
        limit(None)


def test_a_message_that_comes_again_and_again_is_told_seldom() -> None:
    now = [0.0]
    seldom = LogThrottle(lambda: now[0])
    record = logging.makeLogRecord({"msg": "Invalid HTTP request received."})
    assert [seldom.filter(record) for _ in range(3)] == [True, False, False]
    now[0] = connections.LOG_S + 1
    assert seldom.filter(record)
    assert record.msg == "Invalid HTTP request received. (2 more like it since the last such line)"
