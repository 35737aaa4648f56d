"""A scheduler, a pool with shares and pins, and requests of tenants, without a model."""

from __future__ import annotations

from headrace.engine.fairness import FairScheduler
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState, Slice
from headrace.engine.shares import Shares
from headrace.kv.accounts import Account
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.pins import Pin, Pins, prompt_to_pin
from headrace.kv.tree import Node
from headrace.types import CHUNK, InvalidRequest, Request, SamplingParams
from tests.support.scheduler_harness import Harness

Asked = tuple[float, float]
"""kv_share and kv_limit of a tenant."""


class SharedPool(Harness):
    """Requests of tenants, and pins, whose clock is `now`. Whatever is evicted must be nobody's share."""

    def __init__(
        self, chunks: int, budget: int = 1000, ranks: int = 1, drafts: bool = False,
        policy: type[Scheduler] = FairScheduler, copies: bool = False,
    ) -> None:  # fmt: skip
        align = 1 if ranks == 1 else CHUNK
        super().__init__(chunks, budget, ranks=ranks, align=align, drafts=drafts, policy=policy, copies=copies)
        self.cache.block_chunks = 2
        self.now = 0.0
        self.pins = Pins(self.cache, chunks // 2, clock=lambda: self.now)
        self.longest = chunks * CHUNK
        self.shares = Shares(self.cache, self.pins, self.scheduler, self.open, self.longest)
        self.scheduler.open_table = self.open
        self.asked: dict[str, Asked] = {}
        self.waiting: list[tuple[Pin, SequenceState]] = []
        self.taker: Account | None = None
        take_slot = self.cache.tree.take_slot

        def watched(rank: int | None = None, account: Account | None = None) -> int | None:
            self.taker = account
            return take_slot(rank, account)

        self.cache.tree.take_slot = watched  # type: ignore[method-assign]
        self.cache.tree.leaving = self.leaves

    def leaves(self, node: Node) -> None:
        account = node.account
        assert not node.refs and node not in self.pins._holders, "a pinned chunk is evicted"
        assert account in (None, self.taker) or (account and account.over), "a share is taken by another tenant"
        assert not any(node.guards or {}), "chunks of a share lose those before them"

    def open(self, sequence: SequenceState) -> ChunkTable:
        request = sequence.request
        return self.cache.open(
            sequence.tokens,
            salt=request.cache_salt,
            public_tokens=request.public_prefix_tokens,
            account=self.shares.account(request),
        )

    def ask(self, tokens: list[int], answer: int | None, tenant: str = "", public: int = 0) -> SequenceState:
        """answer: None for as many tokens as there may be."""
        share, limit = self.asked.get(tenant, (0.0, 1.0))
        most = self.longest - len(tokens) if answer is None else answer
        if most < 1 or len(tokens) + most > self.longest:
            raise InvalidRequest("longer than the context", None, "kv_pool_exceeded")
        request = Request(
            str(self.order), tokens, SamplingParams(max_tokens=most), tenant or None, public,
            tenant=tenant, kv_share=share, kv_limit=limit,
        )  # fmt: skip
        request = self.shares.admit(request)
        sequence = SequenceState(request, 0, self.order)
        self.order += 1
        self.live[sequence] = request.params.max_tokens or 0
        self.scheduler.add(sequence)
        return sequence

    def pin(
        self, name: str, tokens: list[int], ttl_s: float, tenant: str = "", public: int = 0, soft: bool = False
    ) -> Pin:
        """As the handler of the call does it, beside the request that computes the prefix."""
        sequence = self.ask(prompt_to_pin(tokens), 1, tenant, public)
        pin = self.pins.begin(name, tenant, ttl_s, self.open(SequenceState(sequence.request, 0, 0)), soft)
        self.waiting.append((pin, sequence))
        return pin

    def step(self) -> list[Slice]:
        for sequence in self.live:
            self.live[sequence] = min(self.live[sequence], sequence.request.params.max_tokens or 0)
        self.pins.expire()
        slices = super().step()
        self.follow_pins()
        return slices

    def follow_pins(self) -> None:
        for pin, sequence in list(self.waiting):
            if pin.over:
                self.waiting.remove((pin, sequence))
            elif self.pins.attach(pin):
                self.pins.settle(pin)
                self.waiting.remove((pin, sequence))
            elif sequence not in self.live:
                self.pins.drop(pin)
                self.waiting.remove((pin, sequence))
        self.pins.check()

    def end(self) -> None:
        """All requests end beside the pins, then the pins, and nothing is left."""
        for _ in range(20_000):
            if not self.scheduler.has_work:
                break
            assert self.step(), "a step without work although there is some"
        self.follow_pins()
        assert not self.live and not self.waiting, "requests were starved"
        self.now += 1e9
        self.pins.expire()
        assert self.cache.used == 0 and not self.pins.chunks
        self.cache.tree.clear()
        self.cache.check()
        assert self.cache.pool.free == self.cache.pool.total

    def resident(self, tokens: list[int], tenant: str, public: int = 0) -> int:
        """Whole chunks of a prompt that are in the pool."""
        table = self.cache.open(tokens, salt=tenant or None, public_tokens=public)
        found = [self.cache.tree.find(table.digest(chunk)) for chunk in range(len(tokens) // CHUNK)]
        self.cache.close(table)
        return sum(node is not None for node in found)
