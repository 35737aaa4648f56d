"""A directory of blobs: what a test makes of it and asks of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from headrace.offload.tiers.disk import DiskTier
from tests.support.tier_contract import SIZE

BUDGET = 16 * SIZE


def make(root: Path, budget: int = BUDGET, timeout_s: float = 1.0) -> DiskTier:
    """One that leaves a directory alone for an hour after a failure."""
    return DiskTier(root, budget, timeout_s=timeout_s, retry_s=3600.0)


def pause_over(tier: DiskTier) -> None:
    assert tier.stats().degraded and tier.stats().reason
    tier._health.resume()


def files(root: Path) -> dict[bytes, Path]:
    return {bytes.fromhex(path.name.split("-")[0]): path for path in root.glob("blobs/??/*")}


def drafts(root: Path) -> list[str]:
    return os.listdir(root / "tmp")


def check(tier: DiskTier, root: Path) -> None:
    """Index and directory agree and keep the budget; nothing is left of writes."""
    tier._index.check()
    assert {entry.name: entry.size for entry in tier._index.entries()} == {
        name: path.stat().st_size for name, path in files(root).items()
    }
    assert not drafts(root) and not tier._index.reserved()


def descriptors(root: Path) -> list[int]:
    """Of this process, that lead below root."""
    mine = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{root}/"):
                mine.append(int(fd))
    return mine
