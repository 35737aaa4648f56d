"""Host and disk keep the tiers' contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from headrace.config import EngineConfig, KVTiers, OffloadFormat
from headrace.config.offload import RAW_IF_UNUSED, OffloadSettings
from headrace.config.tiers import DiskTierSettings, TierSettings
from headrace.offload.tiers import open as opening
from headrace.offload.tiers.base import Part, Tier
from headrace.offload.tiers.disk import DiskTier
from headrace.offload.tiers.host import HostBuffer, HostTier
from tests.support.tier_contract import SIZE, TierContract, content, get, name, put


class TestHost(TierContract):
    def make(self, tmp_path: Path, budget_bytes: int, quota: float) -> Tier:
        return HostTier(budget_bytes, quota=quota)


class TestDisk(TierContract):
    def make(self, tmp_path: Path, budget_bytes: int, quota: float) -> Tier:
        return DiskTier(tmp_path / "kv", budget_bytes, quota=quota, timeout_s=60.0)  # no failure over a slow disk


@pytest.mark.parametrize(
    ("budget", "quota", "remedy"), [(0, 0.25, "give it room"), (10, 1.5, "between 0 and 1"), (10, -0.1, "between 0")]
)
def test_refused(tmp_path: Path, budget: int, quota: float, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        HostTier(budget, quota=quota)
    with pytest.raises(ValueError, match=remedy):
        DiskTier(tmp_path / "kv", budget, quota=quota)


class Allocator:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> HostBuffer:
        self.sizes.append(size)
        return np.empty(size, dtype=np.uint8)


def test_buffers_are_used_again() -> None:
    allocate = Allocator()
    tier = HostTier(4 * SIZE, allocate=allocate)
    for number in range(20):
        put(tier, number)
    assert allocate.sizes == [SIZE] * 4
    tier.drop([name(19)])
    put(tier, 20)
    assert len(allocate.sizes) == 4 and get(tier, 20) == content(20)


def test_free_buffers_count_against_the_budget() -> None:
    allocate = Allocator()
    tier = HostTier(4 * SIZE, allocate=allocate)
    for number in range(4):
        put(tier, number)
    tier.drop([name(0), name(1)])
    assert tier._free_bytes == 2 * SIZE
    put(tier, 4, size=SIZE + 1)
    assert tier._free_bytes + tier.stats().used_bytes <= 4 * SIZE
    assert get(tier, 2) == content(2)


def test_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    def allocate(size: int) -> HostBuffer:
        raise MemoryError("none left")

    tier = HostTier(4 * SIZE, allocate=allocate)
    assert not put(tier, 1) and not put(tier, 2)
    stats = tier.stats()
    assert (stats.errors, stats.dropped, stats.used_bytes) == (2, 2, 0)
    assert len(caplog.records) == 1 and "kv_offloading_size" in caplog.text


def test_a_blob_that_is_being_read_is_not_overwritten() -> None:
    """The buffer of an evicted blob is not used again under a reader."""
    tier = HostTier(2 * SIZE)
    put(tier, 1)
    tier._readers[name(1)] += 1
    seen = tier._buffers[name(1)]
    tier.drop([name(1)])
    put(tier, 2), put(tier, 3), put(tier, 4)
    assert bytes(seen) == content(1)
    assert all(buffer is not seen for buffer in tier._buffers.values())


def test_what_is_lent_stays_as_it_is() -> None:
    """Until it is given back; then its buffer is used again."""
    tier = HostTier(SIZE)
    put(tier, 1)
    lent, behind, absent = tier.lend([Part(name(1), 3, 5), Part(name(1), SIZE - 1, 2), Part(name(2), 0, 1)])
    assert lent is not None and bytes(lent) == content(1)[3:8]
    assert behind is None and absent is None
    assert (tier.stats().reads, tier.stats().read_bytes, tier.stats().misses) == (1, 5, 2)
    tier.drop([name(1)])
    put(tier, 2)
    assert bytes(lent) == content(1)[3:8] and get(tier, 2) == content(2)
    tier.give_back([name(1)])
    tier.drop([name(2)])
    put(tier, 3), put(tier, 4)
    assert get(tier, 4) == content(4)


@dataclass(frozen=True, slots=True)
class TapeSettings(TierSettings):
    kind: ClassVar[str] = "tape"
    label: ClassVar[str] = "tape"
    opens: ClassVar[str] = "tape:open_tier"

    size: float = 1.0
    format: OffloadFormat = "raw"


@pytest.mark.parametrize("formats", list(product((None, "raw", "int8", "int4"), repeat=3)))
def test_a_new_tier_changes_no_name_of_stored_chunks(formats: tuple[OffloadFormat | None, ...]) -> None:
    """Those that host, disk and remote have stored: one that is not in use is raw there. The new one adds its own."""
    made = ({"size": 1.0}, {"path": "/kv"}, {"url": "redis://there"})
    asked = [
        kind(format=format, **how)  # type: ignore[arg-type]
        for kind, format, how in zip(RAW_IF_UNUSED, formats, made, strict=True)
        if format
    ]
    assert KVTiers(each=tuple(asked)).formats == tuple(format or "raw" for format in formats)
    tape = KVTiers(each=(*asked, TapeSettings(format="int8")))
    assert tape.formats == (*(format or "raw" for format in formats), "int8")


def test_a_new_tier_is_a_record_and_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those asked for are opened, in their order; what is said of each, it says itself."""

    def open_tape(own: TapeSettings, shared: OffloadSettings) -> HostTier:
        tape = HostTier(int(own.size))
        tape.kind = own.kind  # type: ignore[misc]
        return tape

    tape = SimpleNamespace(open_tier=open_tape, findings=lambda own, shared, free_memory: {"tape": "rewound"})
    monkeypatch.setitem(sys.modules, "tape", tape)
    asked = KVTiers(each=(TapeSettings(), DiskTierSettings(path=str(tmp_path), format="int8", size=0.5)))
    tiers = opening.open_tiers(asked)
    assert [(tier.kind, tier.format) for tier in tiers.tiers] == [("tape", "raw"), ("disk", "int8")]
    assert tiers.tiers[1].stats().budget_bytes == 1 << 29
    tiers.close(1.0)
    monkeypatch.setattr("headrace.offload.tiers.disk_check.PROBE_BYTES", 1 << 60)
    config = EngineConfig()
    object.__setattr__(config, "outside", asked)
    assert list(opening.findings(config, 0)) == ["tape", "disk", "disk free GiB", "disk rates"]
