"""The profile: every rank takes part, and those that share a host know it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from headrace.parallel import measure
from tests.support.loopback_ranks import LoopbackRanks


def on_all(loopback: LoopbackRanks, work: Any) -> list[Any]:
    def run(rank: Any) -> Any:
        torch.set_num_threads(1)
        return work(rank)

    with ThreadPoolExecutor(loopback.size) as threads:
        return list(threads.map(run, loopback.ranks))


def test_a_profile_of_ranks_on_one_host(ours_of: Any) -> None:
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 3)
    for figures, attention in on_all(loopback, measure.take_part):
        profile = measure.machine(figures, attention)
        assert profile.link_cpu_s_per_byte == measure.LINK_CPU_S_PER_BYTE
        assert [rows for rows, _ in profile.attention_flops_s] == list(measure.ROWS)
        assert profile.link_bytes_s > 0 and "GB/s" in measure.describe(profile)


def test_ranks_on_hosts_of_their_own_do_not_share(ours_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 3)
    hosts = itertools.count()
    monkeypatch.setattr(measure, "_host", lambda: bytes([next(hosts)] * 16))
    assert on_all(loopback, measure._shares_host) == [False] * 3
    hosts = itertools.cycle((7, 7, 8))  # who draws which is open: two of three share
    assert sorted(on_all(loopback, measure._shares_host)) == [False, True, True]
    alone = LoopbackRanks(ours_of("llama_gqa", "float32"), 1)
    assert on_all(alone, measure._shares_host) == [False]
