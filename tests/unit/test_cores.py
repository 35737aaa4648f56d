from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace import cgroups, cores

ALL = {0, 1, 2, 3, 4, 5, 6, 7}


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups, on a machine of eight cores."""
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: ALL)
    return tmp_path


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_affinity_mask_counts_where_nothing_limits(groups: Path) -> None:
    assert cores.quota() is None
    assert cores.usable() == 8


@pytest.mark.parametrize(("limit", "usable"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1),
                                               ("1600000 100000", 8), ("100000 0", 8), ("", 8)])  # fmt: skip
def test_quota_of_a_container(groups: Path, limit: str, usable: int) -> None:
    put(groups / "membership", "0::/")
    put(groups / "cpu.max", limit)
    assert cores.usable() == usable


def test_the_tightest_group_above_counts(groups: Path) -> None:
    put(groups / "membership", "0::/machine/pod/inner")
    put(groups / "machine/pod/inner/cpu.max", "max 100000")
    put(groups / "machine/pod/cpu.max", "150000 100000")
    put(groups / "machine/cpu.max", "400000 100000")
    assert cores.quota() == 1.5
    assert cores.usable() == 2


def test_groups_of_the_first_kind(groups: Path) -> None:
    put(groups / "membership", "5:memory:/x\n4:cpu,cpuacct:/docker/abc\n0::/")
    put(groups / "cpu/docker/abc/cpu.cfs_quota_us", "300000")
    put(groups / "cpu/docker/abc/cpu.cfs_period_us", "100000")
    put(groups / "cpu/cpu.cfs_quota_us", "-1")
    put(groups / "cpu/cpu.cfs_period_us", "100000")
    assert cores.usable() == 3


def test_a_group_outside_of_what_the_container_sees(groups: Path) -> None:
    put(groups / "membership", "0::/../../outside")
    put(groups / "cpu.max", "200000 100000")
    assert cores.usable() == 2


@pytest.mark.parametrize("told", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    cores.let_idle_threads_sleep()
    found = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT") if name in os.environ}
    assert found == (told or {"GOMP_SPINCOUNT": cores.SPINS})
