"""Pins and shares of the pool over whole requests, without a model: what is promised stays, and everybody ends."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.engine.fairness import FairScheduler
from headrace.engine.scheduler import Scheduler
from headrace.types import CHUNK, InvalidRequest
from tests.support.scheduler_harness import prompt
from tests.support.shared_pool import Asked, SharedPool

TENANTS = ["", "acme", "globex", "guests"]
ASKED = [(0.0, 1.0), (0.25, 1.0), (0.3, 0.5), (0.0, 0.4), (0.1, 0.2)]


class PoolMachine(RuleBasedStateMachine):
    """Requests of tenants with shares and limits that change, pins that come, end and are released, in a pool that
    holds but a few of them."""

    pool: SharedPool

    @initialize(
        per_rank=st.integers(8, 24),
        budget=st.sampled_from([64, 100, 1000]),
        ranks=st.sampled_from([1, 1, 2, 3]),
        drafts=st.booleans(),
        policy=st.sampled_from([FairScheduler, Scheduler]),
        copies=st.booleans(),
    )
    def start(
        self, per_rank: int, budget: int, ranks: int, drafts: bool, policy: type[Scheduler], copies: bool
    ) -> None:
        self.pool = SharedPool(per_rank // ranks * ranks, budget, ranks, drafts, policy, copies)

    @rule(tenant=st.sampled_from(TENANTS[1:]), asked=st.sampled_from(ASKED))
    def agree(self, tenant: str, asked: Asked) -> None:
        self.pool.asked[tenant] = asked

    @rule(
        length=st.integers(1, 400),
        seed=st.integers(0, 4),
        answer=st.one_of(st.integers(1, 150), st.none()),
        tenant=st.sampled_from(TENANTS),
        public=st.sampled_from([0, 0, 128, 256]),
        n=st.sampled_from([1, 1, 3]),
    )
    def join(self, length: int, seed: int, answer: int | None, tenant: str, public: int, n: int) -> None:
        for _ in range(n):
            try:
                sequence = self.pool.ask(prompt(length, seed), answer, tenant, public)
            except InvalidRequest as error:
                assert error.code == "kv_pool_exceeded"
                return
            self.pool.live[sequence] = min(self.pool.live[sequence], 200)

    @rule(
        chunks=st.integers(1, 5),
        seed=st.integers(0, 4),
        name=st.sampled_from("xyz"),
        tenant=st.sampled_from(TENANTS),
        public=st.sampled_from([0, 128]),
        soft=st.booleans(),
    )
    def pin(self, chunks: int, seed: int, name: str, tenant: str, public: int, soft: bool) -> None:
        try:
            self.pool.pin(name, prompt(chunks * CHUNK, seed), 60.0, tenant, public, soft)
        except InvalidRequest as error:
            assert error.code in ("kv_pool_exceeded", "pins_full")

    @rule(name=st.sampled_from("xyz"), tenant=st.sampled_from(TENANTS))
    def release(self, name: str, tenant: str) -> None:
        there = any(pin.id == name for pin in self.pool.pins.of(tenant))
        try:
            self.pool.pins.release(name, tenant)
        except InvalidRequest:
            assert not there
        else:
            assert there

    @rule(seconds=st.sampled_from([1.0, 25.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.pool.now += seconds

    @precondition(lambda self: self.pool.live)
    @rule(steps=st.integers(1, 30))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            assert self.pool.step() or not self.pool.live, "nobody gets on"

    @precondition(lambda self: self.pool.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = list(self.pool.live)
        self.pool.abort(live[data.draw(st.integers(0, len(live) - 1))])

    @precondition(lambda self: self.pool.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        running = self.pool.scheduler.running
        self.pool.scheduler._preempt(running[data.draw(st.integers(0, len(running) - 1))])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.scheduler.check()
            self.pool.pins.check()
            accounts = self.pool.cache.tree.accounts
            for account in () if accounts is None else accounts.named.values():
                assert account.share <= self.pool.cache.pool.total

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.end()


PoolMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPoolMachine = PoolMachine.TestCase


def flood(pool: SharedPool, tenant: str, prompts: int = 20) -> None:
    for seed in range(prompts):
        pool.ask(prompt(5 * CHUNK, 100 + seed), 3, tenant)
        while pool.live:
            pool.step()


def held(pool: SharedPool, tenant: str, chunks: int, public: int = 0) -> list[int]:
    """A prompt of so many chunks that has been computed for the tenant."""
    tokens = prompt(chunks * CHUNK, 7)
    pool.ask([*tokens, 1], 1, tenant, public)
    while pool.live:
        pool.step()
    assert pool.resident(tokens, tenant, public) == chunks
    return tokens


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_share_survives_the_flood_of_another_tenant(ranks: int) -> None:
    pool = SharedPool(20, ranks=ranks)
    pool.asked["acme"] = (0.25, 1.0)
    kept = held(pool, "acme", 5)
    flood(pool, "guests")
    assert pool.resident(kept, "acme") == 5 and pool.cache.tree.evictions
    flood(pool, "acme")
    assert pool.resident(kept, "acme") == 0, "its own requests may take what is its"
    pool.end()


def test_what_a_tenant_has_beyond_its_share_is_lent() -> None:
    pool = SharedPool(20)
    pool.asked["acme"] = (0.25, 1.0)
    kept = held(pool, "acme", 8)
    flood(pool, "guests")
    assert pool.resident(kept, "acme") == 5
    pool.end()


def test_a_share_keeps_the_public_chunks_before_its_own() -> None:
    pool = SharedPool(20)
    pool.asked["acme"] = (0.25, 1.0)
    kept = held(pool, "acme", 5, public=2 * CHUNK)
    flood(pool, "guests")
    assert pool.resident(kept, "acme", 2 * CHUNK) == 5
    account = pool.cache.tree.open_account("acme")
    assert (account.owned, account.before, account.protected) == (3, 2, 5)
    pool.end()


def test_a_chunk_of_several_sequences_counts_once() -> None:
    pool = SharedPool(20)
    pool.asked["acme"] = (0.25, 1.0)
    for _ in range(3):
        pool.ask([*prompt(4 * CHUNK, 7), 1], 20, "acme")
    pool.step()
    account = pool.cache.tree.open_account("acme")
    assert account.owned == 4 + 3, "four that they share, and an end of each"
    pool.end()


def test_a_tenant_at_its_limit_evicts_its_own() -> None:
    pool = SharedPool(20)
    pool.asked["acme"] = (0.0, 0.5)
    others = held(pool, "guests", 8)
    flood(pool, "acme")
    assert 8 < pool.cache.tree.open_account("acme").owned <= 10
    assert pool.resident(others, "guests") == 8
    with pytest.raises(InvalidRequest, match="the KV pool has 640 for them"):
        pool.ask(prompt(11 * CHUNK, 1), 3, "acme")
    pool.end()


def test_what_does_not_fit_beside_shares_and_pins_is_refused_or_bounded() -> None:
    pool = SharedPool(20)
    pool.asked["acme"] = (0.25, 1.0)
    held(pool, "acme", 1)
    docs = prompt(5 * CHUNK, 3)
    pool.pin("docs", docs, 60.0, "guests")
    while pool.live:
        pool.step()
    assert pool.shares.room(None) == 10
    with pytest.raises(InvalidRequest, match=r"have 641 tokens, and the KV pool has 640 .* release pins"):
        pool.ask(prompt(600, 4), 41, "guests")
    open_ended = pool.ask(prompt(600, 4), None, "guests")
    assert open_ended.request.params.max_tokens == 40, "as at the end of the context"
    over_the_pin = pool.ask([*docs, *prompt(600, 4)], 40, "guests")
    assert over_the_pin.request.params.max_tokens == 40, "what it begins with is in the pool already"
    pool.end()


def test_a_pin_waits_for_requests_that_need_its_room() -> None:
    pool = SharedPool(20)
    pool.ask(prompt(10 * CHUNK, 1), 5 * CHUNK)
    open_ended = pool.ask(prompt(10, 2), None)
    with pytest.raises(InvalidRequest, match="ask again when it has ended"):
        pool.pin("docs", prompt(6 * CHUNK, 3), 60.0)
    assert pool.pins.refused == 1 and open_ended.request.params.max_tokens == 20 * CHUNK - 10
    pool.pin("docs", prompt(5 * CHUNK, 3), 60.0)
    assert open_ended.request.params.max_tokens == 15 * CHUNK - 10, "an open answer gives way"
    pool.end()


def test_a_pin_that_ends_leaves_what_another_holds() -> None:
    pool = SharedPool(20)
    for name, chunks in (("short", 3), ("long", 5)):
        pool.pin(name, prompt(chunks * CHUNK, 3), 60.0)
        while pool.live:
            pool.step()
    pool.pins.release("long", "")
    pool.pins.check()
    assert pool.pins.chunks == 3
    flood(pool, "")
    assert pool.resident(prompt(3 * CHUNK, 3), "") == 3
    pool.end()


def test_a_pin_may_end_under_a_request() -> None:
    pool = SharedPool(20)
    docs = prompt(5 * CHUNK, 3)
    pool.pin("docs", docs, 60.0)
    while pool.live:
        pool.step()
    pool.ask([*docs, 1], 20)
    pool.step()
    pool.now = 60.0
    pool.step()
    assert not pool.pins.chunks and pool.cache.used == 6, "the request has them still"
    pool.end()


def test_a_soft_pin_stays_under_a_flood_and_costs_no_request_its_room() -> None:
    pool = SharedPool(20)
    tokens = held(pool, "a", 8)
    soft = pool.pin("s", tokens, 60.0, "a", soft=True)
    while pool.live:
        pool.step()
    flood(pool, "b")
    assert pool.pins.of("a") == [soft] and pool.resident(tokens, "a") == 8
    large = pool.ask(prompt(18 * CHUNK, 5), 60, "b")
    assert pool.live[large] == 60, "it is let in whole"
    while pool.live:
        assert pool.step()
    assert soft.over and not pool.pins.of("a")
    pool.end()


def test_a_soft_pin_that_waits_for_its_prefix_gives_way_too() -> None:
    pool = SharedPool(20, budget=2 * CHUNK)
    soft = pool.pin("s", prompt(9 * CHUNK, 7), 60.0, "a", soft=True)
    pool.step()
    assert soft.table.nodes and not soft.whole
    assert pool.pins.give_way() and soft.over and not pool.pins.give_way()
    while pool.live:
        assert pool.step()
    assert not pool.pins.chunks and pool.cache.used == 0
    pool.end()


def test_soft_pins_end_for_a_firm_one() -> None:
    pool = SharedPool(20)
    soft = [pool.pin(name, held(pool, name, 4), 60.0, name, soft=True) for name in "ab"]
    firm = pool.pin("f", prompt(5 * CHUNK, 9), 60.0, "c")
    while pool.live:
        pool.step()
    assert [pin.over for pin in soft] == [True, False] and pool.pins.of("c") == [firm], "of ten chunks nine stay"
    with pytest.raises(InvalidRequest, match="max_pinned_share"):
        pool.pin("g", prompt(6 * CHUNK, 11), 60.0, "c")
    assert not soft[1].over, "nobody gives way to what is refused"
    while pool.live:
        pool.step()
    pool.end()
