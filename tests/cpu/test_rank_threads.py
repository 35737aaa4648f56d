"""A step that one rank computes has the cores of all ranks of its host, and the bits of any other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig
from headrace.engine import ranks
from headrace.kernels import dispatch
from headrace.parallel.messages import RankStep, StepGroup, StepPart
from headrace.parallel.threads import RankThreads, one_rank_computes
from tests.support.loopback_ranks import LoopbackRanks, even

pytestmark = pytest.mark.cpu


def part(rank: int, owner: int = 0, tokens: int = 64) -> StepPart:
    return StepPart(list(range(tokens)), 0, [owner], [0, tokens], [rank], 1, tokens)


def test_which_steps_one_rank_computes() -> None:
    def alone(*groups: StepGroup) -> bool:
        return one_rank_computes(RankStep(0, list(groups)))

    assert alone(StepGroup("single", [part(1), part(1)]), StepGroup("single", [part(1, owner=5)]))
    assert not alone(StepGroup("single", [part(0)]), StepGroup("single", [part(1)]))
    assert not alone(StepGroup("single", [part(1)]), StepGroup("ring-q", [part(1)]))  # others attend to its queries
    assert not alone()


@dataclass(frozen=True)
class Noting(RankThreads):
    """Notes how the threads were set."""

    noted: Any = ()

    def use(self, whole: bool) -> None:
        self.noted.append(whole)
        super().use(whole)


def test_threads_of_a_step(ours_of: Any) -> None:
    """All ranks go by the step: rank 0 makes the logits, whoever computed the rows."""
    loopback = LoopbackRanks(ours_of("llama_gqa", "float32"), 2)
    noted: list[list[bool]] = [[], []]
    for rank, notes in zip(loopback.ranks, noted, strict=True):
        rank.threads = Noting(1, 2, noted=notes)
    tokens = torch.randint(0, 100, (128,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for bounds, order in (([0, 128], [1]), even(0, 128, 2)):
        slots = [loopback.slots + chunk for chunk in range(2)]
        prefill = StepPart(tokens, 0, slots, bounds, order, 1, 128)
        found.append(loopback.run([StepGroup("chain" if len(order) > 1 else "single", [prefill])])[0, 0, 127])
    assert noted == [[True, False], [True, False]] and torch.equal(*found)


def test_threads_by_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.cores, "usable", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    before = torch.get_num_threads()

    def threads(**settings: Any) -> RankThreads:
        config = EngineConfig(**settings)
        ranks.set_threads(config)
        return ranks.rank_threads(config)

    try:
        with dispatch.force(None):
            assert threads(context_parallel_size=2) == RankThreads(4, 8)
            assert threads(context_parallel_size=3) == RankThreads(2, 8)
            assert threads(context_parallel_size=16) == RankThreads(1, 8, crowding=2.0)
            assert threads(context_parallel_size=2, tensor_parallel_size=2) == RankThreads(2, 4)
            assert threads(tensor_parallel_size=2) == RankThreads(4, 4)
            assert threads(context_parallel_size=2, threads=1) == RankThreads(1, 2)
            assert threads(context_parallel_size=2, distributed_backend="ray") == RankThreads(4, 4)
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
            assert threads(context_parallel_size=2) == RankThreads(torch.get_num_threads(), torch.get_num_threads())
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        with dispatch.force("torch"):  # whose products have other bits with other threads
            assert threads(context_parallel_size=2) == RankThreads(4, 4)
    finally:
        torch.set_num_threads(before)
