"""Several ranks on a fake device, the Triton kernels in their interpreter: every strategy gives one rank's bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is built for Linux only")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu has ranks on it", allow_module_level=True)

from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.models.decoder import Decoder, load_decoder
from headrace.parallel.messages import StepGroup
from headrace.types import CHUNK
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import ranks_on
from tests.support.loopback_ranks import Conversation, Late, LoopbackRanks

SHAPE = CheckpointShape(hidden=16, layers=2, heads=1, kv_heads=1, head_dim=16, mlp=16, vocab=64, context=2048)
CACHED, OWN, NEW = 8, 1, 12
"""Chunks that both sequences have, that each has by itself, and tokens computed behind these. A span is 8 chunks."""


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    made = FakeDevice()
    with ranks_on(made, monkeypatch):
        yield made


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))

    @lru_cache(None)
    def made() -> Decoder:
        return load_decoder(folder, "float32", device=torch.device("cpu"))

    return made


def ranks(decoder: Decoder, size: int) -> LoopbackRanks:
    return LoopbackRanks(decoder, size, slots=16, backend="triton")


def cached(loopback: LoopbackRanks) -> list[Conversation]:
    """Two sequences on the same prefix of a span, whose end lies on the last rank, each with a chunk of its own."""
    last = loopback.size - 1
    common = [loopback.take(0 if chunk < 5 else last) for chunk in range(CACHED)]
    talks = []
    for number in range(2):
        talk = Conversation(loopback)
        talk.tokens = [0] * CHUNK * (CACHED + OWN)
        talk.slots = [*common, loopback.take(min(number, last))]
        talks.append(talk)
    for number, slot in enumerate([*common, talks[0].slots[-1], talks[1].slots[-1]]):
        g = torch.Generator().manual_seed(number)
        rank = loopback.ranks[slot // loopback.slots]
        for pool in rank.pool.pools:
            for x in pool.tensors:
                x[slot % loopback.slots] = torch.randn(x.shape[1:], generator=g)
    return talks


def computed(loopback: LoopbackRanks, strategy: str) -> list[Tensor]:
    """States of new tokens of both, computed together, and of one more of each that are decoded together."""
    size, parts, talks = loopback.size, [], cached(loopback)
    for number, talk in enumerate(talks):
        start, tokens = len(talk.tokens), [number + at for at in range(NEW)]
        end = start + NEW
        bounds, of = [start, end], [0]
        if strategy.startswith("ring"):  # shards begin with chunks: the second has its rows on another rank
            bounds, of = [start, end, end, end], [number, 1 - number, 1 - number]
        elif size > 1:
            bounds, of = [start, start + 7, *[end] * (size - 1)], list(range(size))
        parts.append(talk.part(tokens, bounds, of, lambda chunk, of=of: of[-1], wanted=3))
    found = _rows(loopback.run([StepGroup(strategy if size > 1 else "single", parts)]))
    parts = []
    for talk in talks:
        home, at = talk.home(), len(talk.tokens)
        parts.append(talk.part([5], [at, at + 1], [home], lambda chunk, home=home: home))
    found += _rows(loopback.run([StepGroup("ring-q" if size > 1 else "single", parts)]))
    assert loopback.hub.left_over() == 0
    return found


def _rows(hidden: Any) -> list[Tensor]:
    return [row for _, row in sorted(hidden.items())]


@pytest.fixture(scope="module")
def truth(decoder: Any) -> Any:
    """Of one rank."""
    return lru_cache(None)(lambda: computed(ranks(decoder(), 1), "single"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["ring-kv", "chain", "ring-q", "gather"])
def test_every_strategy_gives_one_ranks_bits(strategy: str, size: int, decoder: Any, truth: Any) -> None:
    loopback = ranks(decoder(), size)
    for rank in loopback.ranks:
        rank.transport = Late(rank.transport, size)
    ours = computed(loopback, strategy)
    assert len(ours) == len(truth()) and all(torch.equal(x, y) for x, y in zip(ours, truth(), strict=True))
