"""Tensor ranks inside context ranks: every strategy gives the bits that it gives with undivided context ranks."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kv.storage import KVStorage
from headrace.models.decoder import load_decoder
from headrace.parallel.messages import RankStep, StepGroup
from headrace.parallel.rank import Hidden, Rank
from headrace.parallel.tensor import TensorGroup
from headrace.parallel.transport import LoopbackHub, RankLost
from headrace.strategies import KEEPS_ALL, STRATEGIES
from headrace.types import CHUNK
from tests.support.checkpoints import FolderOf, OursOf
from tests.support.kind_sizes import VOCAB
from tests.support.loopback_ranks import Conversation, LoopbackRanks, even, shard_of, zigzag

PROMPTS = (300, 64, 1, 130)


class Mesh(LoopbackRanks):
    """`size` context ranks of `tensor` tensor ranks each, every one with its own weights and pool."""

    def __init__(self, folder: Path, dtype: Any, size: int, tensor: int) -> None:
        self.size, self.slots, self.steps, self.free = size, 128, 0, [0] * size
        inner = [LoopbackHub(tensor) for _ in range(size)]
        outer = [LoopbackHub(size) for _ in range(tensor)]
        self.hubs = inner + outer
        self.mesh = {
            (c, t): self._rank(folder, dtype, TensorGroup(inner[c].transport(t)), outer[t].transport(c))
            for c in range(size)
            for t in range(tensor)
        }

    def _rank(self, folder: Path, dtype: Any, group: TensorGroup, transport: Any) -> Rank:
        decoder = load_decoder(folder, dtype, tensor=group)
        storage = KVStorage(decoder.config.attention, self.slots, decoder.dtype)
        return Rank(decoder, storage, "cpu", transport)

    def run(self, groups: list[StepGroup]) -> Hidden:
        """What context rank 0 found: the same on all of its tensor ranks."""
        step = RankStep(self.steps, groups)
        self.steps += 1

        def work(place: tuple[int, int]) -> Hidden:
            torch.set_num_threads(1)
            try:
                return self.mesh[place].run(step)
            except BaseException as error:
                for hub in self.hubs:
                    hub.fail(f"{place}: {error!r}")
                raise

        with ThreadPoolExecutor(len(self.mesh)) as threads:
            futures = {place: threads.submit(work, place) for place in self.mesh}
        errors = [error for future in futures.values() if (error := future.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, RankLost)):
            raise error
        found = [future.result() for (context, _), future in futures.items() if context == 0]
        for other in found[1:]:
            assert other.keys() == found[0].keys()
            assert all(torch.equal(other[key], found[0][key]) for key in other)
        assert not any(hub.left_over() for hub in self.hubs)
        return found[0]


def talk_to(loopback: LoopbackRanks, strategy: str) -> list[Tensor]:
    """Prompts of uneven lengths by `strategy`, then a token of each by ring pass-Q: hidden states."""
    draw = random.Random(1)
    talks, parts = [Conversation(loopback) for _ in PROMPTS], []
    for talk, count in zip(talks, PROMPTS, strict=True):
        bounds, ranks = ([0, count], [1]) if strategy == "single" else cuts(strategy, count, loopback.size)
        parts.append(talk.part(draw.choices(range(VOCAB), k=count), bounds, ranks, owner(strategy, bounds, ranks), 70))
    found = loopback.run([StepGroup(strategy, parts)])
    parts = []
    for talk in talks:
        home = talk.home()
        parts.append(talk.part([7], [len(talk.tokens), len(talk.tokens) + 1], [home], lambda chunk, home=home: home))
    decoded = loopback.run([StepGroup("ring-q", parts)])
    return [row for states in (found, decoded) for _, row in sorted(states.items())]


def cuts(strategy: str, count: int, size: int) -> tuple[list[int], list[int]]:
    return zigzag(0, count, size) if strategy.startswith("ring") else even(0, count, size)


def owner(strategy: str, bounds: list[int], ranks: list[int]) -> Any:
    if strategy in KEEPS_ALL:
        return lambda chunk: ranks[-1]
    return lambda chunk: shard_of(bounds, ranks, chunk * CHUNK)


def check(loopback: LoopbackRanks, mesh: Mesh, strategy: str) -> None:
    truth, ours = talk_to(loopback, strategy), talk_to(mesh, strategy)
    assert len(ours) == len(truth) == sum(min(70, count) for count in PROMPTS) + len(PROMPTS)
    assert all(torch.equal(x, y) for x, y in zip(ours, truth, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["llama_gqa", "falcon7", "falcon_rw", "qwen3_moe_mixed", "olmoe", "gpt_oss"])
def test_two_by_two(kind: str, strategy: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    """GQA; MQA, whose KV head both tensor ranks hold; ALiBi, whose slopes are those of a rank's own heads; experts, of
    which a rank has a part of each; keys that are normed over the heads of both ranks; sinks of a rank's own heads."""
    path = folder_of(kind)
    check(LoopbackRanks(ours_of(kind, "bfloat16"), 2), Mesh(path, "bfloat16", 2, 2), strategy)


@pytest.mark.parametrize("strategy", ["chain", "ring-kv"])
def test_more_tensor_ranks_than_kv_heads(strategy: str, folder_of: FolderOf, ours_of: OursOf) -> None:
    path = folder_of("llama_gqa")
    check(LoopbackRanks(ours_of("llama_gqa", "float32"), 3), Mesh(path, "float32", 3, 4), strategy)
