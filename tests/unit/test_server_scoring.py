"""POST /v1/score, and log probabilities of prompts, over a fake engine. A token is a byte."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from headrace.engine.scoring import Joined
from headrace.server.scoring import ScoreBody, Scoring
from headrace.types import Delta, Overloaded
from tests.support.fake_server import CHAT, TEXT, Running, ask, check_refusal, serving, text, until

SCORE, EMBEDDINGS = "/v1/score", "/v1/embeddings"


@pytest.fixture(scope="module")
def fast() -> Iterator[Running]:
    with serving() as running:
        yield running


def test_options_are_compared(fast: Running) -> None:
    body: dict[str, Any] = {"model": "fake", "text": "x" * 100, "options": ["zb", [122], "{"]}
    reply = fast.http.post(SCORE, json=body).json()
    assert reply["object"] == "score" and [each["index"] for each in reply["data"]] == [0, 1, 2]
    first = reply["data"][0]
    assert (first["tokens"], first["token_ids"], first["start"]) == (["z", "b"], [122, 98], 100)
    assert first["logprob"] == sum(first["token_logprobs"]) and first["mean_logprob"] == first["logprob"] / 2
    assert reply["best"] == 1 and fast.http.post(SCORE, json={**body, "normalize": "tokens"}).json()["best"] == 0
    assert reply["usage"]["prompt_tokens"] == 102 and reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    named = {key: value for key, value in body.items() if key != "text"} | {"prompt": body["text"]}
    assert fast.http.post(SCORE, json=named).json()["data"] == reply["data"]


def test_salts_reach_the_engine(fast: Running) -> None:
    fast.engine.salts.clear()
    fast.http.post(SCORE, json={"text": "x", "options": ["ab"], "cache_salt": "s", "public_prefix_tokens": 1})
    assert fast.engine.salts == [("s", 1)] * 2


def test_many_options_do_not_fill_the_queue() -> None:
    with serving(max_queued_requests=4, token_s=0.001) as running:
        reply = running.http.post(SCORE, json={"text": "x", "options": ["ab"] * 50})
        assert reply.status_code == 200 and len(reply.json()["data"]) == 50
        assert running.metric("request_prompt_tokens_sum") == 1 + 50 * 2, "the text counts once"


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Running, set[int]], list[int]]:
    """Has the engine's queue full at calls of these numbers. The calls so far."""

    def arrange(running: Running, numbers: set[int]) -> list[int]:
        calls: list[int] = []
        generate = running.engine.generate

        async def refusing(*args: Any, **kwargs: Any) -> AsyncIterator[Delta]:
            calls.append(len(calls))
            if calls[-1] in numbers:
                raise Overloaded("the queue is full", 0.001)
            async with aclosing(generate(*args, **kwargs)) as deltas:
                async for delta in deltas:
                    yield delta

        monkeypatch.setattr(running.engine, "generate", refusing)
        return calls

    return arrange


MANY: dict[str, dict[str, Any]] = {SCORE: {"text": "x", "options": ["ab"] * 50}, EMBEDDINGS: {"input": ["ab"] * 51}}


@pytest.mark.parametrize("route", MANY)
def test_a_queue_that_fills_meanwhile_delays(route: str, full_at: Callable[[Running, set[int]], list[int]]) -> None:
    with serving(max_queued_requests=4, token_s=0.001) as running:
        calls = full_at(running, {7, 8, 20})
        reply = running.http.post(route, json=MANY[route])
        assert reply.status_code == 200 and reply.json()["data"][-1]["index"] >= 49
        assert len(calls) == 51 + 3


@pytest.mark.parametrize("route", MANY)
@pytest.mark.parametrize("number", [0, 1])
def test_a_full_queue_is_told_at_once(
    route: str, number: int, full_at: Callable[[Running, set[int]], list[int]]
) -> None:
    with serving(max_queued_requests=4, token_s=0.02) as running:
        calls = full_at(running, {number})
        refused = running.http.post(route, json=MANY[route])
        check_refusal(refused, 429, None)
        assert refused.headers["retry-after"] == "1" and len(calls) < 4
        until(lambda: running.engine.stats.kv.chunks_used == 0)
        assert running.metric("http_errors_total", status="429") == 1 and not len(running.app.state.headrace.reading)


