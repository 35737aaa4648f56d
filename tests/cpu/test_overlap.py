"""The host one step ahead of a device that is late (tests.support.delayed_device): the answers are those without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is built for Linux only")

from headrace import LLM, SamplingParams
from headrace.bench.shapes import CheckpointShape, write_checkpoint
from headrace.engine import parts
from headrace.engine.device_sampler import DeviceSampler
from headrace.engine.runner import Runner
from headrace.kernels.triton import sampling
from tests.support.delayed_device import DelayedDevice, delayed_device

SHAPE = CheckpointShape(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=32, vocab=64, context=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("model"))


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayedDevice]:
    monkeypatch.setattr(Runner, "record", lambda self: None)  # recordings are made when they are needed
    monkeypatch.setattr(parts, "device_sampler", lambda loaded: DeviceSampler())
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "PIECE", 32)
    with delayed_device(monkeypatch) as device:
        yield device


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"kv_cache_tokens": 1024, "max_sequences": 4, **settings}
    return LLM(str(folder), attention_backend="triton", dtype="float32", **given)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(SHAPE.vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_first(folder: Path, late: DelayedDevice) -> None:
    prompts = [tokens(61, 1), tokens(5, 2), tokens(30, 3)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 5, 7)]
    found = []
    for on in (True, False):
        llm = engine(folder, async_scheduling=on)
        found.append([each.outputs[0].token_ids for each in llm.generate(prompts, params)])
        llm.engine.scheduler.check()
        print(llm.engine.stats().graphs, late.most_ahead)
    assert found[0] == found[1]
