"""The profile: every rank takes part, and those that share a host know it."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from headrace.parallel import measure, probe
from headrace.parallel.probe import _extent
from headrace.parallel.threads import RankThreads
from tests.support.loopback_ranks import LoopbackRanks
from tests.support.planner_oracles import GQA, MACHINE


def on_all(loopback: LoopbackRanks, work: Any) -> list[Any]:
    def run(rank: Any) -> Any:
        torch.set_num_threads(1)
        return work(rank)

    with ThreadPoolExecutor(loopback.size) as threads:
        return list(threads.map(run, loopback.ranks))


def test_a_profile_of_ranks_on_one_host(ours_of: Any) -> None:
    """The first one also measures what it attains with all cores, and sets its threads back."""
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 3)
    for rank in loopback.ranks:
        rank.threads = RankThreads(1, 2, crowding=1.5)
    first, *others = on_all(loopback, lambda rank: (measure.take_part(rank), torch.get_num_threads()))
    for profile, threads in (first, *others):
        assert profile.link_cpu_s_per_byte == measure.LINK_CPU_S_PER_BYTE
        assert [rows for rows, _ in profile.attention_flops_s] == list(measure.ROWS)
        assert profile.link_bytes_s > 0 and "GB/s" in measure.describe(profile)
        assert (profile.cores, threads) == (1, 1)
        assert {name for name, _ in profile.exchange_s} == {"chain", "gather", "ring-kv", "ring-q"}
    assert first[0].one_engine is not None and first[0].one_engine.cores == first[0].alone.cores == 2
    assert "(one engine with all 2 cores: linear " in measure.describe(first[0])
    assert [profile.one_engine for profile, _ in others] == [None, None]
    assert loopback.hub.left_over() == 0


@pytest.mark.parametrize(("given", "repeats"), [(None, 1), (2, 2)])
def test_ranks_that_compute_together_do_not_go_by_their_own_time(
    ours_of: Any, monkeypatch: pytest.MonkeyPatch, given: int | None, repeats: int
) -> None:
    """A tensor rank that measured a slow prefill fewer times than the others would leave them waiting."""
    monkeypatch.setattr(probe, "SLOW_S", 0.0)
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 1)
    short = probe.Probe(loopback.ranks[0], given)
    monkeypatch.setattr(short, "_run", lambda groups: 1.0)
    short._warm([])
    assert short.repeats == repeats


def test_a_probe_is_as_long_as_a_layer_is_light() -> None:
    """Long and deep where layers are small, and never longer or deeper than the model."""
    assert _extent(GQA, 32768) == (1024, 4)
    assert _extent(GQA, 100) == (100, 4)
    assert _extent(msgspec.structs.replace(GQA, layers=1), 32768) == (1024, 1)
    heavy = msgspec.structs.replace(GQA, hidden=8192, heads=64, mlp=28672)
    assert _extent(heavy, 32768) == (128, 2)


def test_ranks_on_hosts_of_their_own_do_not_share(ours_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 3)
    hosts = itertools.count()
    monkeypatch.setattr(measure, "_host", lambda: bytes([next(hosts)] * 16))
    assert on_all(loopback, measure._shares_host) == [False] * 3
    hosts = itertools.cycle((7, 7, 8))  # who draws which is open: two of three share
    assert sorted(on_all(loopback, measure._shares_host)) == [False, True, True]
    alone = LoopbackRanks(ours_of("llama_gqa", "float32"), 1)
    assert on_all(alone, measure._shares_host) == [False]


@pytest.mark.parametrize("tensor", [True, False])
def test_tensor_ranks_cut_alike_whatever_each_has_measured(tensor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute the same rows together, and a message longer than what waits for it would end a process. Ranks that
    share no rows go by what was measured."""
    monkeypatch.setattr(probe, "shape_of", lambda decoder: GQA)
    one: Any = probe.Probe.__new__(probe.Probe)
    one.of = one.rank = SimpleNamespace(decoder=None, states=None)
    one.size, one.me, one.rows, one.given = 2, 0, 1024, 2 if tensor else None
    one._told = one._group = lambda *given: given if len(given) > 1 else given[0]
    slow = msgspec.structs.replace(MACHINE, attention_flops_s=((16, 8e9), (64, 9e9)))
    found = [[(name, tuple(bounds)) for name, bounds, *_ in one._exchanges(each)] for each in (MACHINE, slow)]
    assert (found[0] == found[1]) == tensor and len(found[0]) > 2
