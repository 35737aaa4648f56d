"""Long prefills: streams that begin at once and stay open, progress on request, and clients that leave meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from headrace.config import EngineConfig
from headrace.progress import Prefill
from headrace.server import abandoned, stream
from headrace.server.job import Job, Prompt
from headrace.server.prompt_progress import PromptProgress
from headrace.server.stream import KEEP_ALIVE, EventStream
from headrace.types import SamplingParams
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import CHAT, TEXT, Running, ask, check_refusal, open_request, serving, text, until

pytestmark = pytest.mark.unit

LONG = "x" * 640
"""Ten chunks."""


@contextmanager
def streaming(running: Running, body: dict[str, Any], path: str = TEXT) -> Iterator[httpx.Response]:
    with running.http.stream("POST", path, json={**body, "stream": True}) as reply:
        yield reply


def data(told: str) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = (line.removeprefix("data: ") for line in told.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_headers_come_before_the_prompt_is_read() -> None:
    with serving(running_limit=0) as running, streaming(running, text()) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        assert running.engine.stats.scheduler.waiting == 1


@pytest.mark.parametrize("prompt", [LONG, [LONG, "y" * 640]])
def test_what_the_engine_refuses_at_once_has_a_status(prompt: Any) -> None:
    with serving(running_limit=0, max_queued_requests=2) as running:
        with streaming(running, text()), streaming(running, text()):
            check_refusal(running.http.post(TEXT, json=text(prompt, stream=True)), 429, None)
        check_refusal(running.http.post(TEXT, json=text(prompt, stream=True, max_tokens=0)), 400, "max_tokens")


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_what_fails_later_is_an_event(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(chunk_s=0.001) as running:
        running.engine.fail_after_tokens = 0
        body = ask(LONG) if path == CHAT else text(LONG)
        with streaming(running, body, path) as reply:
            told = reply.read().decode()
        assert reply.status_code == 200 and told.startswith('event: error\ndata: {"error":{"message":"the engine has')
        until(lambda: "failed (EngineDead)" in caplog.text)


def test_a_silent_stream_says_so_by_the_clock() -> None:
    with serving(chunk_s=0.02, sse_keepalive_s=0.03) as running:
        with streaming(running, text(LONG)) as reply:
            told = reply.read().decode()
        before, _, answer = told.partition("data: ")
        assert before == KEEP_ALIVE.decode() * (len(before) // len(KEEP_ALIVE)) and before
        assert answer.count("data: ") == 8 and answer.endswith("data: [DONE]\n\n")
        chunks = list(running.client().completions.create(model="fake", prompt="y" * 640, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == "y" * 16


def test_without_a_clock_it_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(chunk_s=0.005, sse_keepalive_s=0) as running, streaming(running, text(LONG)) as reply:
        assert ": keep" not in reply.read().decode()


def test_comments_come_between_tokens_too() -> None:
    with serving(token_s=0.06, sse_keepalive_s=0.02) as running, streaming(running, text(max_tokens=3)) as reply:
        first, *_, last = reply.read().decode().split("data: ")
        assert ": keep-alive" in first and ": keep-alive" not in last


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_progress_is_told_in_chunks_without_choices(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "NOTE_S", 0.01)
    body = {**(ask(LONG) if path == CHAT else text(LONG)), "return_progress": True}
    with serving(chunk_s=0.02) as running:
        running.engine.prefill_rate = 640.0
        running.http.post(path, json={**body, "return_progress": False, "max_tokens": 1})
        longer = {**body, **(ask(LONG * 2) if path == CHAT else text(LONG * 2))}
        with streaming(running, {**longer, "stream_options": {"include_usage": True}}, path) as reply:
            chunks = data(reply.read().decode())
        told = [chunk for chunk in chunks if "prompt_progress" in chunk]
        assert chunks[: len(told)] == told, "no more of it once the answer has begun"
        assert all(chunk["choices"] == [] and chunk["usage"] is None for chunk in told)
        assert {(chunk["id"], chunk["object"]) for chunk in chunks} == {(told[0]["id"], chunks[-1]["object"])}
        steps = [chunk["prompt_progress"] for chunk in told]
        assert {(step["total"], step["cache"]) for step in steps[1:]} == {(1280 + (path == CHAT), 640)}
        assert [step["processed"] for step in steps] == sorted({step["processed"] for step in steps})
        left_s = (steps[-2]["total"] - steps[-2]["processed"]) / 640
        assert steps[-2]["left_s"] == pytest.approx(left_s, abs=1e-3)
        assert steps[-1]["time_ms"] > 0
        chunks = list(
            running.client().chat.completions.create(
                **ask("z" * 900, stream=True), extra_body={"return_progress": True}
            )
        )
        assert chunks[0].model_extra and chunks[0].model_extra["prompt_progress"]["processed"] < 901


def test_progress_needs_a_stream() -> None:
    with serving() as running:
        check_refusal(running.http.post(TEXT, json=text(return_progress=True)), 400, "return_progress")
        assert running.http.post(TEXT, json=text(return_progress=False)).status_code == 200


def test_progress_of_several_prompts() -> None:
    engine = FakeEngine(EngineConfig(model="fake"))
    params = SamplingParams(max_tokens=2)
    job = Job("r", [Prompt([65] * 100, params), Prompt([66] * 200, params)], 0.0)
    clock = iter([10.0, 10.0, 11.5])
    progress = PromptProgress(job, engine, lambda: next(clock))
    engine.prefill_rate = 10.0
    waiting = {"total": 300, "cache": 0, "processed": 0, "time_ms": 0, "left_s": None}
    assert progress() == waiting and progress() is None, "nothing new is not told again"
    engine.prefills = [Prefill("other", 0, 0, 40), Prefill("r-0", 80, 64, 100), Prefill("r-1", 0, 0, 200)]
    assert progress() == {"total": 300, "cache": 64, "processed": 80, "time_ms": 0, "left_s": 26.0}
    job.choices[0].last_s = 1.0
    engine.prefills = [Prefill("r-1", 50, 0, 200), Prefill("later", 0, 0, 1000)]
    assert progress() == {"total": 300, "cache": 64, "processed": 150, "time_ms": 1500, "left_s": None}
    job.choices[1].last_s = 1.0
    engine.prefills = []
    assert progress() is None, "all are read"


def test_a_stream_is_ended_whether_it_was_begun_or_not() -> None:
    """The client may leave before anything of the answer is asked for."""
    ended, begun = [], []

    async def events() -> AsyncIterator[bytes]:
        begun.append(1)
        yield b"data: 1\n\n"

    async def end() -> None:
        ended.append(1)

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def broken(message: Any) -> None:
        raise OSError("closed")

    asyncio.run(EventStream(events(), end)({}, gone, send))
    with pytest.raises(OSError, match="closed"):
        asyncio.run(EventStream(events(), end)({}, gone, broken))
    assert ended == [1, 1] and begun == [1]


# ---- clients that leave ----------------------------------------------------------------------------------------------


def leave_while_reading(running: Running, body: dict[str, Any], chunks: int = 2) -> None:
    """A request whose client leaves once so many of its chunks are read."""
    count = len(running.engine.read)
    sock = open_request(running.port, body)
    until(lambda: len(running.engine.read) >= count + chunks)
    sock.close()


def cached(running: Running, body: dict[str, Any]) -> int:
    reply = running.http.post(TEXT, json={**body, "stream": False})
    assert reply.status_code == 200
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("streams", [False, True])
def test_a_prefill_is_finished_without_its_client(streams: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    body = text(LONG, stream=streams, max_tokens=3000)
    with serving(on_disconnect="finish", chunk_s=0.01) as running:
        leave_while_reading(running, body)
        until(lambda: running.metric("prefills_after_disconnect_total", outcome="finished") == 1)
        assert len(running.engine.read) == 10 and running.engine.stats.tokens.generated == 1
        assert len(running.engine.aborted) == 1 and running.metric("clients_gone_total") == 1
        assert "prefill finished" in caplog.text
        until(lambda: running.engine.stats.scheduler.running == running.engine.stats.kv.chunks_used == 0)
        assert cached(running, text(LONG)) == 576, "all but the chunk of the last token"


@pytest.mark.parametrize("streams", [False, True])
def test_a_stopped_prefill_keeps_what_it_has(streams: bool) -> None:
    body = text(LONG, stream=streams)
    with serving(chunk_s=0.02) as running:
        leave_while_reading(running, body)
        until(lambda: running.metric("clients_gone_total") == 1)
        assert running.engine.stats.tokens.generated == 0 and 2 <= len(running.engine.read) < 10
        assert running.metric("prefills_after_disconnect_total", outcome="finished") == 0
        assert 128 <= cached(running, text(LONG)) < 576


def test_several_prompts_are_read_and_none_is_answered() -> None:
    with serving(on_disconnect="finish", chunk_s=0.01) as running:
        leave_while_reading(running, text([LONG, "y" * 1280], max_tokens=2000))
        until(lambda: running.metric("prefills_after_disconnect_total", outcome="finished") == 1)
        assert len(running.engine.aborted) == 2
        assert [cached(running, text(prompt)) for prompt in (LONG, "y" * 1280)] == [576, 1216]


def test_it_gives_way_to_whoever_waits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(on_disconnect="finish", chunk_s=0.05, running_limit=1) as running:
        leave_while_reading(running, text(LONG))
        assert running.http.post(TEXT, json=text("hi")).status_code == 200
        assert len(running.engine.read) < 10 and "prefill dropped" in caplog.text
        assert running.metric("prefills_after_disconnect_total", outcome="dropped") == 1
        assert cached(running, text(LONG)) >= 128, "what it had is there"


def test_only_so_many_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abandoned, "MOST", 1)
    with serving(on_disconnect="finish", chunk_s=0.03) as running:
        leave_while_reading(running, text(LONG))
        leave_while_reading(running, text("y" * 640))
        until(lambda: len(running.engine.aborted) == 1)
        until(lambda: running.metric("prefills_after_disconnect_total", outcome="finished") == 1)
        assert running.metric("clients_gone_total") == 2


@pytest.mark.parametrize("how", ["decoding", "queued", "private", "uncached"])
def test_others_are_stopped_as_always(how: str) -> None:
    """An answer under way, a prompt that waits, and one whose chunks nobody could share."""
    options: dict[str, Any] = {"enable_prefix_caching": False} if how == "uncached" else {}
    limit = 0 if how == "queued" else 8
    chunk_s = 0.0 if how == "decoding" else 0.01
    more = {"prompt_logprobs": 1} if how == "private" else {}
    with serving(on_disconnect="finish", chunk_s=chunk_s, running_limit=limit, token_s=0.01, **options) as running:
        stats = running.engine.stats
        sock = open_request(running.port, text(LONG, max_tokens=3000, **more))
        until(
            lambda: bool(stats.scheduler.waiting if how == "queued" else running.engine.read or stats.tokens.generated)
        )
        sock.close()
        until(lambda: running.metric("clients_gone_total") == 1)
        assert stats.scheduler.running == stats.scheduler.waiting == 0 and len(running.engine.read) < 10
        assert running.metric("prefills_after_disconnect_total", outcome="finished") == 0


def test_a_server_that_ends_drops_them() -> None:
    with serving(on_disconnect="finish", chunk_s=0.05) as running:
        leave_while_reading(running, text(LONG))
        until(lambda: len(running.app.state.headrace.abandoned) == 1)
    assert running.app.state.headrace.abandoned.counts["dropped"] == 1 and len(running.engine.aborted) == 1


def test_an_engine_that_dies_meanwhile() -> None:
    with serving(on_disconnect="finish", chunk_s=0.02) as running:
        running.engine.fail_after_tokens = 0
        leave_while_reading(running, text(LONG))
        until(lambda: running.app.state.headrace.abandoned.counts["dropped"] == 1)
        assert not len(running.app.state.headrace.abandoned)


def test_a_job_that_nobody_admitted_does_not_run() -> None:
    """It would meet any tenant's chunks."""
    engine = FakeEngine(EngineConfig(model="fake"))

    async def first() -> Any:
        return await anext(Job("r", [Prompt([65], SamplingParams())], 0.0).events(engine, lambda _: None))

    with pytest.raises(RuntimeError, match="admit"):
        asyncio.run(first())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_all_streams_begin_at_once_and_stay_open(path: str) -> None:
    body: dict[str, Any] = {"model": "fake", "stream": True}
    if path == "/v1/messages":
        body |= {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4}
    else:
        body |= {"input": LONG, "max_output_tokens": 4}
    with serving(chunk_s=0.01, sse_keepalive_s=0.02) as running:
        told = running.http.post(path, json=body).text
        running.engine.fail_after_tokens = 0
        failed = running.http.post(path, json=body)
    before = told.partition("delta")[0]
    assert before.startswith("event: ") and KEEP_ALIVE.decode() in before and "injected" not in told
    assert failed.status_code == 200 and "injected failure" in failed.text
