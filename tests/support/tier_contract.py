"""What every tier must do (offload.tiers.base). A test module derives from TierContract and gives `make`.

class TestDisk(TierContract):
    def make(self, tmp_path, budget_bytes, quota): return DiskTier(tmp_path / "kv", budget_bytes, quota=quota)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.offload.tiers.base import OwnQuotas, Read, Tier, name_of

SIZE = 4096


def name(number: int | str) -> bytes:
    return name_of(hashlib.sha256(str(number).encode()).digest(), "k")


def content(number: int | str, size: int = SIZE) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(size)


def put(tier: Tier, number: int | str, tenant: bytes = b"", size: int = SIZE) -> bool:
    """In two parts."""
    data = content(number, size)
    return tier.put(name(number), tenant, [data[: size // 3], memoryview(data)[size // 3 :]])


def get(tier: Tier, number: int | str, size: int = SIZE, offset: int = 0) -> bytes | None:
    into = bytearray(size)
    done = tier.read([Read(name(number), offset, memoryview(into))])
    return bytes(into) if done == [True] else None


def held(tier: Tier, numbers: range | list[int]) -> list[int]:
    return [number for number, there in zip(numbers, tier.has([name(n) for n in numbers]), strict=True) if there]


class TierContract:
    shares_budget = True
    """Whether the tier keeps a budget and quotas itself."""

    def make(self, tmp_path: Path, budget_bytes: int, quota: float) -> Tier:
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make(tmp_path, 8 * SIZE, 0.25)
        yield tier
        tier.close()

    def test_what_was_put_is_read(self, tier: Tier) -> None:
        assert put(tier, 1, b"a")
        assert tier.has([name(0), name(1), name(1)]) == [False, True, True]
        assert get(tier, 1) == content(1)
        stats = tier.stats()
        assert (stats.writes, stats.written_bytes, stats.reads, stats.read_bytes) == (1, SIZE, 1, SIZE)
        assert (stats.misses, stats.dropped, stats.bad, stats.errors, stats.degraded) == (0, 0, 0, 0, False)

    def test_parts(self, tier: Tier) -> None:
        """Parts of two blobs, some following each other, some not, one empty, one missing, two beyond the end."""
        put(tier, 1), put(tier, 2)
        wanted = [(1, 0, 10), (1, 10, 90), (1, 100, 0), (1, 100, 5), (2, 105, 7), (2, 5, 7), (3, 0, 4), (1, 4000, 96),
                  (1, 4000, 97), (2, SIZE, 1), (2, 0, SIZE)]  # fmt: skip
        buffers = [bytearray(size) for _, _, size in wanted]
        reads = [Read(name(n), at, memoryview(buffer)) for (n, at, _), buffer in zip(wanted, buffers, strict=True)]
        done = tier.read(reads)
        assert done == [at + size <= SIZE and n != 3 for n, at, size in wanted]
        for ok, (number, at, size), buffer in zip(done, wanted, buffers, strict=True):
            assert not ok or bytes(buffer) == content(number)[at : at + size]
        assert tier.stats().misses == 3

    def test_many_parts_in_order(self, tier: Tier) -> None:
        """More than one system call takes."""
        put(tier, 1)
        into = bytearray(SIZE)
        view = memoryview(into)
        assert all(tier.read([Read(name(1), at, view[at : at + 2]) for at in range(0, SIZE, 2)]))
        assert bytes(into) == content(1)

    def test_nothing_asked(self, tier: Tier) -> None:
        assert tier.has([]) == [] == tier.read([])
        tier.drop([])
        assert tier.stats().misses == 0

    def test_a_blob_is_left_as_it_is(self, tier: Tier) -> None:
        assert put(tier, 1, b"a")
        assert tier.put(name(1), b"b", [b"other"])
        assert get(tier, 1) == content(1)
        assert tier.stats().writes == 1

    def test_parts_may_change_after_put(self, tier: Tier) -> None:
        data = bytearray(content(1))
        tier.put(name(1), b"", [data])
        data[:] = bytes(SIZE)
        assert get(tier, 1) == content(1)

    def test_dropped(self, tier: Tier) -> None:
        put(tier, 1), put(tier, 2)
        tier.drop([name(1), name(7)])
        assert held(tier, [1, 2, 7]) == [2]
        assert get(tier, 1) is None
        assert tier.stats().bad == 1
        assert put(tier, 1) and get(tier, 1) == content(1)

    def test_closed(self, tier: Tier) -> None:
        put(tier, 1)
        tier.close()
        tier.close()
        assert not put(tier, 2) and held(tier, [1]) == [] and get(tier, 1) is None
        tier.drop([name(1)])
        tier.stats()

    def test_threads(self, tier: Tier) -> None:
        """Whatever is read is right, while others put, drop and evict."""

        def work(seed: int) -> None:
            for turn in range(60):
                number = (seed * 7 + turn * 5) % 12
                if turn % 3 == 0:
                    put(tier, number, b"%d" % (number % 3))
                elif turn % 20 == 1:
                    tier.drop([name(number)])
                found = get(tier, number)
                assert found is None or found == content(number)
                assert tier.stats().used_bytes <= 8 * SIZE

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert tier.stats().errors == 0

    # Budget and tenants

    def needs_budget(self) -> None:
        if not self.shares_budget:
            pytest.skip("the store itself keeps its budget")

    def test_a_tenant_with_a_quota_of_its_own(self, tier: Tier) -> None:
        """It keeps that much in the flood of another; once it has the common quota, both get half."""
        self.needs_budget()
        assert isinstance(tier, OwnQuotas)
        tier.set_quota(b"a", 0.75)
        for number in range(6):
            put(tier, number, b"a")
        for number in range(10, 30):
            assert put(tier, number, b"b")
        assert held(tier, range(6)) == list(range(6))
        tier.set_quota(b"a", None)
        put(tier, 6, b"a")
        for number in range(30, 50):
            put(tier, number, b"b")
        assert len(held(tier, range(7))) == 4

    def test_gauges(self, tier: Tier) -> None:
        self.needs_budget()
        put(tier, 1), put(tier, 2, size=100)
        stats = tier.stats()
        assert (stats.used_bytes, stats.blobs, stats.budget_bytes) == (SIZE + 100, 2, 8 * SIZE)
        stats.used_bytes = 0
        assert tier.stats().used_bytes == SIZE + 100

    def test_least_recently_used_goes(self, tier: Tier) -> None:
        self.needs_budget()
        for number in range(8):
            put(tier, number)
        tier.has([name(0), name(1)])
        put(tier, 8), put(tier, 9)
        assert held(tier, range(10)) == [0, 1, 4, 5, 6, 7, 8, 9]
        assert tier.stats().evictions == 2

    def test_a_run_loses_its_end_first(self, tier: Tier) -> None:
        self.needs_budget()
        for number in range(8):
            put(tier, number)
        tier.has([name(number) for number in range(8)])
        put(tier, 8), put(tier, 9)
        assert held(tier, range(10)) == [0, 1, 2, 3, 4, 5, 8, 9]

    def test_too_large(self, tier: Tier) -> None:
        self.needs_budget()
        put(tier, 1)
        assert not put(tier, 2, size=8 * SIZE + 1)
        assert held(tier, [1, 2]) == [1]
        assert tier.stats().dropped == 1
        assert put(tier, 3, size=8 * SIZE)

    def test_flood(self, tier: Tier) -> None:
        """Ten times the budget by one tenant leaves another its quota, which is the whole of what it has."""
        self.needs_budget()
        assert put(tier, 0, b"a") and put(tier, 1, b"a")
        for number in range(2, 82):
            assert put(tier, number, b"b")
        assert held(tier, range(82)) == [0, 1, *range(76, 82)]
        assert tier.stats().used_bytes == 8 * SIZE

    def test_flood_takes_what_is_above_the_quota(self, tier: Tier) -> None:
        self.needs_budget()
        for number in range(8):
            put(tier, number, b"a")
        for number in range(8, 20):
            put(tier, number, b"b")
        mine = held(tier, range(8))
        assert len(mine) >= 2 and mine == list(range(8 - len(mine), 8))
