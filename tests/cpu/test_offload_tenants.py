"""Tenants: no tier gives one what another has stored, and none can flush another's quota out of any tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams
from headrace.engine.stored_prefixes import StoredPrefixes
from headrace.kv.cache import KVCache
from headrace.offload.tiers.base import Read, Tier
from headrace.types import CHUNK
from tests.support.offloading import forced, stored
from tests.support.redis_servers import fake_server

PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
POOL = 8 * CHUNK
"""So small that every request evicts what the one before has left."""
GIB = 1 << 30
BLOB = 98_432
"""Of K and V of a chunk of the shipped model, raw."""


class Asked(NamedTuple):
    """A request: one of three texts, cut at so many tokens; the tenant; tokens that are public."""

    text: int
    length: int
    salt: str | None
    public: int

    @property
    def tokens(self) -> list[int]:
        """Texts 0 and 1 have 130 tokens in common, 2 has none with them."""
        differs = 0 if self.text == 2 else 130
        return [(i * 37 + (i >= differs) * self.text * 101) % 1900 + 50 for i in range(self.length)]

    def scope(self, chunk: int) -> str | None:
        """Whose the chunk is; None: everybody's."""
        return None if self.salt is None or chunk < self.public // CHUNK else self.salt


requests = st.builds(
    Asked,
    text=st.sampled_from([0, 0, 1, 2]),
    length=st.sampled_from([129, 200, 257, 330]),
    salt=st.sampled_from([None, "a", "b", "ab"]),
    public=st.sampled_from([0, 0, 63, 64, 130, 400]),
)