@pytest.mark.parametrize("route", MANY)
def test_an_engine_that_dies_meanwhile(route: str, full_at: Callable[[Running, set[int]], list[int]]) -> None:
    with serving(max_queued_requests=4, token_s=0.01) as running:
        calls = full_at(running, set())
        killer = threading.Thread(target=lambda: until(lambda: len(calls) > 10) or running.engine.die("it is broken"))
        killer.start()
        reply = running.http.post(route, json=MANY[route])
        killer.join()
        check_refusal(reply, 503, None)
        assert reply.json()["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("route", MANY)
def test_account_is_given(route: str, caplog: pytest.LogCaptureFixture) -> None:
    """One request in the metrics and the log, whose text counts once; nothing is generated."""
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(max_queued_requests=4, log_requests="params") as running:
        assert running.http.post(route, json=MANY[route]).status_code == 200
        tokens = {SCORE: 1 + 50 * 2, EMBEDDINGS: 51 * 2}[route]
        assert running.metric("request_prompt_tokens_sum") == tokens
        assert running.metric("e2e_request_latency_seconds_count") == 1
        assert running.metric("request_generation_tokens_sum") == 0, "the token that the text's request draws counts"
        until(lambda: " output " in caplog.text)
    assert f"prompt {tokens:>7,}  x 51 answers" in caplog.text and caplog.text.count(" output ") == 1


def test_prompts_are_not_put_together_before_their_turn(fast: Running) -> None:
    """The text is not held once for each option, nor are its rows."""
    state = fast.app.state.headrace
    body = ScoreBody(text=[7] * 3000, options=[[8, 9]] * 1000)
    job = asyncio.run(Scoring().job(state, body, 0.0))
    assert (
        sum(isinstance(prompt.ids, Joined) and prompt.ids.text is job.prompts[0].ids for prompt in job.prompts) == 1000
    )


@pytest.mark.parametrize("route", MANY)
def test_a_client_that_leaves_aborts_all(route: str) -> None:
    with serving(token_s=0.5) as running:
        with pytest.raises(Exception, match="timed out"):
            running.http.post(route, json=MANY[route], timeout=0.3)
        until(lambda: bool(running.engine.aborted))  # the server may be late to begin with it
        until(lambda: running.engine.stats.kv.chunks_used == 0 and running.engine.stats.scheduler.waiting == 0)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": "a", "text_2": ["b"]}, "text_1"),
        ({"queries": "a", "documents": ["b"]}, "queries"),
        ({"options": ["a"]}, "text"),
        ({"text": "a", "prompt": "a", "options": ["a"]}, "text"),
        ({"text": "", "options": ["a"]}, "text"),
        ({"prompt": [1, "a"], "options": ["a"]}, "prompt"),
        ({"prompt": [400], "options": ["a"]}, "prompt"),
        ({"text": "a"}, "options"),
        ({"text": "a", "options": "b"}, "options"),
        ({"text": "a", "options": []}, "options"),
        ({"text": "a", "options": ["b"] * 1025}, "options"),
        ({"text": "a", "options": ["b", ""]}, "options"),
        ({"text": "a", "options": [[1, True]]}, "options"),
        ({"text": "a", "options": [[1, 400]]}, "options"),
        ({"text": "a" * 3999, "options": ["bc"]}, "options"),
        ({"text": "a", "options": ["b"], "normalize": "bytes"}, "normalize"),
        ({"text": "a", "options": ["b"], "stream": True}, "stream"),
        ({"text": "a", "options": ["b"], "cache_salt": ""}, "cache_salt"),
        ({"text": "a", "options": ["b"], "max_tokens": 3}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(fast: Running, body: dict[str, Any], param: str) -> None:
    check_refusal(fast.http.post(SCORE, json=body), 400, param)
    assert fast.engine.stats.kv.chunks_used == 0


# ---- what lm-eval's local-completions sends, and reads ---------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1])
def test_likelihoods_by_echo(fast: Running, most: int) -> None:
    body = text([[97, 98, 99], [120, 121]], max_tokens=most, logprobs=1, echo=True, seed=1234, temperature=0)
    reply = fast.http.post(TEXT, json=body).json()
    for choice, count in zip(reply["choices"], (3, 2), strict=True):
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(len(column) == count + most for column in logprobs.values())
        assert logprobs["token_logprobs"][1:count] == [-1.0] * (count - 1)
        assert max(logprobs["top_logprobs"][1].values()) == -0.5 and choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 2 * most


def test_an_echo_without_an_answer_is_streamed(fast: Running) -> None:
    parts = list(fast.client().completions.create(
        model="fake", prompt="abc", max_tokens=0, logprobs=0, echo=True, stream=True))  # fmt: skip
    assert [part.choices[0].text for part in parts] == ["abc"] and parts[0].choices[0].finish_reason == "length"


def test_tokens_of_one_text_are_told_apart(fast: Running) -> None:
    """Bytes that are parts of characters have the same text."""
    body = text("ab", max_tokens=1, logprobs=0, logprob_token_ids=[200, 201, 97])
    (top,) = fast.http.post(TEXT, json=body).json()["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"a": -0.97, "\ufffd": -2.0, "token_id:201": pytest.approx(-2.01)}


def test_named_tokens_in_chat(fast: Running) -> None:
    body = ask("xy", logprobs=True, logprob_token_ids=[65, 66], max_tokens=1)
    (entry,) = fast.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "x" and [each["token"] for each in entry["top_logprobs"]] == ["A", "B"]


def test_prompt_logprobs_from_a_position_on(fast: Running) -> None:
    body = text("abcd", prompt_logprobs=0, prompt_logprobs_start=3, max_tokens=0)
    rows = fast.http.post(TEXT, json=body).json()["choices"][0]["prompt_logprobs"]
    assert rows[:3] == [None] * 3 and list(rows[3]) == ["100"]


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (TEXT, text(max_tokens=0, echo=True), "max_tokens"),
        (TEXT, text(max_tokens=0, prompt_logprobs=0, n=2), "n"),
        (TEXT, text(prompt_logprobs_start=1), "prompt_logprobs_start"),
        (TEXT, text(logprob_token_ids=[1]), "logprob_token_ids"),
        (CHAT, ask(logprob_token_ids=[1]), "logprob_token_ids"),
        (TEXT, text(logprob_token_ids=[999], logprobs=0), "logprob_token_ids"),
    ],
)
def test_refusals_of_log_probabilities(fast: Running, route: str, body: dict[str, Any], param: str) -> None:
    check_refusal(fast.http.post(route, json=body), 400, param)
