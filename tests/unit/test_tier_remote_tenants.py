"""The remote tier's budget and its tenants' quotas, whose books lie on the server."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.offload.tiers import remote
from headrace.offload.tiers.base import TierStats, name_of
from tests.support.redis_servers import Address
from tests.support.remote_tier import NAMES, blob_of, client, tier_of, whole

pytestmark = pytest.mark.unit


class Account:
    """What quotas.py promises, in Python: blobs in the order of their use."""

    def __init__(self, budget: int, quota: int) -> None:
        self.budget, self.common = budget, quota
        self.own: dict[bytes, int] = {}
        """Of tenants with blobs, as of their last write."""
        self.blobs: dict[bytes, tuple[bytes, int]] = {}

    def use(self, tenant: bytes) -> int:
        return sum(size for owner, size in self.blobs.values() if owner == tenant)

    def touch(self, name: bytes) -> bool:
        if name in self.blobs:
            self.blobs[name] = self.blobs.pop(name)
        return name in self.blobs

    def put(self, name: bytes, tenant: bytes, size: int, quota: int | None = None) -> bool:
        if self.touch(name):
            return True
        quotas = {**self.own, tenant: self.common if quota is None else quota}
        stored = self._put(name, tenant, size, quotas)
        there = {owner for owner, _ in self.blobs.values()}
        self.own = {owner: own for owner, own in self.own.items() if owner in there}
        if stored:
            self.own.pop(tenant, None)
            self.own |= {} if quota is None else {tenant: quota}
        return stored

    def _put(self, name: bytes, tenant: bytes, size: int, quotas: dict[bytes, int]) -> bool:
        kept, uses = dict(self.blobs), {owner: self.use(owner) for owner, _ in self.blobs.values()}
        uses[tenant] = uses.get(tenant, 0) + size
        while sum(uses.values()) > self.budget:
            owners = {owner for owner, _ in kept.values()}
            beyond = {owner: used - quotas.get(owner, self.common) for owner, used in uses.items()}
            giver = max(owners, key=lambda owner: (beyond[owner], owner == tenant, owner), default=None)
            if giver is None or (beyond[tenant] > 0 and beyond[giver] <= 0):
                return False
            oldest = next(name for name, (owner, _) in kept.items() if owner == giver)
            uses[giver] -= kept.pop(oldest)[1]
        self.blobs = kept | {name: (tenant, size)}
        return True


TENANTS = [b"a", b"b:\0", b"", b"d"]
PUT = st.tuples(st.just("put"), st.integers(0, 19), st.sampled_from(TENANTS), st.integers(1, 7))
HAS = st.tuples(st.just("has"), st.lists(st.integers(0, 19), max_size=4))
DROP = st.tuples(st.just("drop"), st.lists(st.integers(0, 19), max_size=2))
AGREE = st.tuples(st.just("agree"), st.sampled_from(TENANTS[:2]), st.sampled_from([None, 0.0, 0.1, 0.6]))
STEPS = st.lists(st.one_of(PUT, PUT, PUT, PUT, HAS, DROP, AGREE), min_size=8, max_size=30)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS, share=st.sampled_from([0.0, 0.25, 0.35, 0.5, 1.0]))
def test_account(server: Address, steps: list[Any], share: float) -> None:
    """The same blobs as the account in Python keeps, after every step; and the server's books agree with its blobs."""
    admin = client(server)
    admin.flushall()
    tier = tier_of(server[1], budget_bytes=1000, quota=share)
    account = Account(1000, int(1000 * share))
    agreed: dict[bytes, float | None] = {}
    for kind, *rest in steps:
        if kind == "put":
            index, tenant, size = rest[0], rest[1], 100 * rest[2]  # equal sums are likely
            own = agreed.get(tenant)
            expected = account.put(NAMES[index], tenant, size, None if own is None else int(1000 * own))
            assert tier.put(NAMES[index], tenant, [bytes(size)]) == expected
        elif kind == "agree":
            agreed[rest[0]] = rest[1]
            tier.set_quota(*rest)
        elif kind == "has":
            names = [NAMES[index] for index in rest[0]]
            assert tier.has(names) == [account.touch(name) for name in reversed(names)][::-1]
        else:
            tier.drop([NAMES[index] for index in rest[0]])
            for index in rest[0]:
                account.blobs.pop(NAMES[index], None)
        books_agree(admin, account)
    assert tier.stats().errors == 0
    tier.close()