class Watched:
    """An engine over some tiers, and the digests that were read from any of them."""

    def __init__(self, **tiers: Any) -> None:
        self.llm = LLM("tiny", kv_cache_tokens=POOL, kv_offload_timeout_s=10.0, kv_offload_activations="on", **tiers)
        assert self.llm.engine.offload is not None
        self.offload = self.llm.engine.offload
        self.offload.choose = forced(0.0, 0.3)
        self.read: set[bytes] = set()
        self.owners: dict[bytes, tuple[str | None, tuple[int, ...]]] = {}
        for tier in self.offload.tiers.peers.agents[0].opened.tiers.tiers:
            self._watch(tier)

    def _watch(self, tier: Tier) -> None:
        plain = tier.read

        def read(reads: Sequence[Read]) -> list[bool]:
            there = plain(reads)
            self.read |= {read.name[:32] for read, found in zip(reads, there, strict=True) if found}
            return there

        tier.read = read  # type: ignore[method-assign]

    def ask(self, asked: Asked) -> list[int]:
        """The answer; afterwards nothing is in the pool, and all of it is stored."""
        request = dict(cache_salt=asked.salt, public_prefix_tokens=asked.public)
        output = self.llm.generate([asked.tokens], PARAMS, **request)[0]  # type: ignore[arg-type]
        self.settle()
        return output.token_ids

    def settle(self) -> None:
        stored(self.llm)
        self.llm.engine.cache.tree.clear()

    def own(self, asked: Asked) -> set[bytes]:
        """Names of the request's chunks. No two of different owners, or of different tokens, have the same name."""
        cache: KVCache = self.llm.engine.cache
        table = cache.open(asked.tokens, salt=asked.salt, public_tokens=asked.public)
        digests = [table.digest(chunk) for chunk in range(asked.length // CHUNK)]
        cache.close(table)
        for chunk, digest in enumerate(digests):
            owner = asked.scope(chunk), tuple(asked.tokens[: (chunk + 1) * CHUNK])
            assert self.owners.setdefault(digest, owner) == owner, "one name for what two tenants own"
        return set(digests)


@pytest.fixture(scope="module")
def cold() -> LLM:
    return LLM("tiny", kv_cache_tokens=POOL, enable_prefix_caching=False)


@pytest.fixture(scope="module", params=["all", "disk", pytest.param("remote", marks=pytest.mark.matrix)])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """All three tiers, with little room in the first, so that the others are asked too; disk alone; remote alone."""
    disk = {"kv_offload_path": str(tmp_path_factory.mktemp("tenants") / "kv")}
    with fake_server() as (_, port):
        remote = {"kv_remote_url": f"redis://127.0.0.1:{port}/0"}
        tiers: dict[str, Any] = {"disk": disk, "remote": remote, "all": {"kv_offloading_size": 0.001, **disk, **remote}}
        made = Watched(**tiers[request.param])
        yield made
        made.llm.close()


@given(several=st.lists(requests, min_size=2, max_size=5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_own_and_public_chunks_come_back(watched: Watched, cold: LLM, several: list[Asked]) -> None:
    """What is stored stays from example to example, so that there is ever more that could be mixed up."""
    for asked in several:
        watched.read.clear()
        answer = watched.ask(asked)
        assert watched.read <= watched.own(asked), "a chunk of somebody else was read"
        assert answer == cold.generate([asked.tokens], PARAMS)[0].token_ids


def test_what_there_is_comes_back(watched: Watched) -> None:
    """So that the test above does not pass because nothing ever does."""
    first = Asked(0, 330, "one", 130)
    watched.ask(first)
    same, public, none = first, first._replace(salt="two"), first._replace(salt="three", public=0)
    for asked, chunks in ((same, 5), (public, 2), (none, 0)):
        watched.read.clear()
        watched.ask(asked)
        assert len(watched.read) == chunks


@pytest.mark.parametrize("tier", ["host", "disk", "remote"])
def test_a_flood_leaves_the_quota_of_others(tier: str, tmp_path: Path) -> None:
    """A tenant with 5 chunks; another stores four times what the tier holds."""
    budget = 20.5 * BLOB / GIB
    given: dict[str, Any] = {"host": {"kv_offloading_size": budget},
                             "disk": {"kv_offload_path": str(tmp_path / "kv"), "kv_offload_disk_size": budget},
                             "remote": {"kv_remote_size": budget}}[tier]  # fmt: skip
    with fake_server() as (_, port):
        if tier == "remote":
            given["kv_remote_url"] = f"redis://127.0.0.1:{port}/0"
        llm = LLM("tiny", kv_cache_tokens=POOL, kv_offload_timeout_s=10.0, kv_tenant_quota=0.3, **given)
        offload = llm.engine.offload
        assert offload is not None
        offload.choose = forced(0.0, 0.0)
        quiet = Asked(0, 330, "quiet", 0)
        truth = llm.generate([quiet.tokens], PARAMS, cache_salt="quiet")[0].token_ids
        for number in range(16):
            flood = [token + number for token in Asked(2, 330, None, 0).tokens]
            llm.generate([flood], PARAMS, cache_salt="flood")
        stored(llm)
        llm.engine.cache.tree.clear()
        told = offload.tiers.stats()[tier]
        assert told.evictions > 40 and told.used_bytes <= told.budget_bytes
        again = llm.generate([quiet.tokens], PARAMS, cache_salt="quiet")[0]
        assert again.token_ids == truth and again.metrics.restored_tokens == 330 // CHUNK * CHUNK
        llm.close()


@contextmanager
def on_disk_of(chunks: int, folder: Path) -> Iterator[tuple[LLM, StoredPrefixes]]:
    """An engine over a disk of so many chunks, which loads whatever is stored."""
    disk: dict[str, Any] = {"kv_offload_path": str(folder / "kv"), "kv_offload_disk_size": (chunks + 0.5) * BLOB / GIB}
    with LLM("tiny", kv_cache_tokens=POOL, kv_offload_timeout_s=10.0, **disk) as llm:
        offload = llm.engine.offload
        assert offload is not None
        offload.choose = forced(0.0, 0.0)
        yield llm, offload


def test_new_salts_of_one_tenant_leave_another_its_quota(tmp_path: Path) -> None:
    """Neither has a quota of its own: on a disk of 24 chunks acme keeps 5, which is less than a quarter."""
    with on_disk_of(24, tmp_path) as (llm, offload):
        acme: dict[str, Any] = {"tenant": "acme", "cache_salt": "acme"}
        quiet = Asked(0, 330, None, 0).tokens
        first = llm.generate([quiet], PARAMS, **acme)[0]
        stored(llm)
        for number in range(30):
            llm.generate([Asked(2, 129, None, 0).tokens], PARAMS, tenant="guests", cache_salt=f"guest {number}")
            stored(llm)
        llm.engine.cache.tree.clear()
        told = offload.tiers.stats()["disk"]
        assert told.evictions > 30 and told.blobs == 24
        again = llm.generate([quiet], PARAMS, **acme)[0]
        assert again.token_ids == first.token_ids and again.metrics.restored_tokens == 330 // CHUNK * CHUNK


def test_quotas_of_two_tenants(tmp_path: Path) -> None:
    """On a disk of 20 chunks acme, with two salts, keeps all of its 10; guests flood it, under a new salt each time."""
    with on_disk_of(20, tmp_path) as (llm, offload):
        acme: dict[str, Any] = {"tenant": "acme", "tier_quota": 0.6}
        quiet = Asked(0, 330, None, 0).tokens
        truth = []
        for salt in ("one", "two"):
            truth += llm.generate([quiet], PARAMS, cache_salt=salt, **acme)
            stored(llm)
        for number in range(12):
            own: dict[str, Any] = {"cache_salt": f"guest {number}", "tenant": "guests", "tier_quota": 0.1}
            llm.generate([Asked(2, 330, None, 0).tokens], PARAMS, **own)
            stored(llm)
        llm.engine.cache.tree.clear()
        (index,) = (tier._index for tier in offload.tiers.peers.agents[0].opened.tiers.tiers)  # type: ignore[attr-defined]
        assert [blobs for _, blobs in index.usage().values()] == [10, 10], "a tenant counts once, whatever its salts"
        for salt, first in zip(("one", "two"), truth, strict=True):
            again = llm.generate([quiet], PARAMS, cache_salt=salt, kv_share=0.9, **acme)[0]
            assert again.token_ids == first.token_ids and again.metrics.restored_tokens == 330 // CHUNK * CHUNK
