"""Pages of the prefix tree of an engine that computes: what requests share is told, between any two steps."""

from __future__ import annotations

import pytest

from headrace import LLM, SamplingParams
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import PinPrefix, ResetPrefixCache, TreePage
from headrace.types import CHUNK, Request

pytestmark = pytest.mark.cpu


def test_what_requests_share() -> None:
    llm = LLM("tiny", kv_cache_tokens=40 * CHUNK)
    engine = llm.engine
    calls = CallHandlers(engine)
    shared = [7] * (3 * CHUNK)
    for number in range(2):
        prompt = shared + [number + 1] * (2 * CHUNK)
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
        engine.step()
        told = calls.ask(TreePage())["segments"]
        assert sum(each["chunks"] for each in told) == len(engine.cache.tree.nodes)
        assert told[0]["holders"] == 1, "while it runs"
        while engine.has_work:
            engine.step()
    assert calls.ask(PinPrefix("p", shared, 60.0))["tokens"] == 3 * CHUNK
    trunk, *forks = calls.ask(TreePage())["segments"]
    assert [(each["chunks"], each["parent"]) for each in (trunk, *forks)] == [
        (3, None), (2, trunk["id"]), (2, trunk["id"]),
    ]  # fmt: skip
    assert (trunk["children"], trunk["pinned_tokens"], trunk["holders"]) == (2, 3 * CHUNK, 1)
    assert trunk["bytes"] == 3 * CHUNK * engine.loaded.capacity.kv_bytes_per_token
    assert calls.ask(ResetPrefixCache()) == 4
    assert [each["id"] for each in calls.ask(TreePage())["segments"]] == [trunk["id"]]
    engine.cache.check()
