"""POST /v1/score, and log probabilities of prompts, over a fake engine. A token is a byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_server import CHAT, TEXT, Running, ask, check_refusal, serving, text, until

SCORE = "/v1/score"


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
    assert reply["usage"]["prompt_tokens"] == 104 and reply["usage"]["completion_tokens"] == 0
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


def test_a_client_that_leaves_aborts_all(fast: Running) -> None:
    with serving(token_s=0.5) as running:
        with pytest.raises(Exception, match="timed out"):
            running.http.post(SCORE, json={"text": "x", "options": ["ab"] * 20}, timeout=0.3)
        until(lambda: running.engine.stats.kv.chunks_used == 0 and running.engine.stats.scheduler.waiting == 0)
        assert running.engine.aborted


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
