"""Shares of the pool: which chunks are whose, and which of them may be evicted for whom.

A tenant with a share has an account. Its chunks are those behind the public prefix of its requests. Public chunks are
nobody's, and so are those of tenants without an account; but a public chunk that an account's chunks follow counts for
that account too, and cannot leave before them:

    public -- public -- acme's -- acme's          account of acme: owned 2, before 2
                   \\--- globex's                  account of globex: owned 1, before 2

As long as an account has no more than its share (owned + before), nobody else's chunk takes the place of one of its
idle chunks; what it has beyond is lent. A tenant at its limit evicts its own chunks first.

Idle chunks stand in one order for each account and one for nobody, so that the choice looks at one chunk of each. A
public chunk that guards others stands in none until it has none left to guard.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

from headrace.kv.pool import SlotPool

Node = Any
"""kv.tree.Node, which knows its account."""


class IdleOrder:
    """Idle nodes, least recently used first, of all ranks and of each."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._all: OrderedDict[Node, None] = OrderedDict()
        self._of: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(pool.ranks)]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._all)

    def add(self, node: Node) -> None:
        self._all[node] = None
        self._of[self._pool.rank_of(node.slot)][node] = None

    def discard(self, node: Node) -> None:
        self._all.pop(node, None)
        self._of[self._pool.rank_of(node.slot)].pop(node, None)

    def count(self, rank: int) -> int:
        return len(self._of[rank])

    def first(self, rank: int | None = None) -> Node | None:
        """The oldest one, or the oldest one of the rank."""
        return next(iter(self._all if rank is None else self._of[rank]), None)


