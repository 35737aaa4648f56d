"""What tests of a GPU's engines and kernels share on a machine without one: a model of one layer, its answers when
nothing is replayed (on tests.support.fake_device), and which way attention goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape
from headrace.engine import graph_buckets
from headrace.engine.runner import Runner
from headrace.kernels.triton import attention, graph_step, tile_schedule
from tests.support.fake_device import FakeDevice, fake_device
from tests.support.traces import Trace, run
from tools.gpu.bits import eager_steps

SHAPE = CheckpointShape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32, vocab=64, context=1024)


@contextmanager
def recorded_when_needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A device whose engines record no step as they start: each recording takes a step's time here."""
    monkeypatch.setattr(Runner, "record", lambda self: None)
    with fake_device(monkeypatch) as device:
        yield device


def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts have buckets of 2 and 4 rows and of the largest step; runs of more than two rows are long."""
    monkeypatch.setattr(graph_buckets, "SMALL", (2, 4))
    monkeypatch.setattr(tile_schedule, "SHORT", 2)
    monkeypatch.setattr(graph_step, "PROGRAMS", 1)


def launched(
    llm: LLM,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
    adapters: str | list[str] = "",
) -> list[Trace]:
    """On an empty cache, without graphs; the cache is empty behind it, too."""
    llm.engine.cache.tree.clear()
    with eager_steps(llm.engine.loaded.executor):
        traces = run(llm, prompts, params, adapters)
    llm.engine.cache.tree.clear()
    return traces


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def force(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention goes one of its two ways alone, flash or split, wherever there is more than one span."""
    if way == "split":
        monkeypatch.setattr(attention, "processors", lambda device: 1 << 30)
    else:
        monkeypatch.setattr("headrace.kernels.triton.heads.STATE_BYTES", -1)