def books_agree(admin: Any, account: Account) -> None:
    start = remote.PREFIX + b"raw:"
    held = {key.removeprefix(start): admin.strlen(key) for key in admin.scan_iter(match=start + b"*", count=1000)}
    assert held == {name: size for name, (_, size) in account.blobs.items()}
    books = admin.hgetall(remote.PREFIX + b"of")
    assert int(books.pop(b"", 0)) == sum(held.values())
    books.pop(b"#", None)
    assert books == {b"raw:" + name: b"%d:%b" % (size, owner) for name, (owner, size) in account.blobs.items()}
    owners = {owner for owner, _ in account.blobs.values()}
    uses = dict(admin.zrange(remote.PREFIX + b"use", 0, -1, withscores=True))
    assert uses == {owner: account.use(owner) for owner in owners}
    quotas = {owner: b"%d" % own for owner, own in account.own.items() if owner in owners}
    assert admin.hgetall(remote.PREFIX + b"quota") == quotas
    for owner in owners:
        order = [b"raw:" + name for name, (of, _) in account.blobs.items() if of == owner]
        assert admin.zrange(remote.PREFIX + b"lru:" + owner, 0, -1) == order


def test_flood_leaves_quotas(server: Address) -> None:
    tier = tier_of(server[1], budget_bytes=100_000, quota=0.25)
    quiet = {name: blob_of(i, 2500) for i, name in enumerate(NAMES[:10])}
    for name, blob in quiet.items():
        assert tier.put(name, b"quiet", [blob])
    for i in range(300):
        assert tier.put(name_of(i.to_bytes(32, "big"), "x"), b"flood", [blob_of(i % 251, 3000)])
    assert tier.has(list(quiet)) == [True] * 10
    assert all(whole(tier, name, 2500) == blob for name, blob in quiet.items())
    stats: TierStats = tier.stats()
    assert stats.used_bytes <= 100_000 and stats.evictions >= 250 and stats.dropped == 0
    assert stats.blobs == 10 + 25
    tier.close()


def test_too_large_for_the_budget(server: Address) -> None:
    tier = tier_of(server[1], budget_bytes=1000)
    assert tier.put(NAMES[0], b"", [bytes(900)])
    assert not tier.put(NAMES[1], b"", [bytes(1001)])
    assert tier.has(NAMES[:2]) == [True, False] and not tier.stats().degraded
    tier.close()


@pytest.mark.parametrize("lost", ["of", "use", "lru:a", "lru:b", "of use", "of lru:a", "use lru:b", "all"])
def test_lost_books(server: Address, lost: str) -> None:
    """Whatever the server loses, writing goes on, and what is there is right."""
    tier, admin = tier_of(server[1], budget_bytes=1000), client(server)
    for i in range(8):
        assert tier.put(NAMES[i], b"ab"[i % 2 : i % 2 + 1], [bytes([i]) * 120])
    if lost == "all":
        admin.flushall()
    else:
        admin.delete(*(remote.PREFIX + key.encode() for key in lost.split()))
    for i in range(8, 40):
        assert tier.put(NAMES[i], b"ab"[i % 2 : i % 2 + 1], [bytes([i]) * 120])
        assert whole(tier, NAMES[i], 120) == bytes([i]) * 120
    assert tier.stats().errors == 0
    named = [member for tenant in b"ab" for member in admin.zrange(remote.PREFIX + b"lru:%c" % tenant, 0, -1)]
    sizes = [admin.strlen(remote.PREFIX + member) for member in named]
    assert set(sizes) == {120} and sum(sizes) <= 1000
    assert sum(use for _, use in admin.zrange(remote.PREFIX + b"use", 0, -1, withscores=True)) == sum(sizes)
    tier.close()
