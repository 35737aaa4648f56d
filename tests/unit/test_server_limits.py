"""Limits of tenants over HTTP: of requests, tokens, sizes and the queue, and how replies tell of them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request

from headrace.server.answering import admitted
from headrace.server.guard import TENANT
from headrace.server.reading import AT_ONCE, ReadingPlaces
from headrace.server.tenants import Rules, Tenant, salt_of, spoken
from tests.support.fake_engine import FakeTokenizer
from tests.support.fake_server import CHAT, TEXT, ask, check_refusal, open_request, serving, text, until
from tests.support.tenant_keys import ACME, FREE, Write, check_limited, key_file, limited, post

pytestmark = pytest.mark.unit


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return key_file(tmp_path)


def limits_of(reply: httpx.Response) -> dict[str, str]:
    found = reply.headers.items()
    return {name.removeprefix("x-ratelimit-"): value for name, value in found if name.startswith("x-ratelimit-")}


def seconds_of(told: str) -> float:
    minutes, _, rest = told.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))


def test_requests_per_minute(write: Write) -> None:
    with serving(api_keys_file=write(limited("requests_per_minute = 2"))) as running:
        assert [post(running, text()).status_code for _ in range(2)] == [200, 200]
        check_limited(post(running, text()), "requests_per_minute", "30")
        with pytest.raises(openai.RateLimitError):
            running.client(ACME).completions.create(model="fake", prompt="hi")
        assert running.client(ACME).models.list().data, "only what is posted counts"
        assert post(running, text(), FREE).status_code == 200


def test_requests_at_once(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_concurrent_requests = 1")), token_s=0.01) as running:
        with running.client(ACME).completions.create(model="fake", prompt="hi", stream=True, max_tokens=3000):
            check_limited(post(running, text()), "max_concurrent_requests", "1")
            assert post(running, text(), FREE).status_code == 200
        until(lambda: post(running, text()).status_code == 200)


def test_tokens_per_minute(write: Write) -> None:
    """The fake finds half of the chunks of a prompt in its cache: 200 of these tokens count, and 8 of the answer."""
    with serving(api_keys_file=write(limited("tokens_per_minute = 600"))) as running:
        tenant = running.app.state.headrace.keys.tenants["acme"]
        assert post(running, text("x" * 384)).status_code == 200
        assert tenant._tokens.level == pytest.approx(600 - 192 - 8, abs=5)
        check_refusal(post(running, text("x" * 384, max_tokens=10_000_000)), 400, "max_tokens")
        running.engine.stats.scheduler.waiting = 1000
        assert post(running, text("x" * 384)).json()["error"]["code"] == "overloaded"
        running.engine.stats.scheduler.waiting = 0
        assert tenant._tokens.level == pytest.approx(600 - 192 - 8, abs=5), "what the engine never had costs nothing"
        check_limited(post(running, text("x" * 599, stream=True)), "tokens_per_minute", "20")
        assert post(running, text("x" * 700), FREE).status_code == 200


@pytest.mark.parametrize("sizes", [[384], [384, 128]])
def test_cached_tokens_of_an_answer_that_is_given_up_are_given_back(write: Write, sizes: list[int]) -> None:
    with serving(api_keys_file=write(limited("tokens_per_minute = 600")), token_s=0.01) as running:
        tenant, whole = running.app.state.headrace.keys.tenants["acme"], sum(sizes)
        asked: Any = {"model": "fake", "prompt": ["x" * size for size in sizes], "max_tokens": 3000, "stream": True}
        with running.client(ACME).completions.create(**asked) as stream:
            assert {chunk.choices[0].index for chunk, _ in zip(stream, range(6), strict=False)} >= {0}
        until(lambda: not tenant.under_way)
        counts = {kind: tenant.counts["tokens", kind] for kind in ("prompt", "cached", "output")}
        assert (counts["prompt"], counts["cached"]) == (whole, whole // 2)
        assert tenant._tokens.level == pytest.approx(600 - whole // 2 - counts["output"], abs=8)


def test_replies_tell_where_the_limits_stand(write: Write) -> None:
    """As OpenAI's do: whole, streamed, refused; and nothing where there is no limit."""
    with serving(api_keys_file=write(limited("requests_per_minute = 3\ntokens_per_minute = 6000"))) as running:
        told = []
        for body in (text("x" * 384), text(stream=True), text(n=0), text()):
            reply = post(running, body)
            told.append((reply.status_code, limits_of(reply)))
        assert [status for status, _ in told] == [200, 200, 400, 429]
        assert [each["remaining-requests"] for _, each in told] == ["2", "1", "0", "0"]
        assert {each["limit-requests"] for _, each in told} == {"3"}
        assert {each["limit-tokens"] for _, each in told} == {"6000"}
        assert 5790 <= int(told[0][1]["remaining-tokens"]) <= 5830, "192 of the prompt and 8 of the answer"
        assert [seconds_of(each["reset-requests"]) for _, each in told[:3]] == pytest.approx([20, 40, 60], abs=5)
        assert not limits_of(post(running, text(), FREE))
        get = running.http.get("/v1/models", headers={"Authorization": f"Bearer {ACME}"})
        assert not limits_of(get) and not limits_of(running.http.post(TEXT, json=text())), "nor without a key"