def mark_of(tenant: str) -> bytes:
    """Stands for a tenant of that name in the tiers, whatever its salts: 16 bytes."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16, person=b"account").digest()


class Account:
    """All numbers are chunks. share: protected from others; limit: the most that may be owned.

    owned: of the tenant, held or idle, with a name or without. before: public chunks that some of these follow.
    mark: stands for the tenant in the tiers below; tier_quota: its own there, a share of each; None: the common one.
    """

    def __init__(self, name: str, pool: SlotPool) -> None:
        self.name = name
        self.mark = mark_of(name)
        self.tier_quota: float | None = None
        self.share, self.limit = 0, pool.total
        self.owned = self.before = 0
        self.idle = IdleOrder(pool)

    @property
    def over(self) -> bool:
        """Whether it has more than its share, so that others may have its oldest idle chunk."""
        return self.owned + self.before > self.share

    @property
    def lent(self) -> int:
        """Idle chunks that others can have for sure: the public ones before them may leave with the first."""
        if not self.over:
            return 0
        return min(len(self.idle), max(1, self.owned - self.share))

    @property
    def left(self) -> int:
        """That it can hold beside those that it holds, for all its limit says."""
        return max(0, self.limit - self.owned + len(self.idle))

    @property
    def protected(self) -> int:
        return min(self.owned + self.before, self.share)


class Accounts:
    """All accounts of a tree. `nobody` has the idle nodes of no account that guard no node of one."""

    def __init__(self, pool: SlotPool, idle: Iterable[Node]) -> None:
        """idle: nodes that are idle already, least recently used first."""
        self._pool = pool
        self.named: dict[str, Account] = {}
        self.nobody = Account("", pool)
        self._clock = 0
        for node in idle:
            self.rest(node)

    def open(self, name: str) -> Account:
        return self.named.setdefault(name, Account(name, self._pool))

    # -- who can have what

    def available_for(self, account: Account | None) -> int:
        """Slots that the account, or nobody, can have one after another. It may turn out to be more; but 0 is exact."""
        found = self._pool.free + len(self.nobody.idle)
        for each in self.named.values():
            found += len(each.idle) if each is account else each.lent
        return found if account is None else min(found, account.left)

    def available_on(self, rank: int, account: Account | None) -> int:
        """Slots of the rank that it can have for sure."""
        if self._pool.ranks == 1:
            return self.available_for(account)
        own = 0 if account is None else account.idle.count(rank)
        found = self._pool.free_of(rank) + self.nobody.idle.count(rank) + own
        return found if account is None else min(found, account.left)

    def oldest(self, account: Account | None, rank: int | None) -> Node | None:
        """The least recently used node that may be evicted for the account. All its descendants may be, too."""
        found = [self.nobody.idle.first(rank)]
        for each in self.named.values():
            if each is account:
                found.append(each.idle.first(rank))
            elif each.over:
                first = each.idle.first()
                on_rank = first is not None and (rank is None or self._pool.rank_of(first.slot) == rank)
                found.append(first if on_rank else None)
        return min((node for node in found if node is not None), key=lambda node: node.idle_since, default=None)

    # -- following the tree

    def charge(self, node: Node, account: Account | None) -> None:
        """The node is the account's from now on. It is held, and has no children."""
        if node.account is not None:
            node.account.owned -= 1
        if account is not None:
            account.owned += 1
        node.account = account

    def enter(self, node: Node) -> None:
        """A held node gets its name, behind its parent. What follows a chunk of an account is the account's."""
        parent = node.parent
        if parent is None:
            return
        if parent.account is not None:
            self.charge(node, parent.account)
        elif node.account is not None:
            self._guard(parent, node.account)

    def _guard(self, node: Node | None, account: Account) -> None:
        while node is not None:
            node.guards = {} if node.guards is None else node.guards
            node.guards[account] = node.guards.get(account, 0) + 1
            if node.guards[account] > 1:
                return
            account.before += 1
            node = node.parent

    def leave(self, node: Node) -> None:
        """A node without children leaves the pool."""
        account, parent = node.account, node.parent
        if account is None:
            self.nobody.idle.discard(node)
            return
        account.idle.discard(node)
        account.owned -= 1
        if parent is not None and parent.account is None:
            self._unguard(parent, account)

    def _unguard(self, node: Node | None, account: Account) -> None:
        while node is not None and node.guards:
            node.guards[account] -= 1
            if node.guards[account]:
                return
            del node.guards[account]
            account.before -= 1
            if not node.refs and not node.guards:
                self.rest(node)
            node = node.parent

    def rest(self, node: Node) -> None:
        """The node is idle from now on, or guards nothing any more."""
        self._clock += 1
        node.idle_since = self._clock
        if node.account is not None:
            node.account.idle.add(node)
        elif not node.guards:
            self.nobody.idle.add(node)

    def wake(self, node: Node) -> None:
        """An idle node is held."""
        (self.nobody if node.account is None else node.account).idle.discard(node)

    def check(self, nodes: Iterable[Node]) -> None:
        """Raises AssertionError unless all counts agree with these nodes: all that have a slot. For tests."""
        every = list(nodes)
        below: dict[Node, dict[Account, int]] = {}
        for node in sorted(every, key=lambda node: -node.number):
            parent, under = node.parent, below.get(node, {})
            if node.account is None:
                assert (node.guards or {}) == under, "a public chunk guards others than follow it"
            for account in under if node.account is None else [node.account]:
                if parent is not None and parent.account is None:
                    counts = below.setdefault(parent, {})
                    counts[account] = counts.get(account, 0) + 1
        for account in self.named.values():
            own = [node for node in every if node.account is account]
            assert account.owned == len(own), f"{account.name} owns {len(own)} chunks and counts {account.owned}"
            before = sum(account in under for under in below.values())
            assert account.before == before, f"{account.name} follows {before} chunks and counts {account.before}"
            assert set(account.idle) == {node for node in own if not node.refs}, "an account knows other idle chunks"
        free = {node for node in every if node.account is None and not node.refs and not node.guards}
        assert set(self.nobody.idle) == free, "nobody's idle chunks are others"
