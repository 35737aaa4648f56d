"""Pinned prefixes in an engine: they survive a flood, end in time, are their owner's, and change no bit."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, InvalidRequest, SamplingParams
from headrace.engine.call_handlers import CallHandlers
from headrace.engine.calls import ListPrefixes, PinPrefix, ReleasePrefix, ResetPrefixCache
from headrace.kv.pins import prompt_to_pin
from headrace.types import CHUNK, Request
from tests.support.hybrid_checkpoints import make_checkpoint
from tests.support.thread_group import ranks_as_threads

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Bench:
    """An engine whose pins have a clock that stands, its calls, and requests of tenants."""

    def __init__(self, **settings: Any) -> None:
        self.llm = LLM(**{"model": "tiny", "kv_cache_tokens": 16 * CHUNK, "max_model_len": 16 * CHUNK, **settings})
        self.core = self.llm.engine
        self.calls = CallHandlers(self.core)
        self.now = 0.0
        self.core.pins._clock = lambda: self.now
        self.names = 0
        self.cached: dict[str, int] = {}

    def add(self, tokens: list[int], params: SamplingParams = ONE, **fields: Any) -> str:
        self.names += 1
        name = f"request-{self.names}"
        self.core.add(Request(name, tokens, params, arrival_s=time.monotonic(), **fields))
        return name

    def step(self) -> None:
        for delta in self.core.step():
            if delta.metrics is not None:
                self.cached[delta.request_id] = delta.metrics.cached_tokens

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def reused(self, tokens: list[int], **fields: Any) -> int:
        """Tokens of a prompt that came from the pool."""
        name = self.add(tokens, **fields)
        self.run()
        return self.cached[name]

    def pin(self, name: str, tokens: list[int], ttl_s: float = 60.0, tenant: str = "", **fields: Any) -> Any:
        """As a server does it: the request first, then the call, which waits for it."""
        after = self.add(prompt_to_pin(tokens), tenant=tenant, cache_salt=tenant or None, **fields)
        call = PinPrefix(name, tokens, ttl_s, tenant, tenant or None, after=after)
        answers = self.calls.begin(1, call)
        while not answers:
            self.step()
            answers = self.calls.advance()
        self.run()
        if (refused := answers[0].refused) is not None:
            raise InvalidRequest(refused.told, refused.param, refused.code)
        return answers[0].answer

    def flood(self, prompts: int = 12, **fields: Any) -> None:
        for number in range(prompts):
            self.add(words(4 * CHUNK, 100 + self.names + number), **fields)
            self.run()


def words(count: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(10, 90) for _ in range(count)]


@pytest.fixture
def bench() -> Any:
    bench = Bench()
    yield bench
    bench.core.scheduler.check()
    bench.core.pins.check()
    bench.now += 1e9
    bench.core.pins.expire()
    assert bench.core.cache.used == 0 and not bench.core.pins.chunks


def test_a_pinned_prefix_survives_a_flood_until_its_time_is_over(bench: Bench) -> None:
    prefix = words(3 * CHUNK + 20, 1)
    told = bench.pin("docs", prefix, ttl_s=60.0)
    assert (told["tokens"], told["chunks"], told["expires_in_s"]) == (192, 3, 60.0)
    assert told["bytes"] == 192 * bench.core.loaded.capacity.kv_bytes_per_token
    bench.flood()
    assert bench.reused([*prefix, 5, 6]) == 192
    bench.now = 59.0
    bench.flood()
    assert bench.reused([*prefix, 5, 6]) == 192
    bench.now = 60.0
    bench.flood()
    assert bench.reused([*prefix, 5, 6]) == 0
    assert bench.calls.ask(ListPrefixes()) == []


def test_pinning_again_extends_the_time(bench: Bench) -> None:
    prefix = words(2 * CHUNK, 1)
    bench.pin("docs", prefix, ttl_s=60.0)
    bench.now = 50.0
    assert bench.pin("docs", prefix, ttl_s=60.0)["expires_in_s"] == 60.0
    bench.now = 100.0
    bench.flood()
    assert bench.reused([*prefix, 5]) == 128
    assert [each["id"] for each in bench.calls.ask(ListPrefixes())] == ["docs"]


def test_its_owner_alone_sees_and_releases_it(bench: Bench) -> None:
    bench.pin("docs", words(3 * CHUNK, 1), tenant="acme")
    assert bench.calls.ask(ListPrefixes("guests")) == [] == bench.calls.ask(ListPrefixes())
    refusals = []
    for pin_id, tenant in (("docs", "guests"), ("docs", ""), ("nothing", "acme")):
        with pytest.raises(InvalidRequest) as told:
            bench.calls.ask(ReleasePrefix(pin_id, tenant))
        refusals.append((str(told.value).replace(pin_id, "ID"), told.value.param, told.value.code))
    assert len(set(refusals)) == 1 and refusals[0][2] == "not_found"
    assert [each["id"] for each in bench.calls.ask(ListPrefixes("acme"))] == ["docs"]
    assert bench.calls.ask(ReleasePrefix("docs", "acme"))["chunks"] == 3
    assert bench.calls.ask(ListPrefixes("acme")) == []


def test_forgetting_what_is_cached_keeps_pins(bench: Bench) -> None:
    prefix = words(3 * CHUNK, 1)
    bench.pin("docs", prefix)
    bench.flood(2)
    assert bench.calls.ask(ResetPrefixCache()) > 0
    assert bench.reused([*prefix, 5]) == 192


def test_answers_over_a_pinned_prefix_are_the_same_bits(bench: Bench) -> None:
    prefix, cold = words(3 * CHUNK, 1), Bench()
    bench.pin("docs", prefix)
    bench.flood()
    seen: list[dict[int, torch.Tensor]] = []
    for each in (cold, bench):
        rows: dict[int, torch.Tensor] = {}
        each.core.on_logits = lambda sequence, start, logits, rows=rows: rows.update({start: logits.clone()})
        each.add([*prefix, *words(30, 2)], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        each.run()
        seen.append(rows)
    assert seen[0].keys() == seen[1].keys() and all(torch.equal(seen[0][at], seen[1][at]) for at in seen[0])


def test_a_pin_of_what_nobody_computes_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequest, match="0 of 3 chunks are in the pool: compute the prefix"):
        bench.calls.ask(PinPrefix("docs", words(3 * CHUNK, 1), 60.0))
    with pytest.raises(InvalidRequest, match="whole chunks of 64 tokens, and the prefix has 63"):
        bench.calls.ask(PinPrefix("docs", words(63, 1), 60.0))
    name = bench.add(words(4 * CHUNK, 1))
    assert bench.calls.begin(1, PinPrefix("docs", words(4 * CHUNK, 1), 60.0, after=name)) == []
    assert bench.calls.advance() == [] and bench.calls.pending, "it waits for the request"
    bench.core.abort(name)
    (answer,) = bench.calls.advance()
    assert answer.refused is not None and answer.refused.code == "not_computed"


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_to_live_has_bounds(bench: Bench, ttl_s: float) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s must be above 0"):
        bench.pin("docs", words(CHUNK, 1), ttl_s)


def test_more_than_the_share_of_pins_is_refused(bench: Bench) -> None:
    bench.pin("first", words(4 * CHUNK, 1))
    bench.pin("second", [*words(4 * CHUNK, 1), *words(2 * CHUNK, 2)])
    assert bench.core.pins.chunks == 6, "what two pins share counts once"
    with pytest.raises(InvalidRequest, match=r"and 8 may be pinned \(max_pinned_share\): release a pin"):
        bench.pin("third", words(3 * CHUNK, 3))
    assert bench.core.pins.refused == 1


def test_the_share_of_a_tenant_survives_the_flood_of_another(bench: Bench) -> None:
    prompt = words(4 * CHUNK + 1, 1)
    acme = {"tenant": "acme", "cache_salt": "acme", "kv_share": 0.25}
    assert bench.reused(prompt, **acme) == 0
    bench.flood(tenant="guests", cache_salt="guests")
    assert bench.reused(prompt, **acme) == 256
    told = bench.core.stats().kv
    assert told.chunks_protected == 4 and told.evictions


@pytest.mark.parametrize("ranks", [{}, {"context_parallel_size": 2, "kv_cache_tokens": 8 * CHUNK}], ids=["one", "two"])
def test_a_pin_takes_what_is_restored(ranks: dict[str, Any]) -> None:
    """Part of the prefix is in the pool, part in a tier alone."""
    with ranks_as_threads():
        bench = Bench(kv_offloading_size=0.01, **ranks)
        prefix = words(4 * CHUNK, 1)
        bench.reused([*prefix, 5])
        while bench.core.settle():
            pass
        bench.flood()
        bench.reused([*prefix[: 2 * CHUNK], 5])
        bench.pin("docs", prefix)
        bench.flood()
        assert bench.reused([*prefix, 5]) == 256
        bench.core.pins.check()
        bench.core.cache.check()
        bench.llm.close()


def test_the_recurrent_state_behind_a_prefix_is_held_too(tmp_path: Path) -> None:
    folder = make_checkpoint("3_5_ends_recurrent", tmp_path)
    bench = Bench(model=str(folder), recurrent_states=4)
    prefix = words(3 * CHUNK, 1)
    bench.pin("docs", prefix)
    bench.pin("more", words(CHUNK, 2))
    assert bench.core.scheduler.max_sequences == 2
    with pytest.raises(InvalidRequest, match="there are 4, half of them for pins: release a pin, or raise"):
        bench.pin("most", words(CHUNK, 3))
    for number in range(8):
        bench.add(words(2 * CHUNK, 50 + number), SamplingParams(max_tokens=70, ignore_eos=True))
    bench.run()
    bench.flood()
    assert bench.reused([*prefix, 5, 6]) == 192
    bench.core.scheduler.check()
    bench.calls.ask(ReleasePrefix("docs"))
    bench.calls.ask(ReleasePrefix("more"))
    assert bench.core.scheduler.max_sequences == 4
    bench.core.cache.check()


def test_without_prefix_caching_nothing_is_pinned() -> None:
    bench = Bench(enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="enable_prefix_caching off"):
        bench.pin("docs", words(CHUNK, 1))
