"""Answers of three tenants on the shipped model: the same in whatever order prompts are computed."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.bench.fairness import FairnessBench
from headrace.engine.fairness import FairScheduler
from headrace.kv.partial import LEAST
from headrace.outputs import RequestOutput
from headrace.types import InvalidRequest, Request, Structured

pytestmark = pytest.mark.cpu

TENANTS = (("a", 1.0), ("b", 3.0), ("c", 0.5))


def requests() -> list[Request]:
    """a has most of them, and the longest; two of each share a prefix."""
    rng, made = random.Random(3), []
    for number in range(12):
        tenant, weight = TENANTS[0 if number < 6 else 1 + number % 2]
        start = [rng.randrange(10, 500) for _ in range(200 if tenant == "a" else 70)]
        params = SamplingParams(
            temperature=0.7, seed=number, max_tokens=16, logprobs=2, n=1 + (number == 2), ignore_eos=True
        )
        for twin in range(2):
            own = [rng.randrange(10, 500) for _ in range(30)]
            made.append(
                Request(f"{number}-{twin}", start + own, params, tenant, arrival_s=time.monotonic(), tenant=tenant,
                        weight=weight, priority=rng.randrange(-1, 2))
            )  # fmt: skip
    return made


def answers(llm: LLM) -> list[RequestOutput]:
    """Tenant a's requests come first; the others' while these are being computed."""
    asked = requests()
    late = [each for each in asked if each.tenant != "a"]
    deltas: dict[str, list[Any]] = {each.request_id: [] for each in asked}
    for each in asked:
        if each.tenant == "a":
            llm.engine.add(each)
    steps = 0
    while llm.engine.has_work:
        steps += 1
        if late and steps > 12:
            llm.engine.add(late.pop(0))
        for delta in llm.engine.step():
            deltas[delta.request_id].append((delta.index, tuple(delta.token_ids), repr(delta.logprobs)))
        llm.engine.scheduler.check()
    return [sorted(found) for found in deltas.values()]  # type: ignore[misc]


def joined(found: list[Any]) -> list[Any]:
    """Tokens and logprobs by sequence, however the deltas were cut."""
    return [[[part for part in one if part[0] == index] for index in {part[0] for part in one}] for one in found]


def test_all_schedules_give_the_same_answers() -> None:
    """Enough room, first come, first served; and turns in so small a pool that sequences give way."""
    with LLM("tiny", scheduling_policy="fcfs", kv_cache_tokens=16_384) as calm:
        expected = joined(answers(calm))
        assert not calm.stats().preemptions
    settings = dict(kv_cache_tokens=1536, max_batch_tokens=96, max_sequences=5)
    for policy in ("fair", "fcfs"):
        with LLM("tiny", scheduling_policy=policy, **settings) as llm:  # type: ignore[arg-type]
            assert joined(answers(llm)) == expected
            if isinstance(llm.engine.scheduler, FairScheduler):
                told = llm.engine.stats().tenants
                assert llm.stats().preemptions >= told["a"].preemptions > 0 and set(told) == {"a", "b", "c"}
            assert llm.engine.cache.used == 0


def test_prompts_that_begin_alike_are_not_parted_by_their_lengths() -> None:
    """Documents with questions of many lengths, in a pool for a few of them: what is shared is found as by arrival."""
    rng = random.Random(1)
    documents = [[rng.randrange(10, 500) for _ in range(rng.randrange(200, 400))] for _ in range(6)]
    prompts = [
        text + [rng.randrange(10, 500) for _ in range(rng.randrange(5, 300))] for text in documents for _ in "1234"
    ]
    cached = {}
    for policy in ("fcfs", "fair"):
        with LLM("tiny", scheduling_policy=policy, kv_cache_tokens=1536, max_batch_tokens=256) as llm:  # type: ignore[arg-type]
            llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            cached[policy] = llm.engine.stats().tokens.cached
    shared = [len(text) - (len(text) % 64 if len(text) % 64 < LEAST else 0) for text in documents]
    assert cached["fair"] == cached["fcfs"] == 3 * sum(shared)


def test_priorities_of_python_calls() -> None:
    with LLM("tiny", max_batch_tokens=64) as llm:
        prompts = [[number] * 60 for number in range(10, 14)]
        params = SamplingParams(temperature=0, max_tokens=1)
        outputs = llm.generate(prompts, params, priority=[3, 2, 1, 0], tenant="a", weight=2.0)
        waits = [each.metrics.ttft_s for each in outputs]
        assert waits == sorted(waits, reverse=True)
        for wrong, param in (({"priority": [1, 2]}, "priority"), ({"priority": "high"}, "priority"),
                             ({"tenant": 3}, "tenant"), ({"weight": 0.0}, "weight")):  # fmt: skip
            with pytest.raises(InvalidRequest, match=param) as refused:
                llm.generate(prompts, params, **wrong)  # type: ignore[arg-type]
            assert refused.value.param == param
        assert not llm.engine.has_work


def test_shares_of_python_calls() -> None:
    with LLM("tiny", kv_cache_tokens=1024) as llm:
        params, own = SamplingParams(temperature=0, max_tokens=1), {"tenant": "acme", "cache_salt": "acme"}
        llm.generate([[5] * 64], params, kv_share=0.25, kv_limit=0.5, tier_quota=0.75, **own)  # type: ignore[arg-type]
        accounts = llm.engine.cache.tree.accounts
        assert accounts is not None
        told = accounts.named["acme"]
        assert (told.share, told.limit, told.tier_quota, told.owned) == (4, 8, 0.75, 1)
        llm.chat([{"role": "user", "content": "hi"}], params, kv_share=0.5, **own)  # type: ignore[arg-type]
        assert (told.share, told.limit, told.tier_quota) == (8, 16, None)
        for wrong in ({"kv_share": 1.5}, {"kv_limit": -1}, {"tier_quota": float("nan")}, {"tier_quota": "half"}):
            (param,) = wrong
            with pytest.raises(InvalidRequest, match=param) as refused:
                llm.generate("hi", params, **wrong)  # type: ignore[arg-type]
            assert refused.value.param == param


def test_the_benchmark_runs_whole() -> None:
    """All prompts of both tenants are answered by both policies, and the goal is set where something is measured."""
    bench = FairnessBench("tiny", quick=True)
    found = {case["policy"]: case for case in bench.cases()}
    assert set(found) == {"fair", "fcfs"} and bench.quick_lengths() == {4096: 512}
    for case in found.values():
        assert case["requests"] >= 1 and case["prompts"] == 4 and case["tokens_s"] > 0 and case["limit_ms"] is None
        assert case["ttft_median_ms"] <= case["ttft_p95_ms"] <= case["ttft_max_ms"]
    assert found["fcfs"]["ratio"] == 1.0
    with pytest.raises(ValueError, match="do not hold a prompt of 4,096"):
        FairnessBench("tiny", kv_tokens=4096)


def test_a_limit_is_named_where_it_refuses() -> None:
    with LLM("tiny", kv_cache_tokens=4096) as llm:
        with pytest.raises(InvalidRequest, match=r"of 4,096 its tenant takes at most 192.*raise its kv_limit"):
            llm.generate([list(range(10, 710))], SamplingParams(max_tokens=2), tenant="t", kv_limit=0.05)
        for given, name in ((dict(kv_limit=0), "kv_limit"), (dict(kv_limit=0.2, kv_share=0.3), "kv_share")):
            with pytest.raises(InvalidRequest) as refused:
                llm.generate("a", SamplingParams(max_tokens=2), tenant="t", **given)  # type: ignore[arg-type]
            assert refused.value.param == name


def test_prompts_of_a_tenant_are_counted_to_the_last_token() -> None:
    """Also where an answer's beginning is forced: the prompt's last token is computed in a step of its own."""
    with LLM("tiny", kv_cache_tokens=4096) as llm:
        for params in (SamplingParams(max_tokens=9, structured=Structured(choice=["the only one"])), SamplingParams()):
            llm.engine.cache.tree.clear()
            llm.generate([list(range(10, 30))], params, tenant="t")
        stats = llm.engine.stats()
        assert stats.tenants["t"].prefilled == stats.tokens.prefilled == 2 * 20
