"""What shares of the pool and pinned prefixes leave to each request, so that whoever is let in can end.

The oldest sequence can always have what nobody else keeps: others are preempted, and what is idle is evicted, but for
pinned chunks and for what accounts have within their shares (kv.accounts):

    room(tenant) = pool - pinned - the shares of the others, each as far as its pins do not take it anyway

A request is let in if it fits there, beside pinned chunks that it begins with itself. Whatever comes later, a pin or a
share, may take no more than those that were let in leave. An answer whose length was left open is bounded instead, as
by the context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import SequenceState
from headrace.kv.accounts import Account
from headrace.kv.cache import KVCache
from headrace.kv.chunk_table import ChunkTable
from headrace.kv.pins import Pin, Pins, full
from headrace.stats import KVStats
from headrace.types import CHUNK, InvalidRequest, Request, chunks_for

if TYPE_CHECKING:
    from headrace.engine.loader import Loaded


class Shares:
    """longest: tokens of the context. open_table: as the scheduler's."""

    def __init__(
        self, cache: KVCache, pins: Pins, scheduler: Scheduler, open_table: Callable[[SequenceState], ChunkTable],
        longest: int,
    ) -> None:  # fmt: skip
        self.cache, self.pins, self.scheduler = cache, pins, scheduler
        self._open_table, self._longest = open_table, longest
        self._bounded: set[str] = set()
        self._most_sequences = scheduler.max_sequences
        pins.make_way, pins.changed = self.make_way, self._leave_states
        scheduler.give_way = pins.give_way

    @classmethod
    def of(
        cls, loaded: Loaded, scheduler: Scheduler, open_table: Callable[[SequenceState], ChunkTable]
    ) -> Shares:  # fmt: skip
        """Of an engine."""
        cache = loaded.cache
        pins = Pins(cache, int(loaded.config.cache.max_pinned_share * cache.pool.total))
        return cls(cache, pins, scheduler, open_table, loaded.capacity.max_model_len)

    def is_live(self, request_id: str) -> bool:
        """Whether a request is under way."""
        return any(each.request.request_id == request_id for each in self._live())

    def account(self, request: Request) -> Account | None:
        """The account of the request's tenant, if it has one."""
        accounts = self.cache.tree.accounts
        return None if accounts is None else accounts.named.get(request.tenant)

    def room(self, account: Account | None) -> int:
        """Chunks that a sequence can have at any time, beside those that are pinned."""
        left = self._left(account)
        return left if account is None else min(left, self._limit(account))

    def _limit(self, account: Account) -> int:
        """Chunks that the account's limit leaves."""
        return account.limit - self.pins.owned[account] - self.pins.awaited

    def _left(self, account: Account | None) -> int:
        """Chunks that others' shares and pins leave."""
        accounts, pins = self.cache.tree.accounts, self.pins
        room = self.cache.pool.total - pins.chunks_of_nobody
        for each in () if accounts is None else accounts.named.values():
            pinned = pins.owned[each]
            room -= pinned if each is account else max(each.share, pinned)
        return room

    def admit(self, request: Request) -> Request:
        """The request, its answer bounded if its length was left open. Raises InvalidRequest if it does not fit."""
        self._follow(request)
        if self.cache.tree.accounts is None and not self.pins.firm_chunks:
            return request
        most = self._most(request, self.room(self.account(request)))
        if most is None:
            most = self._fitting(SequenceState(request, 0, 0))
        if most is None:
            raise self._refusal(request)
        if most == self._asked(request):
            return request
        self._bounded.add(request.request_id)
        return replace(request, params=replace(request.params, max_tokens=most))

    def add_stats(self, told: KVStats) -> None:
        """Writes the figures of pins and accounts into `told`."""
        accounts = self.cache.tree.accounts
        told.pins, told.chunks_pinned, told.pins_refused = len(self.pins), self.pins.chunks, self.pins.refused
        told.chunks_protected = 0 if accounts is None else sum(each.protected for each in accounts.named.values())

    def make_way(self, pin: Pin) -> None:
        """Bounds open answers so that they fit beside the pin. Raises InvalidRequest if something else does not."""
        new, bounds = self.pins.new_firm_chunks(pin), []
        for sequence in self._live():
            most = self._fitting(sequence, new, pin)
            if most is None:
                tokens = sequence.prompt_len + self._asked(sequence.request)
                raise full(
                    f"a request under way may need {tokens:,} tokens, for which {new:,} more pinned chunks leave too "
                    "little: ask again when it has ended, or raise --kv-cache-tokens"
                )
            bounds.append((sequence.request, most))
        for request, most in bounds:
            self._bound(request, most)

    def _leave_states(self) -> None:
        """As many sequences run as there are recurrent states that no pin holds."""
        if self.cache.states is not None:
            free = self.cache.states.total - len(self.cache.pinned)
            self.scheduler.max_sequences = min(self._most_sequences, free)

    def _follow(self, request: Request) -> None:
        """Share, limit and quota of a tenant are those of its latest request; of the pool, as far as requests under way
        leave them."""
        total, account = self.cache.pool.total, self.account(request)
        share, limit = int(request.kv_share * total), max(1, int(request.kv_limit * total))
        asks = share or limit < total or request.tier_quota is not None
        if account is None and not (request.tenant and asks):
            return
        if account is None:
            account = self.cache.tree.open_account(request.tenant)
        account.tier_quota = request.tier_quota
        if (account.share, account.limit) != (share, limit):
            self._change(account, share, limit)

    def _change(self, account: Account, share: int, limit: int) -> None:
        account.share, account.limit = share, limit
        for sequence in self._live():
            most = self._fitting(sequence)
            if most is not None:
                self._bound(sequence.request, most)
                continue
            lacking = self._need(sequence) - self.room(self.account(sequence.request)) - self._common(sequence)
            if self.account(sequence.request) is account:
                account.limit += lacking
            else:
                account.share = max(0, account.share - lacking)

    def _live(self) -> Iterator[SequenceState]:
        yield from (each for each in self.scheduler.running if not each.ended)
        yield from self.scheduler.waiting

    def _fitting(self, sequence: SequenceState, new: int = 0, pin: Pin | None = None) -> int | None:
        """max_tokens with which a sequence fits, where a pin takes `new` chunks more; None if it does not."""
        room = self.room(self.account(sequence.request)) - new
        if self._need(sequence) > room:
            room += self._common(sequence, pin)
        return self._most(sequence.request, room, sequence.n_output)

    def _common(self, sequence: SequenceState, pin: Pin | None = None) -> int:
        """Chunks that the sequence begins with and that are pinned, or will be."""
        table = sequence.table or self._open_table(sequence)
        whole, common = len(sequence.tokens) // CHUNK if table.shares else 0, 0
        names = set() if pin is None else set(pin.names)
        while common < whole and (self.pins.is_firm(name := table.digest(common)) or name in names):
            common += 1
        if sequence.table is None:
            self.cache.close(table)
        return common

    def _asked(self, request: Request) -> int:
        most = request.params.max_tokens
        if request.embed:
            return 0
        return self._longest - len(request.prompt_token_ids) if most is None else most

    def _need(self, sequence: SequenceState) -> int:
        return chunks_for(sequence.prompt_len + self._asked(sequence.request))

    def _most(self, request: Request, room: int, answered: int = 0) -> int | None:
        """max_tokens with which the request fits into so many chunks; None if it does not. answered: tokens that it has
        already."""
        prompt, asked = len(request.prompt_token_ids), self._asked(request)
        if chunks_for(prompt + asked) <= room:
            return asked
        left_open = asked and (prompt + asked >= self._longest or request.request_id in self._bounded)
        most = room * CHUNK - prompt
        return most if left_open and most >= max(1, request.params.min_tokens, answered + 1) else None

    def _bound(self, request: Request, most: int) -> None:
        if most != self._asked(request):
            self._bounded = {each.request.request_id for each in self._live()} & self._bounded
            self._bounded.add(request.request_id)
            request.params = replace(request.params, max_tokens=most)

    def _refusal(self, request: Request) -> InvalidRequest:
        account, tokens = self.account(request), len(request.prompt_token_ids) + self._asked(request)
        room, pinned = max(0, self.room(account)) * CHUNK, self.pins.firm_chunks * CHUNK
        total = self.cache.pool.total * CHUNK
        told = f"prompt and answer may have {tokens:,} tokens, and the KV pool has {room:,} for them: of {total:,} "
        if account is not None and self._limit(account) < self._left(account):
            told += f"its tenant takes at most {account.limit * CHUNK:,}, with its pins; "
            told += "ask for less, release its pins, or raise its kv_limit"
        else:
            told += f"pinned prefixes hold {pinned:,}, and tenants have shares; "
            told += "ask for less, release pins, lower kv_share, or raise --kv-cache-tokens"
        return InvalidRequest(told, None, "kv_pool_exceeded")
