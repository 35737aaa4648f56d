"""Ranks as threads on a device, or on one that is none (tests.support.fake_device), and two sequences for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace import device
from headrace.bench.shapes import CheckpointShape
from headrace.device import Device
from headrace.models.decoder import Decoder
from headrace.parallel.messages import StepGroup
from headrace.parallel.staged_transport import StagedTransport
from headrace.types import CHUNK
from tests.support.fake_nccl import HostLinks
from tests.support.loopback_ranks import Conversation, LoopbackRanks

SHAPE = CheckpointShape(hidden=16, layers=2, heads=1, kv_heads=1, head_dim=16, mlp=16, vocab=64, context=2048)
COMMON = 8
"""Chunks that both sequences have: a span. Each has one more of its own."""


@contextmanager
def interpreted_on(made: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads may launch kernels on the device: the interpreter takes one launch at a time."""
    from triton.runtime import interpreter

    lock = threading.RLock()

    def alone(of: Any, name: str) -> None:
        call = getattr(of, name)

        def locked(self: Any, *args: Any, **more: Any) -> Any:
            with lock:
                return call(self, *args, **more)

        monkeypatch.setattr(of, name, locked)

    alone(interpreter.GridExecutor, "__call__")
    alone(interpreter.InterpretedFunction, "rewrite")  # Python parses for one thread at a time
    with device.use(made):
        yield


def ranks_of(decoder: Decoder, size: int) -> LoopbackRanks:
    """Tensors go from one to the other through pinned memory."""
    loopback = LoopbackRanks(decoder, size, slots=32, backend="triton")
    for rank in loopback.ranks:
        rank.transport = StagedTransport(HostLinks(loopback.hub, rank.transport.rank), device.current())
    return loopback


def cached(loopback: LoopbackRanks) -> list[Conversation]:
    """Two sequences on the same prefix of a span, whose end lies on the last rank, each with a chunk of its own."""
    last = loopback.size - 1
    common = [loopback.take(0 if chunk < 5 else last) for chunk in range(COMMON)]
    talks = []
    for number in range(2):
        talk = Conversation(loopback)
        talk.tokens = [0] * CHUNK * (COMMON + 1)
        talk.slots = [*common, loopback.take(min(number, last))]
        talks.append(talk)
    for number, slot in enumerate([*common, talks[0].slots[-1], talks[1].slots[-1]]):
        g = torch.Generator().manual_seed(number)
        for pool in loopback.ranks[slot // loopback.slots].pool.pools:
            for x in pool.tensors:
                x[slot % loopback.slots] = torch.randn(x.shape[1:], generator=g).to(x)
    return talks


Prepare = Callable[[LoopbackRanks, list[Conversation]], None]


def computed(
    loopback: LoopbackRanks, strategy: str, new: int, prepare: Prepare = lambda loopback, talks: None
) -> list[Tensor]:
    """States of so many new tokens of both, computed together, and of one more of each that are decoded together.
    prepare: does something to the ranks whose sequences are cached."""
    size, parts, talks = loopback.size, [], cached(loopback)
    prepare(loopback, talks)
    for number, talk in enumerate(talks):
        start = len(talk.tokens)
        end, inside = start + new, start + new // CHUNK * CHUNK
        bounds, of = [start, end], [0]
        if strategy.startswith("ring"):  # shards begin with chunks, and each rank has rows
            bounds, of = [start, inside, end, end], [1 - number, number, number]
        elif size > 1:
            bounds, of = [start, start + new // 2 + 1, *[end] * (size - 1)], list(range(size))
        parts.append(talk.part([i % 64 for i in range(new)], bounds, of, lambda chunk, of=of: of[-1], wanted=3))
    found = _rows(loopback.run([StepGroup(strategy if size > 1 else "single", parts)]))
    parts = []
    for talk in talks:
        home, at = talk.home(), len(talk.tokens)
        parts.append(talk.part([5], [at, at + 1], [home], lambda chunk, home=home: home))
    found += _rows(loopback.run([StepGroup("ring-q" if size > 1 else "single", parts)]))
    assert loopback.hub.left_over() == 0
    for rank in loopback.ranks:
        rank.transport.close()  # type: ignore[attr-defined]
    return found


def _rows(hidden: Any) -> list[Tensor]:
    return [row for _, row in sorted(hidden.items())]
