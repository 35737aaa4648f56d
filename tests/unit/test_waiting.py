"""What waits in the queue is counted once where it is shared: Retry-After goes by it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.engine import answer_streams, waiting
from headrace.engine import messages as m
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.waiting import WaitingPrompts
from headrace.kv.cache import KVCache
from headrace.progress import Prefill
from headrace.stats import EngineStats, SchedulerStats, TokenStats
from headrace.types import CHUNK, Delta, Overloaded, Request, SamplingParams

pytestmark = pytest.mark.unit

PREFIX = list(range(1000))
"""15 chunks and 40 tokens."""


def request(name: int | str, tokens: list[int], **more: Any) -> Request:
    return Request(str(name), tokens, SamplingParams(), **more)


def crowd(count: int, **more: Any) -> list[Request]:
    return [request(i, PREFIX + [i] * 100, **more) for i in range(count)]


def new_tokens(requests: list[Request], chunks: int = 1000) -> int:
    queue = WaitingPrompts(chunks)
    for each in requests:
        queue.add(each)
    assert queue.tokens == sum(len(each.prompt_token_ids) for each in requests)
    return queue.new_tokens


def test_a_shared_prefix_counts_once() -> None:
    shared = 15 * CHUNK
    assert new_tokens(crowd(10)) == 10 * 1100 - 9 * shared
    assert new_tokens(crowd(10), chunks=0) == 10 * 1100, "without prefix caching nothing is shared"
    assert new_tokens([request(i, PREFIX[: 2 * CHUNK]) for i in range(2)]) == 4 * CHUNK - CHUNK, "one token is computed"


def test_salts_share_what_is_public() -> None:
    salted = [request(i, [*PREFIX, i], cache_salt=str(i)) for i in range(2)]
    assert new_tokens(salted) == 2 * 1001
    public = [request(i, [*PREFIX, i], cache_salt=str(i), public_prefix_tokens=200) for i in range(2)]
    assert new_tokens(public) == 2 * 1001 - 3 * CHUNK
    assert new_tokens([request(0, PREFIX), public[1]]) == 1000 + 1001 - 3 * CHUNK, "unsalted chunks are public"


@pytest.mark.parametrize("seed", range(5))
def test_the_estimate_is_what_the_tree_shares(seed: int) -> None:
    """Requests one after the other, against a real cache that holds them all."""
    rng, queue, cache = random.Random(seed), WaitingPrompts(5000), KVCache(5000)
    starts = [[rng.randrange(9) for _ in range(rng.randrange(1, 400))] for _ in range(4)]
    for number in range(30):
        tokens = rng.choice(starts) + rng.choice(starts)
        salt, public = rng.choice([None, "a", "b"]), rng.choice([0, 100, 300])
        table = cache.open(tokens, salt=salt, public_tokens=public)
        cached, _ = cache.reuse(table)
        before = queue.new_tokens
        queue.add(request(number, tokens, cache_salt=salt, public_prefix_tokens=public))
        assert queue.new_tokens - before == len(tokens) - cached
        assert cache.extend(table, len(tokens) - cached)
        cache.commit()
        cache.close(table)


def test_what_has_left_is_known_and_does_not_count() -> None:
    queue = WaitingPrompts(1000)
    first, second = crowd(2)
    queue.add(first)
    queue.leave("0")
    queue.leave("0")
    assert (len(queue), queue.tokens, queue.new_tokens) == (0, 0, 0)
    queue.add(second)
    assert queue.new_tokens == 1100 - 15 * CHUNK
    queue.clear()
    assert (len(queue), queue.tokens, queue.new_tokens) == (0, 0, 0)


def test_memory_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_NAMED", 4)
    queue = WaitingPrompts(10)
    for number in range(20):
        queue.add(request(number, [number] * 1000))
    assert len(queue._seen) == 10
    queue.add(request("again", [19] * 1000))
    assert queue.new_tokens == 21 * 1000 - 4 * CHUNK, "the chunks beyond MOST_NAMED count as new"


def test_a_crowd_is_told_to_wait_for_its_new_tokens() -> None:
    """1,000 tokens a second: 10 prompts of 1,100 tokens would take 11 s, their new tokens take 2.36 s."""
    llm = AsyncLLM(EngineConfig(model="tiny", max_queued_requests=10))
    llm._queued = WaitingPrompts(1000)
    llm.stats = EngineStats(SchedulerStats(step_s=2.0), TokenStats(prefilled=2000))
    *waits, last = crowd(11)
    for each in waits:
        llm._enqueue(each)
    with pytest.raises(Overloaded, match=r"11,000 prompt tokens are waiting, 2,360 of them new") as told:
        llm._enqueue(last)
    assert told.value.retry_after_s == pytest.approx(2.36)
    llm._prefilling.begin([Prefill("first", 1000, 0, 3000, 500), Prefill("waits for its chunks", 0, 0, 3000)])
    with pytest.raises(Overloaded) as told:
        llm._enqueue(last)
    assert told.value.retry_after_s == pytest.approx(4.36), "what is being read comes first, and counts once"


def test_answers_that_nobody_reads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all requests together; the one of which most waits is ended, here and in the engine."""
    sent: list[m.ToEngine] = []
    monkeypatch.setattr(answer_streams, "MOST_UNREAD", 10)
    llm = AsyncLLM(EngineConfig(model="tiny"))
    monkeypatch.setattr(llm, "_send", sent.append)
    slow, slower = (llm._enqueue(request(name, [1])) for name in ("slow", "slower"))
    deltas = [Delta(name, 0) for name in ("slow", "slower", "slower")]
    for _ in range(4):
        llm._hand_out(m.Events(deltas, [], {}, EngineStats()))
    assert slow.qsize() == 4 and isinstance(slower.get_nowait(), Overloaded) and slower.empty()
    assert sent[-1] == m.Abort("slower") and len(sent) == 3
    llm._hand_out(m.Events(deltas * 2, [], {}, EngineStats()))
    assert slow.qsize() == 6 and slower.empty(), "what is still on its way is not kept"
    again = llm._enqueue(request("slower", [1]))
    assert not llm._streams.close("slower", slower) and llm._streams.close("slower", again), "the id is another's now"


