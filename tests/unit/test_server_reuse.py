"""Why a prompt came from the cache, or did not: told in the reply and the log line, to its caller alone."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.logs import short_id
from headrace.server import reuse
from headrace.server.reuse import Nearest, RecentRequests, Reuse, Seen, common_tokens, message_at
from headrace.types import CHUNK
from tests.support.fake_engine import FakeEngine
from tests.support.fake_server import TEXT, Running, serving, text, until

pytestmark = pytest.mark.unit

CHAT = "/v1/chat/completions"
LONG = "x" * 130


def ids(*tokens: int) -> reuse.Ids:
    return np.array(tokens, np.int32)


def caching(number: int, engine: FakeEngine) -> None:
    """What was read is found again, by whole chunks."""
    engine.chunk_s = 1e-6


def told(running: Running, prompt: str, **fields: Any) -> dict[str, Any]:
    """What a completion says of its reuse."""
    return dict(running.http.post(TEXT, json=text(prompt, **fields)).json()["headrace"]["reuse"])


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_tokens(one: list[int], other: list[int]) -> None:
    plain = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_tokens(ids(*one), ids(*other)) == plain


def test_message() -> None:
    messages = [{"content": "abc"}, {"content": "def"}, {"content": "ghi"}]
    assert message_at(messages, "<abc><de") == 1
    assert message_at(messages, "<ab") == 0
    assert message_at(messages, "<abc><def><ghi>") is None
    assert message_at([{"content": ["parts"]}], "") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_request_and_one_that_goes_on(stream: bool) -> None:
    with serving() as running:
        first = told(running, LONG)
        assert first["cause"] == "first" and first["request_id"] is None and first["common_tokens"] == 0
        reply = running.http.post(TEXT, json=text(LONG + "y" * 70, stream=stream)).text
        lines = [json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if "headrace" in line]
        second = lines[-1]["headrace"]["reuse"]
        # The fake engine repeats the prompt: its answer is alike, too, up to where the other prompt goes on.
        assert second["common_tokens"] >= len(LONG) and second["request_id"].startswith("cmpl-")


def test_text_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=caching) as running:
        told(running, LONG + "abc")
        found = told(running, LONG + "xyz")
        assert (found["cause"], found["common_tokens"]) == ("text", 130)
        assert (found["text"], found["other_text"], found["message"]) == ("x", "a", None)
        other = short_id(found["request_id"])
        until(lambda: f"differs from {other} at token 130: 'x' here, 'a' there" in caplog.text)


def test_the_message_in_which_a_conversation_differs() -> None:
    with serving(prepare=caching) as running:
        for last in ("red", "blue"):
            messages = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": f"Is it {last}?"}]
            body = {"model": "fake", "max_tokens": 4, "messages": messages}
            found = running.http.post(CHAT, json=body).json()["headrace"]["reuse"]
        assert (found["cause"], found["message"], found["text"], found["other_text"]) == ("text", 1, "b", "r")


def test_what_is_no_longer_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=caching) as running:
        told(running, LONG)
        running.engine.read.clear()
        found = told(running, LONG + "more")
        assert found["cause"] == "evicted" and found["text"] is None
        until(lambda: "what lies behind 0 is no longer kept" in caplog.text)


def test_a_prompt_whose_likelihoods_are_asked_for_is_computed_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Its chunks are kept, and none of them tells them."""
    caplog.set_level(logging.INFO, "headrace.server")
    with serving(prepare=caching) as running:
        told(running, LONG)
        running.engine.read.clear()
        assert told(running, LONG + "more", prompt_logprobs=1)["cause"] == "scored"
        until(lambda: "what lies behind 0 is computed anew for prompt_logprobs" in caplog.text)


def test_nobody_learns_of_anothers_prompts() -> None:
    with serving() as running:
        told(running, LONG, cache_salt="one")
        assert told(running, LONG, cache_salt="two")["cause"] == "first"
        assert told(running, LONG, cache_salt="one")["cause"] != "first"


def test_several_prompts_tell_nothing() -> None:
    with serving() as running:
        answer = running.http.post(TEXT, json=text([LONG, LONG])).json()
        assert answer["headrace"]["reuse"] is None


def nearest(common: int, missing: reuse.Cause = "evicted", length: int = 1000) -> Nearest:
    return Nearest(Seen("r", None, np.zeros(length, np.int32)), common, missing)


@pytest.mark.parametrize(
    ("tokens", "cached", "near", "cause"),
    [
        (200, 0, None, "first"),
        (200, 0, nearest(63), "first"),
        (200, 128, nearest(150), "text"),
        (200, 64, nearest(150), "evicted"),
        (200, 64, nearest(150, "computing"), "computing"),
        (200, 0, nearest(150, "salt"), "salt"),
        (200, 0, nearest(150, "scored"), "scored"),
        (200, 192, nearest(200), "continued"),
        (192, 128, nearest(192), "continued"),  # the last token is always computed
        (400, 192, nearest(256, length=256), "continued"),  # and an answer's last one never was
    ],
)
def test_causes(tokens: int, cached: int, near: Nearest | None, cause: str) -> None:
    found = Reuse(tokens, cached, near)
    assert found.cause == cause and found.told
    assert found.asdict()["cause"] == cause


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "MOST_TOKENS", 1000)
    monkeypatch.setattr(reuse, "MOST_CALLERS", 3)
    recent = RecentRequests()
    for number in range(50):
        seen = recent.add(number % 7, str(number), None, np.full(40, number, np.int32))
        recent.answered(number % 7, seen, [1, 2])
        assert recent.tokens <= 1000 + 2
    held = sum(len(seen.ids) for own in recent._callers.values() for seen in own)
    assert recent.tokens == held and len(recent._callers) <= 3
    recent.answered("gone", seen, [1])
    assert recent.tokens == held


def test_the_latest_of_equals_and_the_own_salt_first() -> None:
    recent, tokens = RecentRequests(), np.zeros(2 * CHUNK, np.int32)
    recent.add("a", "one", "s", tokens)
    recent.add("a", "two", "other", tokens)
    found = recent.nearest("a", tokens, "s")
    assert found is not None and found.seen.request_id == "one" and found.missing == "computing"
    found = recent.nearest("a", tokens, "none")
    assert found is not None and found.seen.request_id == "two" and found.missing == "salt"
    assert recent.nearest("b", tokens, None) is None


@pytest.mark.parametrize(("cached", "words"), [(0, "begins alike"), (40, "begins alike for 64 tokens")])
def test_less_than_a_chunk_may_be_found_all_the_same(cached: int, words: str) -> None:
    found = Reuse(100, cached, Nearest(Seen("a", None, ids(*range(50))), 40, "evicted"))
    assert (found.cause, found.told) == ("first", f"no recent request of this caller {words}")