@pytest.mark.parametrize(
    ("seconds", "told"), [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (7.46, "7.5s"), (60, "1m0s"), (359.99, "6m0s")]
)
def test_times_are_told_as_openai_tells_them(seconds: float, told: str) -> None:
    assert spoken(seconds) == told


def test_sizes_of_a_request(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_prompt_tokens = 100\nmax_output_tokens = 40"))) as running:
        too_long = post(running, text("x" * 101))
        check_refusal(too_long, 400, "prompt")
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        check_refusal(post(running, ask("x" * 101), path=CHAT), 400, "messages")
        check_refusal(post(running, text(["x" * 60] * 2)), 400, "prompt")
        check_refusal(post(running, text(max_tokens=41)), 400, "max_tokens")
        check_refusal(post(running, text(max_tokens=21, n=2)), 400, "max_tokens")
        body = ask(max_tokens=None, max_completion_tokens=41)
        check_refusal(post(running, body, path=CHAT), 400, "max_completion_tokens")
        assert post(running, text("x" * 100, max_tokens=20, n=2)).status_code == 200
        assert post(running, text("x" * 101, max_tokens=41), FREE).status_code == 200
        usual = {name: value for name, value in text(["x", "y"], n=2).items() if name != "max_tokens"}
        cut = post(running, usual).json()
        assert [each["finish_reason"] for each in cut["choices"]] == ["length"] * 4
        assert cut["usage"]["completion_tokens"] == 40
        check_refusal(post(running, usual | {"min_tokens": 11}), 400, "min_tokens")
        check_refusal(post(running, usual | {"n": 21}), 400, "n")
        whole = post(running, ask(max_tokens=None, n=2), path=CHAT).json()
        assert whole["usage"]["completion_tokens"] == 40, "left open: as much as is allowed"
        check_refusal(post(running, ask(max_tokens=None, min_tokens=30, n=2), path=CHAT), 400, "min_tokens")


def test_a_tenant_leaves_half_of_the_queue_to_the_others(write: Write) -> None:
    """acme weighs twice as much as free: of 4 requests under way it may have 2."""
    file = write(limited("weight = 2"))
    with serving(api_keys_file=file, max_queued_requests=4, running_limit=1, token_s=0.01) as running:
        waiting = running.engine.stats.scheduler
        keys = running.app.state.headrace.keys
        with httpx.Client(base_url=running.url) as http:
            socks = [open_request(running.port, text(max_tokens=3000), key=ACME) for _ in range(3)]
            until(lambda: waiting.waiting == 2 and keys.tenants["acme"].under_way == 3)
            assert not keys.beyond_share(keys.tenants["acme"]), "alone it may have all"
            socks.append(open_request(running.port, text(max_tokens=3000), key=FREE))
            until(lambda: waiting.waiting == 3)
            refused = http.post(TEXT, json=text(), headers={"x-api-key": ACME})
            check_refusal(refused, 429, None)
            assert "weight" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "7"
            socks.append(open_request(running.port, text(max_tokens=3000), key=FREE))
            until(lambda: waiting.waiting == 4)
        for sock in socks:
            sock.close()
        until(lambda: waiting.running == waiting.waiting == 0)
        assert all(tenant.under_way == 0 for tenant in keys.tenants.values())


def test_limits_name_the_field_of_each_route(write: Write) -> None:
    with serving(api_keys_file=write(limited("max_output_tokens = 4"))) as running:
        too_many = post(running, {"model": "fake", "input": "hi", "max_output_tokens": 5}, path="/v1/responses")
        check_refusal(too_many, 400, "max_output_tokens")
        message = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
        told = post(running, message, path="/v1/messages")
        assert told.status_code == 400 and told.json()["error"]["type"] == "invalid_request_error"
        assert "this key allows 4" in told.json()["error"]["message"]
        assert post(running, {**message, "max_tokens": 4}, path="/v1/messages").status_code == 200
        assert {salt for salt, _ in running.engine.salts} == {salt_of("acme", None)}


def test_scores_and_embeddings_are_no_output(write: Write) -> None:
    """What is not answered does not share the tokens that answers may have; the text of a score counts once."""
    with serving(api_keys_file=write(limited("max_output_tokens = 1\nmax_prompt_tokens = 40"))) as running:
        options = ["ab"] * 10
        assert post(running, {"text": "x" * 20, "options": options}, path="/v1/score").status_code == 200
        assert post(running, {"input": ["a"] * 40}, path="/v1/embeddings").status_code == 200
        check_refusal(post(running, {"text": "x" * 21, "options": options}, path="/v1/score"), 400, "options")
        check_refusal(post(running, {"input": ["a"] * 41}, path="/v1/embeddings"), 400, "input")
        check_refusal(post(running, text("a", max_tokens=2)), 400, "max_tokens")


def test_texts_of_one_tenant_hold_up_no_other(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one thread that tokenizes. acme has 20 texts for it, which take long and may be refused in the end: free
    waits for no more than those that were there already."""
    go = threading.Semaphore(0)

    def encode(self: FakeTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not text.startswith("slow") or go.acquire(timeout=20)
        return list(text.encode())

    monkeypatch.setattr(FakeTokenizer, "encode", encode)
    with serving(api_keys_file=write(limited("weight = 9"))) as running, ExitStack() as closing:
        places = running.app.state.headrace.reading
        for _ in range(20):
            closing.enter_context(open_request(running.port, text("slow"), key=ACME))
        until(lambda: len(places) == 20)
        closing.enter_context(free := open_request(running.port, text(), key=FREE))
        until(lambda: len(places) == 21)
        go.release(2 * AT_ONCE)
        assert free.recv(1 << 16).startswith(b"HTTP/1.1 200")
        go.release(20)
        until(lambda: not len(places))


def slow_body(port: int, key: str) -> socket.socket:
    """A request whose body does not come."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\nX-Api-Key: {key}\r\n\r\n{{"
    sock.sendall(head.encode())
    return sock


async def test_a_request_that_ends_at_any_moment_keeps_no_turn() -> None:
    """Cancelled while it waits for its turn, in the very moment in which it gets it, and behind that."""
    tenant, places = Tenant("acme", Rules()), ReadingPlaces(100)
    state: Any = SimpleNamespace(reading=places, retry_after_of=lambda tenant: 1.0)
    bodies: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return bodies.pop() if bodies else await asyncio.Event().wait() or {}

    async def hold() -> None:
        async with admitted(state, Request({"type": "http", "headers": [], TENANT: tenant}, receive)):
            await asyncio.Event().wait()

    with places.place(tenant, lambda tenant: 1.0):
        turn = places.turn(tenant)
        for _ in range(AT_ONCE):
            await turn.acquire()
        for moments in range(12):
            bodies.append({"type": "http.request", "body": b"{}"})
            task = asyncio.create_task(hold())
            await asyncio.sleep(0.01)
            turn.release()
            for _ in range(moments):
                await asyncio.sleep(0)
            while not task.done():  # a cancellation that meets another one is lost (server.job.cancel)
                task.cancel()
                await asyncio.sleep(0)
            await asyncio.wait_for(turn.acquire(), 1)


def test_a_full_queue_says_when_what_waits_of_the_tenant_is_done(write: Write) -> None:
    """Also while bodies are being read."""
    with serving(api_keys_file=write(limited("weight = 1")), max_queued_requests=1) as running:
        places = running.app.state.headrace.reading
        with slow_body(running.port, ACME):
            until(lambda: len(places) == 1)
            refused = post(running, text())
        check_refusal(refused, 429, None)
        assert refused.headers["retry-after"] == "7"


def test_bodies_that_one_tenant_sends_slowly_shut_no_other_out(write: Write) -> None:
    """acme alone may take all 6 places; free, with a ninth of the weight, still gets one, and no more."""
    with serving(api_keys_file=write(limited("weight = 9")), max_queued_requests=6) as running:
        places = running.app.state.headrace.reading
        socks = [slow_body(running.port, ACME) for _ in range(6)]
        until(lambda: len(places) == 6)
        check_refusal(post(running, text()), 429, None)
        assert [post(running, text(), FREE).status_code for _ in range(8)] == [200] * 8, "one at a time"
        socks.append(slow_body(running.port, FREE))
        until(lambda: len(places) == 7)
        check_refusal(post(running, text(), FREE), 429, None)
        for sock in socks:
            sock.close()
        until(lambda: not len(places))
        assert post(running, text()).status_code == 200