# -- between tenants


def of(tenant: str, name: int, length: int = 100, weight: float = 1.0) -> Request:
    return request(f"{tenant}-{name}", [name] * length, tenant=tenant, weight=weight)


def test_a_full_queue_of_one_tenant_locks_no_other_out() -> None:
    """Alone a tenant may have the whole queue, beside others its share of it; the first request always has a place."""
    queue = WaitingPrompts(0)
    for number in range(8):
        assert not queue.is_full(of("a", number), 8, 10**6)
        queue.add(of("a", number))
    assert queue.is_full(of("a", 8), 8, 10**6)
    for number in range(4):
        assert not queue.is_full(of("b", number), 8, 10**6)
        queue.add(of("b", number))
    assert queue.is_full(of("b", 4), 8, 10**6) and not queue.is_full(of("b", 4, weight=3.0), 8, 10**6)
    assert not queue.is_full(of("c", 0, weight=0.001), 8, 10**6)
    assert queue.of("b").tokens == 400 and queue.of("nobody").requests == 0
    assert (
        queue.told("b") == "4 requests of this tenant, 12 in all, with 400 prompt tokens are waiting, 400 of them new"
    )
    for number in range(8):
        queue.leave(f"a-{number}")
    assert queue.share("b", 1.0) == 1.0 and not queue.is_full(of("b", 5), 8, 10**6)


def test_tokens_that_wait_are_shared_alike() -> None:
    queue = WaitingPrompts(0)
    queue.add(of("a", 0, 1000))
    assert queue.is_full(of("a", 1, 1), 8, 1000)
    assert not queue.is_full(of("b", 0, 900), 8, 1000)
    queue.add(of("b", 0, 300))
    assert not queue.is_full(of("b", 1, 200), 8, 1000) and queue.is_full(of("b", 1, 201), 8, 1000)


@pytest.mark.parametrize(("policy", "light", "heavy"), [("fair", 15.0, 60.0), ("fcfs", 60.0, 60.0)])
def test_retry_after_is_of_the_tenants_own_prompts(policy: str, light: float, heavy: float) -> None:
    """Those at its share of the rate, where that is sooner than all of them."""
    llm = AsyncLLM(EngineConfig(model="tiny", scheduling_policy=policy))
    llm.stats = EngineStats(scheduler=SchedulerStats(step_s=1.0), tokens=TokenStats(prefilled=100))
    for number in range(6):
        llm._queued.add(of("heavy", number, 1000))
    llm._queued.add(of("light", 0, 750))
    assert (llm.retry_after_s("light", 1.0), llm.retry_after_s("heavy", 1.0)) == (light, heavy)
    with pytest.raises(Overloaded, match="1 requests of this tenant, 7 in all"):
        llm.config = llm.config.replace(max_queued_requests=1)
        llm._enqueue(of("light", 1, 800))
